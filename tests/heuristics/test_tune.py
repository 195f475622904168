"""`tune` and its command on a pretended GPU: what they return, write, print and refuse."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tuned_cases import BUILT, H200, Bench, another, of_model, problem, table

import weightonly as wo
from weightonly.bench import timing, weights
from weightonly.bench.__main__ import main
from weightonly.bench.tune import as_frame, describe_gains, plausible, quickest
from weightonly.heuristics import KernelConfig, Problem
from weightonly.heuristics.configs import CONFIGS
from weightonly.plan import tuned
from weightonly.plan.tuned import Origin

module = importlib.import_module("weightonly.bench.tune")  # `weightonly.bench.tune` is the function


def test_the_frame_and_its_summary() -> None:
    p = problem(64)
    target = plausible(p, BUILT)[1]
    bench = Bench({target.name: 0.5})
    choice = quickest(p, plausible(p, BUILT), bench.open_weight(p.k, p.n), 1e6, bench.clock)
    frame = as_frame([choice])
    assert list(frame.columns) == ["k", "n", "m", "config", "us", "tuned_config", "tuned_us", "gain"]
    row = frame.iloc[0]
    assert (row["k"], row["n"], row["m"]) == (4096, 4096, 64)
    assert (row["config"], row["tuned_config"]) == (of_model(p).name, target.name)
    assert row["gain"] == pytest.approx(row["us"] / row["tuned_us"]) and row["gain"] > 1.5
    assert table(choice.entry("bf16")).config(p, "bf16") == target
    text = describe_gains([1.0, 1.21, 1.0])
    assert text == "1 of 3 choices changed; gain: geometric mean 1.066, largest 1.21"


def test_tune_needs_a_gpu() -> None:
    with pytest.raises(RuntimeError, match=r"^tune needs a CUDA GPU: "):
        wo.bench.tune("256x128", 1, device="cpu")


def test_tune_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "cuda_built", lambda: False)
    with pytest.raises(RuntimeError, match=r"^tune: expected compiled kernels to measure"):
        wo.bench.tune("256x128", 1, device="cuda")


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An H200 as far as `tune` asks for one, whose times are made up. The clock is real."""
    bench = Bench()

    class Timer:
        def __init__(self, shape: tuple[int, int], max_m: int) -> None:
            self.measure = bench.open_weight(*shape)

        def __call__(self, m: int, config: KernelConfig, *, budget_ms: float, give_up_us: float) -> timing.Timing:
            return timing.Timing.of([self.measure(m, config, budget_ms=budget_ms, give_up_us=give_up_us)])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "cuda_built", lambda: True)
    monkeypatch.setattr(module, "kernels", lambda device: list(CONFIGS))
    monkeypatch.setattr(Origin, "of", classmethod(lambda cls, device: H200))
    monkeypatch.setattr(module, "ConfigTimer", Timer)
    monkeypatch.setattr(weights.Weights, "random", lambda k, n, **options: (k, n))
    monkeypatch.setattr(tuned, "_tables", {})
    return bench


def test_tune_writes_merges_and_uses(pretended_gpu: Bench, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`path` has a table of M = 1 and 16 for the first shape already."""
    everywhere = [set(plausible(problem(m, n=n), BUILT)) for n in (4096, 6144) for m in (16, 32)]
    target = min(set.intersection(*everywhere), key=str)
    pretended_gpu.factors[target.name] = 0.2
    options: dict[str, Any] = {"device": "cuda:0", "folder": path.parent}
    frame = wo.bench.tune([(4096, 4096), "4096x6144"], [16, 32], **options)
    assert "4/4" in capsys.readouterr().err
    assert list(frame[["k", "n", "m"]].itertuples(index=False, name=None)) == [
        (4096, n, m) for n in (4096, 6144) for m in (16, 32)
    ]
    assert set(frame["tuned_config"]) == {target.name}
    of = tuned.read(path, H200, CONFIGS)
    assert len(of) == 5 and of.config(problem(1), "f16") == another(problem(1))
    assert of.config(problem(16), "f16") == of.config(problem(32, n=6144), "f16") == target
    used = tuned.table_of(0)
    assert used is not None and list(used) == list(of)
    wo.bench.tune("4096x4096", 64, dtype=torch.bfloat16, symmetric=False, progress=False, **options)
    assert len(tuned.read(path, H200, CONFIGS)) == 6


def test_tune_replaces_a_damaged_table(pretended_gpu: Bench, path: Path) -> None:
    path.write_text("")
    with pytest.warns(RuntimeWarning, match="tuned table refused: it is damaged .*; it is replaced$"):
        wo.bench.tune("4096x4096", 64, device="cuda:0", folder=path.parent, progress=False)
    assert [e.m for e in tuned.read(path, H200, CONFIGS)] == [64]


def test_tune_of_codes(pretended_gpu: Bench, path: Path) -> None:
    wo.bench.tune("4096x4096", 64, format="nf4", group_size=64, device="cuda:0", folder=path.parent, progress=False)
    p = Problem(64, 4096, 4096, "nf4", 64, H200.arch, H200.sm_count)
    assert tuned.read(path, H200, CONFIGS).config(p, "f16") is not None


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("seconds", {"seconds": 0}),
        ("shapes", {"shapes": "llama9"}),
        ("batch", {"batch": [0]}),
        ("bits", {"bits": 3}),
        ("group_size", {"group_size": 100}),
        ("symmetric", {"format": "nf4", "symmetric": False}),
        ("dtype", {"dtype": torch.float32}),
        ("folder", {"folder": None}),
    ],
)
def test_tune_refuses(argument: str, options: dict[str, Any], pretended_gpu: Bench, path: Path) -> None:
    arguments: dict[str, Any] = {"shapes": "4096x4096", "batch": 1, "device": "cuda:0", "folder": path.parent}
    with pytest.raises(ValueError, match=rf"^{argument}(:| must be) "):
        wo.bench.tune(**(arguments | options))
    assert not pretended_gpu.asked


def test_command_prints_choices_and_the_file(
    pretended_gpu: Bench, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"tune --shapes 4096x4096 --batch 16,64 --device cuda:0 --quiet --folder {path.parent}"
    assert main(arguments.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["k", "n", "m", "config", "us", "tuned_config", "tuned_us", "gain"]
    assert lines[-2] == "0 of 2 choices changed; gain: geometric mean 1.000, largest 1.00"
    assert lines[-1] == f"gemm uses it from now on: {path}"
