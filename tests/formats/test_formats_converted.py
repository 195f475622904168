"""A converted folder whose tensors are not those that its config describes, and what lies beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.formats_layers import AWQ, BNB, CT, GPTQ, Layer, awq_layer, bnb_layer, ct_layer, folder_of, gptq_layer

import weightonly as wo
from weightonly.formats import convert


def changed(folder: Path, add: dict[str, torch.Tensor], remove: str = "") -> Path:
    """The folder, with other tensors in its one file, and without an index."""
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file) | add
    tensors.pop(remove, None)
    save_file(tensors, file, metadata)
    return folder


ORDERED = GPTQ | {"desc_act": True}
ZEROS, PERM = torch.ones(2, 16).half(), torch.arange(64).int()

# what differs -> (layer, config of the source, tensors to add, tensor to remove, what the error says)
CONTRADICTIONS: dict[str, tuple[Layer, dict[str, Any], dict[str, torch.Tensor], str, str]] = {
    "needless zeros": (ct_layer, CT, {"a.up.zeros": ZEROS}, "", r"zeros: .*\(symmetric: True\), got it"),
    "no zeros": (awq_layer, AWQ, {}, "a.up.zeros", r"zeros: .*\(symmetric: False\), got none"),
    "needless perm": (awq_layer, AWQ, {"a.up.perm": PERM}, "", r"perm: .*\(act_order: False\), got it"),
    "no perm": (gptq_layer, ORDERED, {}, "a.up.perm", r"perm: .*\(act_order: True\), got none"),
    "zeros of codes": (bnb_layer, BNB, {"a.up.zeros": ZEROS}, "", r"zeros: .*\(symmetric: True\), got it"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_tensors_that_contradict_the_config(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    layer, options, add, remove, message = CONTRADICTIONS[case]
    convert(folder_of(tmp_path, layer, options, generator), tmp_path / "packed", arch="sm80")
    assert len(list(wo.load_checkpoint(tmp_path / "packed"))) == 4
    changed(tmp_path / "packed", add, remove)
    with pytest.raises(ValueError, match=rf"\.safetensors: a\.up\.{message}$"):
        wo.load_checkpoint(tmp_path / "packed")


def test_codes_have_no_zeros(tmp_path: Path, generator: torch.Generator) -> None:
    convert(folder_of(tmp_path, bnb_layer, BNB, generator), tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization_config"]["symmetric"] = False
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    (file,) = (tmp_path / "packed").glob("*.safetensors")
    scales = {name: tensor for name, tensor in load_file(file).items() if name.endswith(".scales")}
    changed(tmp_path / "packed", {name.replace("scales", "zeros"): tensor for name, tensor in scales.items()})
    with pytest.raises(ValueError, match=r"zeros: expected none for a weight of format nf4, got it$"):
        wo.load_checkpoint(tmp_path / "packed")


@pytest.mark.parametrize("version", [None, 2, 4])
def test_versions_that_are_not_read(version: int | None, tmp_path: Path, generator: torch.Generator) -> None:
    convert(folder_of(tmp_path, awq_layer, AWQ, generator), tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization_config"]["format_version"] = version
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"format_version: expected 3, got {version}; convert"):
        wo.load_checkpoint(tmp_path / "packed")


def test_folders_beside_the_weights_are_not_copied(tmp_path: Path, generator: torch.Generator) -> None:
    """Whatever they are called."""
    source = folder_of(tmp_path, awq_layer, AWQ, generator)
    (source / "notes.json").mkdir()
    (source / "tokenizer.json").write_text("{}")
    convert(source, tmp_path / "packed")
    copied = {file.name for file in (tmp_path / "packed").iterdir()}
    assert "tokenizer.json" in copied and "notes.json" not in copied
