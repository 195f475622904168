"""Mixtures of experts through from_pretrained, save_pretrained and load_model: the experts are packed, and stay so."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import ROOT
from tests.expert_models import SMALL, densified, logits, make, models
from tests.hf_models import dense_model, same_state
from transformers import AutoModel, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import weightonly as wo
from weightonly.formats import convert
from weightonly.hf import WeightOnlyConfig, load_model
from weightonly.nn import Experts

FORMATS: dict[str, dict[str, Any]] = {
    "int4, zero points": {"format": "int4", "group_size": 32, "symmetric": False},
    "int8, per channel": {"format": "int8", "group_size": -1},
    "nf4": {"format": "nf4", "group_size": 32},
}
formats = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)


def quantized(folder: Path, **options: Any) -> Any:
    config = WeightOnlyConfig(**{"group_size": 32} | options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


def experts_of(model: torch.nn.Module) -> dict[str, Experts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Experts)}


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    make(name).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@models
@formats
def test_experts_are_packed_while_they_load(name: str, options: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    model = quantized(folder, **options)
    assert len(experts_of(model)) == 2
    assert not any("experts" in left for left in model.hf_quantizer.plan.dense)
    assert not any(p.requires_grad for child in experts_of(model).values() for p in child.parameters())
    exact = logits(densified(model, make(name)))
    torch.testing.assert_close(logits(model), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))
    assert (logits(model) - logits(make(name))).abs().max() > 1e-3 * exact.abs().max()
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert same_state(model, again)
    assert torch.equal(logits(again), logits(model))


@models
def test_experts_are_those_of_quantize_model(name: str, folder: Path) -> None:
    made: Any = wo.nn.quantize_model(make(name), group_size=32)
    assert same_state(made, quantized(folder))


@models
def test_dequantize(name: str, folder: Path, tmp_path: Path) -> None:
    model = quantized(folder)
    exact = densified(model, make(name))
    model.save_pretrained(tmp_path / "packed")
    dense = model.dequantize()
    assert not experts_of(dense) and same_state(dense, exact)
    dense.save_pretrained(tmp_path / "dequantized")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized")
    assert type(again.model.layers[0].mlp.experts) is type(exact.model.layers[0].mlp.experts)
    assert same_state(again, exact)


@pytest.mark.parametrize("name", ["mixtral"])
def test_files_have_a_layer_for_each_expert(name: str, folder: Path, tmp_path: Path) -> None:
    """By the names of the checkpoint's format, so that every reader of this library knows them."""
    model = quantized(folder, group_size=-1)
    model.save_pretrained(tmp_path / "packed", max_shard_size="60KB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 2
    records = {r.name: r for r in wo.load_checkpoint(tmp_path / "packed") if isinstance(r, wo.formats.QuantizedLayer)}
    experts = model.model.layers[1].mlp.experts
    for product in ("gate_up_proj", "down_proj"):
        w = getattr(experts, product).dequantize()
        for e in range(5):
            record = records[f"model.layers.1.block_sparse_moe.experts.{e}.{product}"]
            assert torch.equal(record.dequantize(), w[e])
    convert(tmp_path / "packed", tmp_path / "hopper", arch="sm90", progress=False)
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "hopper"),
        load_model(tmp_path / "packed", arch="sm90"),
    ):
        assert torch.equal(logits(again), logits(model))
    assert again.model.layers[0].mlp.experts.down_proj.layout == "tiled"


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_experts_that_are_left_dense(name: str, folder: Path, tmp_path: Path) -> None:
    model = quantized(folder, modules_to_not_convert=["model.layers.0.mlp.experts"])
    assert list(experts_of(model)) == ["model.layers.1.mlp.experts"]
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert same_state(model, again)


@pytest.mark.parametrize("name", ["gpt-oss"])
def test_experts_that_the_group_size_does_not_fit(name: str, folder: Path) -> None:
    model = quantized(folder, group_size=64)
    assert not experts_of(model) and type(model.model.layers[0].self_attn.q_proj) is wo.nn.Linear
    assert "K=96, got 64" in model.hf_quantizer.plan.dense["model.layers.0.mlp.experts"]


