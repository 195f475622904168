"""Which configuration computes a grouped product: the rows of many experts, in one launch.

The host knows how many rows there are, not whose they are. So the tile is chosen for their even share.
"""

from __future__ import annotations

import math

from .configs import GROUPED_CONFIGS, KernelConfig
from .families.grouped_decode_sm90 import MAX_ROW_TILES, GroupedDecodeSm90
from .families.grouped_sm80 import GroupedSm80
from .families.grouped_sm90 import MAX_EXPERTS, MAX_TILES
from .problem import Problem

_TILE_ROWS = ((5, 8), (24, 16), (48, 64))
"""Rows of an expert up to which a tile of so many rows is taken: most experts then need one tile. Above: 128."""

_NARROW = 1.08
"""The time of a tile of 64 columns and one k of sixteen warps, beside half of that of 128 columns."""


def select_grouped(problem: Problem, experts: int) -> KernelConfig | None:
    """The configuration for problem.m rows of `experts` weights; None: no kernel computes them in one launch."""
    found = [c for c in GROUPED_CONFIGS if c.is_verified and why_not_grouped(c, problem, experts) is None]
    if not found:
        return None
    if isinstance(family := found[0].rules, GroupedSm80):
        return min(found, key=lambda c: family.us(c, problem, experts))
    rows = problem.m / experts
    wanted = next((tile for most, tile in _TILE_ROWS if rows <= most), 128)
    tile_m = min((c.block_m for c in found if c.block_m >= wanted), default=max(c.block_m for c in found))
    with_rows = experts * (1 - (1 - 1 / experts) ** problem.m)  # experts, as even routing has it

    def time(config: KernelConfig) -> float:
        """Of all waves of CTAs, in columns and k."""
        tiles = max(with_rows, problem.m / config.block_m) * -(-problem.n // config.block_n)
        k = -(-problem.k_padded // config.block_k) * config.block_k
        return math.ceil(tiles / problem.sm_count) * k * config.block_n * (_NARROW if config.block_n == 64 else 1)

    return min((c for c in found if c.block_m == tile_m), key=time)


def why_not_grouped(config: KernelConfig, problem: Problem, experts: int, dtype: str | None = None) -> str | None:
    """Why a configuration cannot compute a grouped product; None if it can. problem.m: the rows of all experts."""
    if not config.rules.grouped:
        return f"{config} computes single products"
    if config.tail is not None:
        return f"{config} is two launches, but grouped products take one"
    if (reason := config.rules.why_not(config, problem, dtype)) is not None:
        return reason
    if experts > MAX_EXPERTS:
        return f"{config} computes at most {MAX_EXPERTS} experts, but qweight has {experts}"
    if config.rules.name == GroupedDecodeSm90.name:
        row_tiles = most_row_tiles(problem.m, experts, config.block_m)
        if row_tiles > MAX_ROW_TILES:
            return f"{config} lists at most {MAX_ROW_TILES} tiles along M, but there may be {row_tiles}"
    tiles = (problem.m // 8 + min(problem.m, experts) + 1) * -(-problem.n // 64)
    return None if tiles <= MAX_TILES else f"{config} computes at most {MAX_TILES} tiles, but there may be {tiles}"


def most_row_tiles(rows: int, experts: int, tile_rows: int) -> int:
    """Tiles along M of so many rows, at most: most_row_tiles of kernels/gemm/sm90_decode/grouped.cuh."""
    return (rows + min(rows, experts) * (tile_rows - 1)) // tile_rows
