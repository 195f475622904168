"""What `select` looks at, in two steps: what GPU, format and scales decide (`Space`), then what K does (`AtK`)."""

from __future__ import annotations

import bisect
import functools
import math
from typing import NamedTuple

from .arch import Arch, parse_arch
from .configs import KernelConfig
from .cost import column_bytes, total_us
from .families.base import Bounds, Kernel, Split
from .legal import ever_legal
from .problem import Problem, layouts_of, padded_k

_TYPICAL = 1 << 27
"""K * N of a weight, for which kernels are put in order."""

_HEIGHTS = range(64, 1025, 64)
"""Rows of x that have an order of their own, beside those of tiles."""


class Looked(NamedTuple):
    """A kernel as the search looks at it.

    number        of it in the space
    min_m, max_m  rows of x for which it is looked at
    tile_*        rows and columns of an output tile; of a kernel that takes no more rows than a tile has, that number
    bounds        see `Kernel`
    first_parts   see `Family`
    takes_tail    see `Family`
    """

    number: int
    min_m: int
    max_m: int
    tile_m: int
    tile_n: int
    kernel: Kernel
    bounds: Bounds
    first_parts: int
    takes_tail: bool


Row = tuple[float, float, float, float, float, Looked]
"""A kernel behind what bounds its time, as a plain tuple:

    rest_us, rest_column_us   the least bound_us and column_us from this one on
    bound_us, column_us       no launch takes less than bound_us + K * N * column_us, times M where `Order.by_m`, ...
    byte_us                   ... nor less than bound_us + byte_us for each byte that moves
"""


class Order(NamedTuple):
    """The kernels for some M, those likely to be quick first.

    rows            for one launch
    pair_rows       those that may be one of two launches
    firsts          those that may be the first of two
    pair_column_us  the least column_us of pair_rows
    by_m            whether column_us is for each row of x
    """

    rows: list[Row]
    pair_rows: list[Row]
    firsts: list[Looked]
    pair_column_us: float
    by_m: bool


