"""A product by the native kernels: addresses and sizes for libweightonly_cpu.so."""

from __future__ import annotations

import os

import torch

from ..activations import activation_of
from ..codebooks import codebook_on
from ..layout import CPU, TILE
from ..packed import PackedWeight
from ..packing import relayout
from .blocks import blocks_of
from .library import TYPES, Backend, Params

_TYPES = {torch.float16: TYPES["fp16"], torch.bfloat16: TYPES["bf16"], torch.float32: TYPES["fp32"]}
_FORMATS = {"int4": 0, "int8": 1}  # the others are codes
_CODES = 2
_INT4 = tuple(float(u - 8) for u in range(16))

_SMALL = 1 << 18
"""Multiplications below which one thread is enough: waking another one takes as long."""

_CPU = torch.device("cpu")

_loaded_by = os.getpid()
"""A child made by fork has none of its parent's threads, and waking them would wait forever: it computes with one."""


def gemm(
    backend: Backend,
    x: torch.Tensor,
    qweight: PackedWeight,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = act(x @ w + bias) on the CPU; sums are fp32, and y is rounded once. The arguments are those of `reference`.

    Raises MemoryError where there is none for blocks of the weight.
    """
    m, k, n = x.numel() // qweight.k, qweight.k, qweight.n
    if out is None:
        out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device="cpu")
    if m == 0:
        return out
    if qweight.layout != CPU and qweight.n_padded % TILE:
        qweight = relayout(qweight, CPU)  # int8 of GPUs before sm90, padded to 32 columns
    rows, scales = _rows(x.detach().reshape(m, k)), _rows(scales)
    if zeros is not None:
        zeros = _rows(zeros)
        if zeros.stride(0) != scales.stride(0):  # the kernels take one distance for both
            scales, zeros = scales.contiguous(), zeros.contiguous()
    bias = None if bias is None else bias.contiguous()
    in_torch = None if activation in (None, "identity", "relu") else activation_of(activation).function
    is_direct = in_torch is None and out.stride(-1) == 1 and (out.dim() == 2 or out.is_contiguous())
    y_type = x.dtype if in_torch is None else torch.float32
    y = out if is_direct else torch.empty((m, n), dtype=y_type, device="cpu")
    codebook = codebook_on(qweight.code or _INT4, _CPU, torch.float32)
    groups = scales.shape[0]
    params = Params(
        x=rows.data_ptr(),
        weight=qweight.data.data_ptr(),
        scales=scales.data_ptr(),
        zeros=None if zeros is None else zeros.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        codebook=codebook.data_ptr(),
        ldx=rows.stride(0),
        ld_scales=scales.stride(0),
        ldy=y.stride(0) if y.dim() == 2 else n,
        m=m,
        n=n,
        k=k,
        k_padded=qweight.k_padded,
        group_size=qweight.k_padded if groups == 1 else k // groups,
        groups=groups,
        type=_TYPES[x.dtype],
        y_type=_TYPES[y.dtype],
        format=_FORMATS.get(qweight.format, _CODES),
        relu=activation == "relu",
        threads=1 if m * n * k < _SMALL or os.getpid() != _loaded_by else torch.get_num_threads(),
        level=backend.level,
    )
    if qweight.layout != CPU:
        blocks = blocks_of(qweight)
        params.block_order = blocks.block_order.data_ptr()
        for field in ("block_stride_k", "block_stride_n", "segment_stride", "segments", "segment_bytes"):
            setattr(params, field, getattr(blocks, field))
    if backend.library.wo_cpu_gemm(params):
        raise MemoryError(f"gemm: no memory for {m} rows of K = {k} and their sums")
    if not is_direct:
        out.copy_((y if in_torch is None else in_torch(y)).view(out.shape))
    return out


def _rows(matrix: torch.Tensor) -> torch.Tensor:
    """[rows, columns] whose rows are contiguous inside and do not overlap."""
    apart = matrix.stride(0) >= matrix.shape[1] or matrix.shape[0] == 1
    return matrix if apart and (matrix.stride(1) == 1 or matrix.shape[1] == 1) else matrix.contiguous()
