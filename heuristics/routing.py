"""How many rows experts have, as far as the host can know it: the sum, and that a router is not even."""

from __future__ import annotations

import math

_ALIKE = 4.0
"""How alike the experts are: rows are a negative binomial of this shape. 1: some experts have several times their even
share; without a limit: as if each row drew its expert with even chances."""

_MANY = 64
"""From so many tiles of an expert on, their number is its even share in tiles, and half a tile."""


def tiles_along_m(rows: int, experts: int, tile_m: int) -> float:
    """Tiles of tile_m rows that `rows` rows of `experts` experts make, on average: sum_j P(an expert has more than
    j tile_m rows) for each of them."""
    if experts == 1:
        return math.ceil(rows / tile_m)
    share = rows / experts
    if share > _MANY * tile_m:
        return rows / tile_m + experts / 2
    more = share / (share + _ALIKE)
    chance = math.exp(_ALIKE * math.log1p(-more))  # of an expert to have i rows
    up_to, i, total = chance, 0, 0.0
    for j in range(2 * _MANY):
        while i < j * tile_m:
            i += 1
            chance *= (i - 1 + _ALIKE) / i * more
            up_to += chance
        left = 1 - up_to
        if left < 1e-6 and i > share:
            break
        total += left
    return experts * total


def with_rows(rows: int, experts: int) -> float:
    """Experts that have rows, on average."""
    return experts * (1 - (1 + rows / experts / _ALIKE) ** -_ALIKE)
