"""Folders with tensors of quantizers that are not read, and with scales of a KV cache, under vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from safetensors.torch import load_file, save_file
from tests import ROOT, unknown_cases
from tests import formats_llama as llama
from tests.unknown_cases import CASES
from tests.vllm import vllm_cases as cases
from tests.vllm.test_vllm_folders import FOLDERS, integers, write
from tests.vllm.vllm_models import check, load

from weightonly.vllm.folders import WeightOnlyConfig


@pytest.mark.parametrize("name", CASES)
def test_tensors_of_other_quantizers(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    folder = unknown_cases.write(tmp_path / "model", CASES[name], unknown_cases.awq, generator)
    with pytest.raises(ValueError, match=CASES[name].error):
        WeightOnlyConfig().maybe_update_config(str(folder))


def test_a_model_of_them(tmp_path: Path, generator: torch.Generator) -> None:
    folder = unknown_cases.write(tmp_path / "model", CASES["fp8-scale"], unknown_cases.awq, generator)
    with pytest.raises(ValueError, match="it looks like FP8"):
        load(folder)


def test_quark_in_groups_by_its_own_method(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.model_executor.layers.quantization.quark.schemes.quark_w4a16_int4")
    cases.take_first(monkeypatch, "sm90")
    folder = ROOT / "tests/data/quark_uint4"
    check(load(folder, quantization=None, load_format="auto"), folder, generator)


@pytest.mark.parametrize("name", ["quark_int4", "quark_uint4", "quark_uint8", "quark_mxfp4"])
def test_quark_by_weightonly(name: str, generator: torch.Generator) -> None:
    """vLLM's own method refuses int4 per channel and 8 bits."""
    check(load(ROOT / "tests/data" / name), ROOT / "tests/data" / name, generator)


def test_scales_of_a_kv_cache(tmp_path: Path, generator: torch.Generator) -> None:
    folder = write(tmp_path / "model", *FOLDERS["ct-8bit-zeros"], generator)
    scales = {f"model.layers.{i}.self_attn.{name}_scale": torch.ones(1) for i in range(llama.LAYERS) for name in "kv"}
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors")
    with pytest.raises(ValueError, match="KV cache, which the config does not declare"):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(config))
    check(load(folder), folder, generator)


def test_a_short_last_group(tmp_path: Path, generator: torch.Generator) -> None:
    """K = 256 in groups of 160, the last of 96 rows: groups of 32 here. The others have one group."""
    options = {"quant_method": "gptq", "bits": 4, "group_size": 160, "desc_act": False, "sym": True}
    layer = integers("gptq", 4, False, False)

    def pack(k: int, n: int, g: torch.Generator) -> dict[str, torch.Tensor]:
        tensors, groups = layer(k, n, g), -(-k // 160)
        return tensors | {name: tensors[name][:groups] for name in ("scales", "qzeros")}

    check(load(write(tmp_path / "model", pack, options, generator)), tmp_path / "model", generator)
