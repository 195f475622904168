"""A linear kernel in the place of Marlin's for FP8 weights (E4M3) beside activations of 16 bits.

vLLM takes Marlin, or Humming, on GPUs that do not multiply FP8 themselves, where its kernels that do are disabled, and,
whatever the GPU, for files that leave activations in 16 bits. The layer then has:

weight                          float8_e4m3fn: [N, K] of blocks, else [K, N]
weight_scale, weight_scale_inv  fp32, or E8M0 of blocks; one number, one for each merged layer, [N, 1], or
                                [ceil(N / bn), ceil(K / bk)] for blocks of weight_block_size

w = weight * its scale. A number for each merged layer becomes scales per channel, a block of 128 x 128 a group of 128
rows whose scale is repeated along N.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import HummingFP8ScaledMMLinearKernel, MarlinFP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization import fbgemm_fp8
from vllm.platforms import current_platform

from ..formats.fp8 import read_fp8
from .marlins_place import InMarlinsPlace


class WeightOnlyFp8LinearKernel(InMarlinsPlace, MarlinFP8ScaledMMLinearKernel):
    format = "fp8"

    def scale_name(self, layer: Any) -> str:
        return "weight_scale" if getattr(layer, "weight_scale_inv", None) is None else "weight_scale_inv"

    def weight(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        name = self.scale_name(layer)
        block, weight, scale = getattr(layer, "weight_block_size", None), layer.weight.data, getattr(layer, name).data
        if block is None:
            weight, scale, widths = weight.t(), scale.flatten(), getattr(layer, "logical_widths", [])
            if 1 < len(scale) == len(widths):
                scale = scale.repeat_interleave(torch.tensor(widths, device=scale.device))
        read = read_fp8(weight, scale, block and tuple(block), name=name)
        return read.codes, read.scales

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N]. Raises RuntimeError for weights that another process packed."""
        if self.held is None and layer.weight.dim() == 1:
            raise RuntimeError(
                "weight: expected one that this process packed, got one from a weight cache; VLLM_DISABLED_KERNELS="
                f"{type(self).__name__} in both processes leaves such layers to vLLM"
            )
        return super().apply_weights(layer, x, bias)


def take_fp8() -> None:
    """Registers the kernel directly before the first weight-only one of vLLM's, for GPUs from Ampere on."""
    capability = current_platform.get_device_capability()
    if capability is None or capability.major < 8:  # for Turing our kernels dequantize the weight first
        return
    weight_only = (MarlinFP8ScaledMMLinearKernel, HummingFP8ScaledMMLinearKernel)
    for of_platform in (
        linear._POSSIBLE_FP8_KERNELS,
        linear._POSSIBLE_FP8_BLOCK_KERNELS,
        linear._POSSIBLE_WFP8A16_KERNELS,
    ):
        kernels = of_platform.get(current_platform._enum, [])
        place = next((i for i, kernel in enumerate(kernels) if kernel in weight_only), None)
        if place is not None and WeightOnlyFp8LinearKernel not in kernels:
            kernels.insert(place, WeightOnlyFp8LinearKernel)
    # FBGEMM's layers are prepared for Marlin before the kernel is asked, whichever it is.
    prepare = fbgemm_fp8.prepare_fp8_layer_for_marlin
    if hasattr(prepare, "__wrapped__"):
        return

    @functools.wraps(prepare)
    def prepare_others(layer: Any) -> None:
        if not isinstance(layer.quant_method.fp8_linear, WeightOnlyFp8LinearKernel):
            prepare(layer)

    fbgemm_fp8.prepare_fp8_layer_for_marlin = prepare_others
