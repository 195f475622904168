"""The blocks of GGUF's types as integers and codes of this library: the numbers that package gguf's `dequantize` gives.

A row of a weight is a sequence of blocks: 32 or 256 values, with their scales and minima beside them.

    w = d * q                  int4, int8 or a codebook, exactly
    w = d * q + m              w = d * (q - z), z = -m / d: a fraction, which the kernels round to 16 bits
    w = (d * s) * q            K-quants: the product of d and a number of 6 or 8 bits is exact in fp32, not in 16 bits

So scales of fp16 stay fp16; products, and scales with zero points beside them, are fp32 here and are rounded where a
layer gets the dtype of x. https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h has the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..codebooks import codebook
from ..heuristics.problem import FORMATS
from .e2m1 import e8m0_scales
from .plain import CodeWeight, IntWeight

Values: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""u: uint8 or int8 [R, values]; scales: [R, groups]; minima: fp32 [R, groups], or None where there are none."""

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The codebook of IQ4_NL and IQ4_XS, exact in float16 and bfloat16."""

_FAR = float(1 << 15)
"""Steps: fp16 has no zero point much farther away. Groups that are farther from 0 vary by less than fp16 resolves."""


@dataclass(frozen=True)
class BlockType:
    """A type that is read. values: of a block. groups: that have a scale each. format: of PackedWeight.

    split: blocks uint8 [R, bytes] -> their values. has_zeros: whether there are minima. offset: what is subtracted
    from u where there are none.
    """

    values: int
    groups: int
    format: str
    split: Callable[[torch.Tensor], Values]
    has_zeros: bool = False
    offset: int = 0

    @property
    def group_size(self) -> int:
        return self.values // self.groups

    def read(self, name: str, blocks: torch.Tensor) -> IntWeight | CodeWeight:
        """blocks: uint8 [N, blocks, bytes], on any device. name: of the tensor, for errors.

        Raises TensorError for scales of MXFP4 that are NaN.
        """
        n = blocks.shape[0]
        u, scales, minima = (None if part is None else part.view(n, -1) for part in self.split(blocks.flatten(0, 1)))
        assert u is not None and scales is not None
        if self.format == "mxfp4":
            powers = e8m0_scales(name, scales).t().contiguous()
            return CodeWeight(_t(u), codebook("mxfp4", u.device), powers, "mxfp4", torch.bfloat16)
        if self.format == "code4":
            table = torch.tensor(_IQ4, dtype=torch.float32, device=u.device)
            return CodeWeight(_t(u), table, _t(scales), "code4", torch.float16)
        bits = FORMATS[self.format]
        if minima is None:
            q = (u.view(torch.int8) - self.offset) if self.offset else u.view(torch.int8)
            return IntWeight(_t(q), bits, _t(scales), None, None)
        q, scales, zeros = _with_zeros(u, bits, scales, minima)
        return IntWeight(_t(q), bits, _t(scales), _t(zeros), None)


def _t(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.t().contiguous()


def _with_zeros(
    u: torch.Tensor, bits: int, scales: torch.Tensor, minima: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q int8 [N, K], scales, zeros) with scales * (q - zeros) = scales * u + minima; fp32 [N, groups]."""
    scales = scales.float()
    zeros = torch.where(minima == 0, 0.0, -minima / scales)
    far = zeros.abs() > _FAR
    # Whole steps go from the zero point to q, as far as 8 bits reach (u is at most 31): 16 bits have the fraction left.
    shift = zeros.round().nan_to_num().clamp(31 - 127, 128) if bits == 8 else torch.full_like(zeros, 8.0)
    by_group = u.view(*zeros.shape, -1)
    q = (by_group - shift.to(torch.int16).to(torch.uint8).unsqueeze(-1)).view(torch.int8)  # uint8 wraps, as int8 does
    zeros = zeros - shift
    if bool(far.any()):
        middle = minima + scales * by_group.float().mean(dim=-1)
        q = q.masked_fill(far.unsqueeze(-1), 0)
        scales = torch.where(far, middle.abs(), scales)
        zeros = torch.where(far, -middle.sign(), zeros)
    return q.view_as(u), scales, zeros


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """fp16 [R, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(data: torch.Tensor, run: int) -> torch.Tensor:
    """uint8 [R, bytes] -> [R, 2 * bytes]: of each run of bytes the low halves, then the high ones."""
    runs = data.unflatten(1, (-1, 1, run))
    return torch.cat((runs & 15, runs >> 4), dim=2).flatten(1)


def _bits(data: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """uint8 [R, bytes] -> [R, 8 / width * bytes]: of each run of bytes the lowest bits of all, then the next ones."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device).view(1, 1, -1, 1)
    return (data.unflatten(1, (-1, 1, run)) >> shifts & (1 << width) - 1).flatten(1)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """uint8 [R, 4] -> [R, 32]: bit i belongs to value i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(-1) >> shifts & 1).flatten(1)


def _q4_0(b: torch.Tensor) -> Values:
    return _nibbles(b[:, 2:], 16), _half(b, 0), None


def _q4_1(b: torch.Tensor) -> Values:
    return _nibbles(b[:, 4:], 16), _half(b, 0), _half(b, 2).float()


def _q5_0(b: torch.Tensor) -> Values:
    return _nibbles(b[:, 6:], 16) | _fifth_bits(b[:, 2:6]) << 4, _half(b, 0), None


def _q5_1(b: torch.Tensor) -> Values:
    return _nibbles(b[:, 8:], 16) | _fifth_bits(b[:, 4:8]) << 4, _half(b, 0), _half(b, 2).float()


def _q8_0(b: torch.Tensor) -> Values:
    return b[:, 2:].contiguous(), _half(b, 0), None


def _k_scales(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, minima) of eight groups of Q4_K and Q5_K: 6 bits each, in bytes 4 to 15."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=1)
    return _half(b, 0).float() * scales, -(_half(b, 2).float() * minima)


def _q4_k(b: torch.Tensor) -> Values:
    return _nibbles(b[:, 16:], 32), *_k_scales(b)


def _q5_k(b: torch.Tensor) -> Values:
    return _nibbles(b[:, 48:], 32) | _bits(b[:, 16:48], 1, 32) << 4, *_k_scales(b)


def _q6_k(b: torch.Tensor) -> Values:
    u = _nibbles(b[:, :128], 64) | _bits(b[:, 128:192], 2, 32) << 4
    return u, _half(b, 208).float() * b[:, 192:208].view(torch.int8), None


def _iq4_xs(b: torch.Tensor) -> Values:
    low = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), dim=-1).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)
    high = (b[:, 2:4].unsqueeze(-1) >> shifts & 3).flatten(1)
    return _nibbles(b[:, 8:], 16), _half(b, 0).float() * ((low | high << 4).float() - 32), None


def _mxfp4(b: torch.Tensor) -> Values:
    return _nibbles(b[:, 1:], 16), b[:, :1].contiguous(), None


TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(32, 1, "int4", _q4_0, offset=8),
    "Q4_1": BlockType(32, 1, "int4", _q4_1, has_zeros=True),
    "Q5_0": BlockType(32, 1, "int8", _q5_0, offset=16),
    "Q5_1": BlockType(32, 1, "int8", _q5_1, has_zeros=True),
    "Q8_0": BlockType(32, 1, "int8", _q8_0),
    "Q4_K": BlockType(256, 8, "int4", _q4_k, has_zeros=True),
    "Q5_K": BlockType(256, 8, "int8", _q5_k, has_zeros=True),
    "Q6_K": BlockType(256, 16, "int8", _q6_k, offset=32),
    "IQ4_NL": BlockType(32, 1, "code4", _q4_0),
    "IQ4_XS": BlockType(256, 8, "code4", _iq4_xs),
    "MXFP4": BlockType(32, 1, "mxfp4", _mxfp4),
}
"""Type, as package gguf names it -> how its blocks are read."""
