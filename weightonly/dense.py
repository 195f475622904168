"""A dense weight that is to be quantized: what it has to be, its groups of rows, and its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .require import require_dtype, require_int, require_numbers

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

DEFAULT_GROUP_SIZE = {"int4": 128, "int8": 128, "nf4": 64, "fp4": 64, "mxfp4": 32, "nvfp4": 16, "fp8": 128}
"""Format that a weight can be quantized to -> rows that share a scale, unless the caller says."""

_BLOCK_ELEMS = {"cpu": 1 << 18, "gpu": 1 << 24}
"""Weights that are worked on at a time, in fp32 and with a few times that for temporaries: on a CPU what its caches
hold, elsewhere 64 MiB."""

_SLICE_ELEMS = 1 << 22
"""The same, of a weight that is written in place beside all that is in use: fewer, as memory is short then."""


def default_group_size(format: str) -> int:
    """Rows that share a scale, wherever the caller says nothing; 128 for "code4", to which nothing is quantized."""
    return DEFAULT_GROUP_SIZE.get(format, 128)


def resolve_group_size(group_size: int, k: int) -> int:
    """Rows per scale: `group_size`, or K for -1. Raises ValueError unless it divides K."""
    require_int("group_size", group_size)
    if group_size == -1:
        return k
    if group_size < 1 or k % group_size:
        raise ValueError(f"group_size: expected -1 or a divisor of K={k}, got {group_size}")
    return group_size


def check_weight(w: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Raises TypeError or ValueError unless `w` is a matrix of floats that can get scales in `dtype`."""
    require_dtype("w", w, WEIGHT_DTYPES)
    require_numbers("w", w)
    if w.dim() != 2 or w.numel() == 0:
        raise ValueError(f"w: expected shape [K, N] with K, N >= 1, got {list(w.shape)}")
    check_weight_dtype(dtype)


def check_weight_dtype(dtype: torch.dtype | None) -> None:
    """Raises TypeError unless scales can have it."""
    if not isinstance(dtype, torch.dtype) or dtype not in WEIGHT_DTYPES:
        raise TypeError(f"dtype: expected one of {', '.join(map(str, WEIGHT_DTYPES))}, got {dtype}")


def finite_range(w: torch.Tensor, name: str = "w") -> tuple[float, float]:
    """The smallest and the largest value. Raises ValueError, naming the weight, for NaN or Inf."""
    # A NaN in w is a NaN in both results of aminmax: one reduction and one host sync find it.
    low, high = torch.stack([value.float() for value in torch.aminmax(w)]).tolist()  # autocast stacks no fp16 on a CPU
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name}: expected finite values, got NaN or Inf (min {low}, max {high})")
    return low, high


def check_values(w: torch.Tensor, dtype: torch.dtype, name: str = "w") -> float:
    """The largest magnitude. Raises ValueError, naming the weight, for NaN, Inf and numbers beyond `dtype`."""
    low, high = finite_range(w, name)
    limit = torch.finfo(dtype).max
    if max(-low, high) > limit:
        raise ValueError(f"{name}: expected values within +-{limit:g}, the range of {dtype}, got {low:g}..{high:g}")
    return max(-low, high)


def blocks_of(groups: int, group: int, n: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cover [groups, n] with rectangles of about `_BLOCK_ELEMS` weights, of whole rows where they fit."""
    elems = _BLOCK_ELEMS["cpu" if device.type == "cpu" else "gpu"]
    column_step = min(n, max(1, elems // group))
    group_step = max(1, elems // (group * column_step))
    for start in range(0, groups, group_step):
        for column in range(0, n, column_step):
            yield slice(start, min(start + group_step, groups)), slice(column, min(column + column_step, n))


def over(numbers: torch.Tensor, divisor: float) -> torch.Tensor:
    """numbers / divisor, divided on GPUs, too: there PyTorch multiplies by the reciprocal of a number of Python."""
    return numbers / torch.full((), divisor, dtype=numbers.dtype, device=numbers.device)


def groups_first(w: torch.Tensor, group: int) -> torch.Tensor:
    """A view (g, G, n) of w [G * g, n]: sums over the rows of a group are then elementwise, see `fold`."""
    return w.unflatten(0, (-1, group)).transpose(0, 1)


def in_groups(w: torch.Tensor, group: int) -> torch.Tensor:
    """A copy of w [G * g, n] in fp32 as (g, G, n), contiguous."""
    view = groups_first(w, group)
    return torch.empty(view.shape, dtype=torch.float32, device=w.device).copy_(view)


def columns_at_once(k: int, align: int) -> int:
    """Columns of K rows with about _SLICE_ELEMS weights, a multiple of `align`."""
    return max(align, _SLICE_ELEMS // k // align * align)
