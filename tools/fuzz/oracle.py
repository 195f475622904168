"""The equation of `gemm` in fp64, from the numbers that were packed: it uses no code of the library.

Inputs lie on a grid: every weight is a multiple of a power of two (`Grid.unit`), x is a small integer, and so many rows
of x are zero that no sum leaves the 24 bits of fp32. Then a kernel's fp32 sum is exact in any order, and its result is
the fp64 sum, rounded once: equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

FP32_BITS = 24

ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda y: y,
    "identity": lambda y: y,
    "relu": lambda y: y.clamp(min=0),
    "gelu": lambda y: y * 0.5 * (1 + torch.erf(y * 0.5**0.5)),
    "silu": lambda y: y / (1 + torch.exp(-y)),
}
"""Of an fp64 tensor."""

# |act'| stays below this: an error of the sum comes out at most so much larger.
_STEEPEST = 1.13


@dataclass(frozen=True)
class Grid:
    """What one weight w can be: a multiple of `unit`, at most `largest`."""

    unit: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Grid:
        """The coarsest grid of a list of numbers, not all of them zero."""
        exponents = []
        for value in values:
            if value:
                mantissa, exponent = math.frexp(value)
                integer = int(abs(mantissa) * 2**53)
                exponents.append(exponent - 53 + (integer & -integer).bit_length() - 1)
        return cls(2.0 ** min(exponents), max(map(abs, values)))

    def scaled(self, exponents: tuple[int, int]) -> Grid:
        """Times powers of two, from 2^exponents[0] to 2^exponents[1]."""
        low, high = exponents
        return Grid(self.unit * 2.0**low, self.largest * 2.0**high)

    @property
    def terms(self) -> int:
        """Products with x of magnitude 1 whose sum stays exact in fp32. Half of the range is left for the bias."""
        return int(2 ** (FP32_BITS - 1) * self.unit / self.largest)


def dense(
    q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, table: torch.Tensor | None
) -> torch.Tensor:
    """w fp64 [K, N] from q int8 [K, N], scales and zeros [K / g, N]; of codes the table fp64 [16]."""
    k, n = q.shape
    groups = scales.shape[0]
    values = (q.double() if table is None else table[q.long()]).view(groups, k // groups, n)
    if zeros is not None:
        values = values - zeros.double()[:, None]
    return (values * scales.double()[:, None]).view(k, n)


@dataclass(frozen=True)
class Sums:
    """Of one case: x @ w, fp64 [M, N], and where fp32 sums may round, what they may be off by, else None."""

    exact: torch.Tensor
    slack: torch.Tensor | None

    @classmethod
    def of(cls, x: torch.Tensor, w: torch.Tensor, terms: int | None) -> Sums:
        """x, w: fp64. terms: products of one sum that are not zero, None where all sums are exact in fp32."""
        slack = None
        if terms is not None:
            slack = (terms + 3) * 2.0**-FP32_BITS * (x.abs() @ w.abs())
        return cls(x @ w, slack)

    def rows(self, begin: int, end: int) -> Sums:
        return Sums(self.exact[begin:end], None if self.slack is None else self.slack[begin:end])

    def differs(
        self, y: torch.Tensor, bias: torch.Tensor | None, activation: str | None, rounds_early: bool
    ) -> torch.Tensor:
        """bool [M, N]: where y is not act(sums + bias).

        Exact sums and an activation that rounds nothing leave one number. GELU and SiLU may be off by twice the
        rounding of a framework's fp32 function. rounds_early: the sum is rounded to the dtype of y before the bias is
        added and before the activation (cuBLAS, then an operator of PyTorch).
        """
        before = self.exact if bias is None else self.exact + bias.double()
        expected = ACTIVATIONS[activation](before)
        is_exact = self.slack is None and activation in (None, "identity", "relu")
        if is_exact and not (rounds_early and bias is not None):
            return y != expected.float().to(y.dtype)
        if is_exact and bias is not None:
            # PyTorch's addmm adds the bias to fp32 sums or to rounded ones.
            twice = (self.exact.float().to(y.dtype).double() + bias.double()).to(y.dtype)
            return (y != expected.float().to(y.dtype)) & (y.double() != ACTIVATIONS[activation](twice.double()))
        rounding = torch.finfo(y.dtype).eps / 2
        bound = (
            2 * rounding * expected.abs() + 2.0**-21 * before.abs() + torch.finfo(y.dtype).smallest_normal * rounding
        )
        if self.slack is not None:
            bound += _STEEPEST * self.slack
        if rounds_early:
            bound += _STEEPEST * rounding * (before.abs() + self.exact.abs())
        return ~((y.double() - expected).abs() <= bound)  # NaN differs
