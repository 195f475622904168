"""Plan: what is decided once for all calls that differ in addresses alone."""

from __future__ import annotations

import torch

from ..args import GemmArgs


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

    def check_out(self, args: GemmArgs) -> None:
        """`GemmArgs.check_out`, once for a set of addresses: a decode loop repeats them."""
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

    def gather(self, x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
        """x[..., perm], contiguous: the columns of x in the order of the weight's rows."""
        return x.index_select(-1, perm)

    def run(self, args: GemmArgs) -> torch.Tensor:
        """The product, in `args.out` if it is given, which `check_out` must have seen. `args.x`: already gathered."""
        return args.x.new_empty(self.shape) if args.out is None else args.out
