"""Products of x in E4M3, for a GPU that multiplies 8-bit floats:

python -m weightonly.bench sweep --plugin tools.fp8_providers --dtype bf16 --providers "ours fp8,dense,dense fp8"
"""

from __future__ import annotations

import torch

import weightonly as wo
from weightonly.bench.providers import Packed, Prepared, Provider, nbytes, register
from weightonly.bench.weights import Weights
from weightonly.heuristics.problem import FP8_LAYOUT

_TOLERANCE = 6e-2  # E4M3 has three bits of mantissa


class OursFp8(Provider):
    """`wo.quantize_activations`, then `wo.gemm` of its result."""

    name = "ours fp8"
    formats = ("int4",)
    cuda_only = True
    dtypes = (torch.float16, torch.bfloat16)

    def unavailable(self, device: torch.device, dtype: torch.dtype, format: str, group_size: int) -> str | None:
        if device.type == "cuda" and not wo.fp8_kernels(device.index or 0):
            return "no kernel of this build and GPU takes x in 8 bits"
        return super().unavailable(device, dtype, format, group_size)

    def prepare(self, weights: Weights) -> Prepared[Packed]:
        def run(w: Packed, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            x8, x_scales = wo.quantize_activations(x)
            return w.multiply(x8, out, x_scales=x_scales)

        packed = Packed.of(weights, FP8_LAYOUT)
        return Prepared(packed, run, packed.nbytes, weights.dense, _TOLERANCE)


class DenseFp8(Provider):
    """Dense weights and x in E4M3, each with one scale: a cast of x, then `torch._scaled_mm`, cuBLAS."""

    name = "dense fp8"
    cuda_only = True
    dtypes = (torch.bfloat16,)  # of y

    def label(self, device: torch.device, dtype: torch.dtype) -> str:
        return "cuBLAS fp8"

    def unavailable(self, device: torch.device, dtype: torch.dtype, format: str, group_size: int) -> str | None:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return "it needs compute capability 8.9"
        return super().unavailable(device, dtype, format, group_size)

    def unfit(self, device: torch.device, k: int, n: int) -> str | None:
        return f"its K and N are multiples of 16, not {k} and {n}" if k % 16 or n % 16 else None

    def prepare(self, weights: Weights) -> Prepared[tuple[torch.Tensor, torch.Tensor]]:
        scale = weights.dense.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
        w8 = (weights.dense.t() / scale).to(torch.float8_e4m3fn).contiguous()  # [n, k]
        one = torch.ones_like(scale)  # of x, whose numbers are near 1

        def run(w: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            values, w_scale = w
            x8 = x.to(torch.float8_e4m3fn)
            return torch._scaled_mm(x8, values.t(), one, w_scale, out_dtype=x.dtype, use_fast_accum=True)

        return Prepared((w8, scale), run, nbytes(w8), weights.dense, _TOLERANCE)


for _provider in (OursFp8(), DenseFp8()):
    register(_provider)
