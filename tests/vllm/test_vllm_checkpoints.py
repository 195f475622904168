"""Folders that real quantizers wrote, as models of vLLM: by its own methods, and by "weightonly"."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tests import ROOT

pytest.importorskip("vllm")

from safetensors.torch import load_file, save_file
from tests.vllm import vllm_cases as cases
from tests.vllm import vllm_experts as moe
from tests.vllm.vllm_models import check, load

import weightonly as wo
from weightonly.vllm.support import VARIABLE

CHECKPOINTS = Path(os.environ.get("WEIGHTONLY_CHECKPOINTS", ROOT.parent / "shared/checkpoints"))
"""They are not part of the repository."""

pytestmark = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason=f"{CHECKPOINTS} is not there")


def folder_of(name: str, place: Path) -> Path:
    """The folder; of ct_moe a copy whose shared_expert_gate is dense, as vLLM's own method wants it."""
    if name != "ct_moe":
        return CHECKPOINTS / name
    read = wo.load_checkpoint(CHECKPOINTS / name, progress=False)
    gates = [r for r in read if isinstance(r, wo.formats.QuantizedLayer) and r.name.endswith("shared_expert_gate")]
    tensors = load_file(CHECKPOINTS / name / "model.safetensors")
    tensors = {key: t for key, t in tensors.items() if "shared_expert_gate" not in key}
    tensors |= {f"{r.name}.weight": r.dequantize(torch.float16).t().contiguous() for r in gates}
    config = json.loads((CHECKPOINTS / name / "config.json").read_text())
    config["quantization_config"]["ignore"] += [r.name for r in gates]
    copy = place / name
    copy.mkdir()
    save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize("name", ["gptq4", "awq", "ct_w4a16", "gptq4_moe", "ct_moe"])
def test_by_its_own_method(
    name: str, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's config, layers and loader, with our kernel and our experts."""
    cases.take_first(monkeypatch, "sm90")
    moe.take_ours(monkeypatch, "sm90")
    folder = folder_of(name, tmp_path)
    check(load(folder, quantization=None, load_format="auto"), folder, generator)


@pytest.mark.parametrize("name", ["ct_mxfp4", "ct_nvfp4"])
def test_fp4_by_its_own_method(name: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    fp4 = pytest.importorskip("tests.vllm.vllm_fp4", exc_type=ImportError)  # older versions have no such kernels
    fp4.take_place(monkeypatch, "sm90")
    check(load(CHECKPOINTS / name, quantization=None, load_format="auto"), CHECKPOINTS / name, generator)


@pytest.mark.parametrize("name", ["gptq4", "awq"])
def test_by_autoround(name: str, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are those of GPTQ and AWQ; the config is another one."""
    pytest.importorskip("vllm.model_executor.layers.quantization.inc.inc_linear")
    cases.take_first(monkeypatch, "sm90")
    folder = tmp_path / name
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(CHECKPOINTS / name / "model.safetensors")
    config = json.loads((CHECKPOINTS / name / "config.json").read_text())
    own = config["quantization_config"]
    config["quantization_config"] = {
        "quant_method": "auto-round",
        "packing_format": f"auto_round:auto_{own['quant_method']}",
        "bits": own["bits"],
        "group_size": own["group_size"],
        "sym": name != "awq",
        "data_type": "int",
        "autoround_version": "0.9.0",
    }
    (folder / "config.json").write_text(json.dumps(config))
    check(load(folder, quantization=None, load_format="auto"), folder, generator)
    check(load(folder), folder, generator)


@pytest.mark.parametrize(
    "name", ["gptq4", "gptq4_g16", "awq", "ct_w4a16", "gptq4_moe", "ct_moe", "bnb_nf4", "ct_mxfp4", "ct_nvfp4"]
)
def test_by_weightonly(name: str, generator: torch.Generator) -> None:
    check(load(CHECKPOINTS / name), CHECKPOINTS / name, generator)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gptq4_g16", r"qkv_proj: group_size must be .* got 16"),
        ("gptq4_moe", rf"experts: has quantized experts, which {VARIABLE}=off leaves to vLLM"),
    ],
)
def test_refused(name: str, reason: str, no_groups_of_16: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    with pytest.raises(ValueError, match=reason):
        load(CHECKPOINTS / name)
