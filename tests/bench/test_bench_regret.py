"""Measurements of all configurations, and the regret of the heuristic's choice among them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

import weightonly as wo
from tools.regret import heuristic_choice, main, measure_configs, regret
from weightonly.bench.devices import gpu_facts
from weightonly.heuristics import Problem, legal


def _measured(times_us: dict[str, float], m: int, layout: str = "") -> list[dict[str, object]]:
    cell: dict[str, object] = {
        "k": 64,
        "n": 64,
        "m": m,
        "format": "int4",
        "group_size": 64,
        "arch": 90,
        "sm_count": 132,
    }
    if layout:
        cell |= {"layout": layout, "zeros": True}
    return [{**cell, "config": name, "us": us} for name, us in times_us.items()]


def test_regret_is_the_choice_over_the_best_minus_one() -> None:
    frame = pd.DataFrame(_measured({"a": 10.0, "b": 8.0, "c": 9.0}, m=1) + _measured({"a": 20.0, "b": 30.0}, m=64))
    result = regret(frame, lambda problem: "a" if problem.m == 1 else "b")
    assert list(result.cells["best"]) == ["b", "a"]
    assert list(result.cells["regret"]) == pytest.approx([0.25, 0.5])
    assert result.mean == pytest.approx(0.375)
    assert result.worst == pytest.approx(0.5)


def test_regret_hands_the_problem_over_as_measured() -> None:
    seen: list[Problem] = []

    def choose(problem: Problem) -> str:
        seen.append(problem)
        return "a"

    regret(pd.DataFrame(_measured({"a": 1.0}, m=7, layout="tiled")), choose)
    regret(pd.DataFrame(_measured({"a": 1.0}, m=7)), choose)  # a file of before there were two layouts
    assert seen == [
        Problem(7, 64, 64, "int4", 64, 90, 132, "tiled", True),
        Problem(7, 64, 64, "int4", 64, 90, 132, "interleaved", False),
    ]


def test_regret_refuses_measurements_without_the_choice() -> None:
    with pytest.raises(ValueError, match="chosen configuration z at k=64, n=64, m=1"):
        regret(pd.DataFrame(_measured({"a": 1.0}, m=1)), lambda problem: "z")
    with pytest.raises(ValueError, match="frame"):
        regret(pd.DataFrame())


def test_measure_configs_needs_a_gpu() -> None:
    with pytest.raises(RuntimeError, match=r"^regret needs a CUDA GPU: "):
        measure_configs([(128, 64)], 1, device="cpu")


def test_command_line_reports_the_regret_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(16, 4096, 4096, "int4", 128, 80, 108)
    chosen = heuristic_choice(problem)
    rows = [
        {
            "k": 4096,
            "n": 4096,
            "m": 16,
            "format": "int4",
            "group_size": 128,
            "arch": 80,
            "sm_count": 108,
            **timed,
        }
        for timed in ({"config": chosen, "us": 12.0}, {"config": "another", "us": 10.0})
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "configs.csv", index=False)
    assert main(["--read", str(tmp_path / "configs.csv")]) == 0
    assert "regret: mean 20.0%, worst 20.0% of 1 cells" in capsys.readouterr().out


@pytest.mark.gpu
def test_every_configuration_is_measured(cuda_device: torch.device) -> None:
    frame = measure_configs([(4096, 4096)], [1, 64], device=cuda_device, budget_ms=2, progress=False)
    assert (frame["us"] > 0).all()
    arch, sm_count = gpu_facts(cuda_device)
    problems = [Problem(m, 4096, 4096, "int4", 128, arch, sm_count) for m in (1, 64)]
    runnable = {c.kernel for c in wo.kernels() if any(legal(c, problem) for problem in problems)}
    single = [name for name in frame["config"] if "+" not in name]  # launches
    assert {name.rpartition("_k")[0] for name in single} == runnable
    assert regret(frame).worst >= 0
