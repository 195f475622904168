"""A part of a packed weight: its bytes, cut where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .shapes import CPU, INTERLEAVED, K_ALIGN, PANEL, TILE, TILED, block_bytes, column_align

Range = tuple[int, int]
"""begin and end of neighbouring rows or columns."""


class Blocks(NamedTuple):
    """The bytes of a weight in three dimensions; rows, columns: of the weight in one index of these dimensions."""

    shape: tuple[int, int, int]
    row_dim: int
    rows: int
    column_dim: int
    columns: int


def blocks_of(k: int, n: int, bits: int, layout: str) -> Blocks:
    """k, n: padded. Raises ValueError for an unknown layout."""
    if layout == TILED:
        return Blocks((n // TILE, k // TILE, block_bytes(bits)), 1, TILE, 0, TILE)
    if layout == CPU:
        return Blocks((n // PANEL, k // TILE, TILE * PANEL * bits // 8), 1, TILE, 0, PANEL)
    if layout == INTERLEAVED:
        columns = 16 // bits
        return Blocks((n // columns, k // K_ALIGN, K_ALIGN * columns * bits // 8), 1, K_ALIGN, 0, columns)
    columns = column_align(bits, layout)
    return Blocks((k, n // columns, columns * bits // 8), 0, 1, 1, columns)


def can_cut(k: int, n: int, bits: int, layout: str, rows: Range, columns: Sequence[Range]) -> bool:
    """Whether `cut_bytes` gives, byte for byte, what packing these rows and columns alone gives.

    k, n: the shape before padding. Each range begins and ends at multiples of what the layout pads K and N to; the last
    one may also end where the weight does.
    """
    align = column_align(bits, layout)
    *others, last = columns
    return (
        rows[0] % K_ALIGN == 0
        and (rows[1] % K_ALIGN == 0 or rows[1] == k)
        and all(begin % align == 0 and end % align == 0 for begin, end in others)
        and last[0] % align == 0
        and (last[1] % align == 0 or last[1] == n)
    )


def cut_bytes(
    data: torch.Tensor, k: int, n: int, bits: int, layout: str, rows: Range, columns: Sequence[Range]
) -> torch.Tensor:
    """The bytes of w[rows], its `columns` side by side; of stacked weights, of each.

    data: uint8, the bytes of one weight of the padded shape [k, n], or of several, one after another.
    rows, columns: bounds that `can_cut` allows.

    Returns uint8 in one dimension: a view of `data` where its bytes are neighbours, else a copy.
    """
    blocks = blocks_of(k, n, bits, layout)
    view = data.view(-1, *blocks.shape)
    begin, end = rows[0] // blocks.rows, -(-rows[1] // K_ALIGN) * K_ALIGN // blocks.rows
    view = view.narrow(1 + blocks.row_dim, begin, end - begin)
    align = column_align(bits, layout)
    parts = []
    for first, last in columns:
        begin, end = first // blocks.columns, -(-last // align) * align // blocks.columns
        parts.append(view.narrow(1 + blocks.column_dim, begin, end - begin))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1 + blocks.column_dim)).reshape(-1)


def put_columns(data: torch.Tensor, k: int, n: int, bits: int, layout: str, begin: int, part: torch.Tensor) -> None:
    """Writes packed columns, from `begin` on, into the bytes of one weight of the padded shape [k, n].

    begin: a multiple of `column_align`. part: what `pack_bytes` returns of these columns, [k, columns].
    """
    blocks = blocks_of(k, n, bits, layout)
    columns = part.numel() * 8 // bits // k
    place = data.view(blocks.shape).narrow(blocks.column_dim, begin // blocks.columns, columns // blocks.columns)
    place.copy_(part.view(place.shape))
