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
from tests.vllm import vllm_experts as moe
from tests.vllm import vllm_fp4, vllm_fp8
from tests.vllm import vllm_models as models
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models import gpt_oss

from weightonly.bench.serve import serve
from weightonly.bench.serve.engine import RANDOM, Job, register_random
from weightonly.bench.serve.models import MODELS, QUANTIZERS, config_of, quantization_of, with_layers
from weightonly.gate import Gate

_JOB = Job("tiny", "weightonly", "gptq", 128, 2, "float16", (1,), 8, 8, (), "eager", 0.5, 1, None, False)


def _built(folder: Path, job: Job) -> torch.nn.Module:
    model = with_layers(MODELS[job.model], job.layers)
    quantization = None if job.provider == "dense" else quantization_of(model, job.quant, job.group_size)
    config = config_of(model, quantization, getattr(torch, job.dtype))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    register_random()
    arguments: dict[str, Any] = {"quantization": None, "load_format": RANDOM, "dtype": job.dtype}
    return models.load(folder, **arguments, model_loader_extra_config=vars(job))


@pytest.mark.parametrize("quant", QUANTIZERS)
def test_quantized_model_has_the_numbers_of_the_dense_one(
    quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.take_first(monkeypatch)
    vllm_fp4.take_place(monkeypatch)
    vllm_fp8.take_place(monkeypatch, capability=(9, 0))
    job = replace(_JOB, quant=quant)
    ours = dict(_built(tmp_path / "ours", job).named_modules())
    dense = dict(_built(tmp_path / "dense", replace(job, provider="dense")).named_modules())
    linears = [name for name, module in dense.items() if isinstance(module, LinearBase)]
    assert len(linears) == 8
    for name in linears:
        x = torch.randn(3, dense[name].input_size, generator=torch.Generator().manual_seed(0)).half()
        torch.testing.assert_close(ours[name](x)[0], dense[name](x)[0], rtol=2e-2, atol=2e-2)


def test_gpt_oss_has_the_numbers_of_the_dense_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without attention, whose sinks CPUs do not have, and without dense experts, which need vLLM's own operators."""
    moe.take_ours(monkeypatch, "sm90")
    monkeypatch.setattr(gpt_oss, "Attention", lambda *_, **__: torch.nn.Module())
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "process_weights_after_loading", lambda *_: None)
    job = replace(_JOB, model="tiny-gpt-oss", quant="mxfp4", dtype="bfloat16")
    ours, dense = _built(tmp_path / "ours", job), _built(tmp_path / "dense", replace(job, provider="dense"))
    for name, parameter in dense.named_parameters():
        if ".experts." not in name:
            assert torch.equal(ours.get_parameter(name), parameter), name
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, ids = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([[0, 2, 4, 6], [7, 5, 3, 1], [1, 2, 3, 4]])
    for number in range(2):
        name = f"model.layers.{number}.mlp.experts.routed_experts"
        experts = {key: p.float() for key, p in dense.get_submodule(name).named_parameters()}
        expected = []
        for token, chosen in zip(x.float(), ids, strict=True):
            w13, b13, w2, b2 = (
                experts[f"{stem}_{kind}"][chosen] for stem in ("w13", "w2") for kind in ("weight", "bias")
            )
            z = w13 @ token + b13  # (top_k, 2 * inner), gate and up in turns
            inner = Gate.of("swigluoai")(torch.cat([z[:, ::2], z[:, 1::2]], 1))
            expected.append(weights @ (torch.einsum("ehi,ei->eh", w2, inner) + b2))
        layer: Any = ours.get_submodule(name)
        y = layer.forward_modular(x, weights.expand(3, 4), ids.int())
        torch.testing.assert_close(y.float(), torch.stack(expected), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"providers": ["machete"]}, "providers: expected some of weightonly"),
        ({"model": "llama"}, "model: expected one of llama3-8b"),
        ({"providers": ["weightonly-method"]}, "providers: expected dense with random weights"),
        ({"quant": "gguf"}, "quant: expected one of gptq"),
        ({"model": "gpt-oss-20b", "quant": "mxfp4"}, "quant and dtype: expected mxfp4 and torch.bfloat16 with gpt-oss"),
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
