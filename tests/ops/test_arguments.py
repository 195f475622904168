"""Bad arguments of `gemm`: each error names the argument, what was expected and what came, before any work.

And what looks unusual but is fine: views, leading dimensions, no rows.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.ops.gemm_arguments import (
    GROUPS,
    Arguments,
    Change,
    K,
    M,
    N,
    convert,
    expected,
    good,
    groups_of,
    integers,
    overlapping,
    setting,
    zeros_of,
)
from tests.ops.stand_in import Module
from torch.utils.flop_counter import FlopCounterMode

import weightonly as wo
from weightonly.cpu import library
from weightonly.heuristics.configs import CONFIGS
from weightonly.ops.around_experts import sort_by_expert
from weightonly.plan.cpu import check_sizes


def case(id: str, change: Change, error: type[Exception], message: str) -> Any:
    return pytest.param(change, error, message, id=id)


def on_meta(qweight: wo.PackedWeight) -> wo.PackedWeight:
    return wo.PackedWeight(qweight.data.to("meta"), qweight.k, qweight.n, qweight.format, qweight.layout)


TYPES_AND_DTYPES = [
    case("x array", lambda a: a.update(x=a["x"].numpy()), TypeError, "x: expected a tensor, got ndarray"),
    case("x none", setting(x=None), TypeError, "x: expected a tensor, got NoneType"),
    case("qweight tensor", lambda a: a.update(qweight=a["qweight"].data), TypeError,
         "qweight: expected the PackedWeight that weightonly.preprocess(q, bits) returns, got Tensor; "
         "call preprocess once"),
    case("qweight none", setting(qweight=None), TypeError, "qweight: expected the PackedWeight"),
    case("scales list", lambda a: a.update(scales=a["scales"].tolist()), TypeError,
         "scales: expected a tensor, got list"),
    case("zeros number", setting(zeros=8.0), TypeError, "zeros: expected a tensor, got float"),
    case("bias tuple", setting(bias=(0.0,) * N), TypeError, "bias: expected a tensor, got tuple"),
    case("out list", setting(out=[]), TypeError, "out: expected a tensor, got list"),
    case("x float64", convert("x", torch.float64), TypeError,
         "x: expected dtype float16, bfloat16, float32 on cpu, got torch.float64"),
    case("x int8", convert("x", torch.int8), TypeError,
         "x: expected dtype float16, bfloat16, float32 on cpu, got torch.int8"),
    case("x other than the rest", convert("x", torch.bfloat16), TypeError,
         "scales: expected dtype torch.bfloat16 as x has, got torch.float16"),
    case("scales float32", convert("scales", torch.float32), TypeError,
         "scales: expected dtype torch.float16 as x has, got torch.float32"),
    case("zeros int8", convert("zeros", torch.int8), TypeError,
         "zeros: expected dtype torch.float16 as x has, got torch.int8"),
    case("bias bfloat16", convert("bias", torch.bfloat16), TypeError,
         "bias: expected dtype torch.float16 as x has, got torch.bfloat16"),
    case("out float32", convert("out", torch.float32), TypeError,
         "out: expected dtype torch.float16 as x has, got torch.float32"),
    case("x sparse", lambda a: a.update(x=a["x"].to_sparse()), TypeError,
         "x: expected a dense tensor, got one with layout torch.sparse_coo"),
    case("out sparse", lambda a: a.update(out=torch.zeros(M, N).half().to_sparse()), TypeError,
         "out: expected a dense tensor, got one with layout torch.sparse_coo"),
]  # fmt: skip

DEVICES = [
    case("x", convert("x", "meta"), ValueError, "x: expected a CPU or CUDA tensor, got one on meta"),
    case("qweight", lambda a: a.update(qweight=on_meta(a["qweight"])), ValueError,
         "qweight: expected on cpu as x is, got meta"),
    *(case(name, convert(name, "meta"), ValueError, f"{name}: expected on cpu as x is, got meta")
      for name in ("scales", "zeros", "bias", "out")),
]  # fmt: skip


def codes() -> wo.PackedWeight:
    return wo.preprocess(torch.zeros(K, N, dtype=torch.uint8), format="nf4", layout="interleaved")


SHAPES = [
    case("x scalar", zeros_of("x"), ValueError, "x: expected shape [..., K], got a scalar"),
    case("x K", zeros_of("x", M, K + 8), ValueError,
         "x: expected [..., K] with K = 192 as in qweight, got shape [3, 200]"),
    case("x transposed", zeros_of("x", K, M), ValueError,
         "x: expected [..., K] with K = 192 as in qweight, got shape [192, 3]"),
    case("x vector", zeros_of("x", K - 1), ValueError,
         "x: expected [..., K] with K = 192 as in qweight, got shape [191]"),
    case("scales rank 1", zeros_of("scales", N), ValueError,
         "scales: expected shape [K / group_size, N = 40], got [40]"),
    case("scales rank 3", zeros_of("scales", 1, GROUPS, N), ValueError,
         "scales: expected shape [K / group_size, N = 40], got [1, 3, 40]"),
    case("scales N", zeros_of("scales", GROUPS, N - 1), ValueError,
         "scales: expected shape [K / group_size, N = 40], got [3, 39]"),
    case("scales transposed", zeros_of("scales", N, GROUPS), ValueError,
         "scales: expected shape [K / group_size, N = 40], got [40, 3]"),
    case("scales of the padded N", zeros_of("scales", GROUPS, 64), ValueError,
         "scales: expected shape [K / group_size, N = 40], got [3, 64]"),
    case("scales rows", zeros_of("scales", 5, N), ValueError,
         "scales: expected K / group_size rows, a divisor of K = 192, got shape [5, 40]"),
    case("scales no rows", zeros_of("scales", 0, N), ValueError,
         "scales: expected K / group_size rows, a divisor of K = 192, got shape [0, 40]"),
    case("zeros of codes", lambda a: a.update(qweight=codes()), ValueError,
         "zeros: expected None for a weight of format nf4, got Tensor"),
    case("zeros rank", zeros_of("zeros", N), ValueError,
         "zeros: expected shape [K / group_size, N = 40], got [40]"),
    case("zeros rows", zeros_of("zeros", 1, N), ValueError,
         "zeros: expected shape [3, 40] as scales, got [1, 40]"),
    case("bias length", zeros_of("bias", N + 1), ValueError, "bias: expected shape [N] = [40], got [41]"),
    case("bias rank", zeros_of("bias", 1, N), ValueError, "bias: expected shape [N] = [40], got [1, 40]"),
    case("out rows", zeros_of("out", M + 1, N), ValueError, "out: expected shape [3, 40], got [4, 40]"),
    case("out rank", zeros_of("out", 1, M, N), ValueError, "out: expected shape [3, 40], got [1, 3, 40]"),
    case("out of one row", zeros_of("out", N), ValueError, "out: expected shape [3, 40], got [40]"),
]  # fmt: skip

GROUP_SIZES = [
    case(str(size), groups_of(size), ValueError,
         f"scales: shape [{K // size}, 40] means a group size that is not supported: "
         f"group_size must be -1 (per channel), 16, 32, a multiple of 64, or K = 192; got {size}")
    for size in (1, 8, 48, 96)
]  # fmt: skip

ACTIVATIONS = [
    case(repr(name), setting(activation=name), ValueError,
         f"activation: expected one of None, 'identity', 'relu', 'gelu', 'silu', got {name!r}")
    for name in ("tanh", "ReLU", "", ["relu"], 1, np.array(["relu"]), np.array(["relu", "gelu"]))
]  # fmt: skip


def overlapping_x(a: Arguments) -> None:
    memory = torch.zeros(M, K + N - 1, dtype=torch.float16)
    a.update(x=memory[:, :K], out=memory[:, K - 1 :])


def overlapping_x_from_the_left(a: Arguments) -> None:
    memory = torch.zeros(M, N + K - 1, dtype=torch.float16)
    a.update(x=memory[:, N - 1 :], out=memory[:, :N])


def overlapping_rows_of_x(a: Arguments) -> None:
    """`out` begins in the row after the one in which x ends, but at another distance between rows."""
    memory = torch.zeros(2 * M * K, dtype=torch.float16)
    a.update(x=memory.as_strided((M, K), (2 * K, 1)), out=memory.as_strided((M, N), (K, 1), K))


def overlapping_weight(a: Arguments) -> None:
    a.update(out=a["qweight"].data.view(torch.float16)[: M * N].view(M, N))


def of_three_dimensions(a: Arguments) -> None:
    a.update(x=a["x"][None], out=torch.zeros(1, M, 2 * N, dtype=torch.float16)[..., :N])


OUT = [
    case("transposed", lambda a: a.update(out=torch.zeros(N, M).half().t()), ValueError,
         "out: expected elements of a row next to each other, got strides (1, 3)"),
    case("every other column", lambda a: a.update(out=torch.zeros(M, 2 * N).half()[:, ::2]), ValueError,
         "out: expected elements of a row next to each other, got strides (80, 2)"),
    case("expanded", lambda a: a.update(out=torch.zeros(1, N).half().expand(M, N)), ValueError,
         "out: expected rows that do not overlap, got strides (0, 1)"),
    case("overlapping rows", lambda a: a.update(out=torch.zeros(4 * N).half().as_strided((M, N), (N - 1, 1))),
         ValueError, "out: expected rows that do not overlap, got strides (39, 1)"),
    case("strided rows of three dimensions", of_three_dimensions, ValueError,
         "out: expected contiguous beyond two dimensions, got strides (240, 80, 1)"),
    *(case(f"overlaps {name}", change, ValueError,
           f"out: expected memory of its own, got a tensor that overlaps {name.split()[0]}")
      for name, change in {
          "x": overlapping_x,
          "x from the left": overlapping_x_from_the_left,
          "x at another distance": overlapping_rows_of_x,
          "qweight": overlapping_weight,
          "scales": overlapping("scales"),
          "zeros": overlapping("zeros"),
          "bias": overlapping("bias"),
      }.items()),
]  # fmt: skip

CONFIG = [
    case("on the CPU", setting(config=CONFIGS[0]), ValueError,
         f"config: expected None for CPU tensors, which no kernel computes, got {CONFIGS[0]}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [*TYPES_AND_DTYPES, *DEVICES, *SHAPES, *GROUP_SIZES, *ACTIVATIONS, *OUT, *CONFIG],
)
def test_refused_before_any_work(change: Change, error: type[Exception], message: str) -> None:
    a = good()
    out = a["out"]
    change(a)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        wo.gemm(**a)
    assert out.isnan().all()


def test_what_was_good_does_not_hide_what_is_bad() -> None:
    """An array is equal to a name in its own way: the plan of the call before is not taken for it."""
    a = good()
    wo.gemm(**a)
    for activation in (np.array(["relu"]), np.array(["relu", "gelu"])):
        a["activation"] = activation
        with pytest.raises(ValueError, match="activation: expected one of"):
            wo.gemm(**a)


def test_the_arguments_of_these_tests_are_good() -> None:
    a = good()
    assert wo.gemm(**a) is a["out"]
    assert torch.equal(a["out"], expected(a["x"], a))


def test_positional_zeros_are_refused() -> None:
    a = good()
    with pytest.raises(TypeError, match="positional"):
        wo.gemm(a["x"], a["qweight"], a["scales"], a["zeros"])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(zeros_of("out", M + 1, N), "out: expected shape [3, 40], got [4, 40]", id="out rows"),
        pytest.param(zeros_of("out", 2, M, N), "out: expected shape [3, 40], got [2, 3, 40]", id="out rank"),
        pytest.param(zeros_of("scales", 5, N), "scales: expected K / group_size rows", id="scales"),
        pytest.param(setting(config=CONFIGS[0]), "config: expected None under torch.compile", id="config"),
    ],
)
def test_refused_where_autograd_records(change: Change, message: str) -> None:
    """The way through PyTorch's dispatcher, on which `out` of another shape would be broadcast to."""
    a = good()
    change(a)
    a["x"].requires_grad_()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        wo.gemm(**a)


