"""Slices of a weight's columns that are dequantized one after another, so that little memory is needed for them."""

from __future__ import annotations

WORKSPACE_BYTES = 64 << 20
"""The most that a slice of a product's weight may take in 16-bit floats."""

GRADIENT_BYTES = 256 << 20
"""The same of a gradient: nearly every weight is one slice, and its product needs no sum of parts in fp32."""

_ALIGN = 64  # the kernel that dequantizes starts at multiples of this
_TILE = 256  # where there is room, as widths of cuBLAS' tiles are divisors of it


def longest_k() -> int:
    """Of which the fewest columns fit."""
    return WORKSPACE_BYTES // (2 * _ALIGN)


def slice_columns(n: int, k: int, limit_bytes: int | None = None) -> int:
    """Columns of a slice of [K, N], a multiple of 64: as few slices as fit, of equal width. 0 where K is too long.

    limit_bytes: the most that a slice may take in 16-bit floats; None: WORKSPACE_BYTES.
    """
    limit = (limit_bytes or WORKSPACE_BYTES) // (2 * k) // _ALIGN * _ALIGN
    if n <= limit:
        return -(-n // _ALIGN) * _ALIGN
    step = _TILE if limit >= _TILE else _ALIGN
    limit -= limit % step
    if limit == 0:
        return 0
    slices = -(-n // limit)
    return -(-n // (slices * step)) * step
