"""Linear kernels in the place of Marlin's for 4-bit floats, of compressed-tensors and ModelOpt.

vLLM takes Marlin, or Humming, on GPUs that do not multiply 4-bit floats themselves: x stays in 16 bits, whatever the
file says of activations. It brings the formats to one form:

weight               uint8 [N, K / 2]: E2M1 codes, the even element of K in the low nibble
weight_scale         nvfp4: float8_e4m3fn [N, K / 16]; mxfp4: uint8 [N, K / 32], exponents of E8M0
weight_global_scale  nvfp4 alone: fp32, one number

w = weight_scale * weight_global_scale * number of the code.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MarlinMxFp4LinearKernel, MarlinNvFp4LinearKernel
from vllm.platforms import current_platform

from ..formats.e2m1 import e8m0_scales
from .marlins_place import InMarlinsPlace
from .rows import unpack_rows
from .support import finite_scales, multiplies_fp4


class _OfFp4(InMarlinsPlace):
    def weight(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return unpack_rows(layer.weight.data, self.format), self.scales(layer).t()

    def scales(self, layer: Any) -> torch.Tensor:
        """[N, groups], exactly as the layer has them."""
        raise NotImplementedError


class WeightOnlyNvFp4LinearKernel(_OfFp4, MarlinNvFp4LinearKernel):
    format = "nvfp4"

    def scales(self, layer: Any) -> torch.Tensor:
        return finite_scales(layer.weight_scale.data.float() * layer.weight_global_scale.data)


class WeightOnlyMxFp4LinearKernel(_OfFp4, MarlinMxFp4LinearKernel):
    format = "mxfp4"

    def scales(self, layer: Any) -> torch.Tensor:
        return e8m0_scales("weight_scale", layer.weight_scale.data)


def take_marlins_place() -> None:
    """Registers both, as the first, for GPUs from Ampere on that do not multiply 4-bit floats themselves."""
    capability = current_platform.get_device_capability()
    if multiplies_fp4() or capability is None or capability.major < 8:
        return
    lists = {
        WeightOnlyNvFp4LinearKernel: linear._POSSIBLE_NVFP4_KERNELS,
        WeightOnlyMxFp4LinearKernel: linear._POSSIBLE_MXFP4_KERNELS,
    }
    for kernel, of_platform in lists.items():
        kernels = of_platform.setdefault(current_platform._enum, [])
        if kernel.__name__ not in envs.VLLM_DISABLED_KERNELS and kernel not in kernels:
            kernels.insert(0, kernel)
            if kernel is WeightOnlyNvFp4LinearKernel:
                # For 16-bit activations vLLM asks a few kernels alone, Marlin's by its name in this module.
                linear.MarlinNvFp4LinearKernel = kernel
