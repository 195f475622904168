"""The switch of the batch-invariant mode, and what keeps the mode that it was made with."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import weightonly as wo
from weightonly.args import GemmArgs
from weightonly.cpu import library
from weightonly.fp8_product import gemm_in_fp8
from weightonly.heuristics import Problem, candidates, select
from weightonly.plan import cache
from weightonly.plan.choose import is_of_class
from weightonly.plan.cpu import CpuPlan
from weightonly.vllm import follow_batch_invariance


@pytest.fixture
def w(generator: torch.Generator) -> wo.QuantizedWeight:
    q, scales, _ = wo.quantize(torch.randn(256, 96, generator=generator), group_size=64)
    return wo.QuantizedWeight(wo.preprocess(q), scales)


def modes() -> list[bool]:
    """Of the plans that are kept, the oldest first."""
    return [plan.invariant for plan in cache.plans() if isinstance(plan, CpuPlan)]


def test_it_is_off_until_it_is_set() -> None:
    assert wo.batch_invariant() is False
    wo.set_batch_invariant(True)
    assert wo.batch_invariant() is True
    wo.set_batch_invariant(False)
    assert wo.batch_invariant() is False


@pytest.mark.parametrize("on", [1, 0, "1", None])
def test_what_is_no_bool_is_refused(on: object) -> None:
    wo.set_batch_invariant(True)
    with pytest.raises(TypeError, match=rf"^on: expected a bool, got {type(on).__name__}$"):
        wo.set_batch_invariant(on)  # type: ignore[arg-type]
    assert wo.batch_invariant()


@pytest.mark.parametrize(("value", "expected"), [("1", "True"), ("0", "False"), ("", "False"), (None, "False")])
def test_the_environment(value: str | None, expected: str) -> None:
    assert _imported(value) == expected


def test_another_value_in_the_environment_is_refused() -> None:
    assert _imported("yes") == "ValueError: WEIGHTONLY_BATCH_INVARIANT: expected 0 or 1, got 'yes'"


def _imported(value: str | None) -> str:
    """The mode of a process with this value of the variable, or the last line of its error."""
    environment = {k: v for k, v in os.environ.items() if k != "WEIGHTONLY_BATCH_INVARIANT"}
    if value is not None:
        environment["WEIGHTONLY_BATCH_INVARIANT"] = value
    code = "import weightonly; print(weightonly.batch_invariant())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]


def test_plans_are_of_one_mode(w: wo.QuantizedWeight) -> None:
    x = torch.randn(5, 256)
    for on in (False, True, False, True):
        wo.set_batch_invariant(on)
        for operand in (w, wo.QuantizedWeight(w.packed, w.scales)):
            wo.gemm(x, operand)
            wo.gemm(x, operand.packed, operand.scales)
    assert modes() == [False, False, True, True]


def test_a_call_keeps_the_mode_that_it_began_with(w: wo.QuantizedWeight) -> None:
    x = torch.randn(5, 256)
    args = GemmArgs(x, w)
    wo.set_batch_invariant(True)
    assert not args.invariant and not GemmArgs.from_op(*args.to_op()).invariant
    assert GemmArgs.from_op(*GemmArgs(x, w).to_op()).invariant
    assert args.key() != GemmArgs(x, w).key()


def test_all_threads_see_it() -> None:
    wo.set_batch_invariant(True)
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(wo.batch_invariant()))
    thread.start()
    thread.join()
    assert seen == [True]


@pytest.mark.parametrize("product", [wo.gemm, gemm_in_fp8], ids=["gemm", "gemm_in_fp8"])
def test_an_exported_graph_keeps_it(w: wo.QuantizedWeight, product: object) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return product(x, w)  # type: ignore[operator]

    x = torch.randn(5, 256)
    wo.set_batch_invariant(True)
    graph = torch.export.export(Layer(), (x,)).module()
    wo.set_batch_invariant(False)
    cache.clear()
    graph(x)
    assert modes() == [True]


def test_a_compiled_function_is_compiled_again(w: wo.QuantizedWeight) -> None:
    compiled = torch.compile(lambda x: wo.gemm(x, w) * 2, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 256)
    for on in (True, False, True):
        wo.set_batch_invariant(on)
        cache.clear()
        assert torch.equal(compiled(x), wo.gemm(x, w) * 2)
        assert set(modes()) == {on}


def test_gradients_recompute_with_it(w: wo.QuantizedWeight) -> None:
    x = torch.randn(5, 256, requires_grad=True)
    wo.set_batch_invariant(True)
    y = wo.gemm(x, w, activation="silu")
    wo.set_batch_invariant(False)
    y.sum().backward()
    assert set(modes()) == {True}


def test_explain_says_what_runs() -> None:
    numbers = {"k": 4096, "n": 6144, "format": "int4", "group_size": 128, "arch": "sm90"}
    plain = wo.explain(m=[1, 16], **numbers)  # type: ignore[arg-type]
    wo.set_batch_invariant(True)
    explained = wo.explain(m=[1, 16], **numbers)  # type: ignore[arg-type]
    assert "batch-invariant" not in str(plain) and str(explained).count("; batch-invariant: of one class") == 2
    for row, m in zip(explained.rows, (1, 16), strict=True):
        p = Problem(m, 6144, 4096, "int4", 128, 90, 132, invariant=True)
        assert row.kernel == select(p).name and row.next in {c.name for c in candidates(p) if is_of_class(c, p)}
    layer = wo.nn.quantize_model(torch.nn.Sequential(torch.nn.Linear(512, 64)), dtype=torch.bfloat16)
    if library.backend().library is not None:
        assert [row.kernel for row in wo.explain(layer, m=[1, 300]).rows] == ["many", "many"]


def test_vllm_turns_it_on() -> None:
    follow_batch_invariance(SimpleNamespace())
    follow_batch_invariance(SimpleNamespace(VLLM_BATCH_INVARIANT=False))
    assert not wo.batch_invariant()
    follow_batch_invariance(SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    assert wo.batch_invariant()
