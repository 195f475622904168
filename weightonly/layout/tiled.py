"""The pass of "tiled" and its inverse.

"tiled" is the order in which MMAs take the weight as their A operand out of registers, column n of the weight
being a row of A and row k a column of A: mma.sync m16n8k16, wgmma m64nNk16. From the outside in:

    weight     panel 0 | panel 1 | ...                  a column panel: 64 columns n; panels follow each other along n
    panel      k_block 0 | k_block 1 | ...              a k_block: 64 rows k of the panel; k_blocks follow along k
    k_block    fragment 0 | fragment 1 | ... 2 | ... 3  a warp fragment: the 16 x 64 of A that a warp of four holds
    fragment   lane 0 | lane 1 | ... | lane 31          int4: 512 bytes, 16 per lane, 4 for each 16 k of one MMA
               half 0: lanes 0..31 | half 1: ...        int8: 1024 bytes, 16 per lane and half, a half being 32 k

`tile_fragments` has the formulas and the pictures. Whatever begins and ends at multiples of 64 is made of whole
k_blocks, so a shard of a tiled weight needs no packing of its own:

    along n   a slice of the bytes, as a panel is contiguous
    along k   a slice [:, begin / 64 : end / 64] of the bytes viewed as [N / 64, K / 64, 512 b], b bits per weight
"""

from __future__ import annotations

import torch

from .shapes import TILE, check_multiple, matrix_shape


def tile_fragments(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Put the weights of each lane of a warp side by side, as the A fragments of m16n8k16 and m64nNk16 hold them.

    Lane l = 4 g + t (g < 8, t < 4) of warp w < 4 has, in a k_block, the 32 weights (h < 2, j < 4, i < 2, e < 2)

        n = 64 panel + 8 g + 2 w + h              h: row g (0) or g + 8 (1) of the warp's 16 rows of A
        k = 64 k_block + 16 j + 8 i + 2 t + e     j: which MMA, 16 k each; i: the half of it, k or k + 8

        n % 64     0   1 | 2   3 | 4   5 | 6   7 | 8   9 | ... | 62 63      h = n % 2
        warp w       0   |   1   |   2   |   3   |   0   | ... |   3
        g        --------------- 0 --------------|-- 1 - ...  7 --

        k % 16     0   1 | 2   3 | 4   5 | 6   7 | 8   9 | 10 11 | 12 13 | 14 15      e = k % 2
        t            0   |   1   |   2   |   3   |   0   |   1   |   2   |   3
        i        --------------- 0 --------------|--------------- 1 --------------

    The order of n gives a lane the 8 neighbouring columns 8 g .. 8 g + 7 over the four warps: its scales, zeros,
    biases and results are 16 bytes each. The order of k is the order of the MMA and cannot be chosen, because wgmma
    reads the other operand, x, from shared memory as it is. Below is where a lane finds a weight after
    `add_bias_and_interleave`, in bytes from the start of its warp fragment; c = 8 g + 2 w:

    int4: the word of MMA j at 16 l + 4 j, little endian; nibble p = h + 2 i + 4 e

        bits    31..28   27..24   23..20   19..16 | 15..12   11..8     7..4     3..0
        n        c + 1      c      c + 1      c   |  c + 1      c      c + 1      c
        k       2t + 9   2t + 9   2t + 1   2t + 1 | 2t + 8   2t + 8     2t       2t      + 16 j
        A reg      3        2        1        0   |    3        2        1        0      the half of it: 31..16 | 15..0

        word & 0x000f000f is register 0, as fp16 denormals u * 2^-24; word & 0x00f000f0 is register 1, as u * 2^-20;
        the same two of word >> 8 are registers 2 and 3.

    int8: the word of MMA j and half i at 512 (j // 2) + 16 l + 8 (j % 2) + 4 i; byte p = h + 2 e

        bits    31..24   23..16 | 15..8     7..0
        n        c + 1      c   |  c + 1      c
        k       2t + 1   2t + 1 |   2t       2t      + 16 j + 8 i
        A reg   2i + 1     2i   | 2i + 1     2i      the half of it: 31..16 | 15..0

        bytes 0 and 2 are register 2i, bytes 1 and 3 register 2i + 1: a byte permute each, or a mask and a shift;
        512 = one 16-byte access of all lanes

    codes of a codebook, after `pack_codes`: the word of MMA j where int4 has it; nibble p = e + 2 h + 4 i

        bits    31..28   27..24   23..20   19..16   15..12   11..8     7..4     3..0
        n        c + 1    c + 1      c        c      c + 1    c + 1      c        c
        k       2t + 9   2t + 8   2t + 9   2t + 8   2t + 1     2t     2t + 1     2t      + 16 j
        A reg      3        3        2        2        1        1        0        0
        half    31..16    15..0   31..16    15..0   31..16    15..0   31..16    15..0    of it

        byte r is register r: its two codes are neighbours along k, so a look-up by bytes gives the pair of the MMA

    q: int8 [K, N], K and N multiples of 64. Returns int8 [N / 64, K * 64], a panel in each row, the words still
    in the order that `add_bias_and_interleave` and `pack_codes` expect. Raises ValueError for another shape.
    """
    k, n = matrix_shape(q, bits)
    k_blocks = k // check_multiple("rows of q", k, TILE)
    panels = n // check_multiple("columns of q", n, TILE)
    return q.reshape(_fragment_sizes(k_blocks, panels)).permute(_FRAGMENT_ORDER[bits]).reshape(panels, k * TILE)


def untile_fragments(q: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `tile_fragments`: int8 [N / 64, K * 64] -> int8 [K, N]."""
    panels, length = matrix_shape(q, bits)
    k_blocks = length // check_multiple("columns of q", length, TILE * TILE)
    sizes, order = _fragment_sizes(k_blocks, panels), _FRAGMENT_ORDER[bits]
    tiled = q.reshape([sizes[d] for d in order])
    return tiled.permute([order.index(d) for d in range(len(order))]).reshape(k_blocks * TILE, panels * TILE)


def _fragment_sizes(k_blocks: int, panels: int) -> tuple[int, ...]:
    """[K, N] as the digits of k and n: (k_block, j // 2, j % 2, i, t, e, panel, g, w, h)."""
    return k_blocks, 2, 2, 2, 4, 2, panels, 8, 4, 2


_FRAGMENT_ORDER = {
    4: (6, 0, 8, 7, 4, 1, 2, 3, 9, 5),  # (panel, k_block, w, g, t, j // 2, j % 2, i, h, e), a word being (i, h, e)
    8: (6, 0, 8, 1, 7, 4, 2, 3, 9, 5),  # (panel, k_block, w, j // 2, g, t, j % 2, i, h, e), a word being (h, e)
}
"""Bits per weight -> the digits of `_fragment_sizes` in the order of memory, from the outside in."""
