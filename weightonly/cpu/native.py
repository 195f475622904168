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
    if not is_read(qweight):
        qweight = relayout(qweight, CPU)
    rows, scales = _rows(x if x.dim() == 2 else x.reshape(m, k)), _rows(scales)
    zeros = None if zeros is None else _rows(zeros)
    bias = None if bias is None else aligned(bias, bias.element_size())
    weight = aligned(qweight.data, 4)
    params = sizes(backend, rows, qweight, scales, zeros, out.stride(0) if out.dim() == 2 else n, activation, invariant)
    of_zeros, of_bias = (None if t is None else t.data_ptr() for t in (zeros, bias))
    run(backend, params, rows.data_ptr(), weight.data_ptr(), scales.data_ptr(), of_zeros, of_bias, out.data_ptr())
    return out


def is_read(qweight: PackedWeight) -> bool:
    """Whether the kernels read a weight as it is packed."""
    # The second: int8 of GPUs before sm90, padded to 32 columns.
    return qweight.layout != TILED_FP8 and (qweight.layout == CPU or qweight.n_padded % TILE == 0)


def sizes(
    backend: Backend,
    x: torch.Tensor,
    qweight: PackedWeight,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    ldy: int,
    activation: str | None,
    invariant: bool,
) -> Params:
    """What `run` takes: all but addresses and threads. x: [M, K]; it, scales and zeros as `_rows` gives them."""
    m, k, n, groups = x.shape[0], qweight.k, qweight.n, scales.shape[0]
    params = Params(
        codebook=None if qweight.code is None else codebook_on(qweight.code, _CPU, torch.float32).data_ptr(),
        ldx=x.stride(0),
        ld_scales=scales.stride(0),
        ld_zeros=0 if zeros is None else zeros.stride(0),
        ldy=ldy,
        m=m,
        n=n,
        k=k,
        k_padded=qweight.k_padded,
        group_size=qweight.k_padded if groups == 1 else k // groups,
        groups=groups,
        type=_TYPES[x.dtype],
        format=_FORMATS.get(qweight.format, _CODES),
        activation=activation_of(activation).number,
        threads=1 if m * n * k < _SMALL else 0,
        level=backend.level,
        invariant=invariant,
    )
    if qweight.layout != CPU:
        for field, value in zip(FIELDS, blocks_of(qweight), strict=True):
            setattr(params, field, value)
    return params


def run(
    backend: Backend,
    params: Params,
    x: int,
    weight: int,
    scales: int,
    zeros: int | None,
    bias: int | None,
    y: int,
) -> None:
    """Computes y. params: what `sizes` returns, or a copy. Raises what `gemm` does."""
    params.x, params.weight, params.scales, params.zeros, params.bias, params.y = x, weight, scales, zeros, bias, y
    if params.threads == 0:
        params.threads = torch.get_num_threads()
    if status := backend.library.wo_cpu_gemm(params):
        if status == REFUSED:
            raise ValueError(f"gemm: {backend.library.wo_cpu_error().decode()}")
        raise MemoryError(f"gemm: no memory for {params.m} rows of K = {params.k} and their sums")


def are_rows(matrix: torch.Tensor) -> bool:
    """Whether the kernels read [rows, columns] where they are: contiguous inside, without an overlap."""
    apart = matrix.stride(0) >= matrix.shape[1] or matrix.shape[0] == 1
    return apart and (matrix.stride(1) == 1 or matrix.shape[1] == 1)


def _rows(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix or a copy that the kernels read, at a multiple of the size of an element."""
    in_place = are_rows(matrix) and matrix.data_ptr() % matrix.element_size() == 0
    return matrix if in_place else aligned(matrix, matrix.element_size())
