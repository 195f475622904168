"""Gradients of `grouped_gemm`: the operators that autograd.py calls for it.

On a GPU all experts' weights are dequantized together, some rows of each at a time, and PyTorch's grouped_mm multiplies
by them: the host does not wait for `offs`, and there is one product of a slice, however many experts there are.
Elsewhere each expert that has rows is a gradient of `gemm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from . import autograd, reference
from .args import GRADIENT_SCHEMA
from .device import device_arch
from .grouped import rows_of
from .layout import K_ALIGN, Range, blocks_of
from .ops.dequantize import dequantize_columns, has_kernel
from .packed import PackedWeight
from .plain import aligned_rows
from .weight import LooseWeight, QuantizedWeight

SLICE_BYTES = 240 << 20
"""The most that a slice of the weights of all experts may take when it is dense."""

_ROWS_OF_A_SUM = 128

_COPIED_ELEMS = 1 << 24
"""Of the gradient, at most, in fp32 at a time."""


_GRADIENT_SCHEMA = GRADIENT_SCHEMA.replace(") ->", ", int experts, Tensor offs) ->")


def _gradient_of_x(grad: torch.Tensor, data: torch.Tensor, *rest: Any) -> torch.Tensor:
    """grad_x [T, K] of grad_z [T, N], zeros in rows of no expert."""
    *fields, scales, zeros, perm, experts, offs = rest
    if _multiplies_slices(grad, scales, perm):
        w = LooseWeight(PackedWeight(data, *fields, experts=experts), scales, zeros)
        if blocks_of(w.packed.k_padded, w.packed.n_padded, w.packed.bits, w.packed.layout).column_dim == 0:
            with torch.autocast(grad.device.type, enabled=False):
                return by_slices(grad, w, offs, SLICE_BYTES)
    result = grad.new_zeros(grad.shape[0], fields[0])
    for expert, begin, end in rows_of(offs, grad.shape[0], has_rest=True):
        weight = data.view(experts, -1)[expert]
        others = [None if tensor is None else tensor[expert] for tensor in (scales, zeros, perm)]
        result[begin:end] = autograd.gradient_of_x(grad[begin:end], weight, *fields, *others)
    return result


_gradient_op = torch.library.custom_op("weightonly::grouped_gemm_gradient", mutates_args=(), schema=_GRADIENT_SCHEMA)(
    _gradient_of_x
)
autograd.FUNCTIONS["grouped_gemm_gradient"] = _gradient_of_x


def _multiplies_slices(grad: torch.Tensor, scales: torch.Tensor, perm: torch.Tensor | None) -> bool:
    """Whether grouped_mm has a kernel for these gradients, and rows of x are in order."""
    return (
        grad.is_cuda
        and grad.numel() > 0
        and hasattr(F, "grouped_mm")
        and device_arch(grad.get_device()) >= 80
        and grad.dtype == scales.dtype == torch.bfloat16
        and grad.shape[1] % 8 == 0  # rows of 16 bytes
        and perm is None
    )


def by_slices(grad: torch.Tensor, w: QuantizedWeight, offs: torch.Tensor, limit_bytes: int) -> torch.Tensor:
    """`_gradient_of_x` by dequantized slices of all experts.

    grad: [T, N]; w: of stacked experts, without perm; limit_bytes: the most that a slice takes.
    """
    # Rows of no expert, which are the last ones, are those of one more expert, whose weights are zeros.
    ends = torch.cat([offs, offs.new_full((1,), grad.shape[0])])  # (E + 1)
    grad = grad.contiguous()
    result = grad.new_empty(0)
    for begin, end, rows in _dequantized_rows(w, limit_bytes):
        part = F.grouped_mm(grad, rows.mT, offs=ends)
        if end - begin == w.k:
            return part
        if begin == 0:
            result = grad.new_empty(grad.shape[0], w.k)
        result[:, begin:end] = part
    return result


def _dequantized_rows(w: QuantizedWeight, limit_bytes: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(begin, end, rows begin..end of the weights of all experts, and of one more of zeros: [E + 1, end - begin, N]),
    slice after slice. Each is memory that the next one overwrites."""
    experts, n_padded = w.experts or 0, w.packed.n_padded
    step = _rows_of_a_slice(w, limit_bytes // ((experts + 1) * n_padded * w.scales.element_size()))
    wide, scales, zeros = _side_by_side(w)
    dequantize = _by_kernel if has_kernel(wide, scales, zeros) else _by_reference
    workspace = scales.new_empty(step, experts + 1, n_padded)
    workspace[:, experts] = 0
    for begin in range(0, w.k, step):
        end = min(begin + step, w.k)
        rows = workspace[: end - begin]
        dequantize(wide, scales, zeros, (begin, end), rows.view(end - begin, -1))
        yield begin, end, rows.permute(1, 0, 2)[..., : w.n]


def _rows_of_a_slice(w: QuantizedWeight, most: int) -> int:
    """About as many in each slice, `most` or at least 64, whose groups are whole or one."""
    size = w.group_rows
    if w.groups > 1 and size > most and size % K_ALIGN == 0:
        return max(rows for rows in range(K_ALIGN, max(most, K_ALIGN) + 1, K_ALIGN) if size % rows == 0)
    align = size if w.groups > 1 and size % K_ALIGN == 0 else K_ALIGN
    slices = -(-w.k // max(align, most // align * align))
    return min(w.k, -(-w.k // (slices * align)) * align)


def _side_by_side(w: QuantizedWeight) -> tuple[PackedWeight, torch.Tensor, torch.Tensor | None]:
    """The weights of all experts as one [K, E * n_padded], and its scales and zeros [groups, E * n_padded].

    Bytes of these layouts are columns first: those of experts, one after another, are those of one wide weight.
    """
    packed, columns = w.packed, (w.experts or 0) * w.packed.n_padded
    code = packed.code if packed.format == "code4" else None
    wide = PackedWeight(packed.data, packed.k, columns, packed.format, packed.layout, code)
    scales, zeros = (
        None if t is None else aligned_rows(t, packed.n_padded).transpose(0, 1).reshape(w.groups, columns)
        for t in (w.scales, w.zeros)
    )
    assert scales is not None
    return wide, scales, zeros


def _by_kernel(
    w: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None, rows: Range, out: torch.Tensor
) -> None:
    """Writes these rows of w [K, N] to out [rows, at least N]."""
    dequantize_columns(w, scales, zeros, 0, w.n, out, rows)


def _by_reference(
    w: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None, rows: Range, out: torch.Tensor
) -> None:
    for begin, end in reference.column_blocks(w):
        out[:, begin:end] = reference.dequantize_columns(w, scales, zeros, begin, end)[slice(*rows)]


@_gradient_op.register_fake
def _result_of_gradient(grad: torch.Tensor, data: torch.Tensor, k: int, *rest: Any) -> torch.Tensor:
    return grad.new_empty((grad.shape[0], k))


@torch.library.custom_op(
    "weightonly::grouped_bias_gradient", mutates_args=(), schema="(Tensor grad, Tensor offs) -> Tensor"
)
def _bias_gradient_op(grad: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """[E, N]: the sums of the rows of each expert, in fp32, in an order that `offs` decides; the host does not read it.

    Sums are of `_ROWS_OF_A_SUM` rows at most, then of those: one expert may have nearly all rows.
    """
    rows, columns = grad.shape
    offs = offs.clamp(0, rows)
    cuts = torch.arange(0, rows + 1, _ROWS_OF_A_SUM, dtype=offs.dtype, device=offs.device)
    cuts = torch.cat([cuts, offs]).sort().values
    ends = torch.searchsorted(cuts, torch.cat([offs.new_zeros(1), offs]))
    result = grad.new_empty(offs.shape[0], columns)
    step = max(1, _COPIED_ELEMS // max(rows, 1))
    for begin in range(0, columns, step):
        sums = grad[:, begin : begin + step].float()
        for bounds in (cuts, ends):
            sums = torch.segment_reduce(sums, "sum", offsets=bounds, axis=0, unsafe=True)  # which reads no bounds
        result[:, begin : begin + step] = sums
    return result


@_bias_gradient_op.register_fake
def _result_of_bias_gradient(grad: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return grad.new_empty((offs.shape[0], grad.shape[1]))


_gradient_op.register_autograd(autograd.once("grouped_gemm"))
_bias_gradient_op.register_autograd(autograd.once("grouped_gemm"))
