"""Quantization of a weight to int8 or int4, per channel or per group, in plain PyTorch: by the range of its values, and
from there by a search for the least square error (least_squares.py).

The result q, scales, zeros approximates  w[k, n] = scales[k // g, n] * (q[k, n] - zeros[k // g, n]). For codes
of a codebook see quantize_codes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .dense import (
    blocks_of,
    check_values,
    check_weight,
    default_group_size,
    groups_first,
    in_groups,
    over,
    resolve_group_size,
)
from .heuristics.problem import CODE_FORMATS, FORMATS
from .least_squares import Search, SearchFor, clip, is_better, require_search, squares
from .packing import FLOAT_DTYPES, HAS_ZEROS, format_of
from .quantize_codes import quantize_codes
from .quantize_fp8 import quantize_fp8
from .require import require_bool


def quantize(
    w: torch.Tensor,
    bits: int | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    search: SearchFor = True,
    *,
    format: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantize a weight by each group of rows in each column.

    q is rounded with the scale as it is stored. Without the search each element is within half a scale of its original
    (0.7, with zero points, 8 bits and bfloat16, where a group comes near the largest number of the dtype, 3.4e38). A
    group of zeros has scale 1 and gives exact zeros. A scale below the smallest number of the dtype is rounded up to
    it.

    Codes are the nearest ones of the scale. Without the search those of nf4 and fp4 are bitsandbytes', with absmax
    rounded to the dtype of w. Scales of mxfp4 are powers of two: the one of OCP's specification, or the next one where
    the sum of squares is smaller. Scales of nvfp4 are numbers of E4M3 times one power of two for all of w. Both are
    exact in the dtype of w, and what mxfp4 represents is given back exactly. Scales of fp8 are the largest magnitude
    over 448, and each weight is the nearest 8-bit float (E4M3).

    Args:
        w: [K, N] float16, bfloat16 or float32, on any device, of any strides.
        bits: 4 or 8, another way to say "int4" or "int8".
        group_size: rows that share a scale, a divisor of K; -1: all of them (per channel). None: 128; for nf4 and fp4,
            which take powers of two from 32 to 4096, 64. Groups of mxfp4 are 32, of nvfp4 16.
        symmetric: True: no zero points. False: with zero points; integers alone.
        search: True: scales, and zero points of 4 bits, with the least square error that a few trials find. No group
            has a larger error than with False, and integers that this represents exactly stay exact. "whole": zero
            points stay whole numbers, as the formats of `weightonly export` have them, with an error between that of
            True and False. False: by the range. Without zero points scale = absmax / (2^(bits-1) - 1), with them the
            2^bits levels span the range of the group and 0. Of no effect on mxfp4 and fp8, and on 8 bits with zero
            points, where it finds nothing.
        format: "int4" (the default), "int8", "nf4", "fp4", "mxfp4", "nvfp4", "fp8".

    Returns:
        (q, scales, zeros). q: int8 [K, N], values -2^(bits-1) .. 2^(bits-1) - 1; codes are 0 .. 15; of fp8
        float8_e4m3fn. scales: [K / g, N] in the dtype of w; the search makes some of integers and nf4 negative, as the
        levels above 0 are others than below. zeros: None if symmetric, else [K / g, N] in the dtype of w, in the range
        of q: whole numbers; the search makes fractions of 4 bits where the group has no 0, which is represented
        exactly. The tensor q then remembers that it has some, which `preprocess` passes on to `gemm`; copies of q do
        not.

    Raises:
        TypeError: a `w` of another type or dtype.
        ValueError: a wrong rank, an empty `w`, NaN or Inf in it, other `bits`, an unknown format, zero points of codes,
            and a group size that does not divide K or is none of the format.

    Examples:
        >>> q, scales, zeros = wo.quantize(torch.randn(512, 768), group_size=64, symmetric=False)
        >>> q.shape, scales.shape, zeros.shape
        (torch.Size([512, 768]), torch.Size([8, 768]), torch.Size([8, 768]))
    """
    name = format_of(bits, format)
    size = default_group_size(name) if group_size is None else group_size
    return quantize_for(w, w.dtype if isinstance(w, torch.Tensor) else None, name, size, symmetric, search)


