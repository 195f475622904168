"""The plan for many tokens: slices of the weight are dequantized, and cuBLAS multiplies by them.

The slices take turns in one workspace (heuristics/slices.py), so that a large weight is never dense as a whole. Sums
are as PyTorch lets cuBLAS compute them (torch.backends.cuda.matmul): fp32, and where K is split and nobody objects, the
parts in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .dequantize import aligned_rows, dequantize_columns
from .heuristics import KernelConfig
from .heuristics.slices import slice_columns
from .kernel_plan import Plan
from .packed import PackedWeight

_IN_PLACE: dict[str | None, Callable[[torch.Tensor], torch.Tensor] | None] = {
    None: None,
    "identity": None,
    "relu": torch.relu_,
    "gelu": torch.ops.aten.gelu_.default,  # the erf form
    "silu": torch.ops.aten.silu_.default,
}


class DensePlan(Plan):
    """For each slice of columns the kernel that dequantizes, one matrix product, and the activation in place."""

    __slots__ = ("activate", "columns", "config")

    def __init__(self, x: torch.Tensor, qweight: PackedWeight, config: KernelConfig, activation: str | None) -> None:
        super().__init__(x, qweight)
        self.config = config
        self.activate = _IN_PLACE[activation]
        self.columns = slice_columns(qweight.n, qweight.k)

    def run(
        self,
        x: torch.Tensor,
        qweight: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if out is None:
            out = x.new_empty(self.shape)
        rows = x.reshape(self.m, qweight.k)
        y = out if out.dim() == 2 else out.view(self.m, self.n)
        workspace = x.new_empty((qweight.k, self.columns))
        with torch.no_grad():  # out= is refused where bias, a parameter, might ask for a gradient
            scales = aligned_rows(scales, qweight.n_padded)
            if zeros is not None:
                zeros = aligned_rows(zeros, qweight.n_padded)
            for begin in range(0, self.n, self.columns):
                end = min(begin + self.columns, self.n)
                w, part = workspace[:, : end - begin], y[:, begin:end]
                dequantize_columns(qweight, scales, zeros, begin, end, w)
                if bias is None:
                    torch.mm(rows, w, out=part)
                else:
                    torch.addmm(bias[begin:end], rows, w, out=part)
                if self.activate is not None:
                    self.activate(part)
        return out
