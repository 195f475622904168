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

_FIELDS = 8
"""Inputs of OP_SCHEMA between the bytes of the weight and its scales: k .. has_perm."""

_BIAS = 2 + _FIELDS + 2
"""The place of the bias among these inputs."""


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


# --- the operators `weightonly::gemm` and `weightonly::grouped_gemm` are differentiated by these ------------------


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keeps what `backward` needs of a call; inputs: of OP_SCHEMA, and (experts, offs, has_rest) if grouped."""
    x, data, *fields = inputs[: 2 + _FIELDS]
    scales, zeros, bias, activation, perm, invariant, *grouped = inputs[2 + _FIELDS :]
    rule = activation_of(activation).gradient
    kept = None if rule is None else output if rule.of_output else x
    ctx.save_for_backward(data, scales, zeros, bias, perm, kept, *grouped[1:2])
    ctx.description = fields, activation, invariant, grouped[:1], grouped[2:]


def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """grad: of y [..., N]. Returns a gradient, or None, for each input of the operator."""
    data, scales, zeros, bias, perm, kept, *offs = ctx.saved_tensors
    fields, activation, invariant, experts, has_rest = ctx.description
    operators: Any = torch.ops.weightonly
    flops.tell_counters()  # this begins a backward pass
    rule = activation_of(activation).gradient
    if rule is not None:
        if not rule.of_output:
            product = operators.grouped_gemm if offs else getattr(ctx, "product", operators.gemm)
            kept = product(kept, data, *fields, scales, zeros, bias, None, perm, invariant, *experts, *offs, *has_rest)
        grad = rule.function(grad.float(), kept.float()).to(grad.dtype)
    grads: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
    if ctx.needs_input_grad[0]:
        name = "grouped_gemm_gradient" if offs else "gemm_gradient"
        of_x = getattr(operators, name)
        if are_plain(grad) and not torch.is_grad_enabled():
            of_x = FUNCTIONS[name]  # the rule of the operator is there to refuse a second derivative
        grads[0] = of_x(grad, data, *fields, scales, zeros, perm, *experts, *offs)
    if ctx.needs_input_grad[_BIAS]:
        of_bias = operators.grouped_bias_gradient if offs else _gradient_of_bias
        grads[_BIAS] = of_bias(grad, *offs)
    return tuple(grads)


def _gradient_of_bias(grad: torch.Tensor) -> torch.Tensor:
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(grad.dtype)


def once(name: str) -> Callable[[Any, torch.Tensor], None]:
    """The rule of the operators that compute gradients of `name`."""

    def backward(ctx: Any, grad: torch.Tensor) -> None:
        raise RuntimeError(f"{name} is differentiable once: there is no gradient of its gradient (create_graph=True)")

    return backward


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


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"gemm_gradient": gradient_of_x}
"""An operator's name -> what it calls; grouped_gradient.py adds its own."""

_gradient_op = torch.library.custom_op("weightonly::gemm_gradient", mutates_args=(), schema=GRADIENT_SCHEMA)(
    gradient_of_x
)


@_gradient_op.register_fake
def _result_of_gradient(grad: torch.Tensor, data: torch.Tensor, k: int, *rest: Any) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], k))


_gradient_op.register_autograd(once("gemm"))
