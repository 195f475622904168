"""A layer's weight as it was read and before it is packed: integers or codes, in the conventions of this library."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class IntWeight:
    """w[perm[i], n] = scales[i // g, n] * (q[i, n] - zeros[i // g, n])

    Args:
        q: int8 [K, N], signed values of `bits` bits (4 or 8).
        bits: 4 or 8.
        scales: [groups, N] in the dtype of the file; g = K / groups.
        zeros: like scales, in units of q; None: all are 0.
        perm: int32 [K], a permutation, such that `x[:, perm] @ w[perm] = x @ w`; None: the identity.

    Examples:
        >>> weight = IntWeight(torch.full((64, 8), 3, dtype=torch.int8), 4, torch.full((2, 8), 0.5), None, None)
        >>> weight.dequantize()[0, 0]
        tensor(1.5000)
    """

    q: torch.Tensor
    bits: int
    scales: torch.Tensor
    zeros: torch.Tensor | None
    perm: torch.Tensor | None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """w [K, N], its rows in the order of x: computed in fp32 and rounded once."""
        return unsort_rows(scale_rows(self.q, self.scales, self.zeros), self.perm).to(dtype)


@dataclass(frozen=True, eq=False)
class CodeWeight:
    """`w[k, n] = scales[k // g, n] * table[codes[k, n]]`; without a table `scales[k // g, n] * codes[k, n]`.

    Args:
        codes: uint8 [K, N], values 0..15; of "fp8" float8_e4m3fn, the numbers; of stacked experts [E, K, N].
        table: fp32 [16], the codebook; None for "fp8".
        scales: fp32, or a 16-bit dtype where they are exact in it, [groups, N] or [E, groups, N]; g = K / groups.
        format: one of CODE_FORMATS; "code4" for a codebook that has no name.
        dtype: of the weight before it was quantized, as far as that is known; `dequantize` returns it unless asked for
            another.

    Examples:
        >>> codes, table = torch.full((64, 8), 15, dtype=torch.uint8), torch.arange(16.0)
        >>> CodeWeight(codes, table, torch.full((2, 8), 0.5), "code4", torch.float16).dequantize()[0, 0]
        tensor(7.5000, dtype=torch.float16)
    """

    codes: torch.Tensor
    table: torch.Tensor | None
    scales: torch.Tensor
    format: str
    dtype: torch.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """w [K, N], or [E, K, N]: computed in fp32 and rounded once."""
        w = scale_rows(self.codes if self.table is None else self.table[self.codes.int()], self.scales, None)
        return w.to(self.dtype if dtype is None else dtype)


def scale_rows(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """scales * (q - zeros) in fp32, in place where q is fp32: q [..., K, N], scales, zeros [..., groups, N] -> like q.

    Exact for 16-bit scales and whole zeros: a mantissa of 11 bits times a number of 9 bits fits into fp32's 24.
    """
    w = q.to(torch.float32).unflatten(-2, (scales.shape[-2], -1))  # (..., groups, g, N)
    if zeros is not None:
        w -= zeros.float().unsqueeze(-2)
    return w.mul_(scales.float().unsqueeze(-2)).flatten(-3, -2)


def unsort_rows(w: torch.Tensor, perm: torch.Tensor | None) -> torch.Tensor:
    """The rows of w[perm] back in the order of w."""
    return w if perm is None else torch.empty_like(w).index_copy_(0, perm.long(), w)
