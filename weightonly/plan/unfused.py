"""The unfused plan, for many tokens: a kernel dequantizes slices of the weight, and cuBLAS multiplies by them.

For formats without kernels it is the plan of any number of tokens, and PyTorch's operators dequantize. All slices use
one workspace in turn (heuristics/slices.py), so that a large weight is never dense as a whole. cuBLAS accumulates as
PyTorch lets it (torch.backends.cuda.matmul): in fp32, but where it splits K it may add the partials in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..activations import activation_of
from ..args import GemmArgs
from ..heuristics import KernelConfig
from ..heuristics.slices import slice_columns
from ..ops.dequantize import dequantized_slices, kernel_slices
from ..weight import QuantizedWeight
from .base import Plan


class UnfusedPlan(Plan):
    """For each slice of columns: the kernel that dequantizes, a matrix product, and the activation in place.

    config: None: there is no such kernel.
    """

    __slots__ = ("activate", "columns", "config")

    def __init__(self, args: GemmArgs, config: KernelConfig | None) -> None:
        super().__init__(args)
        self.config = config
        self.activate = activation_of(args.activation).in_place
        self.columns = slice_columns(args.weight.n, args.weight.k)

    def run(self, args: GemmArgs) -> torch.Tensor:
        x, w, bias = args.x, args.weight, args.bias
        out = x.new_empty(self.shape) if args.out is None else args.out
        rows = x.reshape(self.m, w.k)  # [M, K]
        y = out if out.dim() == 2 else out.view(self.m, self.n)  # [M, N]
        with torch.no_grad():  # PyTorch refuses out= where bias, a parameter, might ask for a gradient
            for begin, end, columns in self._slices(w):
                part = y[:, begin:end]
                if bias is None:
                    torch.mm(rows, columns, out=part)
                else:
                    torch.addmm(bias[begin:end], rows, columns, out=part)
                if self.activate is not None:
                    self.activate(part)
        return out

    def _slices(self, w: QuantizedWeight) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(begin, end, these columns of the weight in the dtype of x)"""
        if self.config is not None:
            return kernel_slices(w.packed, w.scales, w.zeros, self.columns)
        slices = dequantized_slices(w.packed, w.scales, w.zeros, 0)
        return ((begin, end, columns.to(w.dtype)) for begin, end, columns in slices)
