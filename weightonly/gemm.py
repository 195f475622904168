"""gemm: the one call. Its arguments become a GemmArgs, which finds or makes a plan; the plan computes the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import is_grad_enabled
from torch._C._functorch import maybe_current_level as current_transform
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from . import autograd, flops
from .args import OP_SCHEMA, GemmArgs
from .dense import WEIGHT_DTYPES
from .fp8_args import FP8_OP_SCHEMA, Fp8Args
from .heuristics import KernelConfig
from .packed import PackedWeight
from .plain import PLAIN, dispatch_modes, function_modes, is_virtual, is_watched, untraced
from .plan import cache
from .plan.base import Plan
from .plan.choose import make_plan
from .weight import LooseWeight, QuantizedWeight, weight_of


def gemm(
    x: torch.Tensor,
    qweight: PackedWeight | QuantizedWeight,
    scales: torch.Tensor | None = None,
    *,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    config: KernelConfig | None = None,
    perm: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`y = act(x[..., perm] @ w + bias)` with `w[k, n] = scales[k // g, n] * (q[k, n] - zeros[k // g, n])`.

    Where q are the codes of a codebook ("nf4", "fp4", "mxfp4", "nvfp4", "code4"), `w[k, n] = scales[k // g, n] *
    codebook[q[k, n]]`. Of "fp8" q are the numbers.

    Under torch.autocast, on the CPU and on CUDA, an x of another 16- or 32-bit float is cast to the dtype of scales.

    Gradients: of x and bias, by Tensor.backward and torch.autograd.grad, under torch.compile, too. The backward pass
    dequantizes the weight in slices and gives the same bits in every run. There is no second derivative, and with `out`
    the bias gets none. Autograd is told that `out` is written: an operation that kept it fails in its backward pass.

    Subclasses of torch.Tensor, and calls that torch.jit.trace or a mode sees (make_fx, FlopCounterMode), go through the
    operator `weightonly::gemm` of PyTorch's dispatcher.

    Args:
        x: [..., K] fp16 or bf16 (fp32 too on the CPU). Rows may be strided; it is copied when rows are not contiguous
            inside or not 16-byte aligned (K or the row stride no multiple of 8 elements).
        qweight: what `preprocess` returned, on the device of x; or a QuantizedWeight, which has scales, zeros and perm:
            `gemm(x, w)` gives the same bits, and checks them when `w` is made.
        scales: [K / g, N], dtype of x; per channel [1, N]. g is 16, 32, a multiple of 64, or K.
        zeros: None (symmetric) or like scales, in units of q; fractions allowed. None for a codebook.
        bias: [N], dtype of x.
        activation: None or "identity", "relu", "gelu" (the erf form), "silu".
        out: the result's tensor, if it is there already; must not overlap an input, nor require a gradient.
        config: the kernel to run, one of `kernels()` (CUDA only); default: what `heuristics.select` picks.
        perm: [K] int32 or int64, act-order: which column of x meets each row of w; None: row k meets column k. Must be
            a permutation of 0 .. K - 1; a number out of range is an error, on CUDA the device-side assert of
            torch.index_select. x is gathered first, in memory of PyTorch's allocator.
        x_scales: None, or fp32 [...]: what `quantize_activations` returned with x, which is float8_e4m3fn then; `y =
            act(x_scales * (x @ w) + bias)` in the dtype of scales, which bias and out have, too. On CUDA for compute
            capability 9.0 and weights in layout "tiled_fp8": int4, symmetric, groups of 32, a multiple of 64, or K;
            MXFP4 on the CPU. It has no gradients.

    Returns:
        [..., N] in the dtype of x; sums are fp32. M = 0 rows give an empty result. Runs on the current stream and can
        be captured in a CUDA graph. Results are bit-identical from run to run.

    Raises:
        TypeError: wrong types and dtypes, and scales, zeros or perm beside a QuantizedWeight.
        ValueError: wrong shapes, devices, group sizes, activations and configurations, tensors in memory that was
            freed, and scales or zeros that require a gradient.
        RuntimeError: where no kernel was built for the device, and inside of torch.func and of forward-mode
            differentiation.

    Examples:
        >>> q, scales, _ = wo.quantize(torch.randn(512, 768).half(), group_size=128)
        >>> wo.gemm(torch.randn(4, 512).half(), wo.preprocess(q), scales, activation="silu").shape
        torch.Size([4, 768])
    """
    if isinstance(qweight, PackedWeight):  # as `weight_of` says, without a call of it
        weight: QuantizedWeight = LooseWeight(qweight, scales, zeros, perm)  # type: ignore[arg-type]
    else:
        weight = weight_of(qweight, scales, zeros, perm)
    if x_scales is not None:
        return gemm_fp8(Fp8Args(x, weight, x_scales, bias, activation, out, config))
    args = GemmArgs(x, weight, bias, activation, out, config)
    if is_dynamo_compiling():
        return _general(args)
    # A call that was made before and that needs no dispatcher: what follows is all that a decode step costs the host.
    # Inside of torch.jit.trace sizes are tensors, and tensors of torch.func have no address: there is no plan of them.
    plan = None
    try:
        is_seen = dispatch_modes() or function_modes() or forward_ad._current_level >= 0
        if not is_seen and not (is_grad_enabled() and _requires_grad(args)):
            plan = cache.find(args.key())
            if plan is not None and not plan.holds(args):
                plan = None
    except (AttributeError, TypeError, RuntimeError):
        plan = None  # some argument is not what it should be: the checks say which
    if plan is None:
        return _general(args)
    return plan.run(args) if out is None and weight._perm is None else _run(plan, args)


