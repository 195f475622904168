"""Weights of random codes in NF4, FP4 and another codebook, for the tests of these formats."""

from __future__ import annotations

import pytest
import torch

import weightonly as wo
from weightonly.codebooks import CODEBOOKS

FORMATS = ["nf4", "fp4", "code4"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
OWN = tuple(torch.linspace(-1.5, 2, 16).tolist())

formats = pytest.mark.parametrize("format", FORMATS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def random_codes(k: int, n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 16, (k, n), generator=g).to(torch.uint8)


def own(format: str) -> tuple[float, ...] | None:
    """What `preprocess` wants for `code`."""
    return OWN if format == "code4" else None


def packed(codes: torch.Tensor, format: str, layout: str | None = None) -> wo.PackedWeight:
    return wo.preprocess(codes, format=format, code=own(format), layout=layout)


def codebook_of(format: str) -> torch.Tensor:
    """fp32 [16]"""
    return torch.tensor(CODEBOOKS.get(format, OWN))
