"""dequantize: a packed weight as a dense matrix, by kernels/convert/dequantize.cu where that kernel can."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import reference
from ..args import check_expected, check_zeros_fit
from ..codebooks import codebook_on
from ..dense import WEIGHT_DTYPES
from ..device import device_arch
from ..heuristics.legal import computes_groups_of_16
from ..heuristics.slices import slice_columns
from ..kernels import _C, FLOAT_TYPES, MAX_K, MAX_N, dequantizes_groups_of_16, dequantizes_on
from ..layout import INTERLEAVED, TILE, TILED
from ..operands import aligned_rows
from ..packed import PackedWeight
from ..plain import are_plain
from ..require import require_dtype, require_memory

_LAYOUT_NUMBERS = {INTERLEAVED: 0, TILED: 1}
"""Layout -> enum PackedLayout of kernels/convert/dequantize.h."""

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)


def dequantize(qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
    """w[k, n] = scales[k // g, n] * (q[k, n] - zeros[k // g, n]); for codes scales[k // g, n] * codebook[q[k, n]].

    qweight: a packed [K, N] weight, or E of them, stacked.
    scales: [K / g, N], of stacked experts [E, K / g, N]: float16, bfloat16 or float32; g is any divisor of K.
    zeros: None, or like scales, in units of q; fractions are allowed. None for codes.

    All are on one device. Returns [K, N], of stacked experts [E, K, N], in the dtype of scales: computed in fp32 and
    rounded once.

    On a GPU a kernel does it. PyTorch's operators do it more slowly, with the same bits, where there is no kernel
    (layout "row_major", fp32, groups that `gemm` does not take, a GPU that the build leaves out), under torch.compile,
    torch.jit.trace and modes, for subclasses of torch.Tensor, and where a gradient is asked for.

    Raises TypeError for a qweight that is not packed or a wrong dtype. Raises ValueError for shapes that do not fit,
    tensors on different devices, and zeros of codes.
    """
    check_operands(qweight, scales, zeros)
    if qweight.experts is not None:
        w = scales.new_empty(qweight.experts, qweight.k, qweight.n)
        for expert, weight in enumerate(qweight):
            w[expert] = dequantize(weight, scales[expert], None if zeros is None else zeros[expert])
        return w
    if not _has_kernel(qweight, scales, zeros):
        return reference.dequantize(qweight, scales, zeros)
    w = torch.empty(qweight.k, qweight.n, dtype=scales.dtype, device=qweight.device)
    scales = aligned_rows(scales, qweight.n_padded)
    zeros = None if zeros is None else aligned_rows(zeros, qweight.n_padded)
    dequantize_columns(qweight, scales, zeros, 0, qweight.n, w)
    return w


def dequantized_slices(
    qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None, limit_bytes: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(begin, end, w): columns begin..end of the weight as a dense matrix [K, end - begin], slice after slice.

    limit_bytes: the most that a slice of the kernel takes.

    w is fp32, or where the kernel reads the weight in the dtype of scales; then it is memory that the next slice
    overwrites. The arguments are checked.
    """
    if not _has_kernel(qweight, scales, zeros):
        for begin, end in reference.column_blocks(qweight):
            yield begin, end, reference.dequantize_columns(qweight, scales, zeros, begin, end)
        return
    scales = aligned_rows(scales, qweight.n_padded)
    zeros = None if zeros is None else aligned_rows(zeros, qweight.n_padded)
    step = slice_columns(qweight.n, qweight.k, limit_bytes) or TILE
    workspace = scales.new_empty(qweight.k, step)
    for begin in range(0, qweight.n, step):
        end = min(begin + step, qweight.n)
        w = workspace[:, : end - begin]
        dequantize_columns(qweight, scales, zeros, begin, end, w)
        yield begin, end, w


def check_operands(
    qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None, name: str = "qweight"
) -> None:
    """Raises TypeError or ValueError for arguments that do not fit together. name: what errors call `qweight`."""
    if not isinstance(qweight, PackedWeight):
        raise TypeError(f"{name}: expected a PackedWeight (see preprocess), got {type(qweight).__name__}")
    require_memory(name, qweight.data)
    _check_group_tensor("scales", scales, qweight)
    if zeros is not None:
        check_zeros_fit(zeros, qweight)
        _check_group_tensor("zeros", zeros, qweight)
        if zeros.dtype != scales.dtype:
            raise TypeError(f"zeros: expected dtype {scales.dtype} as scales have, got {zeros.dtype}")
        if zeros.shape != scales.shape:
            raise ValueError(f"zeros: expected shape {list(scales.shape)} as scales, got {list(zeros.shape)}")
    check_expected(qweight, scales, zeros)


def _check_group_tensor(name: str, tensor: torch.Tensor, qweight: PackedWeight) -> None:
    require_dtype(name, tensor, WEIGHT_DTYPES)
    stack = [] if qweight.experts is None else [qweight.experts]
    *outer, groups, n = tensor.shape if tensor.dim() > 1 else (0, 0)
    if outer != stack or n != qweight.n or not groups or qweight.k % groups:
        expected = "[K / g, N]" if qweight.experts is None else f"[E = {qweight.experts}, K / g, N]"
        raise ValueError(
            f"{name}: expected {expected} for K={qweight.k}, N={qweight.n}, got shape {list(tensor.shape)}"
        )
    if tensor.device != qweight.device:
        raise ValueError(f"{name}: expected on {qweight.device} as qweight is, got {tensor.device}")


def dequantize_columns(
    qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None, begin: int, end: int, w: torch.Tensor
) -> None:
    """Writes columns begin..end of a weight to w [K, end - begin], on the current stream of its GPU.

    scales, zeros: what `aligned_rows` returns. begin: a multiple of 64. w: its last stride is 1.
    """
    groups = scales.shape[0]
    device = w.get_device()
    _C.dequantize(
        device=device,
        bits=qweight.bits,
        type=FLOAT_TYPES[w.dtype],
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
        codebook=0 if qweight.code is None else codebook_on(qweight.code, w.device, torch.float32).data_ptr(),
        w=w.data_ptr(),
        ld_scales=qweight.n_padded,
        ldw=w.stride(0),
        stream=torch._C._cuda_getCurrentRawStream(device),
    )


def _has_kernel(qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None) -> bool:
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
    if scales.shape[0] > 1 and group_size != 32 and group_size % 64:
        is_read = group_size == 16 and dequantizes_groups_of_16() and computes_groups_of_16(arch, qweight.layout)
        return is_read and dequantizes_on(arch)
    return dequantizes_on(arch)
