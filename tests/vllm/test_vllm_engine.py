"""vLLM's engine on a GPU with our kernels, beside the dense model with the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from weightonly.bench.serve import serve
from weightonly.bench.serve.command import LOGPROB_BOUND
from weightonly.bench.serve.engine import RESULT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's engine needs a GPU"),
]

_SMALL: dict[str, Any] = {"batch": (8,), "prompt": 100, "tokens": 16, "prefill": (), "mode": "eager"}
_SMALL |= {"memory": 0.1, "cache_gb": 1.0}  # several engines beside each other


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("quant", ["gptq", "gptq8", "awq", "ct", "ct8", "ct-zeros"])
def test_log_probabilities_of_the_dense_model(quant: str, dtype: torch.dtype) -> None:
    _near_dense(serve("tiny", quant, providers=("weightonly", "dense"), dtype=dtype, **_SMALL))


@pytest.mark.parametrize("group_size", [32, 64])
def test_groups(group_size: int) -> None:
    _near_dense(serve("tiny", "ct", providers=("weightonly", "dense"), group_size=group_size, **_SMALL))


@pytest.mark.parametrize("quant", ["gptq", "awq", "ct", "ct8", "ct-zeros"])
def test_experts(quant: str) -> None:
    _near_dense(serve("tiny-mixtral", quant, providers=("weightonly", "dense"), **_SMALL), "WeightOnlyExpertsMethod")


def test_compiled_graphs_of_one_kernel_are_not_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps what it compiles: served without us, with us, without us, and with us again."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    small = _SMALL | {"mode": "compile"}
    frame = serve("tiny", providers=("vllm", "weightonly", "vllm", "weightonly", "dense"), **small)
    _near_dense(frame)
    assert len(frame) == 5


def _near_dense(frame: Any, ours: str = "WeightOnlyLinearKernel") -> None:
    assert "note" not in frame, frame.get("note")
    found = frame[frame.provider == "weightonly"].iloc[0]
    assert ours in found.kernels
    assert 0 < found.logprob_mean < LOGPROB_BOUND


@cache
def _features(provider: str, model: str) -> dict[str, Any]:
    arguments = [sys.executable, "-m", "tests.vllm.engine_features", provider, model, "ct"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    assert lines, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(RESULT))
    return found


@pytest.mark.parametrize("model", ["tiny", "tiny-mixtral"])
def test_features(model: str) -> None:
    ours, dense = _features("weightonly", model), _features("dense", model)
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
