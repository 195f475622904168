"""gemm: the one call. Checks the arguments, picks a kernel, launches it on the current stream.

What can be decided once for a weight and a shape of x is kept in a `Plan` on the PackedWeight: a decode
step then costs a dictionary look-up, the checks that depend on this call's tensors, one allocation and one
launch.
"""

from __future__ import annotations

import typing

import torch

from . import cpu
from .checks import check_operands, check_out, check_perm_range, check_result
from .heuristics import KernelConfig
from .packed import PackedWeight
from .plan import make_plan

_MAX_PLANS = 4096  # of one weight; a server sees some hundred values of M


def gemm(
    x: torch.Tensor,
    qweight: PackedWeight,
    scales: torch.Tensor,
    *,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    config: KernelConfig | None = None,
    perm: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = act(x[..., perm] @ w + bias) with w[k, n] = scales[k // g, n] * (q[k, n] - zeros[k // g, n]).

    Where q are the codes of a table ("nf4", "fp4", "code4"), w[k, n] = scales[k // g, n] * table[q[k, n]].

    x           [..., K] fp16 or bf16 (fp32 too on the CPU). Rows may be strided; it is copied when rows are
                not contiguous inside or not 16-byte aligned (K or the row stride no multiple of 8 elements).
    qweight     what `preprocess` returned, on the device of x.
    scales      [K / g, N], dtype of x; per channel [1, N]. g is 32, a multiple of 64, or K.
    zeros       None (symmetric) or like scales, in units of q; fractions allowed. None for a table.
    bias        [N], dtype of x.
    activation  None or "identity", "relu", "gelu" (the erf form), "silu".
    out         the result's tensor, if it is there already; must not overlap an input.
    config      the kernel to run, one of `kernels()` (CUDA only); default: what `heuristics.select` picks.
    perm        [K] int32 or int64, act-order: which column of x meets each row of w; None: row k meets column k.
                Must be a permutation of 0 .. K - 1; a number out of range is an error, on CUDA the device-side assert
                of torch.index_select. x is gathered first, in memory of PyTorch's allocator.

    Returns [..., N] in the dtype of x; sums are fp32. M = 0 rows give an empty result. Runs on the current
    stream and can be captured in a CUDA graph. Results are bit-identical from run to run. Not differentiable.

    Raises TypeError for wrong types and dtypes, ValueError for wrong shapes, devices, group sizes,
    activations and configurations, RuntimeError where no kernel was built for the device.
    """
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad):
        # The dispatcher's way: traceable, and autograd says clearly that there is no backward.
        return _through_dispatcher(x, qweight, scales, zeros, bias, activation, out, config, perm)
    return _gemm(x, qweight, scales, zeros, bias, activation, out, config, perm)


def _gemm(
    x: torch.Tensor,
    qweight: PackedWeight,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor | None,
    config: KernelConfig | None,
    perm: torch.Tensor | None,
) -> torch.Tensor:
    try:
        # Everything the checks and the plan depend on, but for the addresses.
        key = (
            x.shape,
            x.stride(),
            x.dtype,
            x.get_device(),
            scales.shape,
            scales.stride(),
            scales.dtype,
            scales.get_device(),
            None if zeros is None else (zeros.shape, zeros.stride(), zeros.dtype, zeros.get_device()),
            None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
            None if perm is None else (perm.shape, perm.dtype, perm.get_device()),
            activation,
            config,
        )
        plan = qweight._plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        plan = key = None  # some argument is not what it should be: the checks will say which
    if plan is None:
        group_size = check_operands(x, qweight, scales, zeros, bias, activation, perm)
        if x.device.type == "cpu":
            return _gemm_cpu(x, qweight, scales, zeros, bias, activation, out, config, perm)
        read = x if perm is None else torch.empty_like(x, memory_format=torch.contiguous_format)  # by the kernel
        plan = make_plan(read, qweight, scales, zeros, bias, group_size, activation, config)
        if len(qweight._plans) >= _MAX_PLANS:
            qweight._plans.clear()
        qweight._plans[key] = plan
    if out is not None:
        plan.check_out(x, qweight, scales, zeros, bias, out, perm)
    if perm is not None:
        x = x.index_select(-1, perm)
    return plan.run(x, qweight, scales, zeros, bias, out)


def _gemm_cpu(
    x: torch.Tensor,
    qweight: PackedWeight,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor | None,
    config: KernelConfig | None,
    perm: torch.Tensor | None,
) -> torch.Tensor:
    if config is not None:
        raise ValueError(f"config: expected None for CPU tensors, which no kernel computes, got {config}")
    if out is not None:
        inputs = {"x": x, "scales": scales, "zeros": zeros, "bias": bias, "perm": perm, "qweight": qweight.data}
        check_out(out, x, (*x.shape[:-1], qweight.n), inputs)
    if perm is not None:
        check_perm_range(perm)
        x = x.index_select(-1, perm)
    return cpu.gemm(x, qweight, scales, zeros, bias, activation, out)


# --- torch.compile and autograd ----------------------------------------------------------------------------


_Floats = typing.Optional[typing.Sequence[float]]  # noqa: UP045 (the spelling that PyTorch 2.4 knows)


@torch.library.custom_op("weightonly::gemm", mutates_args=())
def _gemm_op(
    x: torch.Tensor,
    data: torch.Tensor,
    k: int,
    n: int,
    format: str,
    layout: str,
    code: _Floats,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    perm: torch.Tensor | None,
) -> torch.Tensor:
    qweight = PackedWeight(data, k, n, format, layout, code)
    return _gemm(x, qweight, scales, zeros, bias, activation, None, None, perm)


@_gemm_op.register_fake
def _gemm_fake(
    x: torch.Tensor,
    data: torch.Tensor,
    k: int,
    n: int,
    format: str,
    layout: str,
    code: _Floats,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    perm: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _through_dispatcher(
    x: torch.Tensor,
    qweight: PackedWeight,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor | None,
    config: KernelConfig | None,
    perm: torch.Tensor | None,
) -> torch.Tensor:
    if config is not None:
        raise ValueError(f"config: expected None under torch.compile and autograd, got {config}")
    check_operands(x, qweight, scales, zeros, bias, activation, perm)
    if out is not None:
        check_result(out, x, (*x.shape[:-1], qweight.n))
    w = qweight
    code = w.fields.get("code")  # the table, unless the format says it
    y = _gemm_op(x, w.data, w.k, w.n, w.format, w.layout, code, scales, zeros, bias, activation, perm)
    return y if out is None else out.copy_(y)
