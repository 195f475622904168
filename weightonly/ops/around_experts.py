"""What a layer of experts does around its two products: kernels/experts/ on a GPU, else PyTorch.

Each function has both, and the same result but for rounding. The kernels know no gradients, and torch.compile does not
see them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import maybe_current_level as current_transform
from torch.autograd import forward_ad

from ..activations import activation_of
from ..device import device_arch
from ..heuristics.families import FAMILIES
from ..kernels import _C, FLOAT_TYPES, MAX_M
from ..plain import PLAIN, is_watched

MAX_CHOICES = 4096
"""Choices of experts that the kernel sorts: kMaxChoices of kernels/experts/experts.h."""

INT32_MAX = (1 << 31) - 1

_MAX_EXPERTS = 512
_VECTOR = 8

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


def _is_vectors(*rows: torch.Tensor) -> bool:
    """Whether the kernels read these rows where they are: contiguous, 16-byte aligned, of a multiple of 8 columns, and
    no more than they count."""
    return all(
        r.is_contiguous() and r.shape[-1] % _VECTOR == 0 and r.shape[0] <= MAX_M and r.data_ptr() % 16 == 0
        for r in rows
    )


def sort_by_expert(x: torch.Tensor, ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of x by expert, in the order of the choices ids [M, top_k]; those of no expert come last.

    Returns the rows [M * top_k, H], the ends of experts int32 [E], and places, integers [M * top_k]: the row of each
    choice. Raises ValueError for ids out of range, on the CPU.
    """
    tokens, top_k = ids.shape
    choices = tokens * top_k
    if runs(x, ids) and 1 <= choices <= MAX_CHOICES and experts <= _MAX_EXPERTS and _is_vectors(x):
        ids = ids.contiguous()
        rows = x.new_empty(choices, x.shape[1])
        offs = torch.empty(experts, dtype=torch.int32, device=x.device)
        places = torch.empty(choices, dtype=torch.int32, device=x.device)
        device = x.get_device()
        _C.route(
            device,
            tokens,
            top_k,
            experts,
            x.shape[1],
            ids.dtype == torch.int64,
            ids.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            rows.data_ptr(),
            offs.data_ptr(),
            places.data_ptr(),
            _current_stream(device),
        )
        return rows, offs, places
    order, offs = _route_op(ids, experts) if is_watched() else _route(ids, experts)  # (T = M * top_k), (E)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(choices, device=order.device))
    return x[order // top_k], offs, places


def gated(gate_up: torch.Tensor, activation: str | None) -> torch.Tensor:
    """act(gate) * up, [T, 2 I] -> [T, I]: columns 0 .. I - 1 are gate, the others up. Both are rounded."""
    if gate_up.dim() == 2 and gate_up.numel() and runs(gate_up) and _is_vectors(gate_up):
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        if columns % _VECTOR == 0:
            y = gate_up.new_empty(rows, columns)
            device, type_, number = gate_up.get_device(), FLOAT_TYPES[gate_up.dtype], activation_of(activation).number
            _C.gate(device, type_, number, rows, columns, gate_up.data_ptr(), y.data_ptr(), _current_stream(device))
            return y
    gate, up = gate_up.chunk(2, dim=-1)  # (T, I) each
    return activation_of(activation).function(gate) * up


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
    tokens, top_k = ids.shape
    if (
        places.dtype == torch.int32
        and rows.numel()
        and rows.dtype == dtype
        and runs(rows, weights)
        and _is_vectors(rows)
    ):
        weights = weights.float().contiguous()
        y = rows.new_empty(tokens, rows.shape[1])
        device, type_ = rows.get_device(), FLOAT_TYPES[dtype]
        _C.combine(
            device,
            type_,
            tokens,
            top_k,
            offs.shape[0],
            rows.shape[1],
            rows.data_ptr(),
            weights.data_ptr(),
            places.data_ptr(),
            offs.data_ptr(),
            y.data_ptr(),
            _current_stream(device),
        )
        return y
    y = rows[places].view(tokens, top_k, rows.shape[-1])  # (M, top_k, H)
    weights = torch.where((ids >= 0) & (ids < offs.shape[0]), weights.float(), 0.0)  # (M, top_k)
    total = y[:, 0].float() * weights[:, :1]
    for j in range(1, top_k):
        total = torch.addcmul(total, y[:, j].float(), weights[:, j : j + 1])
    return total.to(dtype)


def _route(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in `ids` sorted by expert, those of no expert last, int64 [M * top_k]; the ends of experts, int32 [E].

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