# --- unusual, and fine ---


VIEWS = {
    "strided rows": lambda: integers(M, K + 8)[:, :K],
    "rows at an odd offset": lambda: integers(M, K + 7)[:, 3 : K + 3],
    "every other row": lambda: integers(2 * M, K)[::2],
    "every other column": lambda: integers(M, 2 * K)[:, ::2],
    "transposed": lambda: integers(K, M).t(),
    "expanded": lambda: integers(1, K).expand(M, K),
    "expanded along K": lambda: integers(M, 1).expand(M, K),
    "a column": lambda: integers(K, M)[:, 1],
    "permuted batch": lambda: integers(2, 3, K).transpose(0, 1),
    "batch of a larger one": lambda: integers(4, 5, K + 1)[1:3, ::2, 1:],
}


@pytest.mark.parametrize("view", VIEWS)
def test_x_may_be_a_view(view: str) -> None:
    x, a = VIEWS[view](), good()
    del a["x"], a["out"]
    before = x.clone()
    y = wo.gemm(x, **a)
    assert y.is_contiguous()
    assert torch.equal(y, expected(x, a))
    assert torch.equal(x, before)


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (1, 1, 4), (0,), (2, 0), (0, 3)], ids=str)
def test_leading_dimensions_are_kept(lead: tuple[int, ...]) -> None:
    a = good()
    del a["x"], a["out"]
    x = integers(*lead, K)
    y = wo.gemm(x, **a)
    assert y.shape == (*lead, N)
    assert y.dtype == x.dtype
    assert torch.equal(y, expected(x, a))
    out = torch.full_like(y, float("nan"))
    assert wo.gemm(x, **a, out=out) is out
    assert torch.equal(out, y)


