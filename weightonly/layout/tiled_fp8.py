"""The pass of "tiled_fp8" and its inverse: "tiled" for a wgmma of 8-bit operands, m64nNk32, and weights of 4 bits.

Panels, k_blocks and warp fragments are those of "tiled" (tiled.py), 512 bytes a fragment, 16 bytes a lane. Lane
l = 4 g + t of warp w < 4 has, in a k_block, the 32 weights (j < 2, i < 2, c < 4, h < 2)

    n = 64 panel + 8 g + 2 w + h                  h: row g (0) or g + 8 (1) of the warp's 16 rows of A
    k = 64 k_block + 32 j + 16 i + 4 t + c        j: which MMA, 32 k each; i: the half of it

in the word at 16 l + 8 j + 4 i, little endian; nibble p = h + 2 c; columns are c' = 8 g + 2 w

    bits    31..28   27..24   23..20   19..16   15..12   11..8     7..4     3..0
    n       c' + 1    c'      c' + 1    c'      c' + 1    c'      c' + 1     c'
    k       4t + 3   4t + 3   4t + 2   4t + 2   4t + 1   4t + 1    4t       4t       + 32 j + 16 i
    A reg   2i + 1    2i      2i + 1    2i      2i + 1    2i      2i + 1     2i      the byte of it: that of the word

so that word & 0x0f0f0f0f is register 2i, and the same of word >> 4 register 2i + 1. An integer q is stored as 2q, or as
-2q - 1 if it is negative: E4M3's bytes 0 to 16 are linear, so that a byte and a sign make an operand of it
(cutlass_ext/fragment/fp8_weight.h).

Codes of E2M1 have their magnitudes, which select a byte, in the low three bits of nibbles 4 h + c, and their signs in
the highest bits of nibbles 2 c + 1 - h: bits 7, 15, 23 and 31 are those of column c', where E4M3 has them.
"""

from __future__ import annotations

import torch

from .shapes import TILE, check_codes, check_multiple, check_range, matrix_shape
from .words import pack_codes, unpack_codes

_ORDER = (5, 0, 7, 6, 3, 1, 2, 4, 8)  # (panel, k_block, w, g, t, j, i, c, h), a word being (c, h)


def pack_fp8_panels(q: torch.Tensor, codes: bool = False) -> torch.Tensor:
    """int8 [K, N], K and N multiples of 64 -> uint8 [N / 64, K * 32], a panel in each row.

    q: values -8..7, or with `codes` those of E2M1, 0..15.
    """
    check_codes(q) if codes else check_range(q, 4)
    k, n = matrix_shape(q)
    k_blocks = k // check_multiple("rows of q", k, TILE)
    panels = n // check_multiple("columns of q", n, TILE)
    nibbles = q if codes else (q << 1) ^ (q >> 7)
    ordered = nibbles.reshape(_sizes(k_blocks, panels)).permute(_ORDER)
    if codes:
        ordered = (ordered & 7).transpose(-1, -2).reshape(ordered.shape) | (ordered & 8).flip(-1)
    return pack_codes(ordered.reshape(panels, k * TILE))


def unpack_fp8_panels(data: torch.Tensor, codes: bool = False) -> torch.Tensor:
    """The inverse of `pack_fp8_panels`: uint8 [panels, bytes] -> int8 [K, 64 * panels]."""
    panels, length_bytes = data.shape
    k_blocks = length_bytes // check_multiple("bytes of a row", length_bytes, TILE * TILE // 2)
    sizes = _sizes(k_blocks, panels)
    nibbles = unpack_codes(data).reshape([sizes[d] for d in _ORDER])
    if codes:
        magnitudes = (nibbles & 7).reshape(*nibbles.shape[:-2], 2, 4).transpose(-1, -2)
        nibbles = magnitudes | (nibbles & 8).flip(-1)
    nibbles = nibbles.permute([_ORDER.index(d) for d in range(len(_ORDER))]).reshape(k_blocks * TILE, panels * TILE)
    return nibbles if codes else (nibbles >> 1) ^ -(nibbles & 1)


def _sizes(k_blocks: int, panels: int) -> tuple[int, ...]:
    """[K, N] as the digits of k and n: (k_block, j, i, t, c, panel, g, w, h)."""
    return k_blocks, 2, 2, 4, 4, panels, 8, 4, 2
