"""Quantization of a weight to 8-bit floats (E4M3): w[k, n] is approximated by scales[k // g, n] * q[k, n]."""

from __future__ import annotations

import torch

from .dense import blocks_of, check_values, over

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantize_fp8(w: torch.Tensor, dtype: torch.dtype, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(q float8_e4m3fn [K, N], scales [K / group, N] in `dtype`) of a weight w [K, N] of checked shape and dtype.

    A scale is the largest magnitude of its group over 448, rounded to `dtype`, such that no number becomes Inf; where
    that is 0, the smallest number of `dtype`, and 1 for a group of zeros.

    Raises ValueError for NaN, Inf and numbers beyond `dtype`.
    """
    check_values(w, dtype)
    k, n = w.shape
    info = torch.finfo(dtype)
    q = torch.empty(k, n, dtype=torch.float8_e4m3fn, device=w.device)
    scales = torch.empty(k // group, n, dtype=dtype, device=w.device)
    for groups, columns in blocks_of(k // group, group, n, w.device):
        rows = slice(groups.start * group, groups.stop * group)
        block = w[rows, columns].to(torch.float32).unflatten(0, (-1, group))  # (G, g, n)
        peak = block.abs().amax(dim=1)  # (G, n)
        scale = over(peak.double(), LARGEST).to(dtype).clamp(min=info.smallest_normal * info.eps)
        scale = torch.where(peak == 0, torch.ones_like(scale), scale)
        # Near the largest number a scale that was rounded up makes Inf: the one before it has the bits before.
        below = (scale.view(torch.int16 if dtype.itemsize == 2 else torch.int32) - 1).view(dtype)
        scale = torch.where(scale.double() * LARGEST > info.max, below, scale)
        level = (block / scale.float().unsqueeze(1)).clamp_(-LARGEST, LARGEST)
        q[rows, columns] = level.to(torch.float8_e4m3fn).flatten(0, 1)
        scales[groups, columns] = scale
    return q, scales
