"""fused_experts: a layer of experts, which is two grouped products and what lies between."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

from . import invariance
from .args import CPU_DTYPES, GroupedArgs
from .fp8_args import Fp8GroupedArgs
from .fp8_product import RoundingProduct
from .gate import Gate
from .gemm import autocast
from .grouped import Product, grouped_fp8
from .ops.around_experts import combine, in_pairs, invariant_rows, runs, sort_by_expert
from .ops.quantize_activations import quantize_activations
from .packed import PackedWeight
from .plain import is_watched
from .plan import cache
from .plan.experts import layer
from .require import require_dtype, require_tensor
from .weight import LooseWeight, QuantizedWeight, check_device

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [T, K] sorted by expert, offs) -> [T, N], zeros in rows after the last expert's."""


def fused_experts(
    x: torch.Tensor,
    w13: QuantizedWeight | tuple[Any, ...],
    w2: QuantizedWeight | tuple[Any, ...],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: str | Gate | None = "silu",
    *,
    x_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`y[m] = sum_j topk_weights[m, j] * (act(x[m] @ gate[e]) * (x[m] @ up[e])) @ w2[e]`, `e = topk_ids[m, j]`.

    Runs as two `grouped_gemm`, with what that says of GPUs. On Hopper a layer is three launches, where M * top_k is at
    most 128 and that is quickest, or five, and a CUDA graph holds the call.

    Args:
        x: [M, H] fp16 or bf16 (fp32 too on the CPU); under torch.autocast cast as `gemm` casts it.
        w13: a QuantizedWeight of stacked experts, without perm, or (w, bias) with its bias; or (qweight, scales, zeros)
            or (qweight, scales, zeros, bias), as `grouped_gemm` takes them; zeros and bias may be None or left out.
            Packed from q [E, H, 2 I]: columns 0 .. I - 1 are gate, the others up. Packed from q [E, H, I] the experts
            have no gate: `act(x[m] @ up[e]) @ w2[e]`.
        w2: the same, packed from q [E, I, H].
        topk_ids: int32 or int64 [M, top_k]: which experts each row goes to. -1 and E say: to none here, as those of
            another rank of expert parallelism are. A row without an expert gives zeros.
        topk_weights: [M, top_k], any float dtype; used in fp32.
        activation: act, on the gate alone: None or "identity", "relu", "relu2", "gelu" (the erf form), "gelu_tanh",
            "silu" or "situ"; "swigluoai", the gate of gpt-oss; or a `Gate`, for one with a limit.
        x_scales: fp32 [M], for an x of float8_e4m3fn, as `quantize_activations` makes both. What is between the
            products is rounded to E4M3 by it, too. The result, bias and all else have the dtype of scales; there are no
            gradients. On a GPU for weights in layout "tiled_fp8", H and I being multiples of 16.

    Returns:
        [M, H] in the dtype of x. Both products are rounded to it, and so is what is between them; the sum over top_k is
        in fp32, from j = 0 on, and rounded once. Results are bit-identical from run to run.

    Raises:
        TypeError | ValueError: as for `grouped_gemm`, and shapes of the two weights that do not fit.
        ValueError: on the CPU, ids other than -1 .. E; on a GPU they count as -1.

    Examples:
        >>> def experts(k, n):  # 4 of them
        ...     q = torch.randint(-8, 8, (4, k, n), dtype=torch.int8)
        ...     return wo.QuantizedWeight(wo.preprocess(q), torch.rand(4, k // 128, n).half())
        >>> ids, weights = torch.tensor([[0, 3], [1, 2]]), torch.full((2, 2), 0.5)
        >>> wo.fused_experts(torch.randn(2, 256).half(), experts(256, 1024), experts(512, 256), ids, weights).shape
        torch.Size([2, 256])
    """
    if x_scales is None:
        require_dtype("x", x, CPU_DTYPES)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape [M, H], got {list(x.shape)}")
    first, second = _product("w13", w13), _product("w2", w2)
    has_gate = False
    if first.operand.n != second.operand.k:  # decided when torch.compile traces it, also of sizes that are symbols
        has_gate = True
    gate = Gate.of(activation, has_gate)
    if x_scales is not None:
        _check_once(x, first, gate, second, x_scales)
        return _in_fp8(x, x_scales, topk_ids, topk_weights, first, gate, second)
    x = autocast(x, first.operand.scales)
    _check_once(x, first, gate, second)
    return run_experts(x, topk_ids, topk_weights, first.operand.experts or 0, first, gate, second)


def _in_fp8(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first: Product,
    between: Callable[[torch.Tensor], torch.Tensor],
    second: Product,
) -> torch.Tensor:
    """`run_experts` of x in E4M3."""
    _check_choice(x, ids, weights)
    if (y := _by_operator(x, ids, weights, first, between, second, x_scales)) is not None:
        return y
    experts, top_k = first.operand.experts or 0, ids.shape[1]
    pairs = invariant_rows(in_pairs(x), ids)
    if isinstance(between, Gate) and _runs(pairs, ids, weights, first, second, x_scales):
        result = layer(pairs, ids, weights, first, between, second, x_scales)
        if result is not None:
            return result
    pairs, offs, places = sort_by_expert(pairs, ids, experts)
    rows = pairs.view(x.dtype)[:, : first.operand.k]  # (T = M * top_k, H)
    row_scales = torch.empty_like(places, dtype=torch.float32)
    row_scales[places.long()] = x_scales.repeat_interleave(top_k)

    def product(of: Product, rows: torch.Tensor, row_scales: torch.Tensor) -> torch.Tensor:
        return grouped_fp8(Fp8GroupedArgs(rows, of.operand, row_scales, offs, of.bias, has_rest=True))

    y = product(second, *quantize_activations(between(product(first, rows, row_scales))))  # (T, H)
    return combine(y, weights, ids, offs, places, y.dtype)


def _check_once(
    x: torch.Tensor, first: Product, gate: Gate, second: Product, x_scales: torch.Tensor | None = None
) -> None:
    """`_check_weights`, once for shapes, dtypes and devices, on which alone it depends."""
    try:
        key: Any = None if is_watched() else (x.shape[1], x.dtype, x.device, first.kind, second.kind)
        if x_scales is not None and key is not None:
            require_tensor("x_scales", x_scales)
            key = (*key, x_scales.shape == x.shape[:1], x_scales.dtype, x_scales.device)
    except TypeError:  # of a subclass of torch.Tensor
        key = None
    if key is None or key not in cache.checked_layers:
        _check_weights(x, first, gate, second, x_scales)
        if key is not None:
            cache.checked_layers.add(key)


def _runs(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *others: Product | torch.Tensor) -> bool:
    """Whether a plan may compute the layer: `runs`, of all that gradients may be asked of."""
    return runs(x, ids, *_tensors(weights, *others))


def _asks_gradient(*operands: Product | torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(*operands))


def _tensors(*operands: Product | torch.Tensor) -> list[torch.Tensor]:
    """All that gradients may be asked of."""
    found: list[torch.Tensor] = []
    for one in operands:
        of = (one.operand._scales, one.bias) if isinstance(one, Product) else (one,)
        found += [t for t in of if t is not None]
    return found


def _check_weights(
    x: torch.Tensor, first: Product, gate: Gate, second: Product, x_scales: torch.Tensor | None = None
) -> None:
    w13, w2 = first.operand, second.operand
    columns, inner, experts = w13.n, w2.k, w13.experts
    if w13.k != x.shape[1]:
        raise ValueError(f"w13: expected K = {x.shape[1]}, the columns of x, got {w13.k}")
    if gate.has_gate and columns != 2 * inner:
        raise ValueError(f"w13: expected N = {2 * inner}, gate and up for K = {inner} of w2, got {columns}")
    if w2.n != x.shape[1] or experts != w2.experts:
        expected = f"{experts} experts with N = {x.shape[1]}, the columns of x"
        raise ValueError(f"w2: expected {expected}, got {w2.experts} with N = {w2.n}")
    for name, rows, product in (("w13", x, first), ("w2", x.new_empty(0, inner), second)):
        offs = torch.zeros(experts or 0, dtype=torch.int32, device=x.device)
        args = GroupedArgs(rows, product.operand, offs, product.bias)
        if x_scales is not None:
            scales = x_scales if rows is x else x_scales.new_empty(0)
            args = Fp8GroupedArgs(rows, product.operand, scales, offs, product.bias)
        try:
            args.check()
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
    if (y := _by_operator(x, ids, weights, first, between, second)) is not None:
        return y
    x = invariant_rows(x, ids)
    if isinstance(first, RoundingProduct) and isinstance(second, RoundingProduct):
        a, b = first.product, second.product
        fits = x.shape[1:] == (a.operand.k,) and x.dtype == a.operand.dtype == b.operand.dtype  # else errors say it
        if fits and not _asks_gradient(x, a, b):  # each row of x is rounded once, before it is there top_k times
            return _in_fp8(*quantize_activations(x), ids, weights, a, between, b)
    if (
        isinstance(first, Product)
        and isinstance(second, Product)
        and isinstance(between, Gate)
        and _runs(x, ids, weights, first, second)
    ):
        y = layer(x, ids, weights, first, between, second)
        if y is not None:
            return y
    rows, offs, places = sort_by_expert(x, ids, experts)  # (T = M * top_k, H), (E), (T)
    y = second(between(first(rows, offs)), offs)  # (T, H)
    return combine(y, weights, ids, offs, places, x.dtype)


def _by_operator(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first: Multiply,
    between: Callable[[torch.Tensor], torch.Tensor],
    second: Multiply,
    x_scales: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Under torch.compile the layer as one operator, in which a plan may compute it; None where there is none.

    A gradient goes through the operators of the single products. In the batch-invariant mode it is they, too, that keep
    the mode of the call.
    """
    if not is_compiling() or invariance._on:
        return None
    if not (isinstance(first, Product) and isinstance(second, Product) and isinstance(between, Gate)):
        return None
    if _asks_gradient(x, weights, first, second):
        return None
    weights = weights.float()  # torch.compile casts them where it makes them; a plan would launch a kernel
    y: torch.Tensor = _operator(x, ids, weights, *first.to_op(), *second.to_op(), *between.key, x_scales)
    return y


def _of_product(number: str) -> str:
    return re.sub(r"(\w+)(?=,|$)", rf"\1_{number}", Product.SCHEMA)


_FIELDS = Product.SCHEMA.count(",") + 1


@torch.library.custom_op(
    "weightonly::fused_experts",
    mutates_args=(),
    schema=f"(Tensor x, Tensor ids, Tensor weights, {_of_product('1')}, {_of_product('2')}, str? activation, "
    "float? limit, float? alpha, float shift, bool has_gate, Tensor? x_scales) -> Tensor",
)
def _operator(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *rest: Any) -> torch.Tensor:
    *gate, x_scales = rest[2 * _FIELDS :]
    first, second = Product.from_op(*rest[:_FIELDS]), Product.from_op(*rest[_FIELDS : 2 * _FIELDS])
    if x_scales is not None:
        return _in_fp8(x, x_scales, ids, weights, first, Gate(*gate), second)
    return run_experts(x, ids, weights, first.operand.experts or 0, first, Gate(*gate), second)


@_operator.register_fake
def _result_of_operator(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *rest: Any) -> torch.Tensor:
    first, second = Product.from_op(*rest[:_FIELDS]), Product.from_op(*rest[_FIELDS : 2 * _FIELDS])
    dtype = x.dtype if rest[-1] is None else first.operand._scales.dtype
    return x.new_empty((x.shape[0], second.operand._packed.n), dtype=dtype)


def _product(name: str, weight: QuantizedWeight | tuple[Any, ...]) -> Product:
    bias = None
    if isinstance(weight, (tuple, list)) and len(weight) == 2 and isinstance(weight[0], QuantizedWeight):
        weight, bias = weight
    if not isinstance(weight, QuantizedWeight):
        if not isinstance(weight, (tuple, list)) or not 2 <= len(weight) <= 4:  # PyTorch 2.8 traces no union
            got = f"{len(weight)} of them" if isinstance(weight, (tuple, list)) else type(weight).__name__
            expected = "a QuantizedWeight, (qweight, scales, zeros) or (qweight, scales, zeros, bias)"
            raise TypeError(f"{name}: expected {expected}, got {got}")
        if not isinstance(weight[0], PackedWeight):
            got = type(weight[0]).__name__
            raise TypeError(f"{name}: expected stacked experts, packed from q [E, K, N], first, got {got}")
        require_tensor(f"{name}: scales", weight[1])
        if len(weight) > 2 and weight[2] is not None:
            require_tensor(f"{name}: zeros", weight[2])
        bias = weight[3] if len(weight) == 4 else None
        weight = LooseWeight(*weight[:3])
    if bias is not None:
        require_tensor(f"{name}: bias", bias)
    if weight.experts is None:
        raise TypeError(f"{name}: expected stacked experts, packed from q [E, K, N], first, got {weight.packed!r}")
    if weight.perm is not None:
        raise ValueError(f"{name}: expected rows in order, got a QuantizedWeight with perm")
    return Product(weight, bias)


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
    check_device("topk_ids", ids, "x", x)
    check_device("topk_weights", weights, "x", x)
