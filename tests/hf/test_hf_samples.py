"""Folders that HQQ, torchao and Quark wrote (tests/data), on every route, beside the logits of what they dequantize."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tests.hf_version  # noqa: F401
import torch
from safetensors.torch import load_file, save_file
from tests.data import HERE, LOGITS, TOKENS
from tests.hf_models import logits, packed_layers
from transformers import AutoModelForCausalLM

from weightonly.formats import convert, open_checkpoint
from weightonly.hf import load_model

NAMES = sorted(load_file(LOGITS))


def near(model: torch.nn.Module, expected: torch.Tensor, bound: float) -> None:
    difference = (logits(model, TOKENS).float() - expected).abs().max() / expected.abs().max()
    assert difference < bound


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, tmp_path: Path) -> None:
    folder, expected = HERE / name, load_file(LOGITS)[name]
    model = load_model(folder, torch.float32)
    assert set(packed_layers(model)) == set(open_checkpoint(folder).layers)
    near(model, expected, 2e-6)
    near(load_model(folder, torch.float16), expected, 4e-3)
    near(load_model(folder, torch.bfloat16), expected, 4e-2)
    convert(folder, tmp_path / "packed", arch="sm90", progress=False)
    near(load_model(tmp_path / "packed", torch.float32), expected, 2e-6)
    model.save_pretrained(tmp_path / "saved")
    near(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32), expected, 2e-6)


def test_layers_of_different_bits(tmp_path: Path) -> None:
    """HQQ has the settings of a layer beside it."""
    few, many = (load_file(HERE / name / "model.safetensors") for name in ("hqq_int4", "hqq_int8"))
    shutil.copytree(HERE / "hqq_int4", tmp_path / "model")
    mixed = {name: tensor for name, tensor in few.items() if "layers.1." not in name}
    mixed |= {name: tensor for name, tensor in many.items() if "layers.1." in name}
    save_file(mixed, tmp_path / "model" / "model.safetensors")
    model = load_model(tmp_path / "model", torch.float32)
    assert {(name.split(".")[2], layer.format) for name, layer in packed_layers(model).items()} == {
        ("0", "int4"),
        ("1", "int8"),
    }
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again, TOKENS), logits(model, TOKENS))
