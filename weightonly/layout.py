"""The passes that bring a quantized weight into the byte order a kernel reads.

The input is always `q`, int8 of shape [K, N], one signed value (or one code of a table) per byte. Each pass
re-orders elements (the last one also packs them) and has an inverse; a layout is a composition of passes:

    row_major     add_bias_and_interleave                      words run along N, rows of K follow each other
    interleaved   permute_rows -> transpose -> interleave_columns -> add_bias_and_interleave
    tiled         tile_fragments -> add_bias_and_interleave    blocks of 64 x 64, in the order of MMA fragments
    tiled, codes  tile_fragments -> pack_codes                 the same for codes of NF4, FP4 and other tables

The order of "interleaved" is that of FasterTransformer's `preprocess_weights_for_mixed_gemm` for sm75 to
sm89, byte for byte. With `b` bits per weight, I = 16 / b columns per line and k' the permuted row:

    element(k', n) = (n // I) * K * I  +  (k' // 64) * 64 * I  +  (n % I) * 64  +  k' % 64

counted in elements of b bits, before the order inside a 32-bit word (see `add_bias_and_interleave`).

"tiled" is the order in which MMAs take the weight as their A operand out of registers, column n of the weight
being a row of A and row k a column of A: mma.sync m16n8k16, wgmma m64nNk16. From the outside in:

    weight   stripe 0 | stripe 1 | ...               a stripe: 64 columns n; stripes follow each other along n
    stripe   block 0 | block 1 | ...                 a block: 64 of the stripe's rows k; blocks follow along k
    block    piece 0 | piece 1 | piece 2 | piece 3   a piece: the 16 x 64 of A that one warp of a warpgroup holds
    piece    lane 0 | lane 1 | ... | lane 31         int4: 512 bytes, 16 per lane, 4 for each step of 16 k
             half 0: lanes 0..31 | half 1: ...       int8: 1024 bytes, 16 per lane and half, a half being 32 k

`tile_fragments` has the formulas and the pictures. Whatever begins and ends at multiples of 64 is made of whole
blocks, so a shard of a tiled weight needs no packing of its own:

    along n   a slice of the bytes, as a stripe is contiguous
    along k   a slice [:, begin / 64 : end / 64] of the bytes viewed as [N / 64, K / 64, 512 b]

Every pass is a handful of strided copies, on the device of its input: no index tensor, no loop over
elements, never more than two int8 copies of the weight alive.
"""

from __future__ import annotations

import torch

ROW_MAJOR = "row_major"
INTERLEAVED = "interleaved"
TILED = "tiled"
LAYOUTS = (ROW_MAJOR, INTERLEAVED, TILED)

K_ALIGN = 64
"""Rows of a tile: 64 of them, as 16-bit activations, are one 128-byte line. K is padded to it."""

N_ALIGN = {4: 64, 8: 32}
"""Bits per weight -> N of row_major and interleaved is padded to a multiple of this (FasterTransformer's limits)."""

TILE = 64
"""Rows and columns of a block of "tiled": the M of a wgmma, and four steps of its K. N is padded to it."""


