"""Real layers of vLLM on tensors that the tests make. Import this where vLLM is installed."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.quantized_cases import METHODS, Weight, beside, config, tensors, weight
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
    model_parallel_is_initialized,
)
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase
from vllm.model_executor.layers.quantization import fbgemm_fp8, get_quantization_config
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.platforms import PlatformEnum, current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.scalar_type import scalar_types

from weightonly.vllm.linear_kernel import WeightOnlyLinearKernel

__all__ = [
    "LISTS_OF_FP4_KERNELS",
    "LISTS_OF_FP8_KERNELS",
    "METHODS",
    "Weight",
    "beside",
    "build",
    "config",
    "finish",
    "keep_kernels",
    "load",
    "rank_of",
    "serving",
    "take_first",
    "tensors",
    "weight",
]


@contextmanager
def serving(dtype: torch.dtype = torch.float16) -> Iterator[None]:
    """What an engine sets up before it builds a model: its config, groups of processes, the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(VllmConfig()):
            if not model_parallel_is_initialized():
                init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            yield
    finally:
        torch.set_default_dtype(before)


LISTS_OF_FP4_KERNELS = ("_POSSIBLE_NVFP4_KERNELS", "_POSSIBLE_MXFP4_KERNELS")
LISTS_OF_FP8_KERNELS = ("_POSSIBLE_FP8_KERNELS", "_POSSIBLE_FP8_BLOCK_KERNELS", "_POSSIBLE_WFP8A16_KERNELS")


def keep_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered from here on is gone when the test ends."""
    for name in ("_POSSIBLE_KERNELS", *LISTS_OF_FP4_KERNELS, *LISTS_OF_FP8_KERNELS, "MarlinNvFp4LinearKernel"):
        if hasattr(linear, name):  # older versions do not have all of them
            monkeypatch.setattr(linear, name, copy.deepcopy(getattr(linear, name)))
    monkeypatch.setattr(fbgemm_fp8, "prepare_fp8_layer_for_marlin", fbgemm_fp8.prepare_fp8_layer_for_marlin)


def take_first(monkeypatch: pytest.MonkeyPatch, arch: str | None = None) -> None:
    """Our kernel in front of vLLM's, packing for `arch`, and a CPU that says it is a Hopper GPU where vLLM asks."""
    monkeypatch.setitem(_POSSIBLE_KERNELS, PlatformEnum.CPU, [WeightOnlyLinearKernel])
    monkeypatch.setattr(WeightOnlyLinearKernel, "arch", arch)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(9, 0))
    # The types that vLLM's GPTQ is content with: on a GPU it has 8 bits, too.
    types = {False: [scalar_types.uint4b8, scalar_types.uint8b128], True: [scalar_types.uint4]}
    monkeypatch.setattr(marlin_utils, "_query_cpu_marlin_supported_quant_types", lambda has_zp, _: types[has_zp])


def rank_of(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    """Layers that are built from here on are those of one rank of tensor parallelism."""
    for module in ("vllm.model_executor.layers.linear", "vllm.model_executor.parameter"):
        monkeypatch.setattr(f"{module}.get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(f"{module}.get_tensor_model_parallel_world_size", lambda: ranks)


def build(
    method: str,
    options: dict[str, Any],
    k: int,
    n: int,
    bias: bool = False,
    kind: type[LinearBase] = ColumnParallelLinear,
) -> LinearBase:
    """A linear layer of vLLM with the quantization method of `options`, its tensors not yet loaded."""
    quantization = get_quantization_config(method).from_config(options)
    return kind(k, n, bias=bias, quant_config=quantization, prefix="model.layers.0.mlp.up_proj")


def load(layer: LinearBase, stored: dict[str, torch.Tensor]) -> None:
    """Loads the tensors, as a model's `load_weights` does. Newer versions of vLLM drop g_idx."""
    parameters = dict(layer.named_parameters())
    for name, tensor in stored.items():
        if name in parameters or name != "g_idx":
            parameters[name].weight_loader(parameters[name], tensor)


def finish(layer: LinearBase) -> None:
    """What a loader does when all tensors are loaded."""
    layer.quant_method.process_weights_after_loading(layer)
