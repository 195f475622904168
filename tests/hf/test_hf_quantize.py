"""from_pretrained(..., quantization_config=WeightOnlyConfig(...)), save_pretrained, and from_pretrained again."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf_models import (
    MODELS,
    SIZES,
    TOKENS,
    gpt2,
    llama,
    logits,
    packed_layers,
    quantized,
    qwen2,
    same_state,
    saved,
    seeded,
)
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

import weightonly as wo
from weightonly.hf import WeightOnlyConfig

FORMATS = ("int4", "int8", "nf4", "fp4")


def dense_twin(make: Any, model: PreTrainedModel) -> PreTrainedModel:
    """The dense model with the numbers that the packed layers of `model` hold."""
    twin = seeded(make)
    for name, layer in packed_layers(model).items():
        dense = twin.get_submodule(name)
        w = layer.dequantize(torch.float32)
        dense.weight.data = w if type(dense).__name__ == "Conv1D" else w.t().contiguous()
    return twin


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_linear_layer_is_packed_and_computes_what_it_holds(format: str, kind: str, tmp_path: Path) -> None:
    make = MODELS[kind]
    model = quantized(saved(tmp_path, make), format=format)
    dense = seeded(make)
    kinds = (torch.nn.Linear, type(seeded(gpt2).transformer.h[0].attn.c_attn))
    expected = {name for name, module in dense.named_modules() if isinstance(module, kinds) and name != "lm_head"}
    layers = packed_layers(model)
    assert set(layers) == expected
    assert {layer.format for layer in layers.values()} == {format}
    assert not any(parameter.requires_grad for layer in layers.values() for parameter in layer.parameters())
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    assert model.training is False
    torch.testing.assert_close(logits(model), logits(dense_twin(make, model)), rtol=0, atol=2e-5)
    assert not torch.equal(logits(model), logits(dense))


@pytest.mark.parametrize("kind", MODELS)
def test_quantized_as_quantize_does(kind: str, tmp_path: Path) -> None:
    model, dense = quantized(saved(tmp_path, MODELS[kind]), symmetric=False), seeded(MODELS[kind])
    for name, layer in packed_layers(model).items():
        weight = dense.get_submodule(name).weight.detach()
        w = weight if type(dense.get_submodule(name)).__name__ == "Conv1D" else weight.t()
        q, scales, zeros = wo.quantize(w, 4, 64, symmetric=False)
        assert torch.equal(wo.unpack(layer.packed), q)
        assert torch.equal(layer.scales, scales)
        assert zeros is not None and layer.zeros is not None and torch.equal(layer.zeros, zeros)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_saved_is_loaded_bit_by_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantized(saved(tmp_path / "dense", MODELS[kind]), dtype, symmetric=False)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=dtype)
    assert same_state(model, again)
    assert torch.equal(logits(model), logits(again))
    assert packed_layers(again).keys() == packed_layers(model).keys()
    again.save_pretrained(tmp_path / "once more")
    assert same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path / "once more", dtype=dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_shards(format: str, tmp_path: Path) -> None:
    model = quantized(saved(tmp_path / "dense", llama), format=format)
    model.save_pretrained(tmp_path / "packed", max_shard_size="30KB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 3
    assert same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path / "packed"))


@pytest.mark.parametrize("arch", ["sm70", "sm80", "sm90"])
def test_layouts(arch: str, tmp_path: Path) -> None:
    model = quantized(saved(tmp_path / "dense", llama), arch=arch)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.layout == wo.preprocess(torch.zeros(1, 1, dtype=torch.int8), arch=arch).layout
    assert torch.equal(logits(model), logits(quantized(tmp_path / "dense", arch="sm80")))
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert again.model.layers[0].mlp.up_proj.layout == layer.layout
    assert torch.equal(logits(model), logits(again))


def test_layers_that_differ_stand_in_the_config(tmp_path: Path) -> None:
    """K = 192 of down_proj takes no groups of 128; the others do."""
    model = quantized(saved(tmp_path / "dense", llama), group_size=-1)
    model.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    assert config["group_size"] == 128
    assert config["layers"] == {f"model.layers.{i}.mlp.down_proj": {"group_size": 192} for i in range(2)}
    assert config["modules_to_not_convert"] == ["lm_head"]
    assert same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path / "packed"))


def test_layers_that_the_group_size_does_not_fit_stay_dense_with_a_reason(tmp_path: Path) -> None:
    model = quantized(saved(tmp_path / "dense", llama), group_size=128)
    left = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert left == {"lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(2))}
    assert "192" in model.hf_quantizer.plan.dense["model.layers.0.mlp.down_proj"]
    model.save_pretrained(tmp_path / "packed")
    assert same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path / "packed"))


@pytest.mark.parametrize("skip", ["down_proj", "model.layers.1", r"model\.layers\.\d\.mlp"])
def test_modules_to_not_convert(skip: str, tmp_path: Path) -> None:
    model = quantized(saved(tmp_path / "dense", llama), modules_to_not_convert=[skip])
    names = set(packed_layers(model))
    everything = set(packed_layers(quantized(tmp_path / "dense")))
    assert names == {name for name in everything if not re.search(skip, name)}
    assert len(names) < len(everything)
    model.save_pretrained(tmp_path / "packed")
    assert same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path / "packed"))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = quantized(saved(tmp_path / "dense", qwen2))
    model.save_pretrained(tmp_path / "packed")
    for loaded in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "packed")):
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_base_model_and_model_with_a_head_load_each_other(tmp_path: Path) -> None:
    model = quantized(saved(tmp_path / "dense", llama))
    model.save_pretrained(tmp_path / "packed")
    base = AutoModel.from_pretrained(tmp_path / "packed")
    assert same_state(base, model.model)
    base.save_pretrained(tmp_path / "base")
    # transformers makes a new head, and says so.
    assert same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "base").model, base)


def test_one_layer_in_full_precision_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what stays dense, no more than one weight of a layer is alive while others are quantized."""
    folder = saved(tmp_path, lambda: llama(num_hidden_layers=4))
    sizes = {128 * 128, 64 * 128, 192 * 128}
    alive: list[int] = []

    # By type(): some objects of other modules raise when asked for __class__, and what torch.compile leaves behind
    # (tensors without values, whose sizes are symbols) is of other types.
    def dense() -> list[torch.Tensor]:
        found = [
            t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu"
        ]
        return [t for t in found if t.is_floating_point() and t.numel() in sizes]

    before = {id(t) for t in dense()}

    def count(*args: Any) -> Any:
        gc.collect()
        alive.append(len({t.untyped_storage().data_ptr() for t in dense() if id(t) not in before}))
        return original(*args)

    from weightonly.nn.recipe import Recipe

    original = Recipe.quantize
    monkeypatch.setattr(Recipe, "quantize", count)
    quantized(folder)
    assert len(alive) == 4 * 7
    assert set(alive) == {1}


