"""Random packed weights, with fractional zeros and scales of both signs, for the tests of what dequantizes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.fp8_cases import random_e4m3

import weightonly as wo
from weightonly.heuristics.problem import FLOAT_FORMATS


@dataclass
class Weight:
    """A packed weight with its scales and zeros, on the CPU."""

    qweight: wo.PackedWeight
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def on(self, device: torch.device) -> tuple[wo.PackedWeight, torch.Tensor, torch.Tensor | None]:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return self.qweight.to(device), self.scales.to(device), zeros


def random_weight(
    k: int,
    n: int,
    format: str,
    layout: str,
    dtype: torch.dtype,
    group_size: int,
    zeros: bool,
    g: torch.Generator,
    exponent: int = -6,
) -> Weight:
    """Fractional zeros, and scales of both signs around 2^exponent."""
    groups = 1 if group_size == -1 else k // group_size
    scales = (torch.randn(groups, n, generator=g).double() * 2.0**exponent).to(dtype)
    if format in ("int4", "int8"):
        bits = 4 if format == "int4" else 8
        limit = 1 << (bits - 1)
        q = torch.randint(-limit, limit, (k, n), dtype=torch.int8, generator=g)
        z = (torch.rand(groups, n, generator=g) * 2 * limit - limit).to(dtype) if zeros else None
        return Weight(wo.preprocess(q, bits=bits, layout=layout), scales, z)
    if format in FLOAT_FORMATS:
        floats = random_e4m3((k, n), g, exact=False)
        return Weight(wo.preprocess(floats, format=format, layout=layout), scales, None)
    codes = torch.randint(0, 16, (k, n), dtype=torch.int8, generator=g)
    table = torch.randn(16, generator=g) if format == "code4" else None
    return Weight(wo.preprocess(codes, format=format, code=table, layout=layout), scales, None)
