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
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MarlinMxFp4LinearKernel, MarlinNvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.platforms import current_platform

from ..formats.e2m1 import e8m0_scales
from ..gemm import gemm
from ..heuristics.arch import Arch
from ..heuristics.problem import FORMAT_GROUPS
from ..packing import preprocess
from ..quantize_codes import check_scales_as
from .rows import unpack_rows
from .support import Held, finite_scales, multiplies_fp4, why_not

logger = init_logger(f"vllm.{__name__}")


class _InPlaceOfMarlin:
    """Mixed into a kernel of Marlin's, which keeps the layers that `gemm` does not compute. After loading:

    weight        uint8 [bytes], the data of the PackedWeight that `held` makes around the parameter
    weight_scale  [groups, N], with weight_global_scale in it
    """

    arch: Arch | None = None
    """The GPU to pack for; None: that of the weight's device (see `preprocess`)."""

    format: str
    held: Held | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.dtype = torch.get_default_dtype()  # of x, while vLLM builds a model

    def process_weights_after_loading(self, layer: Any) -> None:
        try:
            self._pack(layer)
        except ValueError as error:
            logger.warning_once("A layer of %s is left to vLLM's Marlin: %s", self.format, error)
            super().process_weights_after_loading(layer)  # type: ignore[misc]

    def _pack(self, layer: Any) -> None:
        rows, format = layer.weight.data, self.format
        n, k = rows.shape[0], 2 * rows.shape[1]
        reason = why_not(k, n, format, FORMAT_GROUPS[format], False, self.dtype)
        if reason is not None:
            raise ValueError(reason)
        scales = self.scales(layer)
        check_scales_as(scales, self.dtype, format)
        packed = preprocess(unpack_rows(rows, format), 4, self.arch, format=format)
        self.held = Held(k, n, format, packed.layout)
        for name, value in (("weight", packed.data), ("weight_scale", scales.t().to(self.dtype).contiguous())):
            replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))

    def scales(self, layer: Any) -> torch.Tensor:
        """[N, groups], exactly as the layer has them."""
        raise NotImplementedError

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N]"""
        if self.held is None:
            return super().apply_weights(layer, x, bias)  # type: ignore[misc]
        return gemm(x, self.held.operand(layer.weight, layer.weight_scale, None, None), bias=bias)


class WeightOnlyNvFp4LinearKernel(_InPlaceOfMarlin, MarlinNvFp4LinearKernel):
    format = "nvfp4"

    def scales(self, layer: Any) -> torch.Tensor:
        return finite_scales(layer.weight_scale.data.float() * layer.weight_global_scale.data)


class WeightOnlyMxFp4LinearKernel(_InPlaceOfMarlin, MarlinMxFp4LinearKernel):
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
