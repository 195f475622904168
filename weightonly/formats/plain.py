"""A layer's weight between a file and a kernel: plain integers or codes, in the conventions of this library."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CODE_TABLES: dict[str, tuple[float, ...]] = {
    # The quantiles of a normal distribution: Dettmers et al., QLoRA, https://arxiv.org/abs/2305.14314, appendix E.
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    # bitsandbytes' FP4: bit 3 is the sign. Multiples of 1/192, the largest is 1.
    "fp4": tuple(sign * m / 192 for sign in (1, -1) for m in (0, 1, 128, 192, 64, 96, 32, 48)),
}
"""Format -> the number that each 4-bit code stands for."""


def code_table(format: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """The table of "nf4" or "fp4", fp32 [16]."""
    return torch.tensor(CODE_TABLES[format], dtype=torch.float32, device=device)


@dataclass(frozen=True, eq=False)
class IntWeight:
    """w[perm[i], n] = scales[i // g, n] * (q[i, n] - zeros[i // g, n])

    q: int8 [K, N], signed values of `bits` bits (4 or 8).
    scales: [groups, N] in the dtype of the file; g = K / groups.
    zeros: like scales, in units of q; None: all are 0.
    perm: int32 [K], a permutation, such that x[:, perm] @ w[perm] = x @ w; None: the identity.
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
    """w[k, n] = table[codes[k, n]] * absmax[(n * K + k) // blocksize]

    bitsandbytes' 4-bit weights: its blocks run through the flattened [N, K] weight, across rows where blocksize
    does not divide K.

    codes: uint8 [K, N], values 0..15.
    table: fp32 [16].
    absmax: fp32 [ceil(N * K / blocksize)].
    format: "nf4", "fp4", or "code4" for any other table.
    dtype: what the weight was quantized from, and dequantizes to unless asked otherwise.
    """

    codes: torch.Tensor
    table: torch.Tensor
    absmax: torch.Tensor
    blocksize: int
    format: str
    dtype: torch.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """w [K, N]: computed in fp32 and rounded once."""
        k, n = self.codes.shape
        scale = self.absmax.repeat_interleave(self.blocksize)[: n * k]  # of the flattened [N, K]
        return (self.table[self.codes.int()] * scale.view(n, k).t()).to(self.dtype if dtype is None else dtype)


def scale_rows(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """scales * (q - zeros) in fp32: q [K, N], scales and zeros [groups, N] -> [K, N].

    Exact for 16-bit scales and whole zeros: 11 bits times 9 fit into the 24 of fp32.
    """
    w = q.to(torch.float32).unflatten(0, (scales.shape[0], -1))  # (groups, g, N)
    if zeros is not None:
        w -= zeros.float().unsqueeze(1)
    return w.mul_(scales.float().unsqueeze(1)).flatten(0, 1)


def unsort_rows(w: torch.Tensor, perm: torch.Tensor | None) -> torch.Tensor:
    """The rows of w[perm] back in the order of w."""
    return w if perm is None else torch.empty_like(w).index_copy_(0, perm.long(), w)
