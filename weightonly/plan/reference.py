"""The plan on the CPU: the equation in PyTorch."""

from __future__ import annotations

import torch

from .. import reference
from ..args import GemmArgs, check_perm_range
from .base import Plan


class ReferencePlan(Plan):
    """Raises ValueError for a `config`: no kernel runs on a CPU."""

    __slots__ = ()

    def __init__(self, args: GemmArgs) -> None:
        super().__init__(args)
        if args.config is not None:
            raise ValueError(f"config: expected None for CPU tensors, which no kernel computes, got {args.config}")

    def gather(self, x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
        """Raises ValueError for numbers out of range: index_select on a CPU does not say which argument they are in."""
        check_perm_range(perm)
        return super().gather(x, perm)

    def run(self, args: GemmArgs) -> torch.Tensor:
        return reference.gemm(args.x, args.qweight, args.scales, args.zeros, args.bias, args.activation, args.out)
