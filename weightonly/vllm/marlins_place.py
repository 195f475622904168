"""What linear kernels in the place of vLLM's Marlin have in common: those of 4-bit floats and of FP8."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.utils import replace_parameter

from ..gemm import gemm
from ..heuristics.arch import Arch
from ..heuristics.problem import FORMATS
from ..packing import preprocess
from ..quantize_codes import check_scales_as
from .support import Held, why_not

logger = init_logger(f"vllm.{__name__}")


class InMarlinsPlace:
    """Mixed into a kernel of Marlin's, which keeps the layers that `gemm` does not compute. After loading:

    weight                 uint8 [bytes], the data of the PackedWeight that `held` makes around the parameter
    weight_scale, or what
    `scale_name` says      [groups, N] in the dtype of x
    """

    arch: Arch | None = None
    """The GPU to pack for; None: that of the weight's device (see `preprocess`)."""

    format: str
    held: Held | None = None

    def __init__(self, config: Any, **names: Any) -> None:
        super().__init__(config, **names)  # type: ignore[call-arg]
        self.dtype = torch.get_default_dtype()  # of x, while vLLM builds a model

    def weight(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What `preprocess` takes [K, N], and scales [groups, N] as the layer has them. Raises ValueError."""
        raise NotImplementedError

    def scale_name(self, layer: Any) -> str:
        return "weight_scale"

    def process_weights_after_loading(self, layer: Any) -> None:
        try:
            self._pack(layer)
        except ValueError as error:
            logger.warning_once("A layer of %s is left to vLLM's Marlin: %s", self.format, error)
            super().process_weights_after_loading(layer)  # type: ignore[misc]

    def _pack(self, layer: Any) -> None:
        q, scales = self.weight(layer)
        k, n = q.shape
        reason = why_not(k, n, self.format, k // len(scales), False, self.dtype)
        if reason is not None:
            raise ValueError(reason)
        check_scales_as(scales, self.dtype, self.format)
        packed = preprocess(q, FORMATS[self.format], self.arch, format=self.format)
        self.held = Held(k, n, self.format, packed.layout)
        for name, value in (("weight", packed.data), (self.scale_name(layer), scales.to(self.dtype).contiguous())):
            replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N]"""
        if self.held is None:
            return super().apply_weights(layer, x, bias)  # type: ignore[misc]
        return gemm(x, self.held.operand(layer.weight, getattr(layer, self.scale_name(layer)), None, None), bias=bias)
