"""The passes of "interleaved", each followed by its inverse.

The order is as FasterTransformer's `preprocess_weights_for_mixed_gemm` has it for sm75 to sm89, byte for byte. With `b`
bits per weight, I = 16 / b columns per line and k' the permuted row:

    element(k', n) = (n // I) * K * I  +  (k' // 64) * 64 * I  +  (n % I) * 64  +  k' % 64

counted in elements of b bits, before the order inside a 32-bit word (see `add_bias_and_interleave`).
"""

from __future__ import annotations

import torch

from .shapes import K_ALIGN, check_multiple, matrix_shape


def permute_rows(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Re-order K inside blocks of P = 128 / bits rows, so that one `ldmatrix` feeds an MMA operand directly.

    A thread of an m16n8k16 MMA needs rows 2j, 2j+1, 2j+8, 2j+9 of each 16 rows (j = 0..3: its place in the
    quad). With R = 32 / bits weights in a word, the pass puts everything that lane j needs into word j:

        out[base + R*j + 2*h + l] = q[base + 8*h + 2*j + l]          j < 4, h < R/2, l < 2

        int8, P = 16:  in   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15
                       out  0 1 8 9 | 2 3 10 11 | 4 5 12 13 | 6 7 14 15
                            lane 0    lane 1      lane 2      lane 3

    q: int8 [K, N], K a multiple of P. Returns int8 [K, N]. Raises ValueError for another shape.
    """
    k, n = matrix_shape(q, bits)
    word = 32 // bits
    block = check_multiple("rows of q", k, 4 * word)
    return q.reshape(k // block, word // 2, 4, 2, n).transpose(1, 2).reshape(k, n)


def unpermute_rows(q: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `permute_rows`: int8 [K, N] -> int8 [K, N]."""
    k, n = matrix_shape(q, bits)
    word = 32 // bits
    block = check_multiple("rows of q", k, 4 * word)
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

    64 weights of one column are only 64 bytes (int8) or 32 bytes (int4). I columns side by side
    make as many bytes as the 64 activations (16 bit) that they meet, 128, so both are loaded alike.

        int8, I = 2:  column 0: a0 a1 a2 ...     a = 64 consecutive k'
                      column 1: b0 b1 b2 ...
                      out row 0: a0 b0 a1 b1 a2 b2 ...

    q: int8 [N, K] (column major), K a multiple of 64, N of I. Returns int8 [N / I, K * I].
    Raises ValueError for another shape.
    """
    n, k = matrix_shape(q, bits)
    columns = check_multiple("rows of q (columns of the weight)", n, 16 // bits)
    tiles = k // check_multiple("columns of q (rows of the weight)", k, K_ALIGN)
    return q.reshape(n // columns, columns, tiles, K_ALIGN).transpose(1, 2).reshape(n // columns, k * columns)


def deinterleave_columns(q: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `interleave_columns`: int8 [N / I, K * I] -> int8 [N, K]."""
    lines, length = matrix_shape(q, bits)
    columns = 16 // bits
    tiles = length // check_multiple("columns of q", length, K_ALIGN * columns)
    return q.reshape(lines, tiles, columns, K_ALIGN).transpose(1, 2).reshape(lines * columns, tiles * K_ALIGN)
