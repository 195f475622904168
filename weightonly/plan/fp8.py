"""The plans of activations in 8 bits: a compiled kernel, or on the CPU the equation in PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from .. import reference
from ..cpu import native
from ..fp8_args import Fp8Args
from ..plain import aligned, aligned_rows, has_memory
from .base import Plan
from .cpu import CpuPlan
from .kernel import KernelPlan, _current_stream


class Fp8Plan(Plan):
    """What the two share. This class: calls with an x without rows."""

    __slots__ = ()

    def holds(self, args: Any) -> bool:
        return super().holds(args) and has_memory(args.x_scales)

    def gather(self, x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
        """As bytes: PyTorch gathers no 8-bit floats."""
        return super().gather(x.view(torch.uint8), perm).view(x.dtype)


class Fp8CpuPlan(Fp8Plan, CpuPlan):
    __slots__ = ()

    def _params(self, args: Any) -> None:
        """None are kept: x becomes fp32 in each call."""

    def run(self, args: Fp8Args) -> torch.Tensor:  # type: ignore[override]
        x, w, x_scales = args.x, args.weight, args.x_scales
        if not self.invariant or self.backend.library is None:
            operands = (x, w._packed, w._scales, w._zeros, args.bias, args.activation, args.out, x_scales)
            return reference.gemm(*operands, invariant=self.invariant)
        out = args.new_result() if args.out is None else args.out
        zeros = None if w._zeros is None else w._zeros.float()
        y = native.gemm(self.backend, x.float(), w._packed, w._scales.float(), zeros, invariant=True)  # fp32 [..., N]
        reference.finish(y.view(-1, w.n), args.bias, args.activation, x_scales, out, invariant=True)
        return out


class Fp8KernelPlan(Fp8Plan, KernelPlan):
    __slots__ = ()

    def run(self, args: Fp8Args) -> torch.Tensor:  # type: ignore[override]
        x, w, bias, out = args.x, args.weight, args.bias, args.out
        ldy, ldx = self.ldy, self.ldx
        if out is None:
            out = args.new_result()
        elif self.out_has_rows:
            ldy = out.stride(0)
        if not self.rows_aligned or x.data_ptr() % 16:
            x, ldx = self._aligned_copy(x.view(torch.uint8), w.k), self.x_k
        x_scales = args.x_scales.contiguous()
        scales = w._scales if self.scales_in_place else aligned_rows(w._scales, self.ld_scales)
        if scales.data_ptr() % 16:
            scales = aligned(scales, 16)
        if bias is not None:
            bias = bias.contiguous()
        self.launch(
            x.data_ptr(),
            x_scales.data_ptr(),
            w._packed.data.data_ptr(),
            scales.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            ldx,
            ldy,
            _current_stream(self.device),
            scales is w._scales,
        )
        return out
