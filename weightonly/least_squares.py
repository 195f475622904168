"""The scale, and the zero point, of each group of a weight with the least square error that a few trials find.

A trial rounds the weights to the levels of a scale and a zero point, and finds by least squares what fits these levels
best: rounding anew then only lowers the error. The first trials clip the ends of the range, the last ones begin beside
the best so far. Levels are integers, or the numbers of a codebook (see `Nearest`).

The same weights give the same bits in blocks of any size, with any number of threads and on each device: all of it is
elementwise operators, and sums are trees of additions whose order the rows of a group decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from .dense import over

SearchFor: TypeAlias = bool | Literal["whole"]
"""`search` of `weightonly.quantize`."""

Store = Callable[[torch.Tensor], torch.Tensor]
"""fp32 (G, n) -> the nearest numbers that the format can hold, fp32 (G, n)."""

Round = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Numbers, fp32 (g, G, n), and where the nearest levels go, which may be where the numbers are -> the levels."""


def require_search(search: object) -> None:
    """Raises TypeError or ValueError unless it is one of `SearchFor`."""
    if not isinstance(search, bool | str):
        raise TypeError(f'search: expected True, False or "whole", got {type(search).__name__}')
    if isinstance(search, str) and search != "whole":
        raise ValueError(f'search: expected True, False or "whole", got {search!r}')


def fold(t: torch.Tensor) -> torch.Tensor:
    """The sum over g, a view, in an order that g alone decides. t: fp32 (..., g, G, n), overwritten."""
    rows = t.shape[-3]
    while rows > 1:
        half = rows // 2
        t.narrow(-3, 0, half).add_(t.narrow(-3, rows - half, half))
        rows -= half
    return t.select(-3, 0)


def clip(group: int) -> float:
    """The part of the range of `group` weights that 16 levels should cover, of a normal distribution, from 4 on."""
    return 1 - max(math.log2(group) - 2, 0) ** 2 / 300


_FINITE = torch.finfo(torch.float32).max

_NEXT = (1.02, 0.98)
"""Of the best scale so far, what to try: next to it there are other levels, at the scale itself mostly the same."""


