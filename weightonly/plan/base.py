"""Plan: what is decided once for all calls that differ in addresses alone."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from ..args import GemmArgs
from ..plain import has_memory, span_bytes


class Plan:
    """Computes the calls of one key of the cache. This class: calls with an x without rows, which take no kernel.

    It holds no address of a weight, so that all weights of one kind share it.
    """

    __slots__ = ("device", "m", "n", "shape", "x_bytes")

    def __init__(self, args: GemmArgs) -> None:
        self.device = args.x.get_device()
        self.m = args.m
        self.n = args.weight.n
        self.shape = args.result_shape()
        self.x_bytes = span_bytes(args.x)

    def holds(self, args: GemmArgs) -> bool:
        """Whether every operand is in memory. Sets the addresses in `args`.

        Storages are looked at once for a set of addresses, which a decode loop repeats: memory that is freed or cut
        has another address.
        """
        x, w, bias = args.x, args.weight, args.bias
        packed, scales, zeros = w._packed, w._scales, w._zeros
        try:
            args.x_address = x_address = x.data_ptr()
            args.addresses = addresses = (
                packed._data.data_ptr(),
                scales.data_ptr(),
                0 if zeros is None else zeros.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                self,
            )
            is_same = addresses == packed._held
            if not is_same or x_address != packed._held_x:
                memory = x.untyped_storage()  # as in `has_memory`, quicker
                if memory.data_ptr() + memory.nbytes() - x_address < self.x_bytes:
                    return False
        except RuntimeError:  # there is none: a wrapper
            return False
        if not is_same:
            if not self.holds_weight(args):
                return False
            packed._held = addresses
        packed._held_x = x_address
        return w._perm is None or has_memory(w._perm)

    def holds_weight(self, args: GemmArgs) -> bool:
        """Whether the weight and the bias at new addresses are what the plan was made for: in memory, on its device."""
        w = args.weight
        if w._kind is not None and w._kind is not w.look_again():
            return False  # `tensor.data = ...` gave it another tensor
        return all(
            t is None or (t.get_device() == self.device and not t.is_meta and has_memory(t))
            for t in (w._packed._data, w._scales, w._zeros, args.bias)
        )

    def check_out(self, args: GemmArgs) -> None:
        """`GemmArgs.check_out`, once for a set of addresses, which a decode loop repeats. Autograd gets to know it."""
        out, packed, perm = args.out, args.weight._packed, args.weight._perm
        try:
            where = (
                out.data_ptr(),  # type: ignore[union-attr]
                out.shape,  # type: ignore[union-attr]
                out.is_contiguous() or out.stride(),  # type: ignore[union-attr]
                out.dtype,  # type: ignore[union-attr]
                out.get_device(),  # type: ignore[union-attr]
                out.is_neg(),  # type: ignore[union-attr]
                out.requires_grad,  # type: ignore[union-attr]
                0 if self.device >= 0 else out.untyped_storage().nbytes(),  # type: ignore[union-attr]
                type(out),
                args.x_address,
                args.addresses,
                None if perm is None else perm.data_ptr(),
            )
        except (AttributeError, RuntimeError):
            where = None  # `out` is no dense tensor, as the check says
        if where is None or where != packed._checked_out:
            args.check_out()
            packed._checked_out = where
        try:  # noqa: SIM105 (0.2 us more)
            increment_version(out)  # type: ignore[arg-type]
        except RuntimeError:
            pass  # a tensor of inference mode has no version

    def gather(self, x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
        """x[..., perm], contiguous: the columns of x in the order of the weight's rows."""
        return x.index_select(-1, perm)

    def run(self, args: GemmArgs) -> torch.Tensor:
        """The product, in `args.out` if it is given, which `check_out` must have seen. `args.x`: already gathered."""
        return args.new_result() if args.out is None else args.out
