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

Nearest = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(block / scale (G, g, n), scale (G, n), zero (G, n)) -> the nearest levels less zero, a new tensor (G, g, n)."""


@dataclass
class Search:
    """The best scales and zero points so far.

    block: the weights, fp32 (G, g, n).
    nearest: rounds to levels.
    store: rounds scales, fp64 (G, n), to what the format can hold, fp32.
    store_zero: the same for zero points, fp32; None: there are none.
    scale, zero: fp32 (G, n), what the search starts from.
    """

    block: torch.Tensor
    nearest: Nearest
    store: Callable[[torch.Tensor], torch.Tensor]
    scale: torch.Tensor
    store_zero: Callable[[torch.Tensor], torch.Tensor] | None = None
    zero: torch.Tensor | None = None
    error: torch.Tensor = field(init=False)
    """The sum of squares at most, fp64 (G, n)."""

    def __post_init__(self) -> None:
        self.error = torch.full_like(self.scale, torch.inf, dtype=torch.float64)
        self.error = self.try_(self.scale, self.zero, 0.0)

    def try_(self, scale: torch.Tensor, zero: torch.Tensor | None, gain: float = _GAIN) -> torch.Tensor:
        """Tries a scale and zero point that the format can hold, fp32 (G, n), and what fits their levels best.

        Returns the error of what was tried itself, fp64 (G, n).
        """
        ratio = self.block / scale.unsqueeze(1)
        level = self.nearest(ratio, scale, zero)
        off = torch.sub(level, ratio, out=ratio)
        rows = self.block.shape[1]
        product = off * off
        off_off = product.sum(dim=1).double()
        off_level = torch.mul(off, level, out=product).sum(dim=1).double()
        level_level = torch.mul(level, level, out=product).sum(dim=1).double()
        exact = scale.double()
        error = exact * exact * off_off
        # block / scale = level - off = (1 + change) * (level - shift) + what remains
        move: torch.Tensor | float = 0.0
        new_zero = zero
        if zero is not None and self.store_zero is not None:
            off_sum, level_sum = off.sum(dim=1).double(), level.sum(dim=1).double()
            slope = (off_level - off_sum * level_sum / rows) / (level_level - level_sum * level_sum / rows)
            new_zero = self.store_zero(zero + (off_sum - slope * level_sum) / (rows * (1 - slope)))
            move = new_zero.double() - zero.double()
            off_off = off_off - move * (2 * off_sum - rows * move)
            off_level = off_level - move * (off_sum + level_sum - rows * move)
            level_level = level_level - move * (2 * level_sum - rows * move)
        new_scale = self.store(exact * (1 - off_level / level_level))
        change = new_scale.double() / exact - 1
        bound = exact * exact * (off_off + change * (2 * off_level + change * level_level))
        self._take(scale, zero, error, gain)
        self._take(new_scale, new_zero, torch.where(new_scale == 0, torch.inf, bound), gain)
        return error

    def _take(self, scale: torch.Tensor, zero: torch.Tensor | None, error: torch.Tensor, gain: float) -> None:
        better = error < self.error * (1 - gain)  # NaN never is
        self.scale = torch.where(better, scale, self.scale)
        self.error = torch.where(better, error, self.error)
        if zero is not None and self.zero is not None:
            self.zero = torch.where(better, zero, self.zero)
