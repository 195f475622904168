"""The scale, and the zero point, of each group of a weight with the least square error that a few trials find.

A trial rounds the weights to the levels of a scale and a zero point, and finds by least squares what fits these levels
best: rounding anew then only lowers the error. The first trials clip the ends of the range, the last one begins at the
best so far.

The same weights give the same bits in blocks of any size, with any number of threads and on each device: all of it is
elementwise operators, and sums are trees of additions whose order the rows of a group decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Store = Callable[[torch.Tensor], torch.Tensor]
"""fp64 (G, n) -> the nearest numbers that the format can hold, fp64 (G, n)."""


def fold(t: torch.Tensor) -> torch.Tensor:
    """The sum over dim 0, fp64 (G, n), in an order that its size alone decides. t: fp32 (g, G, n), overwritten."""
    rows = len(t)
    while rows > 1:
        half = rows // 2
        t[:half].add_(t[rows - half : rows])
        rows -= half
    return t[0].double()


@dataclass
class Search:
    """The best scale and zero point so far.

    block: the weights, fp32 (g, G, n).
    lowest, largest: the ends of the range of q.
    store_zero: what zero points can be; None: there are none.
    scratch: fp32 (2, g, G, n), overwritten.
    """

    block: torch.Tensor
    lowest: int
    largest: int
    store_zero: Store | None
    scratch: torch.Tensor
    scale: torch.Tensor = field(init=False)
    zero: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.level, self.product = self.scratch
        self.scale = torch.ones_like(self.block[0], dtype=torch.float64)
        self.zero = torch.zeros_like(self.scale)
        self.gain = torch.full_like(self.scale, -1.0)
        """By how much the sum of squares is less than that of the weights."""
        if self.store_zero is not None:
            self.total = fold(self.product.copy_(self.block))

    def try_(self, scale: torch.Tensor, zero: torch.Tensor) -> None:
        """Takes what fits the levels of scale and zero best, fp64 (G, n), where it is better than the best so far."""
        level = torch.mul(self.block, scale.reciprocal().float(), out=self.level)
        if self.store_zero is not None:
            zero = self.store_zero(zero)
            level.add_(zero.float())
        level.round_().clamp_(self.lowest, self.largest)
        dot = fold(torch.mul(self.block, level, out=self.product))
        squares = fold(torch.mul(level, level, out=self.product))
        if self.store_zero is not None:
            count, levels, total = len(level), fold(level), self.total
            spread = squares * count - levels * levels
            fitted = (levels - total * spread / (dot * count - total * levels)) / count
            zero = self.store_zero(torch.where(fitted.isfinite(), fitted, zero))
            dot = dot - zero * total
            squares = squares - zero * (2 * levels - count * zero)
        gain = dot * dot / squares
        better = gain > self.gain  # NaN never is
        self.gain = torch.where(better, gain, self.gain)
        self.scale = torch.where(better, dot / squares, self.scale)
        self.zero = torch.where(better, zero, self.zero)


_CLIPS = (0.92, 0.98, 0.86, 0.82, 1.02)
"""Parts of the larger end of the range to try without zero points."""

_ENDS = ((0.92, 0.92), (0.88, 0.97), (0.97, 0.88), (0.97, 0.94), (0.94, 0.97))
"""Parts of both ends of the range to try with zero points."""


def least_squares(
    block: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    lowest: int,
    largest: int,
    store_zero: Store | None,
    scratch: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero), fp64 (G, n); see `Search`. low, high: the ends of each group's range, fp64 (G, n)."""
    search = Search(block, lowest, largest, store_zero, scratch)
    if store_zero is None:
        peak = torch.where(high > -low, high, low)
        for clip in _CLIPS:  # there is one level more below 0 than above
            search.try_(peak * (clip / lowest), search.zero)
    else:
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        for below, above in _ENDS:
            scale = (high * above - low * below) / (largest - lowest)
            search.try_(scale, lowest - low * below / scale)
    search.try_(search.scale, search.zero)
    return search.scale, search.zero