def test_modules_that_share_the_name_of_a_weight_are_read(tmp_path: Path) -> None:
    """Mixtral's file has `block_sparse_moe.gate.weight`, of a router that is no linear layer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    folder = saved(tmp_path / "dense", lambda: MixtralForCausalLM(MixtralConfig(**SIZES | sizes)))
    dense = AutoModelForCausalLM.from_pretrained(folder)
    model = quantized(folder, modules_to_not_convert=["experts"])
    assert len(packed_layers(model)) == 4
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        name = f"model.layers.0.mlp.{name}"
        assert torch.equal(model.get_parameter(name), dense.get_parameter(name))
    assert "model.layers.0.mlp.experts" in model.hf_quantizer.plan.dense
    model.save_pretrained(tmp_path / "packed")
    assert same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path / "packed"))


class RenamedLlama(LlamaForCausalLM):
    """Of a checkpoint whose mlp has another name; files may have the name of the model, too."""


register_checkpoint_conversion_mapping("RenamedLlama", [WeightRenaming("mlp", "feed_forward")])


def test_names_of_the_model_are_found_where_transformers_renames_them(tmp_path: Path) -> None:
    model = quantized(saved(tmp_path / "dense", llama), modules_to_not_convert=["up_proj"])
    model.save_pretrained(tmp_path / "packed")
    assert same_state(RenamedLlama.from_pretrained(tmp_path / "packed"), model)


class FusedLlama(LlamaForCausalLM):
    """Of a checkpoint whose q, k and v are one layer."""


fused = WeightConverter("qkv_proj", ["q_proj", "k_proj", "v_proj"], [Chunk(dim=0)])
register_checkpoint_conversion_mapping("FusedLlama", [fused])


def test_packed_layers_are_saved_as_they_are_where_transformers_fuses_dense_ones(tmp_path: Path) -> None:
    model: Any = wo.nn.quantize_model(seeded(lambda: FusedLlama(LlamaConfig(**SIZES))), group_size=64)
    model.save_pretrained(tmp_path)
    assert same_state(FusedLlama.from_pretrained(tmp_path), model)


def test_subclasses_of_linear_stay_dense(tmp_path: Path) -> None:
    """torch.nn.MultiheadAttention multiplies by the weight of its out_proj itself."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = SiglipVisionConfig(**sizes, image_size=32, patch_size=16)
    model = SiglipVisionModel.from_pretrained(
        saved(tmp_path, lambda: SiglipVisionModel(config)), quantization_config=WeightOnlyConfig(group_size=64)
    )
    assert "NonDynamicallyQuantizableLinear" in model.hf_quantizer.plan.dense["head.attention.out_proj"]
    assert model(torch.ones(1, 3, 32, 32)).pooler_output.isfinite().all()


# --- devices ------------------------------------------------------------------------------------------------


