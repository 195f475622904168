"""Absmax quantization of a weight to int8 or int4, per channel or per group, in plain PyTorch.

The equation to invert is  w[k, n] = scales[k // g, n] * (q[k, n] - zeros[k // g, n]).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .layout import check_bits

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_BLOCK_ELEMS = 1 << 24
"""Elements that are held in fp32 at a time (64 MiB, a few times over for temporaries)."""


def quantize(
    w: torch.Tensor, bits: int = 4, group_size: int = 128, symmetric: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantize a weight by the largest magnitude (or the range) of each group of rows.

    w: [K, N] float16, bfloat16 or float32, any device and strides.
    bits: 4 or 8.
    group_size: rows of K that share a scale, a divisor of K; -1 is all of them (per channel).
    symmetric: True: scale = absmax / (2^(bits-1) - 1) and no zero point. False: the scale spans the range of
        the group, extended to contain 0, so that 0.0 is represented exactly.

    Returns (q, scales, zeros): q int8 [K, N]; scales [K / g, N] in the dtype of w; zeros None if symmetric,
    else [K / g, N] in the dtype of w, integers in the range of q. q is rounded against the scale as it is
    stored, so every element is within half a scale of its original. A group of zeros has scale 1 and gives
    exact zeros; scales below the dtype's smallest number are rounded up to it.

    Raises TypeError for a `w` of another kind, ValueError for a wrong rank, an empty `w`, NaN or Inf in it,
    other `bits`, or a group size that does not divide K.
    """
    return quantize_for(w, w.dtype if isinstance(w, torch.Tensor) else None, bits, group_size, symmetric)


@torch.no_grad()
def quantize_for(
    w: torch.Tensor, dtype: torch.dtype | None, bits: int, group_size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`quantize` with scales and zeros in `dtype`, that of the activations, whatever the dtype of `w` is.

    Raises, beyond what `quantize` does, TypeError for a dtype that cannot hold scales, and ValueError for
    weights beyond the largest number of `dtype`.
    """
    _check_weight(w)
    if dtype not in WEIGHT_DTYPES:
        raise TypeError(f"dtype: expected one of {', '.join(map(str, WEIGHT_DTYPES))}, got {dtype}")
    check_bits(bits)
    k, n = w.shape
    group = resolve_group_size(group_size, k)
    _check_values(w, dtype)

    q = torch.empty(k, n, dtype=torch.int8, device=w.device)
    scales = torch.empty(k // group, n, dtype=dtype, device=w.device)
    zeros = None if symmetric else torch.empty_like(scales)
    for groups, columns in _blocks(k // group, group, n):
        rows = slice(groups.start * group, groups.stop * group)
        block = w[rows, columns].to(torch.float32).unflatten(0, (-1, group))  # (G, g, n)
        low, high = (t.double() for t in torch.aminmax(block, dim=1))  # (G, n)
        if zeros is None:
            peak = torch.maximum(high, -low)
            scale = _storable_scale(peak, _largest(bits), 0.5, peak, dtype)
            zero = torch.zeros_like(low)
        else:
            low, high = low.clamp(max=0.0), high.clamp(min=0.0)
            scale = _storable_scale(high - low, (1 << bits) - 1, 0.0, torch.maximum(high, -low), dtype)
            zero = torch.round(_smallest(bits) - low / scale.double()).clamp_(_smallest(bits), _largest(bits))
            zeros[groups, columns] = zero.to(dtype)
        scales[groups, columns] = scale
        q[rows, columns] = _round_to_levels(block, scale.float(), zero.float(), bits, dtype).flatten(0, 1)
    return q, scales, zeros


def resolve_group_size(group_size: int, k: int) -> int:
    """Rows per scale: `group_size`, or K for -1. Raises ValueError unless it divides K."""
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size: expected an int, got {type(group_size).__name__}")
    if group_size == -1:
        return k
    if group_size < 1 or k % group_size:
        raise ValueError(f"group_size: expected -1 or a divisor of K={k}, got {group_size}")
    return group_size


def _smallest(bits: int) -> int:
    return -(1 << (bits - 1))


def _largest(bits: int) -> int:
    return (1 << (bits - 1)) - 1


def _check_weight(w: torch.Tensor) -> None:
    if not isinstance(w, torch.Tensor):
        raise TypeError(f"w: expected a tensor, got {type(w).__name__}")
    if w.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"w: expected one of {', '.join(map(str, WEIGHT_DTYPES))}, got {w.dtype}")
    if w.dim() != 2 or w.numel() == 0:
        raise ValueError(f"w: expected shape [K, N] with K, N >= 1, got {list(w.shape)}")


def finite_range(w: torch.Tensor) -> tuple[float, float]:
    """The smallest and the largest value. Raises ValueError for NaN or Inf."""
    # aminmax lets NaN through to its results: one reduction, one sync and no temporary of the size of w
    low, high = torch.stack(torch.aminmax(w)).tolist()
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"w: expected finite values, got NaN or Inf (min {low}, max {high})")
    return low, high


def _check_values(w: torch.Tensor, dtype: torch.dtype) -> None:
    low, high = finite_range(w)
    limit = torch.finfo(dtype).max
    if max(-low, high) > limit:
        raise ValueError(f"w: expected values within +-{limit:g}, the range of {dtype}, got {low:g}..{high:g}")


def _blocks(groups: int, group: int, n: int) -> Iterator[tuple[slice, slice]]:
    """Cover [groups, n] with rectangles of about _BLOCK_ELEMS weights: whole rows as long as they fit."""
    column_step = min(n, max(1, _BLOCK_ELEMS // group))
    group_step = max(1, _BLOCK_ELEMS // (group * column_step))
    for start in range(0, groups, group_step):
        for column in range(0, n, column_step):
            yield slice(start, min(start + group_step, groups)), slice(column, min(column + column_step, n))


def _storable_scale(
    span: torch.Tensor, levels: int, slack: float, peak: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """span / levels, rounded to `dtype` such that `span` is at most `levels + slack` of the rounded scale.

    span: what the levels have to cover; peak: the largest magnitude; both fp64, in which neither the range of
    the largest numbers overflows nor subnormals are rounded. A span of 0 gets scale 1.
    """
    scale = (span / levels).to(dtype)
    # Subnormal scales, zero included, are so coarse that the nearest one can be too small by many levels.
    scale = torch.where(span > (levels + slack) * scale.double(), _step(scale, 1), scale)
    # Near the largest number the level next to the peak may be Inf (7 * 9360 in fp16), and the one below it
    # nearly a whole step away: a slightly smaller scale comes closer.
    reach = torch.floor(torch.finfo(dtype).max / scale.double())
    scale = torch.where(peak / scale.double() - reach > 0.5, _step(scale, -1), scale)
    return torch.where(span == 0, torch.ones_like(scale), scale)


def _step(scale: torch.Tensor, by: int) -> torch.Tensor:
    """The neighbour of a non-negative float: the order of the floats is that of their bits."""
    return (scale.view(torch.int32 if scale.dtype == torch.float32 else torch.int16) + by).view(scale.dtype)


def _round_to_levels(
    block: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """round(block / scale) + zero in fp32 (G, g, n), kept to the range of q and finite scale * (q - zero)."""
    reach = torch.floor(torch.finfo(dtype).max / scale)  # (G, n)
    low = torch.clamp(zero - reach, min=_smallest(bits))
    high = torch.clamp(zero + reach, max=_largest(bits))
    levels = torch.div(block, scale.unsqueeze(1)).round_().add_(zero.unsqueeze(1))
    return levels.clamp_(low.unsqueeze(1), high.unsqueeze(1))
