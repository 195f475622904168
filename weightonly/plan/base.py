"""Plan: what is decided once for all calls that differ in addresses alone."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch.autograd.graph import increment_version

from ..args import GemmArgs
from ..plain import has_memory


class Plan:
    """Computes the calls of one key of the cache. This class: those with an x without rows, which take no kernel.

    It holds no address of a weight, so that all weights of one kind share it.
    """

    __slots__ = ("device", "m", "n", "shape")

    def __init__(self, args: GemmArgs) -> None:
        self.device = args.x.get_device()
        self.m = args.m
        self.n = args.qweight.n
        self.shape = args.result_shape()

    def holds(self, args: GemmArgs) -> bool:
        """Whether every operand is in memory. Sets the addresses in `args`.

        Storages are looked at once for a set of addresses, which a decode loop repeats: memory that is freed or cut
        has another address.
        """
        x, w, scales, zeros, bias = args.x, args.qweight, args.scales, args.zeros, args.bias
        try:
            args.x_address = x_address = x.data_ptr()
            args.addresses = addresses = (
                w._data.data_ptr(),
                scales.data_ptr(),
                0 if zeros is None else zeros.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                self,
            )
        except RuntimeError:  # there is none: a wrapper
            return False
        if addresses != w._held:
            if not all(t is None or has_memory(t) for t in (x, w._data, scales, zeros, bias)):
                return False
            w._held = addresses
        elif x_address != w._held_x and not has_memory(x):
            return False
        w._held_x = x_address
        return args.perm is None or has_memory(args.perm)

    def check_memory(self, args: GemmArgs, *others: torch.Tensor) -> None:
        """Raises TypeError or ValueError, naming it, for an operand that kernels cannot read by its address."""
        if not self.holds(args) or not all(map(has_memory, others)):
            args.check_memory()

    def check_out(self, args: GemmArgs) -> None:
        """`GemmArgs.check_out`, once for a set of addresses, which a decode loop repeats. Autograd gets to know it."""
        out, zeros, bias, perm = args.out, args.zeros, args.bias, args.perm
        try:
            where = (
                self,
                out.data_ptr(),  # type: ignore[union-attr]
                out.shape,  # type: ignore[union-attr]
                out.is_contiguous() or out.stride(),  # type: ignore[union-attr]
                out.dtype,  # type: ignore[union-attr]
                out.get_device(),  # type: ignore[union-attr]
                out.is_neg(),  # type: ignore[union-attr]
                out.requires_grad,  # type: ignore[union-attr]
                type(out),
                args.x.data_ptr(),
                args.scales.data_ptr(),
                None if zeros is None else zeros.data_ptr(),
                None if bias is None else bias.data_ptr(),
                None if perm is None else perm.data_ptr(),
            )
        except (AttributeError, RuntimeError):
            where = None  # `out` is no dense tensor, as the check says
        if where is None or where != args.qweight._checked_out:
            args.check_out()
            args.qweight._checked_out = where
        with suppress(RuntimeError):  # a tensor of inference mode has no version
            increment_version(out)  # type: ignore[arg-type]

    def gather(self, x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
        """x[..., perm], contiguous: the columns of x in the order of the weight's rows."""
        return x.index_select(-1, perm)

    def run(self, args: GemmArgs) -> torch.Tensor:
        """The product, in `args.out` if it is given, which `check_out` must have seen. `args.x`: already gathered."""
        return args.x.new_empty(self.shape) if args.out is None else args.out
