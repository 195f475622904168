"""The last pass: int8 elements of a row packed into bytes, in the order that kernels unpack a 32-bit word."""

from __future__ import annotations

import torch

from .shapes import check_bits, check_codes, check_multiple, check_range


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
    rows, length = q.shape
    words = length // check_multiple("columns of q", length, 32 // bits)
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


def remove_bias_and_deinterleave(data: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `add_bias_and_interleave`: uint8 [rows, bytes] -> int8 [rows, bytes * 8 / bits]."""
    check_bits(bits)
    rows, length_bytes = _check_bytes(data)
    words = length_bytes // check_multiple("bytes of a row", length_bytes, 4)
    if bits == 8:
        values = data.reshape(rows, words, 2, 2).transpose(2, 3).bitwise_xor(0x80)  # (rows, word, pair, parity)
        return values.reshape(rows, length_bytes).view(torch.int8)
    # nibble s of byte 2*parity + pair is element 4*pair + 2*s + parity
    packed = data.reshape(rows, words, 2, 2).transpose(2, 3)  # (rows, word, pair, parity)
    q = torch.empty(rows, words, 2, 2, 2, dtype=torch.uint8, device=data.device)  # (rows, word, pair, s, parity)
    torch.bitwise_and(packed, 0x0F, out=q[:, :, :, 0, :])
    torch.bitwise_right_shift(packed, 4, out=q[:, :, :, 1, :])
    return q.sub_(8).view(torch.int8).view(rows, words * 8)  # 0 - 8 wraps to 248, which is -8 as int8


def pack_codes(q: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Codes of 4 bits: two in a byte, the even one in the low nibble; order and values stay as they are.

    Codes of 8 bits are in the order of int8, without its bias: bytes 0 and 2 of a word are a pair, as are 1 and 3.

    q: int8 [rows, L], L even, of 8 bits a multiple of 4. Returns uint8 [rows, L * bits / 8]. Raises ValueError for
    another shape or for codes out of range.
    """
    check_codes(q, bits)
    if bits == 8:
        return add_bias_and_interleave(q, bits).bitwise_xor_(0x80)
    rows, length = q.shape
    pairs = q.contiguous().view(torch.uint8).view(rows, length // check_multiple("columns of q", length, 2), 2)
    return torch.add(pairs[..., 0], pairs[..., 1], alpha=16)


def unpack_codes(data: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [rows, bytes] -> int8 [rows, bytes * 8 / bits]."""
    _check_bytes(data)
    if bits == 8:
        return remove_bias_and_deinterleave(data ^ 0x80, bits)
    return torch.stack((data & 0x0F, data >> 4), dim=-1).view(torch.int8).flatten(1)


def _check_bytes(data: torch.Tensor) -> tuple[int, int]:
    if data.dtype != torch.uint8 or data.dim() != 2:
        raise ValueError(f"data: expected uint8 [rows, bytes], got {data.dtype} {list(data.shape)}")
    return data.shape[0], data.shape[1]