def _general(args: GemmArgs) -> torch.Tensor:
    """The product of any call."""
    args.x = autocast(args.x, args.weight._scales)
    if is_compiling():
        return dispatch(args, _gemm_op)
    if not needs_dispatch(args):
        return dispatch(args, _gemm_op) if any(map(is_virtual, args.tensors().values())) else compute(args)
    return differentiable(args, _gemm_op, compute)


def needs_dispatch(args: GemmArgs) -> bool:
    """Whether PyTorch's dispatcher must see the call: to trace it, for a subclass of torch.Tensor, or for a gradient.

    Raises RuntimeError inside of torch.func and of forward-mode differentiation, which see no rule of it.
    """
    if is_watched() or (torch.is_grad_enabled() and _requires_grad(args)):
        return True
    if current_transform() is not None or forward_ad._current_level >= 0:
        autograd.check_no_transform(args)
        return any(map(is_virtual, args.tensors().values()))
    try:
        return not args.is_plain()
    except AttributeError:
        return False  # no PackedWeight: the checks say so


def _requires_grad(args: GemmArgs) -> bool:
    """Whether a gradient is asked for. With `out` none goes through the bias: nothing leads back from a buffer."""
    try:
        w = args.weight
        if args.x.requires_grad or w._scales.requires_grad:
            return True
        if w._zeros is not None and w._zeros.requires_grad:
            return True
        return args.bias is not None and args.bias.requires_grad and args.out is None
    except AttributeError:
        return False  # no tensor: the checks say so


