"""Which configuration computes a grouped product: the rows of many experts, in one launch.

The host knows how many rows there are, not which expert has which (routing.py): it chooses the quickest on average.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

from .configs import GROUPED_CONFIGS, GROUPED_FP8_CONFIGS, KernelConfig
from .families.grouped_decode_sm90 import MAX_ROW_TILES, MAX_SORTED_CHOICES, GroupedDecodeSm90
from .families.grouped_sm90 import MAX_TILES
from .h200 import GROUPED
from .invariant import class_of, quickest_class
from .problem import Problem


def select_grouped(problem: Problem, experts: int) -> KernelConfig | None:
    """The configuration for problem.m rows of `experts` weights; None: no kernel computes them in one launch.

    In the batch-invariant mode it is of one class for any number of rows, or None for any. Raises ValueError for more
    rows than the class computes.
    """
    times_us = _times_us(problem, experts)
    return min(times_us, key=times_us.__getitem__, default=None)


class LayerChoice(NamedTuple):
    """The configurations of both products of a layer of experts.

    sorts: whether their kernels sort the choices of tokens by themselves; else a kernel in front does.
    """

    first: KernelConfig
    second: KernelConfig
    sorts: bool


def select_layer(first: Problem, second: Problem, experts: int, is_gated: bool) -> LayerChoice | None:
    """What is quickest for a layer as a whole, with the kernels around its products; None: no kernels compute it.

    In the batch-invariant mode each product has the class that `select_grouped` has.

    first, second: their m are the choices of all tokens. is_gated: the first applies a gate to halves of its columns.
    """
    of_first, of_second = (
        {c: us for c, us in _times_us(problem, experts, gates).items() if c.rules.in_layers}
        for problem, gates in ((first, is_gated), (second, False))
    )

    def us(choice: LayerChoice) -> float:
        around_us = GROUPED.around_sorting_us if choice.sorts else GROUPED.around_us
        other_us = 0.0 if choice.first == choice.second else GROUPED.other_kernel_us
        return of_first[choice.first] + of_second[choice.second] + around_us + other_us

    found = (
        LayerChoice(*both, sorts)
        for both in itertools.product(of_first, of_second)
        for sorts in (True, False)
        if not sorts or (first.m <= MAX_SORTED_CHOICES and all(c.rules.sorts for c in both))
    )
    return min(found, key=us, default=None)


def _times_us(problem: Problem, experts: int, is_gated: bool = False) -> dict[KernelConfig, float]:
    """Of all configurations that compute it; in the batch-invariant mode those of its class."""
    times_us = _all_times_us(problem, experts, is_gated)
    if not problem.invariant:
        return times_us
    found = invariant_grouped_class(replace(problem, m=1), experts)
    if found is None:
        return {}
    of_class = {config: us for config, us in times_us.items() if class_of(config, problem) == found}
    if not of_class:
        raise ValueError(f"x: expected fewer rows of experts in the batch-invariant mode, got {problem.m}")
    return of_class


@functools.lru_cache(maxsize=1024)
def invariant_grouped_class(problem: Problem, experts: int) -> Hashable | None:
    """The class of a grouped product in the batch-invariant mode; None: there is none. problem.m: 1."""

    @functools.cache
    def by_class(m: int) -> dict[Hashable, float]:
        quickest: dict[Hashable, float] = {}
        for config, us in _all_times_us(replace(problem, m=m), experts, False).items():
            of = class_of(config, problem)
            quickest[of] = min(us, quickest.get(of, us))
        return quickest

    return quickest_class([of for of in by_class(1) if of is not None], lambda of, m: by_class(m).get(of))


def _all_times_us(problem: Problem, experts: int, is_gated: bool) -> dict[KernelConfig, float]:
    return {
        c: c.rules.grouped_us(c, problem, experts, is_gated)
        for c in (*GROUPED_CONFIGS, *GROUPED_FP8_CONFIGS)
        if c.is_verified and c.rules.is_calibrated(c, problem.format) and why_not_grouped(c, problem, experts) is None
    }


def why_not_grouped(config: KernelConfig, problem: Problem, experts: int, dtype: str | None = None) -> str | None:
    """Why a configuration cannot compute a grouped product; None if it can. problem.m: the rows of all experts."""
    if not config.rules.grouped:
        return f"{config} computes single products"
    if config.tail is not None:
        return f"{config} is two launches, but grouped products take one"
    if (reason := config.rules.why_not(config, problem, dtype)) is not None:
        return reason
    if experts > config.rules.max_experts:
        return f"{config} computes at most {config.rules.max_experts} experts, but qweight has {experts}"
    if config.rules.name == GroupedDecodeSm90.name:
        row_tiles = most_row_tiles(problem.m, experts, config.block_m)
        if row_tiles > MAX_ROW_TILES:
            return f"{config} lists at most {MAX_ROW_TILES} tiles along M, but there may be {row_tiles}"
    tiles = (problem.m // 8 + min(problem.m, experts) + 1) * -(-problem.n // 64)
    return None if tiles <= MAX_TILES else f"{config} computes at most {MAX_TILES} tiles, but there may be {tiles}"


def most_row_tiles(rows: int, experts: int, tile_rows: int) -> int:
    """Tiles along M of so many rows, at most: most_row_tiles of cutlass_ext/grouped_params.h."""
    return (rows + min(rows, experts) * (tile_rows - 1)) // tile_rows
