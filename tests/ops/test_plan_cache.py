"""Which calls share a plan: eager ones, compiled ones, layers of one shape; and which do not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.ops.gemm_arguments import Arguments, Change, K, M, N, convert, expected, good, integers, setting
from tests.ops.stand_in import Module

import weightonly as wo
from weightonly import reference
from weightonly.args import GemmArgs
from weightonly.heuristics.configs import CONFIGS
from weightonly.plan import cache, tuned
from weightonly.plan.base import Plan

GEMM = sys.modules["weightonly.gemm"]  # `weightonly.gemm` is the function


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """Every plan that is made, in order."""
    plans: list[Plan] = []
    make = GEMM.make_plan

    def counted(args: GemmArgs) -> Plan:
        plans.append(make(args))
        return plans[-1]

    monkeypatch.setattr(GEMM, "make_plan", counted)
    yield plans
    torch.compiler.reset()


def calls_of(monkeypatch: pytest.MonkeyPatch, method: str) -> list[GemmArgs]:
    """The arguments with which a method of GemmArgs is called from now on."""
    calls: list[GemmArgs] = []
    check = getattr(GemmArgs, method)

    def counted(args: GemmArgs) -> None:
        calls.append(args)
        check(args)

    monkeypatch.setattr(GemmArgs, method, counted)
    return calls


def copied(qweight: wo.PackedWeight) -> wo.PackedWeight:
    """A weight of the same kind in memory of its own."""
    return wo.PackedWeight(qweight.data.clone(), **qweight.fields)


# --- one plan ----------------------------------------------------------------------------------------------


def test_calls_with_new_tensors_make_one_plan(made: list[Plan]) -> None:
    a = good()
    for _ in range(5):
        a = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in a.items()}
        a["qweight"] = copied(a["qweight"])
        assert torch.equal(wo.gemm(**a), expected(a["x"], a))
    assert len(made) == 1


@pytest.mark.parametrize("format", ["int4", "nf4", "code4"])
def test_a_compiled_function_makes_one_plan(made: list[Plan], format: str) -> None:
    code = [i / 16 for i in range(16)] if format == "code4" else None
    q = torch.arange(K * N).view(K, N).remainder(8).to(torch.int8)
    qweight = wo.preprocess(q, format=format, code=code, layout="tiled")
    scales = torch.ones(3, N).half()
    function = torch.compile(lambda x: wo.gemm(x, qweight, scales) + 1, fullgraph=True, backend="aot_eager")
    x = integers(M, K)
    want = reference.gemm(x, qweight, scales) + 1
    for _ in range(100):
        assert torch.equal(function(x), want)
    assert len(made) == 1
    wo.gemm(x, qweight, scales)
    wo.gemm(x.clone().requires_grad_(), qweight, scales)
    assert len(made) == 1, "eager calls find the compiled function's"


def test_a_compiled_function_launches_kernels_by_one_plan(made: list[Plan], module: Module) -> None:
    a = good(layout="tiled")
    del a["out"]
    x = a.pop("x")
    function = torch.compile(lambda x: wo.gemm(x, **a), fullgraph=True, backend="aot_eager")
    for _ in range(100):
        function(x)
    assert (len(made), module.plans, len(module.launches)) == (1, 1, 100)


def test_the_operator_is_what_its_schema_says() -> None:
    """PyTorch's own test of an operator: nothing is mutated, and shapes and dtypes are those of the fake."""
    a = good()
    w = wo.QuantizedWeight(a["qweight"], a["scales"], a["zeros"], torch.arange(K))
    torch.library.opcheck(torch.ops.weightonly.gemm.default, GemmArgs(a["x"], w, a["bias"], "relu").to_op())