def test_out_may_be_the_columns_beside_x() -> None:
    """One buffer for input and result; only the result's columns change."""
    a = good()
    memory = integers(M, 8 + K + N + 8)
    before = memory.clone()
    x = memory[:, 8 : 8 + K]
    a.update(x=x, out=memory[:, 8 + K : 8 + K + N])
    y = wo.gemm(**a)
    assert torch.equal(y, expected(x, a))
    memory[:, 8 + K : 8 + K + N] = before[:, 8 + K : 8 + K + N]
    assert torch.equal(memory, before)
    a.update(x=memory[:, -K:], out=memory[:, :N])
    assert torch.equal(wo.gemm(**a), expected(memory[:, -K:], a))


PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "columns of a larger one": lambda t: torch.cat([t, t], -1)[..., t.shape[-1] :],
    "every other column": lambda t: torch.stack([t, t], -1)[..., 0],
    "every other row": lambda t: t.repeat_interleave(2, 0)[::2],
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", ["cpu", "tiled", "interleaved", "row_major"])
@pytest.mark.parametrize("zeros", PLACES)
@pytest.mark.parametrize("scales", PLACES)
def test_scales_and_zeros_have_strides_of_their_own(scales: str, zeros: str, layout: str) -> None:
    a = good(layout=layout)
    a.update(scales=PLACES[scales](a["scales"]), zeros=PLACES[zeros](a["zeros"]))
    want = expected(a["x"], a | {"scales": a["scales"].clone(), "zeros": a["zeros"].clone()})
    assert torch.equal(wo.gemm(**a), want)