@dataclass
class Search:
    """The best scale and zero point so far.

    block: the weights, fp32 (g, G, n).
    round_: to whole numbers or the numbers of a codebook.
    store_scale: what scales can be; None: any number.
    store_zero: what zero points can be; None: there are none.
    scratch: fp32 (3, g, G, n), overwritten.
    """

    block: torch.Tensor
    round_: Round
    store_scale: Store | None
    store_zero: Store | None
    scratch: torch.Tensor
    scale: torch.Tensor = field(init=False)
    zero: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.scale = torch.ones_like(self.block[0])
        self.zero = torch.zeros_like(self.scale)
        self.gain = torch.full_like(self.scale, -1.0)
        """By how much the sum of squares is less than that of the weights."""
        if self.store_zero is not None:
            self.total = fold(self.scratch[0].copy_(self.block)).clone()

    def try_(self, scale: torch.Tensor, zero: torch.Tensor) -> None:
        """Takes what fits the levels of scale and zero best, fp32 (G, n), where it is better than the best so far."""
        level, level_squares, products = self.scratch
        torch.mul(self.block, scale.reciprocal().clamp(-_FINITE, _FINITE), out=level)
        if self.store_zero is not None:
            zero = self.store_zero(zero)
            level.add_(zero)
        self.round_(level, level)
        torch.mul(level, level, out=level_squares)
        torch.mul(self.block, level, out=products)
        sums = fold(self.scratch if self.store_zero is not None else self.scratch[1:])
        squares, dot = sums[-2], sums[-1]
        if self.store_zero is not None:
            count, levels, total = len(level), sums[0], self.total
            mean = over(levels, count)
            # NaN where all levels are one: such a trial is not taken.
            zero = self.store_zero(mean - total * (squares - levels * mean) / (dot * count - total * levels))
            dot -= zero * total
            squares = squares - zero * (2 * levels - count * zero)
        scale = dot / squares
        if self.store_scale is not None:
            scale = self.store_scale(scale)
            dot = 2 * dot - scale * squares
        gain = dot.mul_(scale)
        better = gain > self.gain  # NaN never is
        self.gain = torch.fmax(gain, self.gain)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)

    def best(self, starts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, zero), fp32 (G, n). starts: to try before `_NEXT`."""
        for scale, zero in starts:
            self.try_(scale, zero)
        for part in _NEXT:
            self.try_(self.scale * part, self.zero)
        return self.scale, self.zero


def squares(block: torch.Tensor, scale: torch.Tensor, round_: Round, scratch: torch.Tensor) -> torch.Tensor:
    """The sum of squares of what rounding changes, fp64 (G, n).

    round_: less the zero point, where there is one. scale: fp32 (G, n). scratch: fp32 (2 or more, g, G, n),
    overwritten.
    """
    ratio = torch.div(block, scale, out=scratch[0])
    off = round_(ratio, scratch[1]).sub_(ratio)
    exact = scale.double()
    return exact * exact * fold(off.mul_(off)).double()


_GAIN = 1e-5
"""By what part the error has to be smaller to replace what there is: more than the sums in fp32 are off."""

_NOISE = 2.0**-20
"""Of the largest weight of a group: an error so small is none."""


def is_better(
    before: torch.Tensor, after: torch.Tensor, size: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Where one scale replaces another, bool (G, n), by their sums of squares, fp64 (G, n); NaN replaces nothing.

    size: the largest magnitude of each group of `group` weights, fp64 (G, n). dtype: of scales.
    """
    # What fp32 rounds in block / scale is no error that could be made smaller.
    better = (after < before * (1 - _GAIN)) & (before > group * (_NOISE * size).square())
    # Near the largest number of the dtype few levels are finite, and squares of fp32 end at 2^-126 and 2^128: there
    # the range decides.
    return better & (size < min(torch.finfo(dtype).max / 4, 2.0**48)) & (size > 2.0**-48)


_CELLS = 4096


class Nearest:
    """Finds the next of sorted numbers, as torch.bucketize does, on a CPU quicker: a table says which are near.

    numbers: fp32 [L]. bounds: fp32 [L - 1], up to which, each included, the number before is taken. On a CPU.
    """

    def __init__(self, numbers: torch.Tensor, bounds: torch.Tensor, device: torch.device) -> None:
        self.per_unit = min(_CELLS / 2.1 / float(bounds.abs().max()), 1e38)  # in fp32 no Inf: times 0 it is NaN
        cells = self._cell(bounds).long()
        counts = cells.bincount(minlength=_CELLS)
        first = counts.cumsum(0) - counts
        inside = torch.full((int(counts.max()), _CELLS), math.inf, dtype=torch.float32, device="cpu")
        inside[torch.arange(len(bounds), device="cpu") - first[cells], cells] = bounds
        self.numbers, self.bounds = numbers.to(device), bounds.to(device)
        self.first, self.inside = first.float().to(device), inside.to(device)

    def _cell(self, ratio: torch.Tensor) -> torch.Tensor:
        """int32, which never decreases as ratio grows: so bounds of other cells are known to be above or below."""
        return torch.mul(ratio, self.per_unit).add_(_CELLS / 2).clamp_(0, _CELLS - 1).int()

    def index(self, ratio: torch.Tensor) -> torch.Tensor:
        """Which of the numbers, int32 of the shape of ratio: fp32 without NaN, contiguous."""
        if ratio.is_cuda:  # there it is one pass over ratio, and the host launches one kernel
            return torch.bucketize(ratio, self.bounds, out_int32=True)
        flat = ratio.view(-1)
        cell = self._cell(flat)
        index = self.first.index_select(0, cell)
        for bounds in self.inside:
            found = bounds.index_select(0, cell)
            index += torch.gt(flat, found, out=found)
        return index.int().view(ratio.shape)

    def __call__(self, ratio: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The numbers, as `Round` has it."""
        torch.index_select(self.numbers, 0, self.index(ratio).view(-1), out=out.view(-1))
        return out
