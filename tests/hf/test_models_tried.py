"""A sample of docs/models.md: `python -m tools.models_tried` tries every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import tests.hf_version  # noqa: F401
import torch

import weightonly as wo
from tools.models_tried import GROUP, page, try_one
from tools.tiny_models import Architecture, architectures, output_of, tiny_model
from weightonly.hf import WeightOnlyConfig

SAMPLE = (
    "T5ForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "UMT5ForConditionalGeneration",
    "LongT5ForConditionalGeneration",
    "SwitchTransformersForConditionalGeneration",
    "NllbMoeForConditionalGeneration",
    "MambaForCausalLM",
    "Mamba2ForCausalLM",
    "FalconMambaForCausalLM",
    "BloomForCausalLM",
    "RwkvForCausalLM",
    "FalconForCausalLM",  # a subclass of torch.nn.Linear
    "HrmTextForCausalLM",  # gate and up in one tensor of the files
    "LaraMiniForCausalLM",  # the same, of sizes that the model has
    "ZambaForCausalLM",  # layers that share weights
    "GptOssForCausalLM",
    "JambaForCausalLM",
    "GPT2LMHeadModel",
    "BartForConditionalGeneration",
    "BertModel",
    "DebertaV2Model",
)


def named(name: str) -> Architecture:
    return next(a for a in architectures() if a.class_name == name)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_tiny_model_is_quantized_saved_and_loaded(name: str, tmp_path: Path) -> None:
    result = try_one(named(name), tmp_path)
    assert result.built is None and result.packed and not result.failed, (result.built, result.failed)


def test_the_page_says_what_fails_and_what_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wo.nn.Linear, "forward", lambda self, x: x @ self.weight.t() * 1.01)
    wrong = try_one(named("BertModel"), tmp_path)
    text = page([wrong, try_one(Architecture("no_such_type", "causal", "NoSuchModel"), tmp_path)])
    text = " ".join(text.split())
    assert (
        "tried 2 and built 1; 0 of these" in text
        and "| BertModel | quantize | ValueError: expected an error of" in text
    )
    assert "| NoSuchModel | ValueError: Unrecognized" in text


def test_parts_of_one_tensor_of_the_files_may_stay_dense(tmp_path: Path) -> None:
    """gate packed and up dense, which are gate_up_proj in files: neither reading nor saving mixes them up."""
    dense = tiny_model(named("HrmTextForCausalLM"))
    dense.save_pretrained(tmp_path / "dense")
    for left in ("mlp.up_proj", "mlp.gate_proj"):
        config = WeightOnlyConfig(group_size=GROUP, modules_to_not_convert=[left])
        model = type(dense).from_pretrained(tmp_path / "dense", quantization_config=config).eval()
        expected = {n: m.weight + 0 for n, m in dense.named_modules() if n.endswith(left)}
        assert expected and all(torch.equal(model.get_submodule(n).weight, w) for n, w in expected.items())
        model.save_pretrained(tmp_path / left)
        again = type(dense).from_pretrained(tmp_path / left).eval()
        y, other = (output_of(m, named("HrmTextForCausalLM")) for m in (model, again))
        assert torch.equal(y, other)