@pytest.mark.parametrize("place", ["columns of a larger one", "every other column", "expanded"])
def test_the_bias_may_be_a_view(place: str) -> None:
    a = good()
    a["bias"] = PLACES[place](a["bias"])
    assert torch.equal(wo.gemm(**a), expected(a["x"], a))


# --- sizes that 32 bits do not hold ---


def test_rows_beyond_32_bits_are_refused() -> None:
    """They were cut, and five rows computed. An expanded x takes no memory."""
    if library.backend().library is None:
        pytest.skip("PyTorch counts them")
    qweight, scales = wo.preprocess(torch.ones(1, 1, dtype=torch.int8)), torch.ones(1, 1).half()
    x = torch.ones(1, 1).half().expand((1 << 31) + 5, 1)
    with pytest.raises(ValueError, match=r"^x: expected M of at most \d+ on a CPU, got 2147483653$"):
        wo.gemm(x, qweight, scales)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 1 << 30, 64), "qweight: expected N of at most"),
        ((1, 64, (1 << 28) + 1), "qweight: expected K of at most"),
    ],
    ids=["N", "K"],
)
def test_weights_beyond_32_bits_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check_sizes(*sizes)


def test_choices_of_experts_beyond_32_bits_are_refused() -> None:
    ids = torch.zeros(1, 1, dtype=torch.int64).expand((1 << 31) + 5, 1)
    with pytest.raises(ValueError, match=r"^topk_ids: expected at most 2147483647 choices, got 2147483653$"):
        sort_by_expert(torch.ones(1, 1).expand((1 << 31) + 5, 1), ids, 2)


