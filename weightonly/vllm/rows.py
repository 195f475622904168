"""The form in which vLLM's layers load a weight of ours, which can be cut along N and K: uint8 [N, K * bits / 8].

A byte holds an 8-bit element, or two 4-bit ones along K, the even element in the low nibble. Integers are stored plus
2^(bits-1), codes as they are.
"""

from __future__ import annotations

import torch

from ..formats.words import to_signed
from ..heuristics.problem import CODE_FORMATS, FORMATS

LOADED_FORMATS = ("int4", "int8", "nf4", "fp4", "mxfp4", "nvfp4")

EXACT_SCALES = {"mxfp4": torch.bfloat16, "nvfp4": torch.float32}
"""Dtypes in which scales come that not every x has the range of; others come in that of x."""


def pack_rows(unsigned: torch.Tensor, format: str) -> torch.Tensor:
    """uint8 [N, K], values of `format`, K even -> uint8 [N, K * bits / 8]"""
    if FORMATS[format] == 8:
        return unsigned.contiguous()
    return unsigned[:, ::2] | unsigned[:, 1::2] << 4


def unpack_rows(rows: torch.Tensor, format: str) -> torch.Tensor:
    """The inverse, in the form that `preprocess` takes: int8 integers or uint8 codes [K, N]."""
    bits = FORMATS[format]
    unsigned = rows if bits == 8 else torch.stack((rows & 15, rows >> 4), dim=2).flatten(1)
    columns = unsigned.t().contiguous()
    return columns if format in CODE_FORMATS else to_signed(columns, bits)
