"""A layout as a whole: int8 [K, N] to its bytes and back."""

from __future__ import annotations

import torch

from .cpu import pack_panels, unpack_panels
from .interleaved import (
    deinterleave_columns,
    interleave_columns,
    permute_rows,
    transpose,
    unpermute_rows,
    untranspose,
)
from .shapes import (
    CPU,
    INTERLEAVED,
    K_ALIGN,
    PANEL,
    ROW_MAJOR,
    TILE,
    TILED,
    TILED_FP8,
    check_code_layout,
    check_codes,
    check_layout,
    check_range,
    column_align,
    column_step,
    matrix_shape,
    padded_shape,
    stored_shape,
)
from .tiled import tile_fragments, untile_fragments
from .tiled_fp8 import pack_fp8_panels, unpack_fp8_panels
from .words import add_bias_and_interleave, pack_codes, remove_bias_and_deinterleave, unpack_codes


def pack_bytes(q: torch.Tensor, bits: int, layout: str, codes: bool = False) -> torch.Tensor:
    """int8 [K, N] of a padded shape (see `padded_shape`) -> its bytes in `layout`, uint8 [K * N * bits / 8].

    codes: the values are codes of numbers: of 4 bits 0..15, of 8 bits any; for one of CODE_LAYOUTS, or of E2M1
        for TILED_FP8.
    Raises ValueError for an unknown layout, a shape that is not padded, or values out of the range of `bits`.
    """
    check_layout(layout)
    if codes and layout != TILED_FP8:
        check_code_layout(bits, layout)
    k, n = matrix_shape(q, bits)
    if (k, n) != padded_shape(k, n, bits, layout):
        align = column_align(bits, layout)
        raise ValueError(f"q: expected K a multiple of {K_ALIGN} and N of {align}, got [{k}, {n}]")
    if layout == CPU:
        check_codes(q, bits) if codes else check_range(q, bits)
        q = q.view(torch.uint8) if codes else q
        return pack_panels(q, bits, bias=0 if codes else 1 << (bits - 1)).view(-1)
    if layout == TILED_FP8:
        return pack_fp8_panels(q, codes).view(-1)
    q = _in_order(q, bits, layout)
    return (pack_codes(q, bits) if codes else add_bias_and_interleave(q, bits)).view(-1)


def _in_order(q: torch.Tensor, bits: int, layout: str) -> torch.Tensor:
    """The passes before the last one: int8 [K, N] with its elements in the order of a GPU's layout."""
    if layout == INTERLEAVED:
        q = permute_rows(q, bits)  # (K', N)
        q = transpose(q)  # (N, K')
        return interleave_columns(q, bits)  # (N / I, K' * I)
    return tile_fragments(q, bits) if layout == TILED else q  # (N / 64, K * 64)


def unpack_bytes(
    data: torch.Tensor,
    k: int,
    n: int,
    bits: int,
    layout: str,
    columns: tuple[int, int] | None = None,
    codes: bool = False,
) -> torch.Tensor:
    """The inverse of `pack_bytes`: uint8 [k * n * bits / 8] -> contiguous int8 [k, n].

    columns: (begin, end), multiples of `column_step(bits, layout)`: only these columns, and only their bytes are read.
    codes: as for `pack_bytes`.
    Raises ValueError for an unknown layout, or columns that are out of range or no multiples.
    """
    check_layout(layout)
    if codes and layout != TILED_FP8:
        check_code_layout(bits, layout)
    begin, end = columns if columns is not None else (0, n)
    step = column_step(bits, layout)
    if begin % step or end % step or not 0 <= begin < end <= n:
        raise ValueError(f"columns: expected multiples of {step} within 0..{n}, got ({begin}, {end})")
    if layout == ROW_MAJOR:
        rows = data.view(k, n * bits // 8)[:, begin * bits // 8 : end * bits // 8]
        return remove_bias_and_deinterleave(rows, bits)
    if layout == CPU:
        panels = data.view(stored_shape(k, n, bits, layout))[begin // PANEL : end // PANEL]
        return unpack_panels(panels, bits, bias=0 if codes else 1 << (bits - 1))
    if layout == TILED_FP8:
        return unpack_fp8_panels(data.view(n // TILE, -1)[begin // TILE : end // TILE], codes)
    if layout == TILED:
        panels = data.view(stored_shape(k, n, bits, layout))[begin // TILE : end // TILE]
        return untile_fragments(_elements(panels, bits, codes), bits)
    interleave = 16 // bits
    lines = data.view(stored_shape(k, n, bits, layout))[begin // interleave : end // interleave]
    q = _elements(lines, bits, codes)  # (N / I, K' * I)
    q = deinterleave_columns(q, bits)  # (N, K')
    q = untranspose(q)  # (K', N)
    return unpermute_rows(q, bits)  # (K, N)


def _elements(data: torch.Tensor, bits: int, codes: bool) -> torch.Tensor:
    """uint8 [rows, bytes] -> int8 elements, in the order of their layout."""
    return unpack_codes(data, bits) if codes else remove_bias_and_deinterleave(data, bits)
