"""The plan on the CPU: the native kernels (weightonly/cpu/), or the equation in PyTorch where there are none."""

from __future__ import annotations

import torch

from .. import reference
from ..args import GemmArgs, check_perm_range
from ..cpu import library, native
from .base import Plan


class CpuPlan(Plan):
    """Raises ValueError for a `config`, which names a kernel of GPUs."""

    __slots__ = ("backend",)

    def __init__(self, args: GemmArgs) -> None:
        super().__init__(args)
        if args.config is not None:
            raise ValueError(f"config: expected None for CPU tensors, which no kernel computes, got {args.config}")
        self.backend = library.backend()

    def gather(self, x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
        """Raises ValueError for numbers out of range: index_select on a CPU does not say which argument they are in."""
        check_perm_range(perm)
        return super().gather(x, perm)

    def run(self, args: GemmArgs) -> torch.Tensor:
        operands = (args.x, args.qweight, args.scales, args.zeros, args.bias, args.activation, args.out)
        return reference.gemm(*operands) if self.backend.library is None else native.gemm(self.backend, *operands)
