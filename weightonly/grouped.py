"""grouped_gemm: one product for the rows of many experts; grouped_gradient.py has its gradients.

From Ampere on it is one launch. Elsewhere each expert that has rows is a `gemm` of its own, and the host reads how many
each has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from . import autograd
from .args import OP_SCHEMA, WEIGHT_SCHEMA, GroupedArgs, weight_to_op
from .fp8_args import Fp8GroupedArgs
from .gemm import autocast, compute, differentiable, dispatch, needs_dispatch
from .heuristics import KernelConfig
from .packed import PackedWeight
from .plain import PLAIN, are_plain, has_memory
from .plan import cache
from .plan.base import Plan
from .plan.grouped import make_grouped_plan
from .weight import LooseWeight, QuantizedWeight, weight_of


def grouped_gemm(
    x: torch.Tensor,
    qweight: PackedWeight | QuantizedWeight,
    scales: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    *,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    config: KernelConfig | None = None,
    perm: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`y[t] = act(x[t] @ w[e] + bias[e])`, e being the expert of row t: rows are sorted by expert.

    Under torch.autocast x is cast as `gemm` casts it.

    On a GPU one launch computes up to 1024 experts, packed in layout "tiled" (compute capability 9.0), or up to 512 in
    layout "interleaved" (8.0 and later) and in groups of 32 and more. The host does not read `offs`: the call can be
    captured in a CUDA graph, with ends that change from replay to replay. Ends that are no ascending numbers up to T
    are no error then: nothing is written outside of the result, and its rows after the last end are zeros. An
    activation is applied to the rounded product.

    Otherwise each expert that has rows is one `gemm`, on a GPU too, and the host waits for `offs`. Row t is then bit
    for bit what `gemm` of all rows of its expert gives. torch.compile can trace both.

    Gradients: of x and bias, as `gemm` has them.

    Args:
        x: [T, K] fp16 or bf16 (fp32 too on the CPU), the rows of expert 0 first, then the rows of expert 1, ...
        qweight: what `preprocess` returned for q [E, K, N], on the device of x; or a QuantizedWeight of it, which has
            scales, zeros and perm: `grouped_gemm(x, w, offs=offs)` gives the same bits.
        scales: [E, K / g, N], dtype of x; per channel [E, 1, N]. g is 16, 32, a multiple of 64, or K.
        offs: int32 [E] on the device of x: the rows of expert e end before row offs[e], so expert e has the rows
            `offs[e - 1] .. offs[e] - 1`. Ascending; the last one is T. An expert may have no rows.
        zeros: None (symmetric) or like scales, in units of q. None for a codebook.
        bias: [E, N], dtype of x.
        activation: None or "identity", "relu", "gelu" (the erf form), "silu".
        out: [T, N], the result's tensor, if it is there already; must not overlap an input.
        config: the kernel to run, one of `grouped_kernels()` (CUDA only); default: what suits T rows of E experts.
        perm: [E, K] int32 or int64, act-order: perm[e] is the order of expert e, see `gemm`.
        x_scales: fp32 [T], for an x of float8_e4m3fn, as `gemm` has it: the result and bias have the dtype of scales,
            and there are no gradients. `config` is one of `grouped_fp8_kernels()`.

    Returns:
        [T, N] in the dtype of x; T = 0 gives an empty result. Results are bit-identical from run to run.

    Raises:
        TypeError: wrong types and dtypes, and operands beside a QuantizedWeight, which has them.
        ValueError: wrong shapes, devices, group sizes, activations and configurations, `offs` that are not ascending or
            end at another row than T, and a weight that is not stacked.
        RuntimeError: where no kernel was built for the device.

    Examples:
        >>> q = torch.randint(-8, 8, (4, 512, 768), dtype=torch.int8)  # of 4 experts
        >>> w = wo.QuantizedWeight(wo.preprocess(q), torch.rand(4, 4, 768).half())
        >>> offs = torch.tensor([3, 3, 7, 10], dtype=torch.int32)  # they have 3, 0, 4 and 3 rows
        >>> wo.grouped_gemm(torch.randn(10, 512).half(), w, offs=offs).shape
        torch.Size([10, 768])
    """
    weight = weight_of(qweight, scales, zeros, perm)
    ends: Any = offs  # the checks find that it is None
    if x_scales is not None:
        return grouped_fp8(Fp8GroupedArgs(x, weight, x_scales, ends, bias, activation, out, config))
    return grouped(GroupedArgs(autocast(x, weight._scales), weight, ends, bias, activation, out, config))


def rows_of(offs: torch.Tensor, total: int, has_rest: bool = False) -> list[tuple[int, int, int]]:
    """(expert, begin, end) of each expert that has some of `total` rows. Waits for `offs`.

    Raises ValueError for ends that do not ascend from 0 to `total`; with `has_rest` the last may be before it.
    """
    rows, begin = [], 0
    for expert, end in enumerate(offs.tolist()):
        if end < begin:
            raise ValueError(f"offs: expected ascending ends of rows, got {end} after {begin} for expert {expert}")
        if end > begin:
            rows.append((expert, begin, end))
        begin = end
    if begin > total or (begin < total and not has_rest):
        raise ValueError(f"offs: expected T = {total}, the rows of x, as the last end, got {begin}")
    return rows


