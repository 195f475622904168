"""preprocess and its inverse: a quantized weight in the byte order of a GPU's kernels or a CPU's, and its choice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .codebooks import codebook_of
from .dense import resolve_group_size
from .heuristics.arch import ARCHS, Arch, parse_arch
from .heuristics.problem import CODE_FORMATS, is_read, layouts_of
from .layout import (
    CODE_LAYOUTS,
    CPU,
    TILED,
    TILED_FP8,
    check_bits,
    column_step,
    matrix_shape,
    pack_bytes,
    padded_shape,
    unpack_bytes,
)
from .packed import PackedWeight, check_format_layout, format_bits, format_groups
from .require import require_bool, require_device, require_dtype, require_memory, require_numbers, require_tensor

FLOAT_DTYPES = {"fp8": torch.float8_e4m3fn}
"""Format of floats -> the dtype of q."""

HAS_ZEROS = "_weightonly_has_zeros"
"""An attribute that `quantize` gives a q with zero points, by which `preprocess` knows. Copies of q do not have it."""


def layout_for_arch(arch: Arch, activations: str | None = None) -> str:
    """The layout that `preprocess` makes for `arch`; with activations "fp8" that of layers which take x in E4M3.

    Raises ValueError for an unknown arch (see `target_name`), and for one whose GPU takes no x in E4M3.
    """
    name = target_name(arch)
    if name == CPU:
        return CPU
    if activations is None:
        return layouts_of(parse_arch(name))[0]
    if not is_read(TILED_FP8, parse_arch(name)):
        archs = " or ".join([*(f"sm{a}" for a in ARCHS if is_read(TILED_FP8, a)), CPU])
        raise ValueError(f"activations: expected None for {name}, as {archs} alone take {activations}, got 'fp8'")
    return TILED_FP8


def target_name(arch: Arch) -> str:
    """What a weight is packed for, in one spelling: "sm90" for 90, "90a" and (9, 0); "cpu" for "cpu".

    Raises ValueError for anything else: see `parse_arch`.
    """
    try:
        return CPU if arch == CPU else f"sm{parse_arch(arch)}"
    except ValueError as error:
        raise ValueError(str(error).replace("one of ", f"one of {CPU}, ", 1)) from error


def preprocess(
    q: torch.Tensor,
    bits: int | None = None,
    arch: Arch | None = None,
    layout: str | None = None,
    *,
    format: str | None = None,
    code: torch.Tensor | Sequence[float] | None = None,
    group_size: int | None = None,
    zeros: bool | None = None,
    perm: bool | None = None,
) -> PackedWeight:
    """Bring a quantized weight into the byte order of a GPU's kernels, or of a CPU's: once, before deployment.

    Args:
        q: int8 [K, N], or [E, K, N] of E experts, without a size of 0, on any device; values -8..7 for bits=4. For code
            formats the codes 0..15, int8 or uint8; for "fp8" the numbers, float8_e4m3fn. K is padded to a multiple of
            64; N to one of 64, or of 32 for int8 that for GPUs before sm90. The padding is 0. As code 0 it is a finite
            number: padded rows meet zeros of x, and padded columns are dropped.
        bits: 4 or 8; None: those of `format`, or 4.
        arch: the GPU to pack for, sm70 to sm121: 90, "90", "sm90", "sm_90", "90a" or (9, 0), which is what
            torch.cuda.get_device_capability returns; or "cpu".
        layout: the layout itself, instead of an arch; "tiled_fp8", for x in float8_e4m3fn, has symmetric int4 and
            mxfp4. With neither: the layout of the GPU that `q` is on; for a CPU tensor of the visible GPU, else "cpu".
        format: None for the integers of `bits`; "nf4", "fp4", "mxfp4" or "nvfp4" for codes of these codebooks, "code4"
            for codes of `code`, "fp8" for 8-bit floats.
        code: the codebook of "code4": 16 numbers within the range of fp16, kept in fp32.
        group_size: the rows that share a scale, -1: all of K. `gemm` then refuses scales of other groups. None: not
            known, and any are taken; those of "mxfp4" are always 32, of "nvfp4" 16.
        zeros: whether there are zero points, so that `gemm` refuses forgotten ones. None: not known; but a `q` that
            comes from `quantize(symmetric=False)` itself, not a copy of it on another device or in a stack, is known to
            have some.
        perm: an act-order permutation that `gemm` is to be given, or whether there is one; None: not known.

    Returns:
        A PackedWeight on the device of `q`, for an [E, K, N] a stacked one, as `grouped_gemm` takes it.

    Raises:
        TypeError: a `q` or `code` of another type or dtype.
        ValueError: a wrong rank, an empty `q`, values out of range, NaN, other `bits`, an unknown arch, layout or
            format, arch, layout and format that contradict each other, a `code` that is missing or not needed, a group
            size that does not divide K or is not the format's, and zeros of codes.

    Examples:
        >>> q, scales, _ = wo.quantize(torch.randn(512, 768), group_size=128)
        >>> wo.preprocess(q, arch="sm90").layout
        'tiled'
    """
    require_tensor("q", q)
    require_numbers("q", q)
    zeros = getattr(q, HAS_ZEROS, None) if zeros is None else zeros
    format = format_of(bits, format)
    bits, is_code = format_bits(format), format in CODE_FORMATS
    if (dtype := FLOAT_DTYPES.get(format)) is not None:
        require_dtype("q", q, (dtype,))
        if bool(q.isnan().any()):
            raise ValueError(f"q: expected numbers for {format}, got NaN")
        q = q.view(torch.int8)
    elif is_code and q.dtype == torch.uint8:
        q = q.view(torch.int8)  # 128 and above become negative: the check of the range refuses them
    is_stack = q.dim() == 3
    if is_stack and len(q) == 0:
        raise ValueError(f"q: expected shape [E, K, N] with E >= 1, got {list(q.shape)}")
    k, n = matrix_shape(q[0] if is_stack else q, bits)
    layout = resolve_layout(format, arch, layout, q.device)
    codebook_of(format, code)  # raises for a wrong code now, before any work
    require_bool("zeros", zeros, or_none=True)
    require_bool("perm", perm, or_none=True)
    if zeros and is_code:
        raise ValueError(f"zeros: expected False or None for {format}, whose codes have no zeros, got True")
    if zeros and layout == TILED_FP8:
        raise ValueError(f"zeros: expected False or None in layout {layout!r}, got True")
    if q.numel() == 0:
        raise ValueError(f"q: expected shape [K, N] with K, N >= 1, got {list(q.shape)}")
    group_size = format_groups(format, group_size, k)
    if group_size is not None:
        resolve_group_size(group_size, k)
    if not is_stack:
        data = padded_bytes(q, bits, layout, is_code)
        return PackedWeight(data, k, n, format, layout, code, group_size, zeros, perm)
    k_padded, n_padded = padded_shape(k, n, bits, layout)
    data = torch.empty(len(q), k_padded * n_padded * bits // 8, dtype=torch.uint8, device=q.device)
    for expert, matrix in enumerate(q):
        try:
            data[expert] = padded_bytes(matrix, bits, layout, is_code)
        except ValueError as error:
            raise ValueError(f"expert {expert}: {error}") from error
    return PackedWeight(data.view(-1), k, n, format, layout, code, group_size, zeros, perm, experts=len(q))


def repack(qweight: PackedWeight, arch: Arch | None = None, layout: str | None = None) -> PackedWeight:
    """The same numbers in the byte order of another GPU's kernels, or of a CPU's.

    Args:
        qweight: a packed [K, N] weight, on any device.
        arch: the GPU to pack for, or "cpu"; None: the device of `qweight` (see `preprocess`).
        layout: the layout itself, instead of an arch: "tiled_fp8" for x in float8_e4m3fn, "tiled" back.

    Returns:
        A weight that `unpack`s to the same numbers, byte for byte what `preprocess` makes for `arch` or `layout`;
        `qweight` itself where it has that layout already.

    Raises:
        TypeError: anything but a PackedWeight.
        ValueError: an unknown arch or layout, arch and layout that contradict each other, codes and an arch that does
            not read them, and a layout that has no such weights.

    Examples:
        >>> w = wo.preprocess(torch.zeros(512, 768, dtype=torch.int8), arch="sm80")
        >>> w.layout, wo.repack(w, arch="sm90").layout
        ('interleaved', 'tiled')
    """
    if not isinstance(qweight, PackedWeight):
        raise TypeError(f"qweight: expected a PackedWeight, got {type(qweight).__name__}")
    layout = resolve_layout(qweight.format, arch, layout, qweight.device)
    if layout == TILED_FP8 and qweight.has_zeros:
        raise ValueError(f"qweight: expected one without zeros for layout {layout!r}, got {qweight!r}")
    return relayout(qweight, layout)


def relayout(w: PackedWeight, layout: str) -> PackedWeight:
    """The same numbers in `layout`; `w` itself where it has it. The layout has the format of `w`."""
    if layout == w.layout:
        return w
    packed = preprocess(unpack(w), w.bits, layout=layout, format=w.format, code=w.fields.get("code"))
    return PackedWeight(packed.data, **w.fields | {"layout": layout})


def padded_bytes(q: torch.Tensor, bits: int, layout: str, is_code: bool) -> torch.Tensor:
    """`pack_bytes` of [K, N] in bytes, padded with zeros to what the layout needs."""
    q, (k, n) = q.view(torch.int8), q.shape
    k_padded, n_padded = padded_shape(k, n, bits, layout)
    if (k_padded, n_padded) != (k, n):
        q = torch.nn.functional.pad(q, (0, n_padded - n, 0, k_padded - k))
    return pack_bytes(q, bits, layout, is_code)


def unpack(qweight: PackedWeight) -> torch.Tensor:
    """The inverse of `preprocess`.

    Args:
        qweight: a PackedWeight, on any device.

    Returns:
        int8 [K, N] without padding, on the device of `qweight`; codes are 0..15. Of "fp8" float8_e4m3fn. Of stacked
        experts [E, K, N].

    Raises:
        TypeError: anything but a PackedWeight.

    Examples:
        >>> q = torch.randint(-8, 8, (512, 768), dtype=torch.int8)
        >>> torch.equal(wo.unpack(wo.preprocess(q)), q)
        True
    """
    if not isinstance(qweight, PackedWeight):
        raise TypeError(f"qweight: expected a PackedWeight, got {type(qweight).__name__}")
    require_memory("qweight", qweight.data)
    if qweight.experts is not None:
        dtype = FLOAT_DTYPES.get(qweight.format, torch.int8)
        q = torch.empty(qweight.experts, qweight.k, qweight.n, dtype=dtype, device=qweight.device)
        for expert, weight in enumerate(qweight):
            q[expert] = unpack_columns(weight, 0, weight.n)
        return q
    return unpack_columns(qweight, 0, qweight.n).contiguous()


def unpack_columns(qweight: PackedWeight, begin: int, end: int) -> torch.Tensor:
    """Columns begin..end of what `unpack` returns, [K, end - begin]; begin: a multiple of `column_step`."""
    step = column_step(qweight.bits, qweight.layout)
    padded_end = -(-end // step) * step  # at most the padded N, which is a multiple of step
    w = qweight
    q = unpack_bytes(w.data, w.k_padded, w.n_padded, w.bits, w.layout, (begin, padded_end), codes=w.is_code)
    return q.view(FLOAT_DTYPES.get(w.format, torch.int8))[: w.k, : end - begin]


def format_of(bits: int | None, format: str | None) -> str:
    """`format`, or the integers of `bits`; int4 where both are None.

    Raises ValueError for an unknown format, other bits than 4 and 8, and a format of other bits.
    """
    if bits is not None:
        check_bits(bits)
    if format is None:
        return f"int{int(bits or 4)}"
    if format_bits(format) != (bits or format_bits(format)):
        raise ValueError(f"bits: expected {format_bits(format)} for {format}, got {bits}")
    return format


def resolve_layout(
    format: str,
    arch: Arch | None,
    layout: str | None = None,
    device: torch.device | str | int | None = None,
    activations: str | None = None,
) -> str:
    """The layout to pack a format in: `layout`, or the one for `arch` and `activations`, as `layout_for_arch` has it.

    With neither the one of the GPU `device`, for other devices of the visible GPU, else "cpu". A GPU whose layout has
    no codes gets "tiled" for them, which it can `dequantize`. Raises ValueError for a layout that arch has not,
    and for codes in a layout, or for an arch, that has none.
    """
    is_code = format in CODE_FORMATS
    if is_code and arch is not None and layout_for_arch(arch) not in CODE_LAYOUTS:
        archs = " or ".join(f"sm{a}" for a in ARCHS if layout_for_arch(a) in CODE_LAYOUTS)
        raise ValueError(f"arch: expected {archs} for {format}, which has no layout for other GPUs, got {arch!r}")
    if layout is None:
        return (record_code_layout if is_code else default_layout)(device=device, arch=arch, activations=activations)
    check_format_layout(format, layout)
    if arch is not None and layout_for_arch(arch) != layout:
        raise ValueError(f"layout: expected {layout_for_arch(arch)!r} for arch {arch!r}, got {layout!r}")
    return layout


def record_code_layout(
    arch: Arch | None, device: torch.device | str | int | None = None, activations: str | None = None
) -> str:
    """The layout of codes of a checkpoint, for every GPU: "tiled" where its own has no codes, to `dequantize` them."""
    layout = default_layout(device, arch, activations)
    return layout if activations is not None or layout in CODE_LAYOUTS else TILED


def default_layout(
    device: torch.device | str | int | None, arch: Arch | None = None, activations: str | None = None
) -> str:
    """The layout for `arch`; None: for the GPU `device`, for other devices the visible GPU, else "cpu"."""
    if arch is not None:
        return layout_for_arch(arch, activations)
    device = require_device("cpu" if device is None else device)
    if device.type == "cuda":
        return layout_for_arch(torch.cuda.get_device_capability(device), activations)
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if 10 * major + minor in ARCHS:
            return layout_for_arch((major, minor), activations)
    return CPU