# --- autograd and `out` ---


def a_parameter(out: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(out)


def of_a_graph(out: torch.Tensor) -> torch.Tensor:
    return out.requires_grad_() * 1


@pytest.mark.parametrize("is_warm", [False, True], ids=["first call", "second call"])
@pytest.mark.parametrize("make", [a_parameter, of_a_graph, torch.Tensor.requires_grad_])
def test_out_requires_no_gradient(make: Callable[[torch.Tensor], torch.Tensor], is_warm: bool) -> None:
    a = good()
    if is_warm:
        wo.gemm(**a)
    before = a["out"].clone()
    a["out"] = make(a["out"])
    with pytest.raises(ValueError, match=r"^out: expected a tensor that requires no gradient"):
        wo.gemm(**a)
    assert torch.equal(a["out"].nan_to_num(), before.nan_to_num())


def test_autograd_knows_what_a_kernel_writes(module: Module) -> None:
    a = good(layout="tiled")
    for _ in range(2):
        version = a["out"]._version
        wo.gemm(**a)
        assert a["out"]._version > version
    assert len(module.launches) == 2


@pytest.mark.parametrize("is_watched", [False, True], ids=["eager", "under a mode"])
def test_a_saved_tensor_that_out_overwrites_is_an_error(is_watched: bool) -> None:
    a = good()
    a["out"].zero_()
    for _ in range(2):  # without a plan, and with one
        w = torch.ones(M, N).half().requires_grad_()
        y = (w * a["out"]).sum()
        with FlopCounterMode(display=False) if is_watched else contextlib.nullcontext():
            wo.gemm(**a)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_out_may_be_a_tensor_of_inference_mode() -> None:
    a = good()
    with torch.inference_mode():
        a["out"] = torch.empty(M, N).half()
        assert torch.equal(wo.gemm(**a), expected(a["x"], a))


def test_out_of_grouped_gemm_is_autograds_as_well() -> None:
    a = good()
    stack = wo.preprocess(torch.stack([wo.unpack(a["qweight"])] * 2))
    offs, scales = torch.tensor([1, M], dtype=torch.int32), torch.stack([a["scales"]] * 2)
    out, w = torch.ones(M, N).half(), torch.ones(M, N).half().requires_grad_()
    y = (w * out).sum()
    wo.grouped_gemm(a["x"], stack, scales, offs, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with pytest.raises(ValueError, match=r"^out: expected a tensor that requires no gradient"):
        wo.grouped_gemm(a["x"], stack, scales, offs, out=out.requires_grad_())
