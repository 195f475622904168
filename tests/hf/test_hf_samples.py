"""Folders that HQQ and torchao wrote (tests/data), on every route, beside the logits of what they dequantize."""

from __future__ import annotations

from pathlib import Path

import pytest
import tests.hf_version  # noqa: F401
import torch
from safetensors.torch import load_file
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