@pytest.mark.parametrize("name", ["qwen2-moe"])
def test_offload_and_the_base_model(name: str, folder: Path, tmp_path: Path) -> None:
    model = quantized(folder)
    model.save_pretrained(tmp_path / "packed")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "disk", "model.layers.1": "cpu"}
    for source, options in (
        (tmp_path / "packed", {}),
        (folder, {"quantization_config": WeightOnlyConfig(group_size=32)}),
    ):
        other = AutoModelForCausalLM.from_pretrained(
            source, device_map=places, offload_folder=tmp_path / "offload", dtype=torch.float32, **options
        )
        assert other.model.layers[0].mlp.experts.down_proj.qweight.is_meta
        assert torch.equal(logits(other), logits(model))
        other.save_pretrained(tmp_path / "again")
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))
    base = AutoModel.from_pretrained(tmp_path / "packed")
    assert same_state(base, model.model)
    assert same_state(AutoModel.from_pretrained(folder, quantization_config=WeightOnlyConfig(group_size=32)), base)
    base.save_pretrained(tmp_path / "base")
    assert same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "base").model, base)


# --- checkpoints of other quantizers ------------------------------------------------------------------------

CHECKPOINTS = Path(os.environ.get("WEIGHTONLY_CHECKPOINTS", ROOT.parent / "shared/checkpoints"))


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason=f"{CHECKPOINTS} is not there")
@pytest.mark.parametrize("name", ["gptq4_moe", "ct_moe"])
def test_real_checkpoints(name: str, tmp_path: Path) -> None:
    model = load_model(CHECKPOINTS / name, torch.float32)
    assert len(experts_of(model)) == 2
    exact = logits(dense_model(CHECKPOINTS / name))
    torch.testing.assert_close(logits(model), exact, rtol=0, atol=1e-5)
    convert(CHECKPOINTS / name, tmp_path / "packed", progress=False)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert same_state(model, again)
    model.save_pretrained(tmp_path / "saved")
    assert same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32))