class Space:
    """The kernels of one GPU, format, layout and kind of scales, in the order of CONFIGS.

    panel_columns    of the layout
    output_us        all SMs' time for a k of an element of y in a tail, at least
    tail_us          a tail's time beside that of its elements, at least
    tail_overlap_us  see `Family`
    """

    def __init__(self, kernels: list[Looked], sm_count: int) -> None:
        self.kernels, self.sm_count = kernels, sm_count
        families = [k.kernel.config.rules for k in kernels]
        tails = [(k, k.bounds) for k in kernels if k.takes_tail]
        self.panel_columns = max((family.panel_columns for family in families), default=1)
        self.output_us = min((b.k_us / (k.tile_m * k.tile_n) for k, b in tails), default=math.inf)
        self.tail_us = min((b.launch_us + b.end_us + b.start_us for _, b in tails), default=math.inf)
        self.tail_overlap_us = min((family.tail_overlap_us for family in families if family.takes_tail), default=0.0)
        self._heights = sorted({*_HEIGHTS, *(k.tile_m for k in kernels)})
        self._orders: list[Order | None] = [None] * (len(self._heights) + 1)

    def order(self, m: int) -> Order:
        """M counts as the fewest rows above the next lower height; above the highest, by itself."""
        height = bisect.bisect_left(self._heights, m)
        order = self._orders[height]
        if order is None:
            order = self._orders[height] = self._in_order(height)
        return order

    def _in_order(self, height: int) -> Order:
        by_m = height == len(self._heights)
        least_m = 1 + self._heights[height - 1] if height else 1
        most_m = math.inf if by_m else self._heights[height]
        bounded = []
        for k in self.kernels:
            if k.min_m <= most_m and least_m <= k.max_m:
                bounds, row_tiles = k.bounds, 1 / k.tile_m if by_m else -(-least_m // k.tile_m)
                bound_us = bounds.launch_us + bounds.end_us + least_m * bounds.token_us
                column_us = row_tiles * bounds.k_us / k.tile_n
                compute_us = _TYPICAL * column_us * (least_m if by_m else 1)
                us = total_us((bound_us, compute_us, _TYPICAL / 2 * bounds.byte_us, bounds.unhidden))
                bounded.append((us, bound_us, column_us, bounds.byte_us, k))
        bounded.sort(key=lambda of: of[0])
        for_pairs = [of for of in bounded if of[-1].takes_tail]
        firsts = [k for *_, k in for_pairs if k.first_parts]
        pair_column_us = min((of[2] for of in for_pairs), default=math.inf)
        return Order(_rows(bounded), _rows(for_pairs), firsts, pair_column_us, by_m)


def _rows(bounded: list[tuple[float, float, float, float, Looked]]) -> list[Row]:
    rests = (bounded[i:] for i in range(len(bounded)))
    return [(min(of[1] for of in rest), min(of[2] for of in rest), *rest[0][1:]) for rest in rests]


class AtK:
    """A space for one K: what M and N leave to compute. Splits of a kernel are made when it is first looked at.

    column_bytes  of a column of the packed weight, with scales and zeros
    """

    __slots__ = ("column_bytes", "k", "k_padded", "space", "splits")

    def __init__(self, space: Space, k: int, column_bytes: int) -> None:
        self.space, self.k, self.k_padded, self.column_bytes = space, k, padded_k(k), column_bytes
        self.splits: list[tuple[Split, ...] | None] = [None] * len(space.kernels)

    def make(self, kernel: Looked) -> tuple[Split, ...]:
        splits = self.splits[kernel.number] = kernel.kernel.splits(self.k)
        return splits


@functools.lru_cache(maxsize=256)
def space_of(
    format: str, arch: int, sm_count: int, layout: str, group_step: int, per_channel: bool, zeros: bool
) -> Space:
    """The calibrated and verified kernels that are legal for some M, N and K, with the split_k that are looked at."""
    k = group_step if per_channel else 2 * group_step  # any with such groups
    problem = Problem(1, 1, k, format, -1 if per_channel else group_step, arch, sm_count, layout, zeros)
    by_kernel: dict[str, list[KernelConfig]] = {}
    for config in ever_legal(problem):
        family = config.rules
        is_looked_at = family.looked_at_from(config) is not None and config.split_k in family.splits(config)
        if is_looked_at and family.is_calibrated(config, format):
            by_kernel.setdefault(config.kernel, []).append(config)
    kernels: list[Looked] = []
    made = [configs[0].rules.kernel(configs, problem) for configs in by_kernel.values()]
    for kernel in made:
        if any(other.dominates(kernel) for other in made):
            continue
        c, family = kernel.config, kernel.config.rules
        first_parts = family.first_parts(c)
        sizes = family.looked_at_from(c) or 1, c.max_m, c.block_m, c.block_n
        kernels.append(Looked(len(kernels), *sizes, kernel, kernel.bounds, first_parts, family.takes_tail))
    return Space(kernels, sm_count)


@functools.lru_cache(maxsize=256)  # a model has a few K
def space_at(k: int, format: str, group_size: int, arch: Arch, sm_count: int, layout: str | None, zeros: bool) -> AtK:
    """For all that a `Problem` has but M and N.

    Raises ValueError as that does, and for a layout that arch's kernels do not read.
    """
    p = Problem(1, 1, k, format, group_size, parse_arch(arch), sm_count, layout or "", zeros)
    if p.layout not in layouts_of(p.arch):
        read = ", ".join(layouts_of(p.arch))
        raise ValueError(f"layout must be one that sm{p.arch} reads, {read}, got {p.layout!r}")
    space = space_of(p.format, p.arch, p.sm_count, p.layout, p.group_step, p.per_channel, p.zeros)
    return AtK(space, k, column_bytes(p))


def space_for(problem: Problem) -> AtK:
    p = problem
    return space_at(p.k, p.format, p.group_size, p.arch, p.sm_count, p.layout, p.zeros)
