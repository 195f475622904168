"""gemm_in_fp8: x in 16 bits by kernels that take x in E4M3, the product of layers with activations="fp8"."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from . import autograd
from .args import OP_SCHEMA, GemmArgs
from .fp8_args import check_fp8_layout
from .gemm import autocast, dispatch, gemm, needs_dispatch
from .ops.quantize_activations import quantize_activations
from .plain import is_virtual
from .weight import QuantizedWeight


class RoundingArgs(GemmArgs):
    """The arguments of `gemm_in_fp8`."""

    __slots__ = ()

    def check_weight(self) -> None:
        self.weight.check("qweight", self.x)
        check_fp8_layout(self.x, self.weight.packed.layout)


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
    return gemm(x8, w, bias=args.bias, activation=args.activation, x_scales=x_scales)


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