@torch.no_grad()
def quantize_for(
    w: torch.Tensor,
    dtype: torch.dtype | None,
    format: str,
    group_size: int,
    symmetric: bool,
    search: SearchFor = True,
    *,
    code: Sequence[float] | None = None,
    largest: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`quantize`, with scales and zeros in `dtype`, which `w` need not have.

    code: the codebook of "code4", within -1 .. 1. largest: the largest magnitude of the weight that `w` is columns
    of, where `check_values` has seen it; None: `w` is whole.

    Raises what `quantize` does, TypeError for a `dtype` that is not a 16- or 32-bit float, and ValueError for weights
    beyond the largest number of `dtype`.
    """
    check_weight(w, dtype)
    assert dtype is not None
    require_bool("symmetric", symmetric)
    require_search(search)
    if format in CODE_FORMATS:
        if not symmetric:
            raise ValueError(f"symmetric: expected True for {format}, which has no zero points, got False")
        if format in FLOAT_DTYPES:
            return *quantize_fp8(w, dtype, resolve_group_size(group_size, w.shape[0])), None
        return *quantize_codes(w, dtype, format, group_size, bool(search), code, largest), None
    bits = FORMATS[format]
    k, n = w.shape
    group = resolve_group_size(group_size, k)
    largest = check_values(w, dtype) if largest is None else largest

    q = torch.empty(k, n, dtype=torch.int8, device=w.device)
    scales = torch.empty(k // group, n, dtype=dtype, device=w.device)
    zeros = None if symmetric else torch.empty_like(scales)
    scratch: torch.Tensor | None = None
    for groups, columns in blocks_of(k // group, group, n, w.device):
        rows = slice(groups.start * group, groups.stop * group)
        block = in_groups(w[rows, columns], group)  # (g, G, n)
        if scratch is None or scratch[0].shape != block.shape:
            scratch = torch.empty(3, *block.shape, dtype=torch.float32, device=w.device)
        low, high = block.amin(dim=0).double(), block.amax(dim=0).double()  # (G, n)
        scale, zero = _by_range(low, high, bits, symmetric, dtype, largest)
        if search and (bits == 4 or symmetric):
            scale, zero = _by_search(block, low, high, scale, zero, bits, dtype, search == "whole", scratch)
        scales[groups, columns] = scale
        level = torch.div(block, scale.float(), out=scratch[0])
        level = _nearest(level, scale.float(), zero, bits, dtype, level)
        if zeros is not None and zero is not None:
            zeros[groups, columns] = zero
            level.add_(zero).round_()  # a fraction was taken off
        groups_first(q[rows, columns], group).copy_(level)
    if zeros is not None:
        setattr(q, HAS_ZEROS, True)
    return q, scales, zeros


_Levels = tuple[torch.Tensor, torch.Tensor]


def _smallest(bits: int) -> int:
    return -(1 << (bits - 1))


def _largest(bits: int) -> int:
    return (1 << (bits - 1)) - 1


def _storable_scale(
    span: torch.Tensor, levels: int, slack: float, peak: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """span / levels, rounded to `dtype` such that `span` is at most `levels + slack` of the rounded scale.

    span: what the levels have to cover. peak: the largest magnitude. Both are fp64: there the range of the largest
    numbers does not overflow and subnormal ones are not rounded. A span of 0 gets scale 1.
    """
    scale = over(span, levels).to(dtype)
    # Subnormal scales and 0 are coarse: the nearest one can be too small by many levels.
    scale = torch.where(span > (levels + slack) * scale.double(), _step(scale, 1), scale)
    # Near the largest number the level next to the peak may be Inf (7 * 9360 in fp16), and the level below it may be
    # almost one scale away. The next smaller scale comes closer.
    reach = torch.floor(torch.finfo(dtype).max / scale.double())
    scale = torch.where(peak / scale.double() - reach > 0.5, _step(scale, -1), scale)
    return torch.where(span == 0, torch.ones_like(scale), scale)


def _within_half(
    low: torch.Tensor, high: torch.Tensor, scale: torch.Tensor, bits: int, dtype: torch.dtype, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) such that low and high are within half a scale of a level that is finite.

    Near the largest number of the dtype, the level that is next to an end of the range may be Inf. There the next
    scales up and down are tried, and one for which the last finite level is near enough; the first that fits counts.
    largest: the largest magnitude of the weight, which the host knows.
    """

    def zero_of(scale: torch.Tensor) -> torch.Tensor:
        return torch.round(_smallest(bits) - low / scale.double()).clamp_(_smallest(bits), _largest(bits))

    def error_of(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """How far an end is from its level, in scales."""
        reach = torch.floor(torch.finfo(dtype).max / scale.double())
        above = high / scale.double() - torch.minimum(_largest(bits) - zero, reach)
        below = -low / scale.double() - torch.minimum(zero - _smallest(bits), reach)
        return torch.maximum(above, below)

    zero = zero_of(scale)
    if largest < torch.finfo(dtype).max / 2:  # nearly always
        return scale, zero
    peak = torch.maximum(high, -low)
    error = error_of(scale, zero)
    reach = torch.floor(torch.finfo(dtype).max / scale.double())
    wide = (peak / (reach + 0.5)).to(dtype)
    first = scale
    for candidate in (wide, *(_step(base, by) for by in (1, -1, 2, -2, 3, 4, 5, 6) for base in (wide, first))):
        zero_here = zero_of(candidate)
        error_here = error_of(candidate, zero_here)
        better = (error > 0.5) & (error_here < error)
        scale = torch.where(better, candidate, scale)
        zero = torch.where(better, zero_here, zero)
        error = torch.where(better, error_here, error)
    return scale, zero


def _step(scale: torch.Tensor, by: int) -> torch.Tensor:
    """The next float above (by = 1) or below (by = -1) a non-negative one: floats are ordered as their bits are."""
    return (scale.view(torch.int32 if scale.dtype == torch.float32 else torch.int16) + by).view(scale.dtype)


def _by_range(
    low: torch.Tensor, high: torch.Tensor, bits: int, symmetric: bool, dtype: torch.dtype, largest: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scale in `dtype`, zero fp32 or None) with which the levels cover the range: low, high, fp64 (G, n).

    largest: see `quantize_for`.
    """
    if symmetric:
        peak = torch.maximum(high, -low)
        return _storable_scale(peak, _largest(bits), 0.5, peak, dtype), None
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scale = _storable_scale(high - low, (1 << bits) - 1, 0.0, torch.maximum(high, -low), dtype)
    scale, zero = _within_half(low, high, scale, bits, dtype, largest)
    return scale, zero.float()


_PARTS = (1.0, 0.93, 1.07)
"""Of what the levels should cover of the largest magnitude, without zero points."""

_ENDS = ((0.01, 0.01), (-0.026, 0.046), (0.046, -0.026))
"""Beyond what they should cover of the range below 0, and above it, with zero points."""


def _starts(low: torch.Tensor, high: torch.Tensor, group: int, bits: int, symmetric: bool) -> Iterator[_Levels]:
    """Scales and zero points to try, fp32 (G, n). low, high: the ends of the range."""
    lowest, largest, part = _smallest(bits), _largest(bits), clip(group) if bits == 4 else 1.0
    if symmetric:
        peak, none = torch.where(high > -low, high, low), torch.zeros_like(low)
        for other in _PARTS:  # there is one level more below 0 than above
            yield peak * (part * other / lowest), none
        return
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    for more_below, more_above in _ENDS:
        below, above = low * (part + more_below), high * (part + more_above)
        scale = over(above - below, largest - lowest)
        yield scale, lowest - below / scale


def _by_search(
    block: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
    whole: bool,
    scratch: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scale in `dtype`, zero fp32 or None) with a smaller square error than those given, or these.

    whole: whether zero points have to be whole numbers. scratch: see `Search`.
    """
    size, group = torch.maximum(high, -low), len(block)
    lowest, largest = _smallest(bits), _largest(bits)
    # 0 stays exact where there is any.
    is_whole = None if zero is None or whole else torch.abs(block, out=scratch[0]).amin(dim=0) == 0

    def store_zero(zero: torch.Tensor) -> torch.Tensor:
        zero = zero.clamp(lowest, largest)
        return zero.round() if is_whole is None else torch.where(is_whole, zero.round(), zero.to(dtype).float())

    def round_(ratio: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.round(ratio, out=out).clamp_(lowest, largest)

    def error(scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        scale = scale.float()
        return squares(block, scale, lambda ratio, out: _nearest(ratio, scale, zero, bits, dtype, out), scratch)

    search = Search(block, round_, None, None if zero is None else store_zero, scratch)
    fitted, found = search.best(_starts(low.float(), high.float(), group, bits, zero is None))
    new_scale, new_zero = fitted.to(dtype), None if zero is None else found
    better = is_better(error(scale, zero), error(new_scale, new_zero), size, group, dtype) & (new_scale != 0)
    if zero is not None and new_zero is not None:
        zero = torch.where(better, new_zero, zero)
    return torch.where(better, new_scale, scale), zero


def _nearest(
    ratio: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> torch.Tensor:
    """The levels next to ratio = weights / scale, fp32 (g, G, n), less the zero point; see `Round`.

    scale * level is finite in `dtype`.
    """
    reach = torch.floor(torch.finfo(dtype).max / scale.abs())  # (G, n)
    if zero is None:
        low, high = (-reach).clamp(min=_smallest(bits)), reach.clamp(max=_largest(bits))
        return torch.round(ratio, out=out).clamp_(low, high)
    # Apart, so that the half of a number is rounded as without zero points.
    fraction = zero - zero.round()
    low, high = torch.maximum(-reach, _smallest(bits) - zero), torch.minimum(reach, _largest(bits) - zero)
    return torch.add(ratio, fraction, out=out).round_().sub_(fraction).clamp_(low, high)
