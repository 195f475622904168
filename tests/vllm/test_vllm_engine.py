"""vLLM's engine on a GPU with our kernels, beside the dense model with the same numbers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.vllm.engine_folders import FOLDERS
from tests.vllm.engine_run import CASES, PARTS

from weightonly.bench.serve import serve
from weightonly.bench.serve.command import LOGPROB_BOUND
from weightonly.bench.serve.engine import RESULT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's engine needs a GPU"),
]


def _run(*arguments: str) -> dict[str, Any]:
    """What engine_run.py found; the engine runs on the GPU, other tests of this folder on the CPU."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_TARGET_DEVICE"}
    command = [sys.executable, "-m", "tests.vllm.engine_run", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    assert lines, (done.stdout + done.stderr)[-6000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(RESULT))
    return found


@cache
def _both(what: str, *of: str) -> list[dict[str, Any]]:
    """Ours and the dense model's."""
    return _beside((what, "weightonly", *of), (what, "dense", *of))


def _beside(*runs: tuple[str, ...]) -> list[dict[str, Any]]:
    """Side by side: most of the time goes into imports."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda arguments: _run(*arguments), runs))


def _difference(one: dict[str, Any], other: dict[str, Any]) -> torch.Tensor:
    """Of their log-probabilities, in the mean."""
    return (torch.tensor(one["logprobs"]) - torch.tensor(other["logprobs"])).abs().mean()


def _in_parts(cases: Iterable[str]) -> list[tuple[str, str]]:
    return [(f"part{i % PARTS}", case) for i, case in enumerate(cases)]


@pytest.mark.parametrize(("part", "case"), _in_parts(CASES))
def test_log_probabilities_of_the_dense_model(part: str, case: str) -> None:
    ours, dense = (found[case] for found in _both("logprobs", part.removeprefix("part")))
    wanted = "WeightOnlyExpertsMethod" if case.endswith("experts") else "WeightOnly.*LinearKernel"
    assert any(re.search(wanted, name) for name in ours["kernels"]), ours["kernels"]
    assert _difference(ours, dense) < LOGPROB_BOUND  # 0 where weights are dequantized for cuBLAS


@pytest.mark.parametrize(("part", "case"), _in_parts(FOLDERS))
def test_folders(part: str, case: str) -> None:
    """test_vllm_engine_folders.py loads them on the CPU."""
    ours, dense = (found[case] for found in _both("folders", part.removeprefix("part")))
    assert FOLDERS[case].kernels.items() <= ours["kernels"].items(), ours["kernels"]
    assert "WeightOnly" not in str(dense["kernels"])
    assert _difference(ours, dense) < LOGPROB_BOUND


@pytest.mark.parametrize("model", ["tiny", "tiny-mixtral"])
def test_features(model: str) -> None:
    ours, dense = _both("features", model)
    seen = {name: torch.tensor(rows) for name, rows in ours["logprobs"].items()}
    for name, rows in dense["logprobs"].items():
        assert (seen[name] - torch.tensor(rows)).abs().mean() < LOGPROB_BOUND, name
    first = seen["chunked prefill"]
    for name in ("sleep", "the same weights again", "weights after sleep"):
        assert torch.equal(seen[name], first), name
    for name in ("LoRA", "other weights"):
        if name in seen:
            assert (seen[name] - first).abs().mean() > 5 * LOGPROB_BOUND, name
    firsts = [row[0] for row in ours["tokens"]["first"]]
    assert firsts == [row[0] for row in ours["tokens"]["cached prefixes"]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", ["ct-fp16", "ct-experts", "gpt-oss-experts"])
def test_two_ranks_write_what_one_writes(case: str) -> None:
    """Up to a token where two were as likely. A router whose experts were as likely may choose another one, after which
    tokens differ by more: of eight prompts two at most may part so."""
    one, two = _beside(("ranks", "weightonly", f"{case}:1"), ("ranks", "weightonly", f"{case}:2"))
    assert two["kernels"] == one["kernels"] * 2 and "WeightOnly" in str(one["kernels"])
    assert 0 < _difference(one, two) < LOGPROB_BOUND  # sums in another order
    parted = []  # by how much less likely the other's token was, of each prompt where they differ
    for tokens, others, steps in zip(one["tokens"], two["tokens"], one["steps"], strict=True):
        for token, other, step in zip(tokens, others, steps, strict=True):
            if token != other:
                parted.append(step[str(token)] - step.get(str(other), -torch.inf))
                break
    far = [gap for gap in parted if gap >= 2 * LOGPROB_BOUND]
    assert len(far) <= (2 if case.endswith("experts") else 0), parted


@pytest.mark.parametrize("case", ["gptq-fp16", "awq-bf16", "ct-fp16", "ct8-bf16"])
def test_the_batch_invariant_mode(case: str) -> None:
    """A prompt alone and among others: the same tokens and the same log-probabilities, to the bit, by our kernels."""
    found = _run("invariant", "weightonly", case)
    assert "WeightOnlyLinearKernel" in str(found["kernels"]), found["kernels"]
    assert len(found["alone"]) == 32
    assert found["among 63"] == found["alone"] == found["among 7"]


def test_the_mode_that_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served with us, without us, and dense, with one cache; test_vllm_kernel.py has the keys of the cache."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    small: dict[str, Any] = {"batch": (8,), "prompt": 100, "tokens": 16, "prefill": (), "memory": 0.1, "cache_gb": 1.0}
    frame = serve("tiny", providers=("weightonly", "vllm", "dense"), mode="compile", **small)
    assert "note" not in frame, frame["note"].tolist()
    assert (frame["logprob_mean"] < LOGPROB_BOUND).all()
