"""Which rows or columns of a weight a rank has: as torch.chunk cuts, which is how DTensor cuts, too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from ..layout import Range
from ..slicing import rows_of_a_group


def chunk(size: int, ranks: int, rank: int) -> Range:
    """What rank `rank` has of `size`: each has as many but the last ones, which have fewer or none."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


def columns_of(n: int, parts: Sequence[int] | None, ranks: int, rank: int) -> list[Range]:
    """The columns of a rank: its chunk of each part, without empty ones.

    parts: columns of each of the layers that are fused into this one. Raises ValueError unless their sum is n.
    """
    parts = (n,) if parts is None else parts
    if sum(parts) != n or min(parts) < 1:
        raise ValueError(f"parts: expected columns of fused layers that add up to N = {n}, got {tuple(parts)}")
    ranges, first = [], 0
    for columns in parts:
        begin, end = chunk(columns, ranks, rank)
        if begin < end:
            ranges.append((first + begin, first + end))
        first += columns
    return ranges


def check_rows(k: int, group_size: int, ranks: int) -> None:
    """Raises ValueError, with the next K that works, unless every rank's rows of K make groups that `gemm` takes.

    group_size: rows that share a scale.
    """
    rank = _first_refused(k, group_size, ranks)
    if rank is not None:
        begin, end = chunk(k, ranks, rank)
        works = next(more for more in count(k, group_size) if _first_refused(more, group_size, ranks) is None)
        raise ValueError(
            f"in_features: expected a K that {ranks} ranks can cut into groups of {group_size} or parts of them, the "
            f"next one is {works}, got {k}, of which rank {rank} would have rows {begin}..{end}"
        )


def _first_refused(k: int, group_size: int, ranks: int) -> int | None:
    """The first rank with rows that make no groups which `gemm` takes."""
    for rank in range(ranks):
        begin, end = chunk(k, ranks, rank)
        try:
            if begin < end:
                rows_of_a_group(k, group_size, begin, end)
        except ValueError:
            return rank
    return None
