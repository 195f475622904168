"""What the tests of stacked experts share."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.code_cases import own, random_codes
from tests.fp8_cases import random_e4m3
from tests.packed_cases import random_q

import weightonly as wo
from weightonly.heuristics.problem import FLOAT_FORMATS

KINDS = [(f"int{bits}", layout) for bits in (4, 8) for layout in ("row_major", "interleaved", "tiled", "cpu")]
KINDS += [(format, layout) for format in ("nf4", "fp4", "code4") for layout in ("tiled", "cpu")]

kinds = pytest.mark.parametrize(("format", "layout"), KINDS, ids=lambda value: value)


def random_stack(experts: int, k: int, n: int, format: str, generator: torch.Generator) -> torch.Tensor:
    """Integers, codes or floats that `format` has, [experts, k, n]."""
    if format in FLOAT_FORMATS:
        return random_e4m3((experts, k, n), generator, exact=True)
    if not format.startswith("int"):
        return random_codes(experts * k, n, generator).view(experts, k, n).view(torch.int8)
    return random_q(experts * k, n, int(format[3:]), generator).view(experts, k, n)


def pack(q: torch.Tensor, format: str, layout: str) -> wo.PackedWeight:
    return wo.preprocess(q, 8 if format == "int8" else 4, layout=layout, format=format, code=own(format))


@dataclass
class Stack:
    """A stacked weight with its scales and zeros, and the same weights in fp64."""

    qweight: wo.PackedWeight
    scales: torch.Tensor  # [E, K / 64, N]
    zeros: torch.Tensor  # like scales
    w64: torch.Tensor  # [E, K, N]


def exact_stack(
    experts: int,
    k: int,
    n: int,
    generator: torch.Generator,
    format: str = "int4",
    layout: str = "tiled",
    dtype: torch.dtype = torch.float32,
) -> Stack:
    """Integers, K a multiple of 64. Scales are powers of two, zeros integers: sums of integers times it are exact."""
    q = random_stack(experts, k, n, format, generator)
    shape = (experts, k // 64, n)
    scales = torch.exp2(torch.randint(-2, 2, shape, generator=generator).double())
    zeros = torch.randint(-4, 4, shape, generator=generator).double()
    w64 = (q.double().view(experts, k // 64, 64, n) - zeros.unsqueeze(2)) * scales.unsqueeze(2)
    return Stack(pack(q, format, layout), scales.to(dtype), zeros.to(dtype), w64.view(experts, k, n))


def ends(counts: list[int]) -> torch.Tensor:
    """`offs` of so many rows for each expert."""
    return torch.tensor(counts).cumsum(0).int()