def packed_mixtral(folder: Path, generator: torch.Generator, **options: Any) -> Path:
    """A folder as `convert` writes it of a quantizer's Mixtral: w1, w2, w3 of each expert."""
    config = MixtralConfig(**SMALL | {"intermediate_size": 128, "num_local_experts": 3, "num_hidden_layers": 1})
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    perm = torch.randperm(64, generator=generator).int()
    for name in [name for name in tensors if "experts" in name or "_proj" in name]:
        w = tensors.pop(name).t()
        layer = name.removesuffix(".weight")
        is_down = layer.endswith("w2")
        zeros = options.get("zeros", "all") == "all" or layer.endswith(("0.w1", "0.w3"))
        group_size = 64 if layer.endswith(options.get("coarse", ())) else 32
        q, scales, z = wo.quantize(w, group_size=group_size, symmetric=not zeros)
        packed = wo.preprocess(q, layout="tiled")
        inside = {"qweight": packed.data.view(packed.n_padded // 64, -1), "scales": scales, "zeros": z}
        if not is_down and options.get("act_order", "nowhere") in layer:
            inside["perm"] = perm.clone()
        tensors |= {f"{layer}.{tensor}": value for tensor, value in inside.items() if value is not None}
    config_json = json.loads((folder / "config.json").read_text())
    common = {"format": "int4", "group_size": 32, "symmetric": False, "act_order": False, "layout": "tiled"}
    layers = {}
    for name in tensors:
        layer, _, tensor = name.rpartition(".")
        if tensor == "qweight":
            own: dict[str, object] = {
                "symmetric": f"{layer}.zeros" not in tensors,
                "act_order": f"{layer}.perm" in tensors,
            }
            own["group_size"] = 64 if layer.endswith(options.get("coarse", ())) else 32
            layers[layer] = {field: value for field, value in own.items() if common[field] != value}
    config_json["quantization_config"] = {"quant_method": "weightonly", "format_version": 3, **common, "layers": layers}
    (folder / "config.json").write_text(json.dumps(config_json))
    save_file(options.get("edit", lambda t: t)(tensors), folder / "model.safetensors")
    return folder


CASES: dict[str, dict[str, Any]] = {
    "zero points": {},
    "act-order": {"act_order": "experts"},
    "act-order of one expert": {"act_order": "experts.1"},
    "zero points of one expert": {"zeros": "first expert"},
}


@pytest.mark.parametrize("case", CASES)
def test_experts_packed_one_by_one(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    folder = packed_mixtral(tmp_path, generator, **CASES[case])
    exact = logits(dense_model(folder))
    for model in (AutoModelForCausalLM.from_pretrained(folder), load_model(folder), load_model(folder, arch="sm80")):
        [experts] = experts_of(model).values()
        assert (experts.gate_up_proj.perm is not None) is ("act-order" in case)
        assert experts.gate_up_proj.zeros is not None
        torch.testing.assert_close(logits(model), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


STEM = "model.layers.0.block_sparse_moe.experts."


def with_biases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {f"{STEM}{e}.w2.bias": torch.ones(64) for e in range(3)}


def with_a_narrow_gate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """64 columns of the gate of expert 1 are those of its up."""
    for tensor, dim in {"qweight": 0, "scales": 1, "zeros": 1}.items():
        names = [f"{STEM}1.{w}.{tensor}" for w in ("w1", "w3")]
        parts = torch.cat([tensors[name] for name in names], dim).chunk(4, dim)
        tensors |= {names[0]: parts[0].contiguous(), names[1]: torch.cat(parts[1:], dim)}
    return tensors


UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "columns": (
        {"edit": with_a_narrow_gate},
        rf"{STEM}1\.w1: expected K x N = 64 x 128 as the model's config says, got 64 x 64",
    ),
    "biases": ({"edit": with_biases}, rf"{STEM}0\.w2\.bias: expected none or zeros, .*, got others"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_experts_that_cannot_be_stacked(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    options, message = UNLIKE[case]
    folder = packed_mixtral(tmp_path, generator, **options)
    for load in (AutoModelForCausalLM.from_pretrained, load_model):
        with pytest.raises(ValueError, match=message):
            load(folder)


def test_experts_of_several_group_sizes_are_dense(tmp_path: Path, generator: torch.Generator) -> None:
    folder = packed_mixtral(tmp_path, generator, coarse="1.w1")
    for load in (AutoModelForCausalLM.from_pretrained, load_model):
        model = load(folder)
        assert not experts_of(model)
        torch.testing.assert_close(logits(model), logits(dense_model(folder)))


def without(*names: str) -> Any:
    return lambda tensors: {name: value for name, value in tensors.items() if not name.startswith(names)}


def test_an_expert_that_is_not_there(tmp_path: Path, generator: torch.Generator) -> None:
    stem = "model.layers.0.block_sparse_moe.experts."
    folder = packed_mixtral(tmp_path, generator, edit=without(f"{stem}2.w1"))
    for load in (AutoModelForCausalLM.from_pretrained, load_model):
        with pytest.raises(ValueError, match=r"experts\.gate_up_proj: expected 3 experts, got none for expert 2"):
            load(folder)


def test_a_product_that_is_not_there(tmp_path: Path, generator: torch.Generator) -> None:
    stem = "model.layers.0.block_sparse_moe.experts."
    folder = packed_mixtral(
        tmp_path, generator, edit=without(*(f"{stem}{e}.{w}" for e in range(3) for w in ("w1", "w3")))
    )
    with pytest.raises(ValueError, match=r"expected the experts of model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        load_model(folder)


def test_another_number_of_experts(tmp_path: Path, generator: torch.Generator) -> None:
    folder = packed_mixtral(tmp_path, generator)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"num_local_experts": 3', '"num_local_experts": 4'))
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj: expected 4 experts, got none for expert 3"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_experts_of_another_shape(tmp_path: Path, generator: torch.Generator) -> None:
    folder = packed_mixtral(tmp_path, generator)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 128', '"intermediate_size": 64'))
    message = r"experts\.0\.w1: expected K x N = 64 x 64 as the model's config says, got 64 x 128"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


@models
def test_a_model_of_quantize_model_saves_itself(name: str, tmp_path: Path) -> None:
    model: Any = wo.nn.quantize_model(make(name), group_size=32, skip=["model.layers.1.mlp.experts"])
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert list(experts_of(again)) == ["model.layers.0.mlp.experts"]
    assert same_state(model, again)
    assert torch.equal(logits(again), logits(model))
