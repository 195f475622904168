"""gemm_in_fp8, RoundingProduct: x in 16 bits by kernels that take x in E4M3, for layers with activations="fp8"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

from . import autograd
from .args import OP_SCHEMA, GemmArgs, GroupedArgs
from .fp8_args import Fp8Args, Fp8GroupedArgs, check_fp8_layout
from .gemm import autocast, dispatch, gemm_fp8, needs_dispatch
from .grouped import GROUPED_OP_SCHEMA, Product, grouped_fp8
from .ops.quantize_activations import quantize_activations
from .plain import is_virtual
from .weight import QuantizedWeight


class _Rounds(GemmArgs):
    """What a call changes that rounds x."""

    __slots__ = ()

    def check_weight(self) -> None:
        self.weight.check("qweight", self.x)
        check_fp8_layout(self.x, self.weight.packed.layout)


class RoundingArgs(_Rounds):
    """The arguments of `gemm_in_fp8`."""

    __slots__ = ()


class RoundingGroupedArgs(_Rounds, GroupedArgs):
    """The arguments of a `RoundingProduct`."""

    __slots__ = ()


def gemm_in_fp8(
    x: torch.Tensor, w: QuantizedWeight, *, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """`gemm` of `quantize_activations(x)` and of w, bit for bit: one call, one operator under torch.compile.

    The arguments and the result are those of `gemm`, and so is torch.autocast. Gradients of x are those of x @ w, as if
    x had not been rounded ("straight through").

    Raises what `gemm` raises, and ValueError on CUDA for a weight in another layout than "tiled_fp8".
    """
    args = RoundingArgs(autocast(x, w._scales), w, bias, activation)
    if is_compiling() or needs_dispatch(args) or any(map(is_virtual, args.tensors().values())):
        return dispatch(args, _operator)
    return _compute(args)


def _compute(args: GemmArgs) -> torch.Tensor:
    x, w = args.x, args.weight
    if x.dtype != w._scales.dtype:
        args.check()  # raises: what follows takes any dtype
    x8, x_scales = quantize_activations(x)
    args8 = Fp8Args(x8, w, x_scales, args.bias, args.activation)
    args8.invariant = args.invariant
    return gemm_fp8(args8)


@torch.library.custom_op("weightonly::gemm_in_fp8", mutates_args=(), schema=OP_SCHEMA)
def _operator(*operands: Any) -> torch.Tensor:
    return _compute(RoundingArgs.from_op(*operands))


@_operator.register_fake
def _result_of_op(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return RoundingArgs.from_op(x, *rest).new_result()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    autograd.setup_context(ctx, inputs, output)
    ctx.product = torch.ops.weightonly.gemm_in_fp8


_operator.register_autograd(autograd.backward, setup_context=_setup_context)


@dataclass(eq=False)  # PyTorch 2.8 does not trace frozen ones
class RoundingProduct:
    """`grouped_gemm` of `quantize_activations(x)`, as `Multiply` has it; gradients of x are those of x @ w."""

    product: Product

    def __call__(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        args = RoundingGroupedArgs(x, self.product.operand, offs, self.product.bias, has_rest=True)
        return dispatch(args, _grouped_op) if needs_dispatch(args) else _compute_grouped(args)


def _compute_grouped(args: GroupedArgs) -> torch.Tensor:
    if args.x.dtype != args.weight._scales.dtype:
        args.check()  # raises: what follows takes any dtype
    x8, x_scales = quantize_activations(args.x)
    args8 = Fp8GroupedArgs(x8, args.weight, x_scales, args.offs, args.bias, args.activation, has_rest=args.has_rest)
    args8.invariant = args.invariant
    with torch.no_grad():
        return grouped_fp8(args8)


@torch.library.custom_op("weightonly::grouped_gemm_in_fp8", mutates_args=(), schema=GROUPED_OP_SCHEMA)
def _grouped_op(*operands: Any) -> torch.Tensor:
    return _compute_grouped(RoundingGroupedArgs.from_op(*operands))


@_grouped_op.register_fake
def _result_of_grouped_op(x: torch.Tensor, data: torch.Tensor, k: int, n: int, *rest: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], n))


_grouped_op.register_autograd(autograd.backward, setup_context=autograd.setup_context)
