"""The scale, and the zero point, of each group of a weight with the least square error that a few trials find.

A trial rounds the weights to the levels of a scale and a zero point. It then keeps the levels, finds by least squares
the scale and zero point that fit them best, and knows what error these have at most: rounding anew only lowers it. So
each trial is worth two. All of it is elementwise operators and sums over the rows of a group, for all groups at once,
in fp32 and units of the scale: no magnitude overflows, and sums of what rounding changes keep their digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

_GAIN = 1e-5
"""By what part the error has to be smaller to replace what there is: more than the sums in fp32 are off."""

_OUTLIER = 3.0
"""Times the root mean square of a group: a weight of this size and up counts more."""

_NOISE = 2.0**-20
"""Of the largest weight of a group: an error so small is none."""

Nearest = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(block / scale (G, g, n), scale (G, n), zero (G, n)) -> the nearest levels less zero, a new tensor (G, g, n)."""


@dataclass
class Search:
    """The best scales and zero points so far.

    block: the weights, fp32 (G, g, n).
    nearest: rounds to levels.
    store: rounds scales, fp64 (G, n), to what the format can hold, fp32.
    scale, zero: fp32 (G, n), what the search starts from; zero None: there are no zero points.
    store_zero: `store` for zero points.
    """

    block: torch.Tensor
    nearest: Nearest
    store: Callable[[torch.Tensor], torch.Tensor]
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    store_zero: Callable[[torch.Tensor], torch.Tensor] | None = None
    error: torch.Tensor = field(init=False)
    """The weighted sum of squares at most, fp64 (G, n)."""

    def __post_init__(self) -> None:
        self.importance = _importance(self.block)
        self.count = self.importance.sum(dim=1).double()
        self.error = torch.full_like(self.scale, torch.inf, dtype=torch.float64)
        self.start = self.scale, self.zero
        self.try_(self.scale, self.zero, gain=0.0)

    def try_(self, scale: torch.Tensor, zero: torch.Tensor | None, *, gain: float = _GAIN) -> None:
        """Tries a scale and zero point that the format can hold, fp32 (G, n), and what fits their levels best."""
        ratio = self.block / scale.unsqueeze(1)
        level = self.nearest(ratio, scale, zero)
        off = torch.sub(level, ratio, out=ratio)
        weighted = off * self.importance
        product = weighted * off
        off_off = _sum(product)
        off_level = _sum(torch.mul(weighted, level, out=product))
        off_sum = _sum(weighted)
        torch.mul(level, self.importance, out=weighted)
        level_level = _sum(torch.mul(weighted, level, out=product))
        exact = scale.double()
        self._take(scale, zero, exact * exact * off_off, gain)
        # block / scale = level - off = (1 + change) * (level - move) + what remains
        if zero is not None and self.store_zero is not None:
            level_sum, count = _sum(weighted), self.count
            slope = (off_level - off_sum * level_sum / count) / (level_level - level_sum * level_sum / count)
            new_zero = self.store_zero(zero + (off_sum - slope * level_sum) / (count * (1 - slope)))
            move = new_zero.double() - zero.double()
            off_off = off_off - move * (2 * off_sum - count * move)
            off_level = off_level - move * (off_sum + level_sum - count * move)
            level_level = level_level - move * (2 * level_sum - count * move)
            zero = new_zero
        new_scale = self.store(exact * (1 - off_level / level_level))
        change = new_scale.double() / exact - 1
        error = exact * exact * (off_off + change * (2 * off_level + change * level_level))
        self._take(new_scale, zero, torch.where(new_scale == 0, torch.inf, error), gain)

    def _take(self, scale: torch.Tensor, zero: torch.Tensor | None, error: torch.Tensor, gain: float) -> None:
        better = error < self.error * (1 - gain)  # NaN never is
        self.scale = torch.where(better, scale, self.scale)
        self.error = torch.where(better, error, self.error)
        if zero is not None and self.zero is not None:
            self.zero = torch.where(better, zero, self.zero)

    def result(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The best scale and zero point; what the search started from, where their plain sum of squares is no
        smaller."""
        scale, zero = self.start
        before = self._squares(scale, zero)
        better = self._squares(self.scale, self.zero) < before * (1 - _GAIN)
        # What fp32 rounds in block / scale is no error that could be made smaller.
        size = self.block.abs().amax(dim=1).double()
        better &= before > self.block.shape[1] * (_NOISE * size).square()
        if zero is not None and self.zero is not None:
            zero = torch.where(better, self.zero, zero)
        return torch.where(better, self.scale, scale), zero

    def _squares(self, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        """The sum of squares of what rounding changes, fp64 (G, n)."""
        ratio = self.block / scale.unsqueeze(1)
        off = self.nearest(ratio, scale, zero).sub_(ratio)
        exact = scale.double()
        return exact * exact * _sum(off.square_())


def _sum(t: torch.Tensor) -> torch.Tensor:
    return t.sum(dim=1).double()


def _importance(block: torch.Tensor) -> torch.Tensor:
    """What the square of each weight's error counts: 1, or more for outliers; fp32 (G, g, n).

    The few weights of several times the others' size meet large activations, as measured on MiniLM: to clip them for
    the sake of the others costs outputs more than it saves.
    """
    size = block.abs()
    peak = size.amax(dim=1, keepdim=True)
    size /= torch.where(peak == 0, 1.0, peak)
    typical = size.square().mean(dim=1, keepdim=True).sqrt_()
    return size.div_(_OUTLIER * torch.where(peak == 0, 1.0, typical)).clamp_(min=1).square_()