BLOCKS = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
MAPS: dict[str, Any] = {
    "auto": "auto",
    "cpu": "cpu",
    "dict": {"": "cpu"},
    "a layer on disk": BLOCKS | {"model.layers.0": "disk", "model.layers.1": "cpu"},
    "all layers on disk": BLOCKS | {"model.layers": "disk"},
}


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("device_map", MAPS)
def test_device_maps(device_map: str, kind: str, folders: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    dense, packed, expected = folders
    config = {"quantization_config": WeightOnlyConfig(group_size=64)} if kind == "dense" else {}
    model = AutoModelForCausalLM.from_pretrained(
        dense if kind == "dense" else packed,
        device_map=MAPS[device_map],
        offload_folder=tmp_path / "offload",
        dtype=torch.float32,
        **config,
    )
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), expected)  # weights are brought back each time
    on_disk = "disk" in device_map
    assert model.model.layers[0].mlp.up_proj.qweight.is_meta is on_disk
    if on_disk:
        with pytest.raises(ValueError, match=r"model\.layers\.0\..*: expected a weight in memory to dequantize"):
            model.dequantize()
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), expected)


def test_auto_counts_packed_bytes(folders: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    """A memory limit that the packed model fits, and the dense one does not: nothing goes to disk."""
    dense, _, expected = folders
    model = AutoModelForCausalLM.from_pretrained(
        dense,
        quantization_config=WeightOnlyConfig(group_size=64),
        device_map="auto",
        max_memory={"cpu": 520_000},
        offload_folder=tmp_path,
        dtype=torch.float32,
    )
    assert sum(p.nbytes for p in seeded(llama).parameters()) > 900_000
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(logits(model), expected)


# --- what a loaded model does -------------------------------------------------------------------------------


def test_generate(folders: tuple[Path, Path, torch.Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[1])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    eager = model.generate(TOKENS[:1], **options)
    assert eager.shape == (1, 18)
    assert torch.equal(model.generate(TOKENS[:1], cache_implementation="static", **options), eager)


@pytest.mark.slow
def test_compile(folders: tuple[Path, Path, torch.Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[1])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled), folders[2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_dequantize(kind: str, tmp_path: Path) -> None:
    make = MODELS[kind]
    model = quantized(saved(tmp_path / "dense", make))
    twin = dense_twin(make, model)
    dense = model.dequantize()
    assert not packed_layers(dense)
    assert torch.equal(logits(dense), logits(twin))
    dense.save_pretrained(tmp_path / "dequantized")
    config = json.loads((tmp_path / "dequantized/config.json").read_text())
    assert "quantization_config" not in config and not config.get("fusion_config")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized")
    assert not packed_layers(again)
    assert torch.equal(logits(again), logits(twin))


# --- quantize_model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_quantize_model_saves_itself(kind: str, tmp_path: Path) -> None:
    model: Any = wo.nn.quantize_model(seeded(MODELS[kind]), group_size=64, symmetric=False)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert same_state(model, again)
    assert torch.equal(logits(again), logits(model))
    assert same_state(quantized(saved(tmp_path / "dense", MODELS[kind]), symmetric=False), model)
    assert same_state(again.dequantize(), model.dequantize())
    assert not packed_layers(model)


def test_a_loaded_model_of_quantize_model_saves_itself(tmp_path: Path) -> None:
    """In two steps, and what is saved is what the model has then."""
    model = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "dense", llama))
    wo.nn.quantize_model(model, group_size=64, only=["*.mlp.*"])
    wo.nn.quantize_model(model, format="int8", group_size=-1, skip=["*.v_proj"])
    for name, layer in packed_layers(model).items():
        if "layers.1" in name:
            layer.repack("sm90")
    model.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    assert set(config["modules_to_not_convert"]) == {"lm_head", *(f"model.layers.{i}.self_attn.v_proj" for i in (0, 1))}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert same_state(model, again)
    formats = {name.split(".")[-1]: layer.format for name, layer in packed_layers(again).items()}
    assert (formats["up_proj"], formats["q_proj"]) == ("int4", "int8")
    assert torch.equal(logits(again), logits(model))
    assert model.half().dtype == torch.float16  # which transformers refuses for other quantized models


def test_gpt2_in_two_steps_is_one_again() -> None:
    """Its Conv1D are Conv1D after both."""
    model: Any = wo.nn.quantize_model(seeded(gpt2), group_size=64, only=["*.attn.*"])
    wo.nn.quantize_model(model, group_size=64)
    twin = dense_twin(gpt2, model)
    assert same_state(model.hf_quantizer._dequantize(model), twin)


def test_a_model_of_another_method_is_left_alone() -> None:
    model: Any = seeded(llama)
    model.hf_quantizer = other = object()
    wo.nn.quantize_model(model, group_size=64)
    assert model.hf_quantizer is other
    assert not hasattr(model.config, "quantization_config")
