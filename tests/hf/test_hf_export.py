"""`export` of saved models: transformers with compressed-tensors, and load_model, run what comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.expert_models import make
from tests.hf_models import TOKENS, llama
from transformers import AutoModelForCausalLM

import weightonly as wo
from weightonly.formats import QuantizedLayer, export, load_checkpoint
from weightonly.hf import WeightOnlyConfig, load_model

KINDS: dict[str, dict[str, Any]] = {
    "int4": {"format": "int4", "group_size": 32},
    "int4 zeros": {"format": "int4", "group_size": 64, "symmetric": False},
    "int8": {"format": "int8", "group_size": -1},
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
}


def saved(folder: Path, model: Any, dtype: torch.dtype = torch.float16, **kind: Any) -> Path:
    """What `save_pretrained` of a quantized model writes."""
    model.to(dtype).save_pretrained(folder / "dense")
    config = WeightOnlyConfig(**kind, arch="cpu", search="whole")
    quantized = type(model).from_pretrained(folder / "dense", dtype=dtype, quantization_config=config)
    quantized.save_pretrained(folder / "ours")
    return folder / "ours"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.float()


def unpacked(folder: Path) -> dict[str, list[torch.Tensor]]:
    """Layer -> codes, scales."""
    records = load_checkpoint(folder, "cpu", progress=False)
    return {r.name: [wo.unpack(r.weight), r.scales.float()] for r in records if isinstance(r, QuantizedLayer)}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_transformers_runs_it_by_compressed_tensors(kind: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source, target = saved(tmp_path, llama(), **kind), tmp_path / "out"
    export(source, target, "compressed-tensors", progress=False)
    is_float = kind["format"].endswith("fp4")  # compressed-tensors makes them dense in bfloat16
    dtype = torch.bfloat16 if is_float else torch.float32
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    assert theirs.config.quantization_config.quant_method == "compressed-tensors"
    ours, expected = load_model(target, torch.float32, arch="cpu"), load_model(source, torch.float32)
    assert torch.equal(logits(ours), logits(expected))
    logits(theirs)  # layers are made dense on first use
    found = dict(theirs.named_modules())
    for name, layer in expected.named_modules():
        if isinstance(layer, wo.nn.Linear):
            w = found[name].weight.float()
            assert torch.equal(w, layer.dequantize().t().to(dtype).float()), name


@pytest.mark.parametrize("to", ["compressed-tensors", "gptq", "awq"])
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "mixtral",
            ("block_sparse_moe.experts.1.w1", "block_sparse_moe.experts.1.w3", "block_sparse_moe.experts.1.w2"),
        ),
        ("qwen3-moe", ("mlp.experts.1.gate_proj", "mlp.experts.1.up_proj", "mlp.experts.1.down_proj")),
    ],
)
def test_experts_have_the_names_of_the_model(name: str, parts: tuple[str, ...], to: str, tmp_path: Path) -> None:
    source, target = saved(tmp_path, make(name), format="int4", group_size=32), tmp_path / "out"
    export(source, target, to, progress=False)
    before, after = unpacked(source), unpacked(target)
    gate, up, down = (after[f"model.layers.0.{part}"] for part in parts)
    prefix = f"model.layers.0.{parts[0].rpartition('.')[0]}"
    for both, a, b in zip(before[f"{prefix}.gate_up_proj"], gate, up, strict=True):
        assert torch.equal(both, torch.cat([a, b], -1))
    assert all(map(torch.equal, before[f"{prefix}.down_proj"], down))
    assert not any("gate_up_proj" in layer for layer in after)
    assert torch.equal(logits(load_model(target, torch.float32, arch="cpu")), logits(load_model(source, torch.float32)))


def test_experts_without_names_of_their_own_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path, make("gpt-oss"), format="int4", group_size=32)
    with pytest.raises(ValueError, match=r"experts\.0\.gate_up_proj: expected experts whose gate and up have names"):
        export(source, tmp_path / "out", "compressed-tensors", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_bf16_model_is_no_gptq(tmp_path: Path) -> None:
    source = saved(tmp_path, llama(), torch.bfloat16, format="int4", group_size=32)
    with pytest.raises(
        ValueError, match=r"scales in torch.bfloat16, not torch.float16; compressed-tensors can hold it"
    ):
        export(source, tmp_path / "out", "gptq", progress=False)
    export(source, tmp_path / "out", "compressed-tensors", progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "fusion_config" not in config
    assert torch.equal(logits(load_model(tmp_path / "out", arch="cpu")), logits(load_model(source)))