def test_checks_run_once(made: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = calls_of(monkeypatch, "check")
    a = good()
    for _ in range(10):
        wo.gemm(**a)
    assert len(checks) == len(made) == 1


# --- a plan of its own -------------------------------------------------------------------------------------


def packed_as(layout: str) -> Change:
    return lambda a: a.update(qweight=wo.preprocess(wo.unpack(a["qweight"]), layout=layout))


def bits_8(a: Arguments) -> None:
    a["qweight"] = wo.preprocess(wo.unpack(a["qweight"]), bits=8, layout="interleaved")


def per_channel(a: Arguments) -> None:
    a.update(scales=a["scales"][:1].clone(), zeros=a["zeros"][:1].clone())


OTHERS: dict[str, Change] = {
    "rows": lambda a: a.update(x=integers(M + 1, K), out=None),
    "dimensions": lambda a: a.update(x=a["x"][None], out=None),
    "strides of x": lambda a: a.update(x=integers(M, K + 8)[:, :K]),
    "layout": packed_as("tiled"),
    "format": bits_8,
    "groups": per_channel,
    "no zeros": setting(zeros=None),
    "no bias": setting(bias=None),
    "strided scales": lambda a: a.update(scales=a["scales"].t().contiguous().t()),
    "strided zeros": lambda a: a.update(zeros=a["zeros"].t().contiguous().t()),
    "strided bias": lambda a: a.update(bias=torch.stack([a["bias"], a["bias"]], 1)[:, 0]),
    "perm": setting(perm=torch.arange(K)),
    "activation": setting(activation="silu"),
    "identity": setting(activation=None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_plan_depends_on(made: list[Plan], name: str) -> None:
    a = good()
    wo.gemm(**a)
    OTHERS[name](a)
    for _ in range(2):
        wo.gemm(**a)
    assert len(made) == 2


def test_dtypes_have_plans_of_their_own(made: list[Plan]) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32) * 2:
        a = good()
        for name in ("x", "scales", "zeros", "bias", "out"):
            convert(name, dtype)(a)
        wo.gemm(**a)
    assert len(made) == 3


def test_codebooks_have_plans_of_their_own(made: list[Plan]) -> None:
    q = torch.ones(K, N, dtype=torch.int8)
    x, scales = torch.ones(1, K), torch.ones(1, N)
    for first in (0.0, 0.5, 0.0):
        code = [first, *range(1, 16)]
        wo.gemm(x, wo.preprocess(q, format="code4", code=code), scales)
    assert len(made) == 2


def test_configurations_have_plans_of_their_own(module: Module) -> None:
    a = good(layout="tiled")
    configs = [c for c in CONFIGS if c.family == "gemm_sm90" and "int4" in c.formats][:2]
    for config in (*configs, *configs, configs[0].with_split_k(2)):
        wo.gemm(**a, config=config)
    assert module.plans == 3


# --- what is not hidden by a plan --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "scales", "zeros", "bias"])
def test_tensors_without_memory_after_a_good_call(name: str) -> None:
    """A tensor on "meta" has the device number of the CPU."""
    a = good()
    wo.gemm(**a)
    convert(name, "meta")(a)
    with pytest.raises(ValueError, match=f"^{name}: expected .* meta$"):
        wo.gemm(**a)


def test_a_weight_without_memory_after_a_good_call() -> None:
    a = good()
    wo.gemm(**a)
    a["qweight"] = a["qweight"].to("meta")
    with pytest.raises(ValueError, match=r"^qweight: expected on cpu as x is, got meta$"):
        wo.gemm(**a)


def moved(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The same numbers in other memory, which is larger."""
    return memory.view(tensor.dtype)[: tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("name", ["x", "scales", "zeros", "bias"])
def test_an_input_in_the_memory_of_out_after_a_good_call(name: str) -> None:
    a = good()
    out = torch.zeros(M * K, dtype=torch.float16)
    a["out"] = out[: M * N].view(M, N)
    wo.gemm(**a)
    a[name] = moved(a[name], out)
    with pytest.raises(ValueError, match=rf"^out: expected memory of its own, got a tensor that overlaps {name}$"):
        wo.gemm(**a)


def test_another_weight_in_the_memory_of_out() -> None:
    """Of the same kind: with the one before, this `out` was fine."""
    a = good()
    memory = torch.zeros_like(a["qweight"].data)
    a["out"] = memory.view(torch.float16)[: M * N].view(M, N)
    wo.gemm(**a)
    a["qweight"] = wo.PackedWeight(memory, **a["qweight"].fields)
    with pytest.raises(ValueError, match=r"^out: expected memory of its own, got a tensor that overlaps qweight$"):
        wo.gemm(**a)


def test_out_is_checked_once_for_the_same_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = calls_of(monkeypatch, "check_out")
    a = good()
    others = good()
    for _ in range(3):  # layers of one shape take turns
        wo.gemm(**a)
        wo.gemm(**others)
    assert len(checked) == 2
    a["out"] = torch.empty_like(a["out"])
    wo.gemm(**a)
    assert len(checked) == 3


@pytest.mark.parametrize("perm", [torch.arange(K), torch.arange(K).flip(0)], ids=["identity", "flipped"])
def test_a_permutation_is_looked_at_in_every_call(perm: torch.Tensor) -> None:
    a = good()
    wo.gemm(**a, perm=perm)
    with pytest.raises(ValueError, match=r"^perm: expected a permutation of 0\.\.191"):
        wo.gemm(**a, perm=perm + 1)


# --- how many, and for how long ----------------------------------------------------------------------------


def test_the_cache_is_bounded(made: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_PLANS", 3)
    a = good()
    del a["x"], a["out"]

    def call(rows: int) -> None:
        x = integers(rows, K)
        assert torch.equal(wo.gemm(x, **a), expected(x, a))

    for rows in (1, 2, 3, 4, 5):
        call(rows)
    assert [plan.m for plan in cache.plans()] == [3, 4, 5]
    call(3)
    assert len(made) == 5
    call(1)
    assert [plan.m for plan in cache.plans()] == [4, 5, 1]


@pytest.mark.parametrize("forget", [cache.clear, lambda: tuned.use(0, None)], ids=["clear", "another tuned table"])
def test_plans_can_be_forgotten(made: list[Plan], monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]) -> None:
    monkeypatch.setattr(tuned, "_tables", {})
    a = good()
    wo.gemm(**a)
    forget()
    assert cache.plans() == []
    wo.gemm(**a)
    assert len(made) == 2


def test_a_plan_that_cannot_be_made_is_not_kept() -> None:
    a = good()
    for _ in range(2):
        with pytest.raises(ValueError, match="config: expected None for CPU tensors"):
            wo.gemm(**a, config=CONFIGS[0])
    assert cache.plans() == []
