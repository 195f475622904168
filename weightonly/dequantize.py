"""dequantize: a packed weight as a dense matrix, by a kernel (kernels/dequantize.cu) where there is one."""

from __future__ import annotations

import torch

from . import cpu
from .code_tables import table_on
from .kernels import _C, MAX_K, dequantizes_on, device_arch
from .layout import INTERLEAVED, TILED
from .packed import PackedWeight

_LAYOUT_NUMBERS = {INTERLEAVED: 0, TILED: 1}
_TYPE_NUMBERS = {torch.float16: 0, torch.bfloat16: 1}


def dequantize(qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
    """w = scales * (q - zeros), or scales * table[q] for a code table, computed in fp32 and rounded once.

    qweight: a packed [K, N] weight; scales: [K / g, N] float16, bfloat16 or float32, any g that divides K;
    zeros: None or like scales, fractions allowed; None for a code table. All on one device. Returns [K, N] in the
    dtype of scales.

    On a GPU one kernel does it. Where the library has none for this (layout "row_major", fp32, groups that `gemm` does
    not take, a GPU that the build leaves out), and under torch.compile and autograd, PyTorch's operators do: more
    slowly, and with the same bits.

    Raises TypeError for a qweight that is not packed or a wrong dtype, ValueError for shapes that do not fit,
    tensors on different devices, or zeros of a code table.
    """
    cpu.check_dequantize(qweight, scales, zeros)
    if not _has_kernel(qweight, scales, zeros):
        return cpu.dequantize(qweight, scales, zeros)
    w = torch.empty(qweight.k, qweight.n, dtype=scales.dtype, device=qweight.device)
    scales = aligned_rows(scales, qweight.n_padded)
    zeros = None if zeros is None else aligned_rows(zeros, qweight.n_padded)
    dequantize_columns(qweight, scales, zeros, 0, qweight.n, w)
    return w


def dequantize_columns(
    qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None, begin: int, end: int, w: torch.Tensor
) -> None:
    """Writes columns begin..end of a weight to w [K, end - begin], on the current stream of its GPU.

    scales, zeros: as `aligned_rows` gives them; begin: a multiple of 64; w: elements of a row next to each other.
    """
    groups = scales.shape[0]
    device = w.get_device()
    _C.dequantize(
        device=device,
        bits=qweight.bits,
        type=_TYPE_NUMBERS[w.dtype],
        layout=_LAYOUT_NUMBERS[qweight.layout],
        k=qweight.k,
        k_padded=qweight.k_padded,
        n_begin=begin,
        n_end=end,
        n_padded=qweight.n_padded,
        group_size=qweight.k_padded if groups == 1 else qweight.k // groups,
        weight=qweight.data.data_ptr(),
        scales=scales.data_ptr(),
        zeros=0 if zeros is None else zeros.data_ptr(),
        table=0 if qweight.code is None else table_on(qweight.code, w.device, torch.float32).data_ptr(),
        w=w.data_ptr(),
        ld_scales=qweight.n_padded,
        ldw=w.stride(0),
        stream=torch._C._cuda_getCurrentRawStream(device),
    )


def aligned_rows(rows: torch.Tensor, n_padded: int) -> torch.Tensor:
    """Scales or zeros as kernels read them, [groups, n_padded] in 16-byte aligned rows: a copy unless they are so."""
    if rows.shape[1] == n_padded and rows.is_contiguous() and rows.data_ptr() % 16 == 0:
        return rows
    copy = rows.new_zeros((rows.shape[0], n_padded))
    copy[:, : rows.shape[1]] = rows
    return copy


def _has_kernel(qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None) -> bool:
    """Whether the kernel reads this weight, and nobody asks for more than the numbers."""
    if not qweight.data.is_cuda or torch.compiler.is_compiling():
        return False
    if qweight.layout not in _LAYOUT_NUMBERS or scales.dtype not in _TYPE_NUMBERS or qweight.k_padded > MAX_K:
        return False
    if torch.is_grad_enabled() and (scales.requires_grad or (zeros is not None and zeros.requires_grad)):
        return False
    group_size = qweight.k // scales.shape[0]
    if scales.shape[0] > 1 and group_size != 32 and group_size % 64:
        return False
    return dequantizes_on(device_arch(qweight.data.get_device()))
