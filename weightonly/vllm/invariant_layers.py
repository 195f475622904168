"""Layers for which vLLM asks no linear kernel in its batch-invariant mode: ours, where `gemm` computes them in its own.

There vLLM dequantizes compressed-tensors' integers and AWQ's in every step. GPTQ's layers ask for a kernel as ever.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.auto_awq import (
    AutoAWQConfig,
    AutoAWQLinearMethod,
    AutoAWQMarlinLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

from .linear_kernel import WeightOnlyLinearKernel


class InvariantAwqMethod(AutoAWQMarlinLinearMethod):
    """The method that asks for a kernel; where ours does not answer, the layer gets the one that dequantizes."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        if not _creates_ours(self, super().create_weights, layer, *args, **kwargs):
            layer.quant_method = AutoAWQLinearMethod(self.quant_config)
            layer.quant_method.create_weights(layer, *args, **kwargs)


def take_invariant_layers() -> None:
    """Called in vLLM's batch-invariant mode alone."""
    get_quant_method = AutoAWQConfig.get_quant_method
    create_weights = CompressedTensorsWNA16.create_weights
    if hasattr(create_weights, "__wrapped__"):
        return

    @functools.wraps(get_quant_method)
    def of_awq(self: Any, layer: Any, prefix: str) -> Any:
        method = get_quant_method(self, layer, prefix)
        if type(method) is not AutoAWQLinearMethod or not isinstance(layer, LinearBase):
            return method
        try:
            return InvariantAwqMethod(self)
        except ValueError:  # a type that Marlin's method does not load
            return method

    @functools.wraps(create_weights)
    def of_compressed_tensors(self: Any, *args: Any, **kwargs: Any) -> None:
        create = functools.partial(create_weights, self)
        is_invariant, self.use_batch_invariant = self.use_batch_invariant, False
        if not is_invariant:
            create(*args, **kwargs)
        elif not _creates_ours(self, create, *args, **kwargs):
            self.use_batch_invariant, self.kernel = True, None
            create(*args, **kwargs)

    AutoAWQConfig.get_quant_method = of_awq
    CompressedTensorsWNA16.create_weights = of_compressed_tensors


def _creates_ours(method: Any, create_weights: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a layer's method has our kernel when it has created the weights."""
    try:
        create_weights(*args, **kwargs)
    except ValueError:  # no kernel
        return False
    return isinstance(method.kernel, WeightOnlyLinearKernel)