def padded_shape(k: int, n: int, bits: int, layout: str) -> tuple[int, int]:
    """The shape that the passes of `layout` work on: K and N rounded up to K_ALIGN and `column_align`."""
    align = column_align(bits, layout)
    return -(-k // K_ALIGN) * K_ALIGN, -(-n // align) * align


def column_align(bits: int, layout: str) -> int:
    """N is padded to a multiple of this. Raises ValueError for unknown `bits` or an unknown layout."""
    check_bits(bits)
    check_layout(layout)
    return TILE if layout == TILED else N_ALIGN[bits]


def column_step(bits: int, layout: str) -> int:
    """`unpack_bytes(columns=...)` cuts at multiples of this: the weights in one 32-bit word, or a tiled stripe."""
    return TILE if layout == TILED else 32 // bits


def block_bytes(bits: int) -> int:
    """Bytes of a block of "tiled"."""
    return TILE * TILE * bits // 8


# --- one function per pass, each followed by its inverse ---------------------------------------------------


def permute_rows(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Re-order K inside blocks of P = 128 / bits rows, so that one `ldmatrix` feeds an MMA operand directly.

    A thread of an m16n8k16 MMA needs rows 2j, 2j+1, 2j+8, 2j+9 of each 16-row step (j = 0..3: its place in
    the quad). With R = 32 / bits weights in a word, the pass puts everything that lane j needs into word j:

        out[base + R*j + 2*h + l] = q[base + 8*h + 2*j + l]          j < 4, h < R/2, l < 2

        int8, P = 16:  in   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15
                       out  0 1 8 9 | 2 3 10 11 | 4 5 12 13 | 6 7 14 15
                            lane 0    lane 1      lane 2      lane 3

    q: int8 [K, N], K a multiple of P. Returns int8 [K, N]. Raises ValueError for another shape.
    """
    k, n = matrix_shape(q, bits)
    word = 32 // bits
    block = _check_multiple("rows of q", k, 4 * word)
    return q.reshape(k // block, word // 2, 4, 2, n).transpose(1, 2).reshape(k, n)


def unpermute_rows(q: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `permute_rows`: int8 [K, N] -> int8 [K, N]."""
    k, n = matrix_shape(q, bits)
    word = 32 // bits
    block = _check_multiple("rows of q", k, 4 * word)
    return q.reshape(k // block, 4, word // 2, 2, n).transpose(1, 2).reshape(k, n)


def transpose(q: torch.Tensor) -> torch.Tensor:
    """Row major to column major: int8 [K, N] -> contiguous int8 [N, K], out[n, k] = q[k, n].

    The pass comes before packing, so a 4-bit value is moved as a whole byte and needs no special case.
    """
    matrix_shape(q)
    return q.t().contiguous()


def untranspose(q: torch.Tensor) -> torch.Tensor:
    """The inverse of `transpose`: int8 [N, K] -> contiguous int8 [K, N]."""
    matrix_shape(q)
    return q.t().contiguous()


def interleave_columns(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Put 64 rows of I = 16 / bits neighbouring columns side by side: one 128-byte line of memory.

    64 weights of one column are only 64 bytes (int8) or 32 bytes (int4). Taking I columns in turn makes the
    piece that meets 64 activations (16 bit, 128 bytes) as long as theirs, so both are loaded alike.

        int8, I = 2:  column 0: a0 a1 a2 ...     a = 64 consecutive k'
                      column 1: b0 b1 b2 ...
                      out row 0: a0 b0 a1 b1 a2 b2 ...

    q: int8 [N, K] (column major), K a multiple of 64, N of I. Returns int8 [N / I, K * I].
    Raises ValueError for another shape.
    """
    n, k = matrix_shape(q, bits)
    columns = _check_multiple("rows of q (columns of the weight)", n, 16 // bits)
    tiles = k // _check_multiple("columns of q (rows of the weight)", k, K_ALIGN)
    return q.reshape(n // columns, columns, tiles, K_ALIGN).transpose(1, 2).reshape(n // columns, k * columns)


def deinterleave_columns(q: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `interleave_columns`: int8 [N / I, K * I] -> int8 [N, K]."""
    lines, length = matrix_shape(q, bits)
    columns = 16 // bits
    tiles = length // _check_multiple("columns of q", length, K_ALIGN * columns)
    return q.reshape(lines, tiles, columns, K_ALIGN).transpose(1, 2).reshape(lines * columns, tiles * K_ALIGN)


def tile_fragments(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Put the weights of each lane of a warp side by side, as the A fragments of m16n8k16 and m64nNk16 hold them.

    Lane l = 4 g + t (g < 8, t < 4) of warp w < 4 has, in a block, the 32 weights (h < 2, j < 4, i < 2, e < 2)

        n = 64 stripe + 8 g + 2 w + h             h: row g (0) or g + 8 (1) of the warp's 16 rows of A
        k = 64 block + 16 j + 8 i + 2 t + e       j: the step of 16 k; i: its half, k or k + 8

        n % 64     0   1 | 2   3 | 4   5 | 6   7 | 8   9 | ... | 62 63      h = n % 2
        warp w       0   |   1   |   2   |   3   |   0   | ... |   3
        g        --------------- 0 --------------|-- 1 - ...  7 --

        k % 16     0   1 | 2   3 | 4   5 | 6   7 | 8   9 | 10 11 | 12 13 | 14 15      e = k % 2
        t            0   |   1   |   2   |   3   |   0   |   1   |   2   |   3
        i        --------------- 0 --------------|--------------- 1 --------------

    The order of n gives a lane the 8 neighbouring columns 8 g .. 8 g + 7 over the four pieces: its scales, zeros,
    biases and results are 16 bytes each. The order of k is the MMA's own and not a better one, because wgmma
    reads the other operand, x, from shared memory as it is. Where a lane finds a weight, after
    `add_bias_and_interleave`, in bytes from the start of its piece; c = 8 g + 2 w:

    int4: the word of step j at 16 l + 4 j, little endian; nibble p = h + 2 i + 4 e

        bits    31..28   27..24   23..20   19..16 | 15..12   11..8     7..4     3..0
        n        c + 1      c      c + 1      c   |  c + 1      c      c + 1      c
        k       2t + 9   2t + 9   2t + 1   2t + 1 | 2t + 8   2t + 8     2t       2t      + 16 j
        A reg      3        2        1        0   |    3        2        1        0      the half of it: 31..16 | 15..0

        word & 0x000f000f is register 0, as fp16 denormals u * 2^-24; word & 0x00f000f0 is register 1, as u * 2^-20;
        the same two of word >> 8 are registers 2 and 3.

    int8: the word of step j and half i at 512 (j // 2) + 16 l + 8 (j % 2) + 4 i; byte p = h + 2 e

        bits    31..24   23..16 | 15..8     7..0
        n        c + 1      c   |  c + 1      c
        k       2t + 1   2t + 1 |   2t       2t      + 16 j + 8 i
        A reg   2i + 1     2i   | 2i + 1     2i      the half of it: 31..16 | 15..0

        bytes 0 and 2 are register 2i, bytes 1 and 3 register 2i + 1: a byte permute each, or a mask and a shift;
        512 = one 16-byte access of all lanes

    codes of a table, after `pack_codes`: the word of step j where that of int4 is; nibble p = e + 2 h + 4 i

        bits    31..28   27..24   23..20   19..16   15..12   11..8     7..4     3..0
        n        c + 1    c + 1      c        c      c + 1    c + 1      c        c
        k       2t + 9   2t + 8   2t + 9   2t + 8   2t + 1     2t     2t + 1     2t      + 16 j
        A reg      3        3        2        2        1        1        0        0
        half    31..16    15..0   31..16    15..0   31..16    15..0   31..16    15..0    of it

        byte r is register r: a look-up by bytes gives the pair of values, neighbours along k, as the MMA takes it

    q: int8 [K, N], K and N multiples of 64. Returns int8 [N / 64, K * 64], a stripe in each row, the words still
    in the order that `add_bias_and_interleave` and `pack_codes` expect. Raises ValueError for another shape.
    """
    k, n = matrix_shape(q, bits)
    blocks = k // _check_multiple("rows of q", k, TILE)
    stripes = n // _check_multiple("columns of q", n, TILE)
    return q.reshape(_fragment_sizes(blocks, stripes)).permute(_FRAGMENT_ORDER[bits]).reshape(stripes, k * TILE)


def untile_fragments(q: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `tile_fragments`: int8 [N / 64, K * 64] -> int8 [K, N]."""
    stripes, length = matrix_shape(q, bits)
    blocks = length // _check_multiple("columns of q", length, TILE * TILE)
    sizes, order = _fragment_sizes(blocks, stripes), _FRAGMENT_ORDER[bits]
    tiled = q.reshape([sizes[d] for d in order])
    return tiled.permute([order.index(d) for d in range(len(order))]).reshape(blocks * TILE, stripes * TILE)


def _fragment_sizes(blocks: int, stripes: int) -> tuple[int, ...]:
    """[K, N] as the digits of k and n: (block, j // 2, j % 2, i, t, e, stripe, g, w, h)."""
    return blocks, 2, 2, 2, 4, 2, stripes, 8, 4, 2


_FRAGMENT_ORDER = {
    4: (6, 0, 8, 7, 4, 1, 2, 3, 9, 5),  # (stripe, block, w, g, t, j // 2, j % 2, i, h, e), a word being (i, h, e)
    8: (6, 0, 8, 1, 7, 4, 2, 3, 9, 5),  # (stripe, block, w, j // 2, g, t, j % 2, i, h, e), a word being (h, e)
}
"""Bits per weight -> the digits of `_fragment_sizes` in the order of memory, from the outside in."""


def pack_codes(q: torch.Tensor) -> torch.Tensor:
    """Two codes in a byte, in their order, the even one in the low nibble; their values are left as they are.

    q: int8 [rows, L], L even, values 0..15. Returns uint8 [rows, L / 2]. Raises ValueError for another shape or
    for values out of range.
    """
    check_codes(q)
    return _pack_codes(q)


def unpack_codes(data: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [rows, bytes] -> int8 [rows, 2 * bytes]."""
    _check_bytes(data)
    return torch.stack((data & 0x0F, data >> 4), dim=-1).view(torch.int8).flatten(1)


def add_bias_and_interleave(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Make the values unsigned, re-order them inside each 32-bit word, and pack them.

    The bias 2^(bits-1) lets a kernel build a float by or-ing the bits into a mantissa. Even elements go
    before odd ones, so that one mask or byte permute yields a pair (e0, e1) in the two halves of a register:

        int8, bytes:            low  e0 e2 e1 e3  high
        int4, nibbles:          low  e0 e2 e4 e6 e1 e3 e5 e7  high

    q: int8 [rows, L], L a multiple of 32 / bits, values -2^(bits-1) .. 2^(bits-1) - 1.
    Returns uint8 [rows, L * bits / 8]. Raises ValueError for another shape or for values out of range.
    """
    check_range(q, bits)
    return _bias_and_pack(q, bits)


def remove_bias_and_deinterleave(data: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `add_bias_and_interleave`: uint8 [rows, bytes] -> int8 [rows, bytes * 8 / bits]."""
    check_bits(bits)
    rows, length_bytes = _check_bytes(data)
    words = length_bytes // _check_multiple("bytes of a row", length_bytes, 4)
    if bits == 8:
        values = data.reshape(rows, words, 2, 2).transpose(2, 3).bitwise_xor(0x80)  # (rows, word, pair, parity)
        return values.reshape(rows, length_bytes).view(torch.int8)
    # nibble s of byte 2*parity + pair is element 4*pair + 2*s + parity
    packed = data.reshape(rows, words, 2, 2).transpose(2, 3)  # (rows, word, pair, parity)
    q = torch.empty(rows, words, 2, 2, 2, dtype=torch.uint8, device=data.device)  # (rows, word, pair, s, parity)
    torch.bitwise_and(packed, 0x0F, out=q[:, :, :, 0, :])
    torch.bitwise_right_shift(packed, 4, out=q[:, :, :, 1, :])
    return q.sub_(8).view(torch.int8).view(rows, words * 8)  # 0 - 8 wraps to 248, which is -8 as int8


# --- the layouts -------------------------------------------------------------------------------------------


def pack_bytes(q: torch.Tensor, bits: int, layout: str, codes: bool = False) -> torch.Tensor:
    """int8 [K, N] of a padded shape (see `padded_shape`) -> its bytes in `layout`, uint8 [K * N * bits / 8].

    codes: the values are the 4-bit codes of a table, 0..15; for "tiled" alone.
    Raises ValueError for an unknown layout, a shape that is not padded, or values out of the range of `bits`.
    """
    check_layout(layout)
    if codes:
        check_code_layout(bits, layout)
    k, n = matrix_shape(q, bits)
    if (k, n) != padded_shape(k, n, bits, layout):
        align = column_align(bits, layout)
        raise ValueError(f"q: expected K a multiple of {K_ALIGN} and N of {align}, got [{k}, {n}]")
    if codes:
        check_codes(q)
        return _pack_codes(tile_fragments(q, bits)).view(-1)
    check_range(q, bits)
    if layout == INTERLEAVED:
        q = permute_rows(q, bits)  # (K', N)
        q = transpose(q)  # (N, K')
        q = interleave_columns(q, bits)  # (N / I, K' * I)
    elif layout == TILED:
        q = tile_fragments(q, bits)  # (N / 64, K * 64)
    return _bias_and_pack(q, bits).view(-1)


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

    columns: (begin, end), multiples of `column_step(bits, layout)`: read these columns only, no other bytes.
    codes: as for `pack_bytes`.
    """
    check_layout(layout)
    if codes:
        check_code_layout(bits, layout)
    begin, end = columns if columns is not None else (0, n)
    step = column_step(bits, layout)
    if begin % step or end % step or not 0 <= begin < end <= n:
        raise ValueError(f"columns: expected multiples of {step} within 0..{n}, got ({begin}, {end})")
    if layout == ROW_MAJOR:
        rows = data.view(k, n * bits // 8)[:, begin * bits // 8 : end * bits // 8]
        return remove_bias_and_deinterleave(rows, bits)
    if layout == TILED:
        stripes = data.view(n // TILE, k * TILE * bits // 8)[begin // TILE : end // TILE]
        return untile_fragments(unpack_codes(stripes) if codes else remove_bias_and_deinterleave(stripes, bits), bits)
    interleave = 16 // bits
    lines = data.view(n // interleave, k * interleave * bits // 8)[begin // interleave : end // interleave]
    q = remove_bias_and_deinterleave(lines, bits)  # (N / I, K' * I)
    q = deinterleave_columns(q, bits)  # (N, K')
    q = untranspose(q)  # (K', N)
    return unpermute_rows(q, bits)  # (K, N)


# --- checks ------------------------------------------------------------------------------------------------


def check_bits(bits: int) -> None:
    """Raise ValueError unless `bits` is 4 or 8."""
    if bits not in N_ALIGN:
        raise ValueError(f"bits: expected 4 or 8, got {bits!r}")


def check_layout(layout: str) -> None:
    """Raise ValueError unless `layout` is one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")


def check_range(q: torch.Tensor, bits: int) -> None:
    """Raise ValueError unless all of `q` fits into `bits` signed bits (the one host sync of packing)."""
    matrix_shape(q, bits)
    if bits == 8 or q.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(q)).tolist()
    limit = 1 << (bits - 1)
    if low < -limit or high >= limit:
        raise ValueError(f"q: expected values in {-limit}..{limit - 1} for bits={bits}, got {low}..{high}")


def check_code_layout(bits: int, layout: str) -> None:
    """Raise ValueError for what the codes of a table are not packed in."""
    if bits != 4:
        raise ValueError(f"bits: expected 4 for the codes of a table, got {bits}")
    if layout != TILED:
        raise ValueError(f"layout: expected {TILED!r}, the one for the codes of a table, got {layout!r}")


def check_codes(q: torch.Tensor) -> None:
    """Raise ValueError unless all of `q` is within 0..15 (the one host sync of packing)."""
    matrix_shape(q)
    if q.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(q)).tolist()
    if low < 0 or high > 15:
        raise ValueError(f"q: expected codes in 0..15, got {low}..{high}")


def matrix_shape(q: torch.Tensor, bits: int | None = None) -> tuple[int, int]:
    """The shape of `q`. Raises TypeError unless it is int8, ValueError unless it has two dimensions."""
    if bits is not None:
        check_bits(bits)
    if not isinstance(q, torch.Tensor) or q.dtype != torch.int8:
        raise TypeError(f"q: expected an int8 tensor, got {getattr(q, 'dtype', type(q).__name__)}")
    if q.dim() != 2:
        raise ValueError(f"q: expected 2 dimensions, got shape {list(q.shape)}")
    return q.shape[0], q.shape[1]


def _check_multiple(what: str, size: int, multiple: int) -> int:
    if size % multiple:
        raise ValueError(f"{what}: expected a multiple of {multiple}, got {size}")
    return multiple


def _check_bytes(data: torch.Tensor) -> tuple[int, int]:
    if data.dtype != torch.uint8 or data.dim() != 2:
        raise ValueError(f"data: expected uint8 [rows, bytes], got {data.dtype} {list(data.shape)}")
    return data.shape[0], data.shape[1]


def _pack_codes(q: torch.Tensor) -> torch.Tensor:
    """`pack_codes` without its range check."""
    rows, length = q.shape
    pairs = q.contiguous().view(torch.uint8).view(rows, length // _check_multiple("columns of q", length, 2), 2)
    return torch.add(pairs[..., 0], pairs[..., 1], alpha=16)


def _bias_and_pack(q: torch.Tensor, bits: int) -> torch.Tensor:
    """`add_bias_and_interleave` without its range check, which a composed layout has made already."""
    rows, length = q.shape
    words = length // _check_multiple("columns of q", length, 32 // bits)
    unsigned = q.contiguous().view(torch.uint8)
    if bits == 8:
        # x + 128 modulo 256 flips the top bit
        swapped = unsigned.view(rows, words, 2, 2).transpose(2, 3)  # (rows, word, parity, pair)
        return swapped.reshape(rows, length).bitwise_xor_(0x80)
    elements = unsigned.view(rows, words, 2, 2, 2)  # (rows, word, pair, s, parity)
    low = elements[:, :, :, 0, :].transpose(2, 3)  # (rows, word, parity, pair)
    high = elements[:, :, :, 1, :].transpose(2, 3)
    packed = torch.empty(rows, words, 2, 2, dtype=torch.uint8, device=q.device)
    # (low + 8) | (high + 8) << 4  ==  low + 16 * high + 136 modulo 256: one pass instead of four
    torch.add(low, high, alpha=16, out=packed)
    return packed.add_(136).view(rows, length // 2)
