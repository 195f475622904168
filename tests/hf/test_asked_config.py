"""A WeightOnlyConfig beside a folder that is quantized already: what it asks for counts, or is refused."""

# mypy: disable-error-code="union-attr"

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf_models import llama, saved, write_model
from transformers import AutoModelForCausalLM

import weightonly as wo
from weightonly.formats import convert
from weightonly.hf import WeightOnlyConfig, load_model

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "the default, by its name": ("gptq-8bit-v2", {"format": "int4"}, "format: expected 'int8', .*'int4'"),
    "nf4 of AWQ": ("awq", {"format": "nf4"}, "format: expected 'int4', .* or nothing, got 'nf4'"),
    "groups": ("awq", {"group_size": 16}, "group_size: expected 32, .* got 16"),
    "zero points": ("awq", {"symmetric": True}, "symmetric: expected False, .* got True"),
    "dense layers": ("awq", {"modules_to_not_convert": ["lm_head"]}, "modules_to_not_convert: expected None"),
    "packed, format": ("packed", {"format": "int8"}, "format: expected 'int4', .* got 'int8'"),
    "packed, arch": ("packed", {"arch": "sm90"}, "arch: expected one whose layout is 'cpu', .* got 'sm90'; load_model"),
}


def folder_of(case: str, path: Path, generator: torch.Generator) -> Path:
    folder = write_model(path / "model", "awq" if case == "packed" else case, generator)
    if case == "packed":
        convert(folder, path / "packed", "cpu", progress=False)
    return path / "packed" if case == "packed" else folder


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_folder_has_not_is_refused(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    name, arguments, message = REFUSED[case]
    folder = folder_of(name, tmp_path, generator)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=WeightOnlyConfig(**arguments))


@pytest.mark.parametrize("case", ["awq", "packed"])
def test_what_the_folder_has_may_be_said(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(case, tmp_path, generator)
    config = WeightOnlyConfig(format="int4", symmetric=False, group_size=32, arch="cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert model.model.layers[0].mlp.up_proj.layout == "cpu"


def test_load_model_refuses_it_as_well(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of("awq", tmp_path, generator)
    with pytest.raises(ValueError, match="format: expected 'int4'"):
        load_model(folder, quantization_config=WeightOnlyConfig(format="int8"))


def test_arguments_are_not_saved() -> None:
    assert not {"given", "asked", "search"} & WeightOnlyConfig(format="int4", group_size=64).to_dict().keys()
    assert WeightOnlyConfig.from_dict(WeightOnlyConfig(format="nf4").to_dict()).group_size == 64


@pytest.mark.parametrize("search", [True, False])
def test_search_reaches_the_layers(search: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path / "dense", llama)
    dense = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.up_proj.weight
    config = WeightOnlyConfig(group_size=64, symmetric=False, search=search)
    layer = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).model.layers[0].mlp.up_proj
    _, scales, zeros = wo.quantize(dense.t(), 4, 64, symmetric=False, search=search)
    assert zeros is not None
    assert torch.equal(layer.scales, scales)
    assert torch.equal(layer.zeros, zeros)


def test_search_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="search: expected True, False or \"whole\", got 'no'"):
        WeightOnlyConfig(search="no")  # type: ignore[arg-type]


def test_names_that_match_no_layer_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    folder = saved(tmp_path / "dense", llama)
    config = WeightOnlyConfig(group_size=64, modules_to_not_convert=["up_proj", "lm_haed"])
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert "modules_to_not_convert: 'lm_haed' matches no layer of LlamaForCausalLM" in caplog.text
    assert "'up_proj' matches" not in caplog.text
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
