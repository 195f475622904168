"""Experts of gpt-oss in MXFP4, whose quantization config says "mxfp4". For x = "gate_up_proj" and "down_proj":

x_blocks  uint8 [E, N, K / 32, 16]: E2M1 codes along K; the even element in the low nibble
x_scales  uint8 [E, N, K / 32]: exponents of E8M0
x_bias    float [E, N]

w = 2^(scale - 127) * number of the code. The columns of gate and up alternate in x = "gate_up_proj". transformers
(integrations/mxfp4.py) has the definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..codebooks import codebook
from ..heuristics.problem import FORMAT_GROUPS
from .e2m1 import e8m0_scales, unpack_codes
from .expect import FLOATS, expect, option
from .layers import LayerFormat, LayerShape, Tensors
from .plain import CodeWeight

METHOD = "mxfp4"

_ROWS = FORMAT_GROUPS["mxfp4"]


def read_gpt_oss(blocks: torch.Tensor, scales: torch.Tensor) -> CodeWeight:
    """The experts of one product: codes [E, K, N], and scales [E, K / 32, N] in bfloat16, which are exact.

    Both tensors are on one device, CPU or CUDA.

    Args:
        blocks: uint8 [E, N, K / 32, 16]: E2M1 codes along K; the even element in the low nibble.
        scales: uint8 [E, N, K / 32]: exponents of E8M0.

    Raises:
        TensorError: a ValueError, tensors that do not fit together, and scales that are NaN or, with their codes,
            beyond fp32.

    Examples:
        >>> blocks = torch.randint(256, (4, 768, 16, 16), dtype=torch.uint8)
        >>> wo.formats.read_gpt_oss(blocks, torch.full((4, 768, 16), 127, dtype=torch.uint8)).codes.shape
        torch.Size([4, 512, 768])
    """
    _shape(blocks, scales)
    powers = e8m0_scales("scales", scales).transpose(1, 2).contiguous()
    codes = unpack_codes(blocks.flatten(2)).transpose(1, 2)  # strided: each expert is copied when it is packed
    return CodeWeight(codes, codebook("mxfp4", blocks.device), powers, "mxfp4", torch.bfloat16)


def gpt_oss_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format. Raises ValueError for a `modules_to_not_convert` that is no list."""
    option(options, "modules_to_not_convert", list)

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        experts, k, n = _shape(tensors["blocks"], tensors["scales"])
        if "bias" in tensors:
            expect("bias", tensors["bias"], FLOATS, [experts, n])
        return LayerShape("mxfp4", k, n, _ROWS, symmetric=True, act_order=False, experts=experts)

    return LayerFormat(
        name=METHOD,
        anchors=("blocks",),
        required=("scales",),
        optional=("bias",),
        owned=("scales",),
        small=(),
        describe=describe,
        read=lambda layer, tensors, zeros: read_gpt_oss(tensors["blocks"], tensors["scales"]),
        separator="_",
    )


def _shape(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[int, int, int]:
    """(E, K, N). Raises TensorError for tensors that do not fit together."""
    expect("blocks", blocks, torch.uint8, ["E", "N", "K / 32", _ROWS // 2])
    experts, n, groups, _ = blocks.shape
    expect("scales", scales, torch.uint8, [experts, n, groups])
    return experts, groups * _ROWS, n
