"""What `gemm` takes from a tuned table: its entries, their neighbours, or the model's choice."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from tests.tuned_cases import another, entry, of_model, problem, table

from weightonly.heuristics import candidates
from weightonly.heuristics.configs import TypeConfig
from weightonly.plan import tuned

PLAN = sys.modules["weightonly.plan.choose"]


def test_the_later_of_two_entries_counts() -> None:
    first, second = [config for config in candidates(problem(16)) if config != of_model(problem(16))][:2]
    merged = table(entry(problem(16), first), entry(problem(1)), entry(problem(16), second))
    assert len(merged) == 2
    assert merged.config(problem(16), "f16") == second


def test_a_problem_that_was_not_tuned_is_the_models() -> None:
    of = table(entry(problem(16)))
    assert of.config(problem(16), "f16") is not None
    assert of.config(problem(16), "bf16") is None
    for other in (
        problem(16, k=8192),
        problem(16, n=8192),
        problem(16, group_size=64),
        problem(16, format="int8"),
        dataclasses.replace(problem(16), zeros=True),
        dataclasses.replace(problem(16), layout="interleaved"),
    ):
        assert of.config(other, "f16") is None


def test_a_group_of_all_of_k_is_per_channel() -> None:
    of = table(entry(problem(16, group_size=-1)))
    assert of.config(problem(16, group_size=4096), "f16") == another(problem(16, group_size=-1))


def test_between_two_measured_m_the_larger_counts() -> None:
    wide = next(config for config in candidates(problem(64)) if config.family == "gemm_sm90")
    of = table(entry(problem(16)), entry(problem(64), wide))
    assert [of.config(problem(m), "f16") for m in (33, 48, 63, 64)] == [wide] * 4
    # Twice as large or more is too far, and beyond the largest there is none.
    assert [of.config(problem(m), "f16") for m in (8, 17, 32, 65)] == [None] * 4
    assert of.config(problem(9), "f16") == another(problem(16))


def test_a_neighbour_that_is_not_legal_leaves_the_choice_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    of = table(entry(problem(16)))
    monkeypatch.setattr(tuned, "legal", lambda config, p: p.m == 16)
    assert of.config(problem(12), "f16") is None
    assert of.config(problem(16), "f16") is not None


def test_gemm_runs_the_tuned_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    types = TypeConfig("f16", "int4", "group")
    monkeypatch.setattr(PLAN, "runs_on", lambda config, arch: True)
    monkeypatch.setattr(PLAN, "is_compiled", lambda config, types: True)
    p, of = problem(16), table(entry(problem(16)))
    assert PLAN.choose(p, types, None, of) == another(p)
    assert PLAN.choose(p, types, None, None) == of_model(p) == PLAN.choose(p, types, None)
    assert PLAN.choose(problem(1000), types, None, of) == of_model(problem(1000))
    given = candidates(p)[-1]
    assert PLAN.choose(p, types, given, of) == given
    assert of_model(p) != another(p)  # and select itself knows nothing of it
