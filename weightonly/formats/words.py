"""4- and 8-bit integers out of int32 words and bytes, as several formats store them."""

from __future__ import annotations

import torch


def words_for(count: int, bits: int) -> int:
    """The 32-bit words that hold `count` values of `bits` bits."""
    return -(-count * bits // 32)


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Values of 4 or 8 bits out of 32-bit words, lowest bits first, spread along `dim`.

    words: int32 [R, C]. Returns uint8 [R, C * 32 / bits] for dim=1, [R * 32 / bits, C] for dim=0. Value i of word w
    comes to place w * 32 / bits + i.
    """
    rows, columns = words.shape
    data = words_as_bytes(words)
    values = data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).view(rows, columns, 8)
    if dim == 0:
        values = values.transpose(1, 2)  # (R, 32 / bits, C)
        return values.reshape(-1, columns)
    return values.reshape(rows, -1)


def words_as_bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, C, 4], the lowest bits of a word first (little endian)."""
    # Flattened first: a contiguous [R, 1] may have a last stride that view(dtype) refuses.
    return words.contiguous().view(-1).view(torch.uint8).view(*words.shape, 4)


def to_signed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """u - 2^(bits-1): uint8 of `bits` bits -> int8 of the same shape, the library's convention."""
    return (values - (1 << (bits - 1))).view(torch.int8)  # uint8 wraps: 0 - 8 is 248, which is -8 as int8


def signed_zeros(zeros: torch.Tensor, bits: int) -> torch.Tensor | None:
    """Unsigned zero points, uint8 [groups, N] -> the library's, int8; None if all of them become 0.

    Then w = s * (q - 0) = s * q, bit for bit, and kernels without zero points are faster. One host sync.
    """
    signed = to_signed(zeros, bits)
    return signed if bool(signed.any()) else None


def unpack_nibbles(data: torch.Tensor, count: int) -> torch.Tensor:
    """uint8 [bytes] -> uint8 [count], the even element from the high nibble, as bitsandbytes packs them."""
    return torch.stack((data >> 4, data & 15), dim=-1).view(-1)[:count]


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_nibbles`: uint8 [count] -> uint8 [(count + 1) // 2]; an odd count is padded by a 0."""
    padded = torch.nn.functional.pad(values, (0, values.numel() % 2)).view(-1, 2)
    return padded[:, 0] << 4 | padded[:, 1]


def to_unsigned(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `to_signed`: int8 -> uint8."""
    return values.contiguous().view(torch.uint8) + (1 << (bits - 1))


def pack_words(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The inverse of `unpack_words`: uint8 [R, C] -> int32, the last word of each line filled up with 0."""
    rows = values if dim == 1 else values.t()
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % (32 // bits)))
    data = rows if bits == 8 else rows[:, ::2] | rows[:, 1::2] << 4
    words = data.contiguous().view(torch.int32)
    return words if dim == 1 else words.t().contiguous()