def grouped(args: GroupedArgs) -> torch.Tensor:
    """`grouped_gemm` of arguments in one object."""
    return differentiable(args, _grouped_op, _compute) if needs_dispatch(args) else _compute(args)


def grouped_fp8(args: Fp8GroupedArgs) -> torch.Tensor:
    """The same of x in 8 bits."""
    if torch.is_grad_enabled():
        args.check_no_gradient()
    return dispatch(args, _fp8_op) if needs_dispatch(args) else _compute(args)


@torch.no_grad()
def _compute(args: GroupedArgs) -> torch.Tensor:
    plan = cache.plan_of(args, _make_plan)
    if not all(map(has_memory, args.of_each_call())):
        args.check_memory()
    if args.out is not None:
        plan.check_out(args)
    return plan.run(args)


def _make_plan(args: GroupedArgs) -> Plan:
    args.check()
    return make_grouped_plan(args) or ExpertsPlan(args)


@dataclass(eq=False)  # PyTorch 2.8 does not trace frozen ones
class Product:
    """`grouped_gemm` with these weights, as `Multiply` has it."""

    SCHEMA: ClassVar[str] = f"{WEIGHT_SCHEMA}, Tensor? perm, int experts, Tensor? bias"
    """What an operator of PyTorch's dispatcher is given of it: see `to_op`."""

    operand: QuantizedWeight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return grouped(GroupedArgs(x, self.operand, offs, self.bias, has_rest=True))

    def to_op(self) -> tuple[Any, ...]:
        """The arguments of SCHEMA."""
        return *weight_to_op(self.operand), self.operand._perm, self.operand.experts, self.bias

    @classmethod
    def from_op(cls, *operands: Any) -> Product:
        """The inverse of `to_op`."""
        *fields, scales, zeros, perm, experts, bias = operands
        return cls(LooseWeight(PackedWeight(*fields, experts=experts), scales, zeros, perm), bias)

    @property
    def kind(self) -> tuple[object, ...]:
        """What its checks and a plan depend on. Raises TypeError for subclasses of torch.Tensor, which have none."""
        return self.operand.kind, None if (bias := self.bias) is None else (
            bias.shape,
            bias.stride(),
            bias.dtype,
            bias.device,
            bias.is_neg(),
        )

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Of the weight, scales, zeros and bias, 0 for None."""
        w, bias = self.operand, self.bias
        zeros = 0 if w._zeros is None else w._zeros.data_ptr()
        return w._packed._data.data_ptr(), w._scales.data_ptr(), zeros, 0 if bias is None else bias.data_ptr()

    def holds(self) -> bool:
        """Whether kernels may read all of it by its addresses. Storages are looked at once for a set of addresses, and
        `kind` is of the tensors which are there. Raises TypeError where there is no kind."""
        w = self.operand
        tensors = (w._packed._data, w._scales, w._zeros, self.bias)
        if any(t is not None and type(t) not in PLAIN for t in tensors):
            return False
        addresses = self.addresses
        if (*addresses, w._kind) != w._packed._held:
            if not are_plain(*tensors):
                return False
            w.look_again()
            w._packed._held = (*addresses, w._kind)
        return not (addresses[1] | addresses[2]) % 16


class ExpertsPlan(Plan):
    """A `gemm` for each expert that has rows, which the host waits for."""

    def run(self, args: Any) -> torch.Tensor:
        if args.out is None:
            args.out = args.new_result()
        rows = rows_of(args.offs, args.x.shape[0], args.has_rest)
        for expert, begin, end in rows:
            compute(args.of_expert(expert, begin, end), checks_out=False)
        args.out[rows[-1][2] if rows else 0 :] = 0
        return args.out


GROUPED_OP_SCHEMA = OP_SCHEMA.replace(") ->", ", int experts, Tensor offs, bool has_rest) ->")
"""See `GroupedArgs.to_op`."""


@torch.library.custom_op("weightonly::grouped_gemm", mutates_args=(), schema=GROUPED_OP_SCHEMA)
def _grouped_op(*operands: Any) -> torch.Tensor:
    return _compute(GroupedArgs.from_op(*operands))


@_grouped_op.register_fake
def _result_of_op(x: torch.Tensor, data: torch.Tensor, k: int, n: int, *rest: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], n))


_grouped_op.register_autograd(autograd.backward, setup_context=autograd.setup_context)


@torch.library.custom_op(
    "weightonly::grouped_gemm_fp8", mutates_args=(), schema=GROUPED_OP_SCHEMA.replace(") ->", ", Tensor x_scales) ->")
)
def _fp8_op(*operands: Any) -> torch.Tensor:
    return _compute(Fp8GroupedArgs.from_op(*operands))


@_fp8_op.register_fake
def _result_of_fp8_op(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return Fp8GroupedArgs.from_op(x, *rest).new_result()
