"""What a layer of experts does around its two products: kernels/experts/ on a GPU, else PyTorch.

Each function has both, and the same result but for rounding. torch.compile does not see the kernels. Each is the
other's gradient: sorting puts a token's row in places, combining adds up what is in them. So a backward pass runs the
same kernels, and keeps no more than the rows and the choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import maybe_current_level as current_transform
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from .. import invariance
from ..device import device_arch
from ..heuristics.families import FAMILIES
from ..heuristics.families.grouped_sm90 import MAX_EXPERTS
from ..kernels import _C, FLOAT_TYPES
from ..plain import PLAIN, aligned, is_watched

MAX_CHOICES = 1 << 21
"""Choices of experts that the kernel sorts: kMaxChoices of kernels/experts/experts.h."""

VECTOR = 8
"""Columns of 16 bytes, which the kernels read at once."""

INT32_MAX = (1 << 31) - 1

_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def runs(*tensors: torch.Tensor) -> bool:
    """Whether the kernels compute with these tensors: on Hopper, without a gradient, and not traced."""
    x = tensors[0]
    if not x.is_cuda or _C is None or is_watched() or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    if not PLAIN.issuperset(map(type, tensors)):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    if current_transform() is not None or forward_ad._current_level >= 0:
        return False
    return FAMILIES["grouped_sm90"].verified and device_arch(x.get_device()) == 90


def in_pairs(x8: torch.Tensor) -> torch.Tensor:
    """Rows of 8 bits [M, H] as what moves them has them: [M, (H + 1) / 2] of 16 bits, where they are or in a copy.

    Where kernels are not seen bytes: they have no address yet.
    """
    if is_watched():
        return x8.view(torch.uint8)
    if x8.shape[1] % 2:
        x8 = torch.nn.functional.pad(x8.view(torch.uint8), (0, 1))
    return aligned(x8, 2).view(torch.float16)


def is_rows(rows: torch.Tensor) -> bool:
    """Whether the kernels read these rows where they are: 16-byte aligned, of a multiple of 8 columns."""
    if rows.shape[-1] % VECTOR or rows.stride(-1) != 1 or rows.data_ptr() % 16:
        return False
    return rows.shape[0] == 1 or (rows.stride(0) % VECTOR == 0 and rows.stride(0) >= rows.shape[1])


def invariant_rows(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """x of a layer; in the batch-invariant mode on a GPU such that any number of its rows takes the same kernels.

    They are copied where kernels do not read them, as those of one row alone may be read. Raises ValueError for more
    choices than kernels sort.
    """
    if not invariance._on or not x.is_cuda:
        return x
    if ids.numel() > MAX_CHOICES:
        raise ValueError(
            f"topk_ids: expected at most {MAX_CHOICES} choices in the batch-invariant mode, got {ids.numel()}"
        )
    return x if is_watched() or is_rows(x) else aligned(x, 16)


def sort_by_expert(x: torch.Tensor, ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of x by expert, in the order of the choices ids [M, top_k]; rows of no expert come last.

    Returns the rows [M * top_k, H], the ends of experts int32 [E], and places, integers [M * top_k]: the row of each
    choice. Rows of no expert may hold any numbers. Raises ValueError for ids out of range, on the CPU.
    """
    if _asks_gradient(x):
        rows, offs, places = _Sort.apply(x, ids, experts)
        return rows, offs, places
    tokens, top_k = ids.shape
    choices = tokens * top_k
    if runs(x, ids) and 1 <= choices <= MAX_CHOICES and experts <= MAX_EXPERTS and is_rows(x):
        offs = torch.empty(experts, dtype=torch.int32, device=x.device)
        places = torch.empty(choices, dtype=torch.int32, device=x.device)
        rows = x.new_empty(choices, x.shape[1])
        route(x, ids.contiguous(), rows, offs, places)
        return rows, offs, places
    order, offs = _route_op(ids, experts) if is_watched() else _route(ids, experts)  # (T = M * top_k), (E)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(choices, device=order.device))
    return x[order // top_k], offs, places


def route(
    x: torch.Tensor,
    ids: torch.Tensor,
    rows: torch.Tensor,
    offs: torch.Tensor,
    places: torch.Tensor,
    scales: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
) -> None:
    """Two launches: sorts the choices ids [M, top_k], contiguous, and writes `rows`, `offs` and `places`.

    scales: fp32 [M], contiguous; with it `row_scales` [M * top_k] are written, too.
    """
    tokens, top_k = ids.shape
    experts, columns, device = offs.shape[0], x.shape[1], x.get_device()
    stream, ends, row_of = _current_stream(device), offs.data_ptr(), places.data_ptr()
    _C.route(device, tokens * top_k, experts, ids.dtype == torch.int64, ids.data_ptr(), ends, row_of, stream)
    distance = x.stride(0) if tokens > 1 else columns
    given = 0 if scales is None else scales.data_ptr()
    written = 0 if row_scales is None else row_scales.data_ptr()
    target = rows.data_ptr()
    sizes = (device, tokens, top_k, experts, columns)
    _C.gather(*sizes, x.data_ptr(), distance, given, ends, row_of, target, written, stream)


def combine(
    rows: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    offs: torch.Tensor,
    places: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """y[m] = sum_j weights[m, j] * rows[places[m, j]], in fp32 from j = 0 on, rounded to `dtype` once.

    rows [M * top_k, H] are sorted by expert; weights and ids are [M, top_k]. Choices of no expert add nothing.
    """
    if _asks_gradient(rows, weights):
        y: torch.Tensor = _Combine.apply(rows, weights, ids, offs, places, dtype)
        return y
    tokens, top_k = ids.shape
    if (
        places.dtype == torch.int32
        and rows.numel()
        and rows.dtype == dtype
        and runs(rows, weights)
        and rows.is_contiguous()
        and is_rows(rows)
    ):
        y = rows.new_empty(tokens, rows.shape[1])
        add_choices(rows, weights.float().contiguous(), places, offs[-1:], y)
        return y
    y = rows[places].view(tokens, top_k, rows.shape[-1])  # (M, top_k, H)
    is_chosen = _is_chosen(ids, offs)
    y = torch.where(is_chosen[..., None], y, 0)  # rows of no expert may hold Inf and NaN
    weights = torch.where(is_chosen, weights.float(), 0.0)  # (M, top_k)
    total = y[:, 0].float() * weights[:, :1]
    for j in range(1, top_k):
        if invariance._on:  # rounded twice, in whole registers of a CPU as behind them
            total = total + y[:, j].float() * weights[:, j : j + 1]
        else:
            total = torch.addcmul(total, y[:, j].float(), weights[:, j : j + 1])
    return total.to(dtype)


def add_choices(
    rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, rows_end: torch.Tensor, y: torch.Tensor
) -> None:
    """One launch: `combine` into y [M, H]. weights: fp32 [M, top_k], contiguous. rows_end: int32, the first row that
    does not count."""
    tokens, top_k = weights.shape
    device = rows.get_device()
    _C.combine(
        device,
        FLOAT_TYPES[rows.dtype],
        tokens,
        top_k,
        rows.shape[1],
        rows.data_ptr(),
        weights.data_ptr(),
        places.data_ptr(),
        rows_end.data_ptr(),
        y.data_ptr(),
        _current_stream(device),
    )


def _is_chosen(ids: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return (ids >= 0) & (ids < offs.shape[0])


# --- gradients -------------------------------------------------------------------------------------------------------


def _asks_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd is to see one of `_Sort` and `_Combine`; what watches operators sees PyTorch's instead."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return False
    if is_watched() or current_transform() is not None or forward_ad._current_level >= 0:
        return False
    return PLAIN.issuperset(map(type, tensors))


class _Sort(torch.autograd.Function):
    """`sort_by_expert`; the gradient of a token's row is the sum of those in its places, in fp32, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
        rows, offs, places = sort_by_expert(x, ids, experts)
        ctx.save_for_backward(ids, offs, places)
        ctx.mark_non_differentiable(offs, places)
        return rows, offs, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *others: Any) -> tuple[torch.Tensor, None, None]:
        ids, offs, places = ctx.saved_tensors
        ones = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
        return combine(grad.contiguous(), ones, ids, offs, places, grad.dtype), None, None


class _Combine(torch.autograd.Function):
    """`combine`. The gradient of a row is that of its token times the weight of its choice; that of the weight is the
    product of the row and the gradient of its token, summed in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        offs: torch.Tensor,
        places: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights, ids, offs, places)
        ctx.dtype = rows.dtype
        return combine(rows, weights, ids, offs, places, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, ids, offs, places = ctx.saved_tensors
        grad = grad.contiguous()
        if (
            places.dtype == torch.int32
            and grad.numel()
            and grad.dtype == ctx.dtype
            and runs(grad, weights)
            and is_rows(grad)
            and (rows is None or (rows.is_contiguous() and is_rows(rows)))
        ):
            of_rows = grad.new_empty(len(places), grad.shape[1]) if ctx.needs_input_grad[0] else None
            of_weights = None if rows is None else grad.new_empty(weights.shape, dtype=torch.float32)  # contiguous
            _spread(grad, rows, weights.float().contiguous(), places, offs[-1:], of_rows, of_weights)
            return of_rows, None if of_weights is None else of_weights.to(weights.dtype), None, None, None, None
        tokens, top_k = ids.shape
        is_chosen = _is_chosen(ids, offs)
        of_rows = of_weights = None
        if ctx.needs_input_grad[0]:
            order = torch.empty_like(places, dtype=torch.int64)
            order.scatter_(0, places.long(), torch.arange(len(places), device=places.device))
            of_rows = grad[order // top_k].to(ctx.dtype)  # (T, H)
            of_rows *= torch.where(is_chosen, weights.float(), 0.0).view(-1)[order, None]
        if ctx.needs_input_grad[1]:
            of_weights = torch.empty(tokens, top_k, dtype=torch.float32, device=grad.device)
            wide = grad.float()
            for j, places_of_j in enumerate(places.view(tokens, top_k).unbind(1)):
                of_weights[:, j] = (wide * rows[places_of_j]).sum(1)
            of_weights = torch.where(is_chosen, of_weights, 0.0).to(weights.dtype)
        return of_rows, of_weights, None, None, None, None


def _spread(
    grad: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor,
    places: torch.Tensor,
    rows_end: torch.Tensor,
    of_rows: torch.Tensor | None,
    of_weights: torch.Tensor | None,
) -> None:
    """One launch: the gradients of `add_choices`, of its rows and weights. rows: there if of_weights is."""
    tokens, top_k = weights.shape
    device = grad.get_device()
    _C.spread(
        device,
        FLOAT_TYPES[grad.dtype],
        tokens,
        top_k,
        grad.shape[1],
        grad.data_ptr(),
        0 if rows is None else rows.data_ptr(),
        weights.data_ptr(),
        places.data_ptr(),
        rows_end.data_ptr(),
        0 if of_rows is None else of_rows.data_ptr(),
        0 if of_weights is None else of_weights.data_ptr(),
        _current_stream(device),
    )


# ---------------------------------------------------------------------------------------------------------------------


def _route(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in `ids` sorted by expert, choices of none last, int64 [M * top_k]; the ends of experts, int32 [E].

    Raises ValueError for ids out of range, on the CPU: on a GPU the host would have to wait for them.
    """
    flat = ids.reshape(-1)
    if flat.numel() > INT32_MAX:  # the ends are int32
        raise ValueError(f"topk_ids: expected at most {INT32_MAX} choices, got {flat.numel()}")
    if flat.device.type == "cpu" and flat.numel():
        low, high = torch.stack(torch.aminmax(flat)).tolist()
        if low < -1 or high > experts:
            raise ValueError(f"topk_ids: expected -1..{experts} for {experts} experts, got numbers in {low}..{high}")
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    flat, order = torch.sort(flat, stable=True)
    all_experts = torch.arange(experts, dtype=flat.dtype, device=flat.device)
    return order, torch.searchsorted(flat, all_experts, right=True, out_int32=True)


@torch.library.custom_op("weightonly::route", mutates_args=(), schema="(Tensor ids, int experts) -> (Tensor, Tensor)")
def _route_op(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _route(ids, experts)


@_route_op.register_fake
def _result_of_route(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return ids.new_empty(ids.numel(), dtype=torch.int64), ids.new_empty(experts, dtype=torch.int32)
