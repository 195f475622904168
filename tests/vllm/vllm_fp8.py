"""Our kernel of FP8 weights in vLLM, and layers as files store them. Import this where vLLM is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fp8_cases import ct_config, dequantize, quantize
from tests.vllm import vllm_cases as cases
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm import marlin
from vllm.platforms import PlatformEnum, current_platform
from vllm.platforms.interface import DeviceCapability

import weightonly as wo
from weightonly.vllm.fp8_kernels import WeightOnlyFp8LinearKernel, take_fp8

BLOCKS = {"tensor": (-1, -1), "channel": (1, -1), "block": (128, 128)}
METHODS = [
    ("fp8", "tensor"),
    ("fp8", "block"),
    ("fbgemm_fp8", "channel"),
    *(("compressed-tensors", scales) for scales in BLOCKS),
]


def take_place(monkeypatch: pytest.MonkeyPatch, arch: str | None = None, capability: tuple[int, int] = (8, 0)) -> None:
    """Our kernel as `register` puts it, on a CPU that says it is a GPU where vLLM asks, until the test ends."""
    cases.keep_kernels(monkeypatch)
    for name in cases.LISTS_OF_FP8_KERNELS:
        getattr(linear, name)[PlatformEnum.CPU] = [linear.MarlinFP8ScaledMMLinearKernel]
    monkeypatch.setattr(WeightOnlyFp8LinearKernel, "arch", arch)
    set_capability(monkeypatch, capability)
    monkeypatch.setattr(marlin, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(marlin, "is_fp8_marlin_supported", lambda: True)
    take_fp8()


def set_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(*capability))


@contextmanager
def serving(dtype: torch.dtype = torch.float16) -> Iterator[None]:
    with cases.serving(dtype):
        get_current_vllm_config().model_config = SimpleNamespace(dtype=dtype)
        yield


@dataclass
class Fp8Weight:
    """q float8_e4m3fn [N, K], scales [ceil(N / bn), ceil(K / bk)] in fp32."""

    q: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    @property
    def dense(self) -> torch.Tensor:
        """[K, N] in fp64"""
        return dequantize(self.q, self.scales, self.block).t()

    def gemm(self, x: torch.Tensor, bias: torch.Tensor | None = None, arch: str | None = None) -> torch.Tensor:
        n, k = self.q.shape
        columns, rows = (size if size > 0 else whole for size, whole in zip(self.block, (n, k), strict=True))
        group = rows if k % rows == 0 else 64
        by_group = self.scales[torch.arange(n) // columns][:, torch.arange(0, k, group) // rows].t()
        packed = wo.preprocess(self.q.t().contiguous(), arch=arch, format="fp8")
        return wo.gemm(x, packed, by_group.to(x.dtype).contiguous(), bias=bias)


def weight(g: torch.Generator, scales: str, k: int, n: int, factor: float = 0.05) -> Fp8Weight:
    w = torch.randn(n, k, generator=g) * factor * (1 + torch.arange(n)[:, None] % 3)
    return Fp8Weight(*quantize(w, BLOCKS[scales]), BLOCKS[scales])


def tensors(method: str, w: Fp8Weight) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of `method` for one layer, with scales of activations that are not used."""
    name = "weight_scale_inv" if method == "fp8" and w.block[0] == 128 else "weight_scale"
    scales = w.scales.reshape(()) if w.block == BLOCKS["tensor"] else w.scales
    if method == "modelopt":
        scales = scales[:, None, :, None] if w.block[0] == 128 else scales.squeeze()
    return {"weight": w.q, name: scales, "input_scale": torch.tensor(0.25)}


def config(method: str, scales: str, activations: str | None = "dynamic") -> dict[str, Any]:
    """`quantization_config` of such a checkpoint. activations: "static", "dynamic", or None: in 16 bits."""
    if method == "fp8":
        block = {"weight_block_size": [128, 128]} if scales == "block" else {}
        return {"quant_method": "fp8", "activation_scheme": activations} | block
    if method == "fbgemm_fp8":
        return {"quant_method": method, "modules_to_not_convert": [], "activation_scale_ub": 1200.0}
    if method == "modelopt":
        algorithms = {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO"}
        return {"quant_method": method, "quant_algo": algorithms[scales], "ignore": []}
    return ct_config(scales, activations)


def build(
    method: str, scales: str, k: int, n: int, activations: str | None = "dynamic", bias: bool = False, **kind: Any
) -> Any:
    return cases.build(method, config(method, scales, activations), k, n, bias=bias, **kind)


def load(layer: Any, method: str, w: Fp8Weight, bias: torch.Tensor | None = None) -> None:
    known = dict(layer.named_parameters())
    stored = tensors(method, w) | ({} if bias is None else {"bias": bias})
    cases.load(layer, {name: tensor for name, tensor in stored.items() if name in known})
