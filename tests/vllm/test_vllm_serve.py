"""`bench serve`: the random weights that it brings, loaded by vLLM's own methods; and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.vllm import vllm_cases as cases
from tests.vllm import vllm_fp4
from tests.vllm import vllm_models as models
from vllm.model_executor.layers.linear import LinearBase

from weightonly.bench.serve import serve
from weightonly.bench.serve.engine import RANDOM, Job, register_random
from weightonly.bench.serve.models import MODELS, QUANTIZERS, config_of, with_layers

_JOB = Job("tiny", "weightonly", "gptq", 128, 2, "float16", (1,), 8, 8, (), "eager", 0.5, 1, None, False)


def _built(folder: Path, job: Job) -> torch.nn.Module:
    quantization = None if job.provider == "dense" else QUANTIZERS[job.quant].config(job.group_size)
    config = config_of(with_layers(MODELS[job.model], job.layers), quantization, torch.float16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    register_random()
    arguments: dict[str, Any] = {"quantization": None, "load_format": RANDOM}
    return models.load(folder, **arguments, model_loader_extra_config=vars(job))


@pytest.mark.parametrize("quant", QUANTIZERS)
def test_quantized_model_has_the_numbers_of_the_dense_one(
    quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.take_first(monkeypatch)
    vllm_fp4.take_place(monkeypatch)
    job = replace(_JOB, quant=quant)
    ours = dict(_built(tmp_path / "ours", job).named_modules())
    dense = dict(_built(tmp_path / "dense", replace(job, provider="dense")).named_modules())
    linears = [name for name, module in dense.items() if isinstance(module, LinearBase)]
    assert len(linears) == 8
    for name in linears:
        x = torch.randn(3, dense[name].input_size, generator=torch.Generator().manual_seed(0)).half()
        torch.testing.assert_close(ours[name](x)[0], dense[name](x)[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"providers": ["machete"]}, "providers: expected some of weightonly"),
        ({"model": "llama"}, "model: expected one of llama3-8b"),
        ({"providers": ["weightonly-method"]}, "providers: expected dense with random weights"),
        ({"quant": "gguf"}, "quant: expected one of gptq"),
        ({"mode": "fast"}, "mode: expected one of graphs"),
        ({"batch": []}, "batch: expected at least one"),
        ({"batch": [0]}, "batch: expected at least 1, got 0"),
        ({"tokens": 1}, "tokens: expected at least 2, got 1"),
        ({"layers": 0}, "layers: expected at least 1, got 0"),
        ({"memory": 1.5}, "memory: expected more than 0 and at most 1"),
        ({"cache_gb": 0}, "cache_gb: expected more than 0, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve(**({"model": "tiny"} | arguments))