def autocast(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x, cast to the dtype of the scales where torch.autocast says so; one comparison where it has that dtype."""
    try:
        if x.dtype == scales.dtype or not torch.is_autocast_enabled(x.device.type):
            return x
        return x.to(scales.dtype) if {x.dtype, scales.dtype} <= set(WEIGHT_DTYPES) else x
    except (AttributeError, RuntimeError):
        return x  # no tensor, or on a device without autocast: the checks say so


def compute(args: GemmArgs, checks_out: bool = True) -> torch.Tensor:
    """The product by the plan of these arguments. checks_out: False where `out` is a part of one that was checked."""
    return _run(cache.plan_of(args, make_plan), args, checks_out)


def _run(plan: Plan, args: GemmArgs, checks_out: bool = True) -> torch.Tensor:
    """args: of a call; the plan has checked that all of them are in memory."""
    if args.out is not None and checks_out:
        plan.check_out(args)
    if args.weight._perm is not None:
        args.x = plan.gather(args.x, args.weight._perm)
    return plan.run(args)


# --- autograd without the dispatcher: its operators cost the host some 0.2 ms a call more --------------------


def differentiable(
    args: GemmArgs, operator: Callable[..., torch.Tensor], function: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """The product of a call that `needs_dispatch`: by `function` if for a gradient alone, else by `operator`."""
    is_seen = is_watched() or current_transform() is not None or args.out is not None or args.config is not None
    if is_seen or not isinstance(args.weight._packed, PackedWeight) or not args.is_plain():
        return dispatch(args, operator)
    autograd.check_no_transform(args)
    autograd.check_differentiable(args)
    y: torch.Tensor = _Product.apply(*args.to_op(), args, function)
    return y


class _Product(torch.autograd.Function):
    """An operator with its rule; the last arguments are the GemmArgs that the others come from, and what it calls."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> torch.Tensor:
        *inputs, args, function = operands
        y: torch.Tensor = function(args)
        autograd.setup_context(ctx, tuple(inputs), y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        return autograd.backward(ctx, grads[0])


# --- torch.compile, and autograd with it ---------------------------------------------------------------------


@torch.library.custom_op("weightonly::gemm", mutates_args=(), schema=OP_SCHEMA)
def _gemm_op(*operands: Any) -> torch.Tensor:
    return compute(GemmArgs.from_op(*operands))


@_gemm_op.register_fake
def _result_of_op(x: torch.Tensor, data: torch.Tensor, k: int, n: int, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], n))


_gemm_op.register_autograd(autograd.backward, setup_context=autograd.setup_context)


@torch.library.custom_op("weightonly::gemm_fp8", mutates_args=(), schema=FP8_OP_SCHEMA)
def _fp8_op(*operands: Any) -> torch.Tensor:
    return compute(Fp8Args.from_op(*operands))


@_fp8_op.register_fake
def _result_of_fp8_op(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return Fp8Args.from_op(x, *rest).new_result()


def gemm_fp8(args: Fp8Args) -> torch.Tensor:
    """`gemm` of activations in 8 bits."""
    if torch.is_grad_enabled():
        args.check_no_gradient()
    if is_watched() or any(type(t) not in PLAIN or is_virtual(t) for t in _tensors(args)):
        return dispatch(args, _fp8_op)
    return compute(args)


def _tensors(args: GemmArgs) -> list[torch.Tensor]:
    """Those that are tensors: the checks say what the others should be."""
    return [t for t in args.tensors().values() if isinstance(t, torch.Tensor)]


def _check(args: GemmArgs) -> None:
    args.check()
    if args.out is not None:  # the result is copied to it
        is_direct = not is_compiling() and args.is_plain() and not torch._is_functional_tensor(args.out)
        args.check_out() if is_direct else args.check_result()
        if is_direct and any(map(torch._is_functional_tensor, args.tensors().values())):
            raise ValueError("out: expected a functional tensor, as an operand is one, got another")
    if args.config is not None:
        raise ValueError(f"config: expected None under torch.compile and autograd, got {args.config}")


def dispatch(args: GemmArgs, operator: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The product by an operator of PyTorch's dispatcher: torch.compile can trace it, autograd knows its gradients."""
    if is_compiling():
        _check(args)
    else:
        with untraced():
            _check(args)
        autograd.check_no_transform(args)
        flops.tell_counters()
    if torch.is_grad_enabled():
        autograd.check_differentiable(args)
    if args.out is None:
        return operator(*args.to_op())
    with torch.no_grad():
        return args.out.copy_(operator(*args.to_op()))
