"""fused_experts: a layer of experts, which is two grouped products and what lies between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .args import CPU_DTYPES, check_device
from .gate import Gate
from .gemm import autocast
from .grouped import Product
from .grouped_args import GroupedArgs
from .ops.around_experts import combine, runs, sort_by_expert
from .packed import PackedWeight
from .plain import is_watched
from .plan import cache
from .plan.experts import layer
from .require import require_dtype, require_tensor
from .weight import QuantizedWeight

Weight = QuantizedWeight | tuple[Any, ...]
"""Stacked experts: one object, or (qweight, scales), (qweight, scales, zeros), (qweight, scales, zeros, bias)."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [T, K] sorted by expert, offs) -> [T, N], zeros in rows after the last expert's."""


def fused_experts(
    x: torch.Tensor,
    w13: Weight,
    w2: Weight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: str | Gate | None = "silu",
) -> torch.Tensor:
    """y[m] = sum_j topk_weights[m, j] * (act(x[m] @ gate[e]) * (x[m] @ up[e])) @ w2[e], with e = topk_ids[m, j].

    x             [M, H] fp16 or bf16 (fp32 too on the CPU); under torch.autocast cast as `gemm` casts it.
    w13           a QuantizedWeight of stacked experts, without perm; or (qweight, scales, zeros) or (qweight, scales,
                  zeros, bias), as `grouped_gemm` takes them; zeros and bias may be None or left out. Packed from q [E,
                  H, 2 I]: columns 0 .. I - 1 are gate, the others up. Packed from q [E, H, I] the experts have no gate:
                  act(x[m] @ up[e]) @ w2[e].
    w2            the same, packed from q [E, I, H].
    topk_ids      int32 or int64 [M, top_k]: which experts each row goes to. -1 and E say: to none here, as those of
                  another rank of expert parallelism are. A row without an expert gives zeros.
    topk_weights  [M, top_k], any float dtype; used in fp32.
    activation    act, on the gate alone: None or "identity", "relu", "relu2", "gelu" (the erf form), "gelu_tanh",
                  "silu" or "situ"; "swigluoai", the gate of gpt-oss; or a `Gate`, for one with a limit.

    Returns [M, H] in the dtype of x. Both products are rounded to it, and so is what is between them; the sum over
    top_k is in fp32, from j = 0 on, and rounded once. Results are bit-identical from run to run.

    Runs as two `grouped_gemm`, with what that says of GPUs. On Hopper a layer is three launches, where M * top_k is
    at most 128 and that is quickest, or five, and a CUDA graph holds the call.

    Raises TypeError and ValueError as `grouped_gemm` does, and for shapes of the two weights that do not fit. Ids other
    than -1 .. E are a ValueError on the CPU; on a GPU they count as -1.
    """
    require_dtype("x", x, CPU_DTYPES)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape [M, H], got {list(x.shape)}")
    first, second = Product(*_stack("w13", w13)), Product(*_stack("w2", w2))
    x = autocast(x, first.scales)
    gate = Gate.of(activation, has_gate=first.qweight.n != second.qweight.k)
    # What is checked depends on shapes, dtypes and devices alone: a layer is checked once.
    key = (x.shape[1], x.dtype, x.device, first.kind(), second.kind()) if not is_watched() else None
    if key is None or key not in cache.checked_layers:
        _check_weights(x, first, gate, second)
        if key is not None:
            cache.checked_layers.add(key)
    return run_experts(x, topk_ids, topk_weights, first.qweight.experts or 0, first, gate, second)


def _check_weights(x: torch.Tensor, first: Product, gate: Gate, second: Product) -> None:
    columns, inner, experts = first.qweight.n, second.qweight.k, first.qweight.experts
    if first.qweight.k != x.shape[1]:
        raise ValueError(f"w13: expected K = {x.shape[1]}, the columns of x, got {first.qweight.k}")
    if gate.has_gate and columns != 2 * inner:
        raise ValueError(f"w13: expected N = {2 * inner}, gate and up for K = {inner} of w2, got {columns}")
    if second.qweight.n != x.shape[1] or experts != second.qweight.experts:
        expected = f"{experts} experts with N = {x.shape[1]}, the columns of x"
        raise ValueError(f"w2: expected {expected}, got {second.qweight.experts} with N = {second.qweight.n}")
    for name, rows, product in (("w13", x, first), ("w2", x.new_empty(0, inner), second)):
        offs = torch.zeros(experts or 0, dtype=torch.int32, device=x.device)
        try:
            GroupedArgs(rows, product.qweight, product.scales, offs, product.zeros, product.bias).check()
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error


def run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    first: Multiply,
    between: Callable[[torch.Tensor], torch.Tensor],
    second: Multiply,
) -> torch.Tensor:
    """y[m] = sum_j weights[m, j] * second(between(first(x[m]))), by expert ids[m, j]; see `fused_experts`.

    between: (T, columns of the first product) -> (T, rows of the second).
    """
    _check_choice(x, ids, weights)
    if (
        isinstance(first, Product)
        and isinstance(second, Product)
        and isinstance(between, Gate)
        and runs(x, weights, ids)
    ):
        y = layer(x, ids, weights, first, between, second)
        if y is not None:
            return y
    rows, offs, places = sort_by_expert(x, ids, experts)  # (T = M * top_k, H), (E), (T)
    y = second(between(first(rows, offs)), offs)  # (T, H)
    return combine(y, weights, ids, offs, places, x.dtype)


def _stack(name: str, weight: Weight) -> tuple[Any, ...]:
    """(qweight, scales, zeros, bias), None where left out."""
    if isinstance(weight, QuantizedWeight):
        if weight.perm is not None:
            raise ValueError(f"{name}: expected rows in order, got a QuantizedWeight with perm")
        weight = (weight.packed, weight.scales, weight.zeros)
    if not isinstance(weight, (tuple, list)) or not 2 <= len(weight) <= 4:  # PyTorch 2.8 traces no union
        got = f"{len(weight)} of them" if isinstance(weight, (tuple, list)) else type(weight).__name__
        expected = "a QuantizedWeight, (qweight, scales, zeros) or (qweight, scales, zeros, bias)"
        raise TypeError(f"{name}: expected {expected}, got {got}")
    if not isinstance(weight[0], PackedWeight) or weight[0].experts is None:
        got = repr(weight[0]) if isinstance(weight[0], PackedWeight) else type(weight[0]).__name__
        raise TypeError(f"{name}: expected stacked experts, packed from q [E, K, N], first, got {got}")
    for field, tensor in zip(("scales", "zeros", "bias"), weight[1:], strict=False):
        if tensor is not None or field == "scales":
            require_tensor(f"{name}: {field}", tensor)
    return tuple(weight)


def _check_choice(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    require_tensor("x", x)
    require_dtype("topk_ids", ids, (torch.int32, torch.int64))
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.shape[1] == 0:
        raise ValueError(f"topk_ids: expected shape [M = {x.shape[0]}, top_k], got {list(ids.shape)}")
    require_tensor("topk_weights", weights)
    if not weights.is_floating_point():
        raise TypeError(f"topk_weights: expected a float dtype, got {weights.dtype}")
    if weights.shape != ids.shape:
        raise ValueError(f"topk_weights: expected shape {list(ids.shape)} as topk_ids, got {list(weights.shape)}")
    check_device("topk_ids", ids, x)
    check_device("topk_weights", weights, x)
