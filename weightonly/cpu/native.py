"""A product by the native kernels: addresses and sizes for libweightonly_cpu.so."""

from __future__ import annotations

import torch

from ..activations import activation_of
from ..codebooks import codebook_on
from ..layout import CPU, TILE, TILED_FP8
from ..packed import PackedWeight
from ..packing import relayout
from ..plain import aligned
from .blocks import FIELDS, blocks_of
from .library import REFUSED, TYPES, Backend, Params

_TYPES = {torch.float16: TYPES["fp16"], torch.bfloat16: TYPES["bf16"], torch.float32: TYPES["fp32"]}
_FORMATS = {"int4": 0, "int8": 1, "fp8": 3}  # the others are codes of a codebook
_CODES = 2

_SMALL = 1 << 18
"""Multiplications below which one thread is enough: waking another one takes as long."""

_CPU = torch.device("cpu")


def gemm(
    backend: Backend,
    x: torch.Tensor,
    qweight: PackedWeight,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """y = act(x @ w + bias) on the CPU; sums are fp32, and y is rounded once. `reference.gemm` has the same arguments.

    invariant: whether the bits of a row of y depend on that row of x alone.

    Raises MemoryError where there is none for blocks of the weight, ValueError for what the library refuses.
    """
    m, k, n = x.numel() // qweight.k, qweight.k, qweight.n
    if out is None:
        out = x.new_empty(*x.shape[:-1], n)  # in half the time of torch.empty
    if m == 0:
        return out
    if qweight.layout == TILED_FP8 or (qweight.layout != CPU and qweight.n_padded % TILE):
        qweight = relayout(qweight, CPU)  # the second: int8 of GPUs before sm90, padded to 32 columns
    rows, scales = _rows(x if x.dim() == 2 else x.reshape(m, k)), _rows(scales)
    zeros = None if zeros is None else _rows(zeros)
    bias = None if bias is None else aligned(bias, bias.element_size())
    weight = aligned(qweight.data, 4)
    codebook = None if qweight.code is None else codebook_on(qweight.code, _CPU, torch.float32)
    groups = scales.shape[0]
    params = Params(
        x=rows.data_ptr(),
        weight=weight.data_ptr(),
        scales=scales.data_ptr(),
        zeros=None if zeros is None else zeros.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=out.data_ptr(),
        codebook=None if codebook is None else codebook.data_ptr(),
        ldx=rows.stride(0),
        ld_scales=scales.stride(0),
        ld_zeros=0 if zeros is None else zeros.stride(0),
        ldy=out.stride(0) if out.dim() == 2 else n,
        m=m,
        n=n,
        k=k,
        k_padded=qweight.k_padded,
        group_size=qweight.k_padded if groups == 1 else k // groups,
        groups=groups,
        type=_TYPES[x.dtype],
        format=_FORMATS.get(qweight.format, _CODES),
        activation=activation_of(activation).number,
        threads=1 if m * n * k < _SMALL else torch.get_num_threads(),
        level=backend.level,
        invariant=invariant,
    )
    if qweight.layout != CPU:
        for field, value in zip(FIELDS, blocks_of(qweight), strict=True):
            setattr(params, field, value)
    if status := backend.library.wo_cpu_gemm(params):
        if status == REFUSED:
            raise ValueError(f"gemm: {backend.library.wo_cpu_error().decode()}")
        raise MemoryError(f"gemm: no memory for {m} rows of K = {k} and their sums")
    return out


def _rows(matrix: torch.Tensor) -> torch.Tensor:
    """[rows, columns] with rows that are contiguous inside, do not overlap, and begin at a multiple of an element."""
    apart = matrix.stride(0) >= matrix.shape[1] or matrix.shape[0] == 1
    is_dense = apart and (matrix.stride(1) == 1 or matrix.shape[1] == 1)
    return (
        matrix
        if is_dense and matrix.data_ptr() % matrix.element_size() == 0
        else aligned(matrix, matrix.element_size())
    )
