"""Our kernels and experts of 4-bit floats in vLLM. Import this where vLLM is installed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.fp4_cases import ROWS, Fp4Weight, config, tensors, weight
from tests.vllm import vllm_experts as moe
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.nvfp4 import marlin
from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

import weightonly as wo
from weightonly.vllm.fp4_kernels import WeightOnlyMxFp4LinearKernel, WeightOnlyNvFp4LinearKernel, take_marlins_place

__all__ = ["ROWS", "Fp4Experts", "Fp4Weight", "config", "experts", "take_place", "tensors", "weight"]


def take_place(monkeypatch: pytest.MonkeyPatch, arch: str | None = None, capability: tuple[int, int] = (9, 0)) -> None:
    """Our kernels as `register` puts them, on a CPU that says it is a GPU where vLLM asks, until the test ends."""
    platform = current_platform._enum
    for kernels in (linear._POSSIBLE_NVFP4_KERNELS, linear._POSSIBLE_MXFP4_KERNELS):
        monkeypatch.setitem(kernels, platform, [])
    monkeypatch.setattr(linear, "MarlinNvFp4LinearKernel", linear.MarlinNvFp4LinearKernel)
    for kernel in (WeightOnlyNvFp4LinearKernel, WeightOnlyMxFp4LinearKernel):
        monkeypatch.setattr(kernel, "arch", arch)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(*capability))
    for module in (marlin, marlin_utils_fp4):
        monkeypatch.setattr(module, "is_fp4_marlin_supported", lambda: True)
    take_marlins_place()


class Fp4Experts(moe.Experts):
    """Experts of `Fp4Weight`s, each projection of each expert with a factor of its own."""

    weights: dict[str, list[Any]]

    def tensors(self, method: str) -> Iterator[tuple[str, torch.Tensor]]:
        for projection, weights in self.weights.items():
            for expert, w in enumerate(weights):
                for name, tensor in tensors(method, w).items():
                    yield f"{expert}.{projection}.{name}", tensor

    def stacks(self, arch: str | None = None, dtype: torch.dtype = torch.float16) -> tuple[Any, Any]:
        gate, up, down = (self.weights[name] for name in moe.PROJECTIONS)
        biases: tuple[torch.Tensor | None, ...] = (None, None)
        if self.bias is not None:
            biases = (torch.cat([self.bias["gate_proj"], self.bias["up_proj"]], 1), self.bias["down_proj"])
        return (
            _stack(list(zip(gate, up, strict=True)), arch, dtype, biases[0]),
            _stack([(w,) for w in down], arch, dtype, biases[1]),
        )

    def of_gpt_oss(self) -> dict[str, torch.Tensor]:
        """The tensors of a layer as vLLM's model of gpt-oss hands them out, for one rank."""
        found = {}
        for stem, projections in (("w13", moe.PROJECTIONS[:2]), ("w2", moe.PROJECTIONS[2:])):
            parts = [[tensors("mxfp4", w) for w in self.weights[name]] for name in projections]
            for name in ("weight", "weight_scale"):
                of_parts = [torch.stack([t[name] for t in part]) for part in parts]
                found[f"{stem}_{name}"] = torch.stack(of_parts, 2).flatten(1, 2)  # (E, N, ...), columns alternate
            if self.bias is not None:
                found[f"{stem}_bias"] = torch.stack([self.bias[name] for name in projections], 2).flatten(1)
        return found


def _stack(
    weights: list[tuple[Fp4Weight, ...]], arch: str | None, dtype: torch.dtype, bias: torch.Tensor | None
) -> tuple[wo.PackedWeight, torch.Tensor, None, torch.Tensor | None]:
    codes = torch.stack([torch.cat([w.codes for w in beside], 1) for beside in weights])
    scales = torch.stack([torch.cat([w.scales for w in beside], 1) for beside in weights])
    return wo.preprocess(codes, 4, arch=arch, format=weights[0][0].format), scales.to(dtype), None, bias


def experts(g: torch.Generator, format: str, hidden: int, inner: int, has_bias: bool = False) -> Fp4Experts:
    shapes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    factors = itertools.cycle([2.0**-9, 2.0**-10, 2.0**-8])
    weights: Any = {
        name: [weight(g, format, *shape, factor=next(factors)) for _ in range(moe.E)] for name, shape in shapes.items()
    }
    bias = {name: torch.randn(moe.E, n, generator=g).bfloat16() for name, (_, n) in shapes.items()}
    return Fp4Experts(weights, bias if has_bias else None)
