"""Layers of 4-bit floats as compressed-tensors and ModelOpt store them. Import this where vLLM is installed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.vllm import vllm_experts as moe
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.nvfp4 import marlin
from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

import weightonly as wo
from weightonly.codebooks import codebook
from weightonly.vllm.fp4_kernels import WeightOnlyMxFp4LinearKernel, WeightOnlyNvFp4LinearKernel, take_marlins_place

ROWS = {"nvfp4": 16, "mxfp4": 32}


@dataclass
class Fp4Weight:
    """codes uint8 [K, N]; raw: scales of the file [groups, N]; factor: of nvfp4, what they are multiplied with."""

    format: str
    codes: torch.Tensor
    raw: torch.Tensor
    factor: float

    @property
    def scales(self) -> torch.Tensor:
        """fp32 [groups, N]"""
        if self.format == "mxfp4":
            return torch.exp2(self.raw.float() - 127)
        return self.raw.float() * self.factor

    @property
    def dense(self) -> torch.Tensor:
        """[K, N] in fp64"""
        rows = self.scales.double().repeat_interleave(ROWS[self.format], 0)
        return rows * codebook(self.format).double()[self.codes.long()]

    def gemm(self, x: torch.Tensor, bias: torch.Tensor | None = None, arch: str | None = None) -> torch.Tensor:
        packed = wo.preprocess(self.codes, 4, arch=arch, format=self.format)
        return wo.gemm(x, packed, self.scales.to(x.dtype), bias=bias)


def weight(g: torch.Generator, format: str, k: int, n: int, factor: float = 1.0 / 512) -> Fp4Weight:
    codes = torch.randint(0, 16, (k, n), generator=g).to(torch.uint8)
    groups = k // ROWS[format]
    if format == "mxfp4":
        return Fp4Weight(format, codes, torch.randint(118, 122, (groups, n), generator=g).to(torch.uint8), 1.0)
    raw = (torch.rand(groups, n, generator=g) * 8 + 4).to(torch.float8_e4m3fn)
    return Fp4Weight(format, codes, raw, factor)


def tensors(method: str, w: Fp4Weight) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of `method` for one layer."""
    rows, raw = w.codes.t(), w.raw.t().contiguous()
    data = (rows[:, ::2] | rows[:, 1::2] << 4).contiguous()
    if method == "compressed-tensors":
        stored = {"weight_packed": data, "weight_scale": raw}
        extra = {"weight_global_scale": torch.tensor([1 / w.factor]), "input_global_scale": torch.tensor([448.0])}
    else:
        stored = {"weight": data, "weight_scale": raw}
        extra = {"weight_scale_2": torch.tensor(w.factor), "input_scale": torch.tensor(0.5)}
    return stored | extra if w.format == "nvfp4" else stored


def config(method: str, format: str, is_a16: bool = True) -> dict[str, Any]:
    """`quantization_config` of such a checkpoint. is_a16: activations are not quantized."""
    if method == "modelopt_fp4":
        algorithm = "W4A16_NVFP4" if is_a16 else "NVFP4"
        return {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "ignore": []}
    if method != "compressed-tensors":
        return {"quant_method": "mxfp4"}
    strategy = "tensor_group" if format == "nvfp4" else "group"
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": ROWS[format]}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": args | {"dynamic": False}}
    if not is_a16:
        group["input_activations"] = args | {"dynamic": "local" if format == "nvfp4" else True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{format}-pack-quantized",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {"group_0": group},
    }


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
