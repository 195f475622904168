"""`tune` on a GPU, and `gemm` with the tables that it or another process wrote."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from tests.tuned_cases import entry, of_model

import weightonly as wo
from weightonly.heuristics import Problem, candidates, select
from weightonly.plan import cache, tuned
from weightonly.plan.kernel import KernelPlan
from weightonly.plan.tuned import Origin, Table
from weightonly.plan.unfused import UnfusedPlan

SHAPE = (1024, 512)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder for tables, and a process that has read none; afterwards as before."""
    monkeypatch.setenv("WEIGHTONLY_TUNED", str(tmp_path))
    monkeypatch.setattr(tuned, "_tables", {})
    return tmp_path


def run_gemm(m: int) -> str:
    """Multiplies by a new weight, checks the product, and returns the name of the configuration that `gemm` picked."""
    k, n = SHAPE
    qweight = wo.preprocess(torch.randint(-8, 8, (k, n), dtype=torch.int8).cuda(), bits=4)
    scales = torch.rand(k // 128, n, device="cuda").half() * 0.01
    x = torch.randn(m, k, device="cuda").half()
    cache.clear()
    y = wo.gemm(x, qweight, scales)
    (plan,) = cache.plans()
    expected = x.double() @ wo.dequantize(qweight, scales).double()
    assert (y.double() - expected).norm() < 2e-3 * expected.norm()
    assert isinstance(plan, (KernelPlan, UnfusedPlan))
    assert plan.config is not None
    return plan.config.name


@pytest.mark.gpu
def test_tune_and_run(cuda_device: torch.device, fresh: Path) -> None:
    started = time.perf_counter()
    frame = wo.bench.tune([SHAPE], [1, 16, 64], seconds=6, device=cuda_device, progress=False)
    assert time.perf_counter() - started < 20
    assert list(frame["m"]) == [1, 16, 64] and (frame["gain"] >= 1).all()
    origin = Origin.of(torch.cuda.current_device())
    for row in frame.to_dict("records"):
        assert row["config"] == select(row["m"], 512, 1024, "int4", 128, origin.arch, origin.sm_count).name
        assert run_gemm(row["m"]) == row["tuned_config"]
    (file,) = fresh.iterdir()
    assert len(json.loads(file.read_text())["entries"]) == 3


@pytest.mark.gpu
def test_a_table_reaches_gemm_in_a_new_process_and_merges(
    cuda_device: torch.device, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = torch.cuda.current_device()
    origin, built = Origin.of(index), wo.kernels(index)
    p = Problem(16, 512, 1024, "int4", 128, origin.arch, origin.sm_count)
    kernels = {config.kernel for config in built}
    other = next(c for c in candidates(p) if c.kernel in kernels and c != of_model(p))
    file = fresh / origin.file_name
    tuned.write(file, Table(origin, [entry(p, other)], built))
    assert run_gemm(16) == other.name
    wo.bench.tune([SHAPE], 1, seconds=2, progress=False)
    assert {e.m: e.config for e in tuned.read(file, origin, built)}[16] == other.name
    assert run_gemm(16) == other.name
    file.write_text("{")
    monkeypatch.setattr(tuned, "_tables", {})
    with pytest.warns(RuntimeWarning, match="tuned table refused: it is damaged"):
        assert run_gemm(16) == of_model(p).name
    assert run_gemm(1) == of_model(dataclasses.replace(p, m=1)).name
