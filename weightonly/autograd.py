"""Gradients of `gemm`: of x and of the bias. The weight, its scales and its zeros are constants.

    y = act(z),  z = x[..., perm] @ w + bias
    grad_z = grad_y * act'(z),  grad_x[..., perm] = grad_z @ w^T,  grad_bias = sum of the rows of grad_z

The backward pass dequantizes the weight in slices of columns, in turn, of 256 MB at most on a GPU. gelu and silu need
z, which is computed again: a call keeps x for them, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from . import flops
from .activations import activation_of
from .args import GRADIENT_SCHEMA, GemmArgs
from .heuristics.slices import GRADIENT_BYTES
from .ops.dequantize import dequantized_slices
from .packed import PackedWeight
from .plain import are_plain


def check_differentiable(args: GemmArgs) -> None:
    """Raises ValueError, naming the argument, for gradients that there are none of; x or another requires one."""
    for name, tensor in (("scales", args.weight.scales), ("zeros", args.weight.zeros)):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:  # PyTorch 2.4 traces no getattr
            raise ValueError(
                f"{name}: expected a tensor that requires no gradient, as gemm has those of x and bias alone, "
                "got one that does; detach it"
            )
    if args.out is not None and args.x.requires_grad:
        raise ValueError("out: expected None where x requires a gradient, got a tensor")


def check_no_transform(args: GemmArgs) -> None:
    """Raises RuntimeError inside of torch.func and of forward-mode differentiation, which see no rule of `gemm`."""
    w = args.weight
    tensors = {"x": args.x, "scales": w.scales, "zeros": w.zeros, "bias": args.bias, "out": args.out}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        # torch.func.functionalize passes the operator on.
        is_wrapped = is_functorch_wrapped_tensor(tensor) and not torch._is_functional_tensor(tensor)
        is_dual = not is_wrapped and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None
        if is_wrapped or is_dual:
            got = "a dual tensor of forward-mode differentiation" if is_dual else "one inside of a torch.func transform"
            raise RuntimeError(
                f"{name}: expected a plain tensor, got {got} (grad, vjp, jvp, vmap); gemm has gradients of "
                "Tensor.backward and torch.autograd.grad"
            )


# --- the operator `weightonly::gemm` is differentiated by these --------------------------------------------------


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keeps what `backward` needs of a call; inputs: those of OP_SCHEMA."""
    x, data, *description = inputs
    *fields, scales, zeros, bias, activation, perm = description
    ctx.save_for_backward(data, scales, zeros, bias, perm, kept_for(activation, x, output))
    ctx.fields = fields
    ctx.activation = activation


def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """grad: of y [..., N]. Returns a gradient, or None, for each input of OP_SCHEMA."""
    data, scales, zeros, bias, perm, kept = ctx.saved_tensors
    grad = before_activation(
        grad,
        kept,
        ctx.activation,
        lambda x: torch.ops.weightonly.gemm(x, data, *ctx.fields, scales, zeros, bias, None, perm),
    )
    # x, data, the fields of the weight, scales, zeros, bias, activation, perm
    before_scales = 2 + len(ctx.fields)
    grads: list[torch.Tensor | None] = [None] * (before_scales + 5)
    if ctx.needs_input_grad[0]:
        # The rule of the operator is there to refuse a second derivative.
        is_last = are_plain(grad) and not torch.is_grad_enabled()
        of_x = gradient_of_x if is_last else torch.ops.weightonly.gemm_gradient
        grads[0] = of_x(grad, data, *ctx.fields, scales, zeros, perm)
    if ctx.needs_input_grad[before_scales + 2]:
        grads[before_scales + 2] = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(grad.dtype)
    return tuple(grads)


def kept_for(activation: str | None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """What the backward pass of a call needs for its activation: its y, its x, or nothing."""
    rule = activation_of(activation).gradient
    return None if rule is None else y if rule.of_output else x


def before_activation(
    grad: torch.Tensor,
    kept: torch.Tensor | None,
    activation: str | None,
    product: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """grad_z of grad_y; kept: what `kept_for` gave. product: x -> z."""
    flops.tell_counters()  # this begins a backward pass
    rule = activation_of(activation).gradient
    if rule is None or kept is None:
        return grad
    kept = kept if rule.of_output else product(kept)
    return rule.function(grad.float(), kept.float()).to(grad.dtype)


def gradient_of_x(grad: torch.Tensor, data: torch.Tensor, *rest: Any) -> torch.Tensor:
    """grad_x [..., K] of grad_z [..., N], in its dtype; sums over slices of N are fp32."""
    *fields, scales, zeros, perm = rest
    qweight = PackedWeight(data, *fields)
    rows = grad.reshape(-1, qweight.n)  # [M, N]
    total: torch.Tensor | None = None  # [M, K]
    with torch.autocast(grad.device.type, enabled=False):
        for begin, end, w in dequantized_slices(qweight, scales, zeros, GRADIENT_BYTES):  # w [K, end - begin]
            part = rows[:, begin:end].to(w.dtype) @ w.t()
            total = part if total is None else total.float().add_(part)
    assert total is not None
    result = total.to(grad.dtype)
    if perm is not None:
        result = torch.empty_like(result).index_copy_(1, perm.long(), result)
    return result.view(*grad.shape[:-1], qweight.k)


_gradient_op = torch.library.custom_op("weightonly::gemm_gradient", mutates_args=(), schema=GRADIENT_SCHEMA)(
    gradient_of_x
)


@_gradient_op.register_fake
def _result_of_gradient(grad: torch.Tensor, data: torch.Tensor, k: int, *rest: Any) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], k))


def _no_second_backward(ctx: Any, grad: torch.Tensor) -> None:
    raise RuntimeError("gemm is differentiable once: there is no gradient of its gradient (create_graph=True)")


_gradient_op.register_autograd(_no_second_backward)
