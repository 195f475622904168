"""The plug-in on two ranks of SGLang: processes of their own, whose layers add up and gather by gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from . import two_ranks
from .test_sglang_experts import close, exact

SEED = 5
CASES = [pytest.param(case, id=f"{case[0]}-{case[1]}bit-{case[3]}") for case in two_ranks.CASES]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What both ranks have found, the same bits. request.param: "experts" or "tensors", as the layers are split."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    started = []
    for rank in range(2):
        command = [sys.executable, "-m", two_ranks.__name__, str(rank), str(folder), request.param, str(SEED)]
        with open(folder / f"{rank}.log", "w") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    try:
        status = [process.wait(240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert status == [0, 0], (folder / "0.log").read_text() + (folder / "1.log").read_text()
    one, two = (torch.load(folder / f"{rank}.pt") for rank in range(2))
    for key, value in one.items():
        assert torch.equal(value, two[key]) if isinstance(value, torch.Tensor) else value == two[key]
    return one


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("found", ["experts", "tensors"], indirect=True)
def test_layers_of_experts(found: dict[Any, Any], case: two_ranks.Case) -> None:
    x, topk = two_ranks.rows(SEED)
    y = found["experts", case]
    assert close(y, exact(two_ranks.stack(case, SEED), x, topk)) and y[2].any() and not y[3].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("cls", "k", "n"), two_ranks.LINEARS)
@pytest.mark.parametrize("found", ["tensors"], indirect=True)
def test_linear_layers(found: dict[Any, Any], cls: type[Any], k: int, n: int, case: two_ranks.Case) -> None:
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(SEED + 1)).half()
    wanted = x.double() @ two_ranks.weight(case, k, n, SEED).dense
    y = found[cls.__name__, case]
    assert y.shape == wanted.shape and (y.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


@pytest.mark.parametrize("found", ["experts"], indirect=True)
def test_expert_parallelism_that_is_left_to_sglang(found: dict[Any, Any]) -> None:
    assert found["left"] == {
        "": "",
        "EPLB": "experts with load balancing of experts (EPLB)",
        "ids": "experts with ids of all ranks' experts",
        "all-to-all": "experts with all-to-all kernels",
    }
    assert found["packed"].startswith("topk: expected topk_ids and topk_weights with expert parallelism")


@pytest.mark.parametrize("found", ["tensors"], indirect=True)
def test_groups_that_the_ranks_cut_are_left_to_sglang(found: dict[Any, Any]) -> None:
    assert len(found["left"]) == 2
    for reason in found["left"]:
        assert reason.startswith("w2: 64 rows and ") and reason.endswith(f"in groups of {two_ranks.CUT}")
