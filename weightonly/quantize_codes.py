"""Quantization of a weight to the codes of a codebook: blocks as bitsandbytes has them, and OCP's microscaling formats.

w[k, n] is approximated by  scales[k // g, n] * codebook[q[k, n]].

    nf4, fp4  scale = the largest magnitude of a group; see ops/blocks_4bit.py; searched (least_squares.py), any number
    mxfp4     scale = 2^e (E8M0), groups of 32; the better one of two
    nvfp4     scale = an 8-bit float (E4M3) times one factor for all of the weight, groups of 16; searched, such a float

The codes of the last two are 4-bit floats (E2M1), rounded to nearest, ties to the even code. What they stand for, and
the scales, are exact in 16 bits: a weight is what its bits say, in float16 and bfloat16, too. That is why the factor
is a power of two; it has no part in the error, but for scales 2^14 times smaller than the largest.

E2M1, E8M0 and mxfp4: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial

import torch

from .codebooks import BLOCK_FORMATS, CODEBOOKS, E2M1
from .dense import (
    DEFAULT_GROUP_SIZE,
    blocks_of,
    check_values,
    check_weight,
    groups_first,
    in_groups,
    over,
    resolve_group_size,
)
from .formats.words import unpack_nibbles
from .heuristics.problem import FORMAT_GROUPS, check_format_groups
from .least_squares import Nearest, Search, Store, clip, is_better, squares
from .ops.blocks_4bit import BLOCKSIZES, quantize_4bit

_LARGEST_E4M3 = 448.0
_SMALLEST_E4M3 = 2.0**-9


def check_code_groups(format: str, group_size: int, has_code: bool = False) -> None:
    """Raises ValueError for a code format, or groups of one, that `quantize` does not make.

    has_code: whether there is a codebook of the caller's.
    """
    if format not in DEFAULT_GROUP_SIZE and not has_code:
        raise ValueError(f"format: expected one of {', '.join(DEFAULT_GROUP_SIZE)} to quantize to, got {format!r}")
    if format in FORMAT_GROUPS:
        check_format_groups(format, group_size, group_size)
    elif format in BLOCK_FORMATS and group_size not in BLOCKSIZES:
        sizes = ", ".join(map(str, BLOCKSIZES))
        raise ValueError(f"group_size: expected one of {sizes} for {format}, got {group_size}")


@torch.no_grad()
def quantize_codes(
    w: torch.Tensor,
    dtype: torch.dtype,
    format: str,
    group_size: int,
    search: bool = True,
    code: Sequence[float] | None = None,
    largest: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 [K, N], scales [K / g, N] in `dtype`) of a weight w [K, N]; code, largest: see `quantize_for`.

    Raises what `weightonly.quantize` raises.
    """
    check_weight(w, dtype)
    k, n = w.shape
    group = resolve_group_size(group_size, k)
    check_code_groups(format, group, code is not None)
    if format not in FORMAT_GROUPS and not search:
        return _quantize_blocks(w, dtype, format, group, code)
    largest = check_values(w, dtype) if largest is None else largest
    # Searched groups may have 4 as the largest code: quantized again, with a peak that was rounded down, they find the
    # factor of the first time or one as good.
    factor = _factor(largest / (E2M1[-2] if search else E2M1[-1]), dtype)
    to_codes = _to_codes(CODEBOOKS[format] if code is None else tuple(code), format in FORMAT_GROUPS, w.device)
    q = torch.empty(k, n, dtype=torch.int8, device=w.device)
    scales = torch.empty(k // group, n, dtype=dtype, device=w.device)
    for groups, columns in blocks_of(k // group, group, n, w.device):
        rows = slice(groups.start * group, groups.stop * group)
        block = in_groups(w[rows, columns], group)  # (g, G, n)
        scratch = torch.empty(3, *block.shape, dtype=torch.float32, device=w.device)
        peak = torch.abs(block, out=scratch[0]).amax(dim=0)  # (G, n)
        if format == "mxfp4":
            scale = _e8m0_scale(block, peak, dtype, to_codes.nearest, scratch)
        else:
            scale = _e4m3_scale(peak, factor, dtype) if format == "nvfp4" else peak.to(dtype).float()
            if search:
                store = partial(_as_e4m3, factor=factor) if format == "nvfp4" else None
                scale = _by_search(
                    block, peak, scale, _PARTS.get(format, _PARTS["nf4"]), store, dtype, to_codes, scratch
                )
        scales[groups, columns] = scale
        codes = to_codes(torch.div(block, _divisor(scale), out=scratch[0]))
        groups_first(q[rows, columns], group).copy_(codes)
    return q, scales


_PARTS = {
    "nf4": (-1.015, 1.055, 0.95, -1.1, -0.95),
    "fp4": (0.99, 0.91, 1.08),
    "nvfp4": (0.995, 1.52, 0.91, 1.075),
}
"""Scales to try, of the largest magnitude clipped. The numbers of NF4 are others below 0 than above."""


def _by_search(
    block: torch.Tensor,
    peak: torch.Tensor,
    scale: torch.Tensor,
    parts: Sequence[float],
    store: Store | None,
    dtype: torch.dtype,
    to_codes: _ToCodes,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Scales, fp32 (G, n), with a smaller square error than those given, or these. scratch: see `Search`."""
    nearest, none = to_codes.nearest, torch.zeros_like(peak)
    whole = peak * (clip(len(block)) / to_codes.largest)
    found, _ = Search(block, nearest, store, None, scratch).best((whole * part, none) for part in parts)
    found = found.to(dtype).float()
    before, after = (squares(block, _divisor(s), nearest, scratch) for s in (scale, found))
    better = is_better(before, after, peak.double(), len(block), dtype) & (found != 0)
    return torch.where(better, found, scale)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """Of weights: what is 0 with a scale is 0 without."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


class _ToCodes:
    """Weights / scale, fp32 -> codes of a book, int8."""

    def __init__(self, book: tuple[float, ...], is_e2m1: bool, device: torch.device) -> None:
        order = sorted(range(len(book)), key=book.__getitem__)  # stable: equal numbers keep their order
        self.is_e2m1 = is_e2m1
        if is_e2m1:
            order.remove(8)  # -0: the sign says it
        numbers = torch.tensor([book[code] for code in order], dtype=torch.float32, device="cpu")
        bounds = (numbers[:-1] + numbers[1:]) / 2  # which are of the number below
        if is_e2m1:
            is_odd = torch.tensor([code % 2 == 1 for code in order[:-1]], device="cpu")
            bounds = torch.where(is_odd, torch.nextafter(bounds, torch.full_like(bounds, -torch.inf)), bounds)
        self.nearest = Nearest(numbers, bounds, device)
        self.order = torch.tensor(order, dtype=torch.int8, device=device)
        self.largest = max(map(abs, book))

    def __call__(self, ratio: torch.Tensor) -> torch.Tensor:
        codes = self.order.index_select(0, self.nearest.index(ratio).view(-1)).view(ratio.shape)
        return codes.bitwise_or_(ratio.signbit().to(torch.int8) << 3) if self.is_e2m1 else codes


_to_codes = functools.cache(_ToCodes)


def check_scales_as(scales: torch.Tensor, dtype: torch.dtype, format: str) -> None:
    """Raises ValueError for scales that do not fit into another dtype.

    Those of mxfp4 have to be exact, and so has every weight that they make. Others may be rounded, as in bfloat16, but
    those of nvfp4 not to 0 or to infinity: in float16 scales below 6e-5 have fewer bits, down to none.
    """
    if scales.dtype == dtype or scales.is_meta:
        return
    cast = scales.to(dtype)
    if format == "mxfp4":
        low, high = mxfp4_range(dtype)
        bad = (cast != scales) | (cast < low) | (cast > high)
        expected = f"powers of two in 2^{round(math.log2(low))} .. 2^{round(math.log2(high))}"
    else:
        bad = cast.isinf() & ~scales.isinf()
        if format == "nvfp4":
            bad |= (cast == 0) & (scales != 0)
        expected = "numbers within its range"
        if not bool(bad.any()) and dtype == torch.float16:
            # Of all together: some groups of small numbers count for nothing beside the others.
            exact = scales.double()
            if float((cast.double() - exact).norm()) > 2**-8 * float(exact.norm()):
                bad = cast != scales
    if bool(bad.any()):
        found = ", ".join(f"{value:g}" for value in scales[bad].float().unique()[:3].tolist())
        raise ValueError(f"scales: expected {expected} for {format} in {dtype}, got {found}; bfloat16 has the range")


def mxfp4_range(dtype: torch.dtype) -> tuple[float, float]:
    """The smallest and the largest scale of mxfp4 with which every code is a number of `dtype`, and is exact."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps  # the smallest subnormal number
    return max(2.0**-127, smallest / E2M1[1]), 2.0 ** math.floor(math.log2(info.max / E2M1[-1]))


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32, exactly. exponent: int32, -149 .. 127."""
    normal = exponent.clamp(min=-126) + 127 << 23
    subnormal = 1 << (exponent.clamp(max=-127) + 149)
    return torch.where(exponent < -126, subnormal, normal).view(torch.float32)


def _quantize_blocks(
    w: torch.Tensor, dtype: torch.dtype, format: str, group: int, code: Sequence[float] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    k, n = w.shape
    packed, absmax = quantize_4bit(w.t(), group, format if code is None else "nf4", code)
    limit = torch.finfo(dtype).max
    if absmax.max() > limit:
        raise ValueError(f"w: expected values within +-{limit:g}, the range of {dtype}, got {absmax.max():g}")
    codes = unpack_nibbles(packed.view(-1), k * n).view(n, k).t()  # [K, N]
    return codes.contiguous().view(torch.int8), absmax.view(n, -1).t().to(dtype).contiguous()


def _e8m0_scale(
    block: torch.Tensor, peak: torch.Tensor, dtype: torch.dtype, nearest: Nearest, scratch: torch.Tensor
) -> torch.Tensor:
    """Powers of two, fp32 (G, n), with the smaller sum of squares of two: by OCP's rule, and the next one.

    OCP's rule is the largest power of two in a group over the largest in E2M1, which is 4. A group of zeros gets 1.
    """
    low, high = mxfp4_range(dtype)
    exponent = torch.frexp(peak).exponent - 3
    ocp = power_of_two(exponent.clamp(-127, 127)).clamp(low, high)
    wide = (ocp * 2).clamp(max=high)
    before, after = (squares(block, scale, nearest, scratch) for scale in (ocp, wide))
    return torch.where(peak == 0, torch.ones_like(ocp), torch.where(after < before, wide, ocp))


def _factor(scale: float, dtype: torch.dtype) -> float:
    """The factor of nvfp4: the smallest power of two with which the largest number of E4M3 reaches `scale`.

    A power of two, so that scales stay exact in 16 bits; no smaller than what keeps the smallest one a number of
    `dtype`.
    """
    if scale == 0:
        return 1.0
    mantissa, exponent = math.frexp(scale / _LARGEST_E4M3)
    info = torch.finfo(dtype)
    return 2.0 ** max(exponent - (mantissa == 0.5), round(math.log2(info.smallest_normal * info.eps / _SMALLEST_E4M3)))


def _e4m3_scale(peak: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """fp32 (G, n): peak / 6, as a number of E4M3 times `factor`. A group of zeros gets `factor`."""
    exact = over(peak.double(), E2M1[-1] * factor).float().clamp(min=_SMALLEST_E4M3)
    scale = exact.to(torch.float8_e4m3fn)
    # Rounded up, the largest code may be beyond the dtype. The number of E4M3 before has the bits before.
    below = (scale.view(torch.uint8) - 1).view(torch.float8_e4m3fn)
    too_large = scale.double() * (E2M1[-1] * factor) > torch.finfo(dtype).max
    scale = torch.where(too_large, below.float(), scale.float())
    return torch.where(peak == 0, torch.ones_like(scale), scale) * factor


def _as_e4m3(scale: torch.Tensor, factor: float) -> torch.Tensor:
    """The nearest number of E4M3 times `factor`."""
    return (scale / factor).clamp(_SMALLEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn).float() * factor
