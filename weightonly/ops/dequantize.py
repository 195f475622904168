"""A packed weight as a dense matrix, by kernels/convert/dequantize.cu where that kernel can."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import reference
from ..codebooks import codebook_on
from ..device import device_arch
from ..heuristics.legal import computes_groups_of_16
from ..heuristics.legal import has_kernels as computes_format
from ..heuristics.problem import FLOAT_FORMATS
from ..heuristics.slices import slice_columns
from ..kernels import _C, FLOAT_TYPES, MAX_K, MAX_N, dequantizes_fp8, dequantizes_groups_of_16, dequantizes_on
from ..layout import INTERLEAVED, TILE, TILED, Range, blocks_of
from ..packed import PackedWeight
from ..plain import aligned_rows, are_plain

_LAYOUT_NUMBERS = {INTERLEAVED: 0, TILED: 1}
"""Layout -> enum PackedLayout of kernels/convert/dequantize.h."""

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)


def dense(qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """`weightonly.dequantize` of one weight; the arguments are checked."""
    if not has_kernel(qweight, scales, zeros):
        return reference.dequantize(qweight, scales, zeros)
    ((_, _, w),) = kernel_slices(qweight, scales, zeros, qweight.n)
    return w


def dequantized_slices(
    qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None, limit_bytes: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(begin, end, w): columns begin..end of the weight as a dense matrix [K, end - begin], slice after slice.

    limit_bytes: the most that a slice of the kernel takes.

    w is fp32, or where the kernel reads the weight in the dtype of scales; then it is memory that the next slice
    overwrites. The arguments are checked.
    """
    if not has_kernel(qweight, scales, zeros):
        for begin, end in reference.column_blocks(qweight):
            yield begin, end, reference.dequantize_columns(qweight, scales, zeros, begin, end)
        return
    yield from kernel_slices(qweight, scales, zeros, slice_columns(qweight.n, qweight.k, limit_bytes) or TILE)


def kernel_slices(
    qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None, step: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """`dequantized_slices` of `step` columns, by the kernel: in memory that the next slice overwrites."""
    scales = aligned_rows(scales, qweight.n_padded)
    zeros = None if zeros is None else aligned_rows(zeros, qweight.n_padded)
    workspace = scales.new_empty(qweight.k, step)
    for begin in range(0, qweight.n, step):
        end = min(begin + step, qweight.n)
        w = workspace if end - begin == step else workspace[:, : end - begin]
        dequantize_columns(qweight, scales, zeros, begin, end, w)
        yield begin, end, w


def dequantize_columns(
    qweight: PackedWeight,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    begin: int,
    end: int,
    w: torch.Tensor,
    rows: Range | None = None,
) -> None:
    """Writes columns begin..end of a weight, all rows or these, to w [rows, end - begin], on the current stream of its
    GPU.

    scales, zeros: what `aligned_rows` returns. begin: a multiple of 64. w: its last stride is 1. rows: their first one
    is a multiple of 64, and of the rows of a group unless all of them are of one.
    """
    first, last = rows or (0, qweight.k)
    size = qweight.k // scales.shape[0]
    group, blocks = first // size, blocks_of(qweight.k_padded, qweight.n_padded, qweight.bits, qweight.layout)
    device = w.get_device()
    _C.dequantize(
        device=device,
        bits=qweight.bits,
        type=FLOAT_TYPES[w.dtype],
        layout=_LAYOUT_NUMBERS[qweight.layout],
        k=last - first,
        k_padded=qweight.k_padded,
        n_begin=begin,
        n_end=end,
        n_padded=qweight.n_padded,
        group_size=qweight.k_padded if last <= (group + 1) * size else size,
        weight=qweight.data.data_ptr() + first // blocks.rows * blocks.shape[2],
        scales=scales[group].data_ptr(),
        zeros=0 if zeros is None else zeros[group].data_ptr(),
        codebook=0 if qweight.code is None else codebook_on(qweight.code, w.device, torch.float32).data_ptr(),
        w=w.data_ptr(),
        ld_scales=qweight.n_padded,
        ldw=w.stride(0),
        stream=torch._C._cuda_getCurrentRawStream(device),
        is_float=qweight.format in FLOAT_FORMATS,
    )


def has_kernel(qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None) -> bool:
    """Whether the kernel reads this weight, here and now: not where others watch, and not for a gradient."""
    if not qweight.data.is_cuda or not are_plain(qweight.data, scales, zeros):
        return False
    if qweight.layout not in _LAYOUT_NUMBERS or scales.dtype not in _KERNEL_DTYPES:
        return False
    if qweight.k_padded > MAX_K or qweight.n_padded > MAX_N:
        return False
    if torch.is_grad_enabled() and (scales.requires_grad or (zeros is not None and zeros.requires_grad)):
        return False
    arch, group_size = device_arch(qweight.data.get_device()), qweight.k // scales.shape[0]
    if qweight.format in FLOAT_FORMATS:
        of_all = -1 if scales.shape[0] == 1 else group_size
        if not dequantizes_fp8() or not computes_format(qweight.format, of_all, arch, qweight.layout):
            return False
    if scales.shape[0] > 1 and group_size != 32 and group_size % 64:
        is_read = group_size == 16 and dequantizes_groups_of_16() and computes_groups_of_16(arch, qweight.layout)
        return is_read and dequantizes_on(arch)
    return dequantizes_on(arch)
