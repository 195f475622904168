"""The plan on the CPU: the native kernels (weightonly/cpu/), or the equation in PyTorch where there are none."""

from __future__ import annotations

import torch

from .. import reference
from ..args import GemmArgs, check_perm_range
from ..cpu import library, native
from ..kernels import MAX_M, MAX_N
from ..plain import has_memory
from .base import Plan

MAX_K = 1 << 28
"""Rows of a weight: the native kernels step over its scales in 32-bit numbers, in groups of 16."""


class CpuPlan(Plan):
    """Raises ValueError for a `config`, which names a kernel of GPUs."""

    __slots__ = ("backend", "invariant", "itemsize", "params")

    def __init__(self, args: GemmArgs) -> None:
        super().__init__(args)
        if args.config is not None:
            raise ValueError(f"config: expected None for CPU tensors, which no kernel computes, got {args.config}")
        self.backend, self.invariant = library.backend(), args.invariant
        if self.backend.library is not None:
            check_sizes(self.m, self.n, args.weight.k)
        self.itemsize, self.params = args.x.element_size(), self._params(args)

    def _params(self, args: GemmArgs) -> native.Params | None:
        """What `native.run` takes but for addresses, where all operands are read as they are."""
        x, w = args.x, args.weight
        if self.backend.library is None or not self.m or not native.is_read(w.packed) or w.perm is not None:
            return None
        if x.dim() != 2 and not x.is_contiguous():
            return None
        rows = x.view(self.m, w.k)
        in_place = all(t is None or native.are_rows(t) for t in (rows, w.scales, w.zeros))
        if not in_place or not (args.bias is None or args.bias.is_contiguous()):
            return None
        operands = (rows, w.packed, w.scales, w.zeros, self.n, args.activation, args.invariant)
        return native.sizes(self.backend, *operands)

    def holds(self, args: GemmArgs) -> bool:
        """As of all plans. Lengths of storages are looked at in each call: freed memory may be grown again, shorter, at
        its address. Calls on a GPU take the host too little time for that."""
        x, w, bias = args.x, args.weight, args.bias
        packed, scales, zeros = w._packed, w._scales, w._zeros
        data = packed._data
        try:
            args.x_address = x.data_ptr()
            args.addresses = addresses = (  # type: ignore[assignment]
                data.data_ptr(),
                data.untyped_storage().nbytes(),
                scales.data_ptr(),
                scales.untyped_storage().nbytes(),
                zeros is not None and (zeros.data_ptr(), zeros.untyped_storage().nbytes()),
                bias is not None and (bias.data_ptr(), bias.untyped_storage().nbytes()),
                self,
            )
            memory = x.untyped_storage()
            if memory.data_ptr() + memory.nbytes() - args.x_address < self.x_bytes:
                return False
        except RuntimeError:  # there is none: a wrapper
            return False
        if addresses != packed._held:
            if not self.holds_weight(args):
                return False
            packed._held = addresses
        return w._perm is None or has_memory(w._perm)

    def gather(self, x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
        """Raises ValueError for numbers out of range: index_select on a CPU does not say which argument they are in."""
        check_perm_range(perm)
        return super().gather(x, perm)

    def run(self, args: GemmArgs) -> torch.Tensor:
        w = args.weight
        if self.params is not None and args.out is None:
            data, _, scales, _, zeros, bias, _ = args.addresses  # type: ignore[misc]
            zeros, bias = zeros and zeros[0], bias and bias[0]
            if not (args.x_address | scales | zeros | bias) % self.itemsize and not data % 4:
                y = args.x.new_empty(self.shape)
                params = native.Params.from_buffer_copy(self.params)  # threads share the plan
                native.run(
                    self.backend, params, args.x_address, data, scales, zeros or None, bias or None, y.data_ptr()
                )
                return y
        operands = (args.x, w._packed, w._scales, w._zeros, args.bias, args.activation, args.out)
        if self.backend.library is None:
            return reference.gemm(*operands, invariant=self.invariant)
        return native.gemm(self.backend, *operands, invariant=self.invariant)


def check_sizes(m: int, n: int, k: int) -> None:
    """Raises ValueError for sizes beyond what the native kernels count with, in 32 bits."""
    for name, sizes, got, limit in (("x", "M", m, MAX_M), ("qweight", "N", n, MAX_N), ("qweight", "K", k, MAX_K)):
        if got > limit:
            raise ValueError(f"{name}: expected {sizes} of at most {limit} on a CPU, got {got}")
