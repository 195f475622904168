"""How many rows experts have, as far as the host can know it: the sum, and that a router is not even."""

from __future__ import annotations

import math

ALIKE = 2.5
"""How alike the experts are: rows are a negative binomial of this shape. 1: some experts have several times their even
share; without a limit: as if each row drew its expert with even chances. 2.5 has about the regret of 4 on routings that
were measured, and the layer with favourites loses less (docs/kernels/sm90_grouped.md)."""

_MANY = 64
"""From so many tiles of an expert on, their number is its even share in tiles, and half a tile."""


def tiles_along_m(rows: int, experts: int, tile_m: int) -> tuple[float, float]:
    """Tiles of tile_m rows that `rows` rows of `experts` experts make: their number on average, and its variance.

    With R rows of an expert, and T = sum_j [R > j tile_m] tiles. The rows of all experts are known, so that what their
    sum says of T does not vary.
    """
    if experts == 1:
        return math.ceil(rows / tile_m), 0.0
    share = rows / experts
    if share > _MANY * tile_m:
        return rows / tile_m + experts / 2, 0.0
    more = share / (share + ALIKE)
    chance = math.exp(ALIKE * math.log1p(-more))  # of R = i
    up_to, rows_up_to, i = chance, 0.0, 0  # P(R <= i), E[R; R <= i]
    mean = of_squares = of_both = 0.0  # E[T], E[T^2], E[T R]
    for j in range(2 * _MANY):
        while i < j * tile_m:
            i += 1
            chance *= (i - 1 + ALIKE) / i * more
            up_to += chance
            rows_up_to += i * chance
        left = 1 - up_to
        if left < 1e-6 and i > share:
            break
        mean += left
        of_squares += (2 * j + 1) * left
        of_both += share - rows_up_to
    of_rows = share + share**2 / ALIKE  # the variance of R
    variance = of_squares - mean**2 - (of_both - mean * share) ** 2 / of_rows
    return experts * mean, experts * max(0.0, variance)


def with_rows(rows: int, experts: int) -> float:
    """Experts that have rows, on average."""
    return experts * (1 - (1 + rows / experts / ALIKE) ** -ALIKE)
