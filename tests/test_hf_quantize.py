"""from_pretrained(..., quantization_config=WeightOnlyConfig(...)), save_pretrained, and from_pretrained again."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import (
    MODELS,
    SIZES,
    TOKENS,
    VOCABULARY,
    gpt2,
    llama,
    logits,
    packed_layers,
    qwen2,
    same_state,
    saved,
    seeded,
)
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import weightonly as wo
from weightonly.hf import WeightOnlyConfig

FORMATS = ("int4", "int8", "nf4", "fp4")


def quantized(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    config = WeightOnlyConfig(**{"group_size": 64} | options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


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


# --- devices ------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, torch.Tensor]:
    """A dense folder, a packed one, and the logits of the packed one."""
    model = quantized(saved(tmp_path / "dense", llama))
    model.save_pretrained(tmp_path / "packed")
    return tmp_path / "dense", tmp_path / "packed", logits(model)


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


# --- without the import -------------------------------------------------------------------------------------


def in_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("before", ["", "import weightonly; "])
@pytest.mark.parametrize("cls", ["AutoModelForCausalLM", "AutoModel", "LlamaForCausalLM"])
def test_transformers_refuses_the_folder_without_the_import(
    cls: str, before: str, folders: tuple[Path, Path, torch.Tensor]
) -> None:
    run = in_process(f"{before}import transformers; transformers.{cls}.from_pretrained({str(folders[1])!r})")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].endswith("`import weightonly.hf` before from_pretrained)")


def test_the_import_is_all_that_it_takes(folders: tuple[Path, Path, torch.Tensor]) -> None:
    run = in_process(
        "import weightonly.hf, transformers; "
        f"m = transformers.AutoModelForCausalLM.from_pretrained({str(folders[1])!r}); "
        "print(type(m.model.layers[0].mlp.up_proj).__module__)"
    )
    assert run.stdout == "weightonly.nn.linear\n", run.stderr


def test_import_weightonly_imports_no_framework() -> None:
    run = in_process(
        "import sys, weightonly; print([m for m in ('transformers', 'peft', 'accelerate') if m in sys.modules])"
    )
    assert run.stdout == "[]\n", run.stderr


# --- bad input ----------------------------------------------------------------------------------------------

WRONG_CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "format": ({"format": "int3"}, ValueError, "format: expected one of int4, int8, nf4, fp4.*got 'int3'"),
    "code4": ({"format": "code4"}, ValueError, "format: expected one of int4, int8, nf4, fp4.*got 'code4'"),
    "group size": ({"group_size": 48}, ValueError, "group_size must be .*got 48"),
    "group size 0": ({"group_size": 0}, ValueError, "group_size: .*got 0"),
    "group size text": ({"group_size": "64"}, TypeError, "group_size: expected an int, got str"),
    "zeros of codes": ({"format": "nf4", "symmetric": False}, ValueError, "symmetric: expected True for nf4"),
    "nf4 on sm80": ({"format": "nf4", "arch": "sm80"}, ValueError, "arch: expected .*sm90.* for nf4.*got 'sm80'"),
    "arch": ({"arch": "sm91"}, ValueError, "arch: .*'sm91'"),
    "skip": ({"modules_to_not_convert": "lm_head"}, TypeError, "modules_to_not_convert: expected a list.*'lm_head'"),
    "unknown": ({"bits": 4}, ValueError, "quantization_config: unknown entries bits"),
    "method": ({"quant_method": "gptq"}, ValueError, "quant_method: expected 'weightonly', got 'gptq'"),
    "version": ({"format_version": 9}, ValueError, "format_version: expected 2 or 3, got 9"),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_wrong_configs(case: str) -> None:
    options, error, message = WRONG_CONFIGS[case]
    with pytest.raises(error, match=message):
        WeightOnlyConfig(**options)


def test_wrong_dtype(folders: tuple[Path, Path, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="dtype: expected one of float16, bfloat16, float32, got float64"):
        quantized(folders[0], torch.float64)


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_devices_without_kernels(device: str, folders: tuple[Path, Path, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=f"device_map: expected cpu and cuda devices.*got '{device}'"):
        AutoModelForCausalLM.from_pretrained(folders[1], device_map={"": device})


def test_a_model_without_layers_to_quantize(folders: tuple[Path, Path, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM: expected a linear layer to quantize, got none"):
        quantized(folders[0], modules_to_not_convert=["model"])


def test_weights_that_cannot_be_quantized_are_named(tmp_path: Path) -> None:
    model = seeded(llama)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    # transformers collects errors of conversions, logs them and raises one of its own.
    with pytest.raises(RuntimeError, match="conversion"):
        quantized(tmp_path)


EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"format_version": 7}, "format_version: expected 2 or 3, got 7"),
    "format": ({"format": "int8"}, r"qweight: expected uint8 \[\d+, \d+\], got uint8"),
    "layout": ({"layout": "tiled"}, r"qweight: expected uint8 \[\d+, \d+\], got uint8"),
    "no layout": ({"layout": None}, r"layout of model\.layers\.0\S+: expected one of row_major.*got None"),
    "group size": ({"group_size": 32}, r"qweight: expected uint8 \[\d+, \d+\], got uint8"),
    "zeros": ({"symmetric": False}, r"zeros: expected what the config says \(symmetric: False\), got none"),
    "perm": ({"act_order": True}, r"perm: expected what the config says \(act_order: True\), got none"),
    "a packed layer as dense": (
        {"modules_to_not_convert": ["model.layers.0.mlp.up_proj"]},
        r"modules_to_not_convert: expected layers that are not packed, got model\.layers\.0\.mlp\.up_proj",
    ),
    "type": ({"group_size": "64"}, r"group_size: expected int, got '64'"),
}


@pytest.mark.parametrize("case", EDITS)
def test_configs_that_contradict_the_tensors(case: str, folders: tuple[Path, Path, torch.Tensor]) -> None:
    edit, message = EDITS[case]
    path = folders[1] / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= edit
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folders[1])


def test_a_model_of_another_shape(folders: tuple[Path, Path, torch.Tensor]) -> None:
    path = folders[1] / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 192', '"intermediate_size": 256'))
    with pytest.raises(
        ValueError, match=r"down_proj: expected K x N = 256 x 128 as the model's config says, got 192 x 128"
    ):
        AutoModelForCausalLM.from_pretrained(folders[1])


def test_a_model_with_more_layers(folders: tuple[Path, Path, torch.Tensor]) -> None:
    path = folders[1] / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ValueError, match=r"expected model\.layers\.2\.self_attn\.q_proj\.qweight or .*got neither"):
        AutoModelForCausalLM.from_pretrained(folders[1])


def test_another_method_for_a_packed_folder(folders: tuple[Path, Path, torch.Tensor]) -> None:
    from transformers import BitsAndBytesConfig

    with pytest.raises(ValueError, match="quantized with WeightOnlyConfig but you are passing a BitsAndBytesConfig"):
        AutoModelForCausalLM.from_pretrained(
            folders[1], quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        )


def test_vocabulary_of_the_tests() -> None:
    assert int(TOKENS.max()) < VOCABULARY


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


def test_a_model_of_another_method_is_left_alone() -> None:
    model: Any = seeded(llama)
    model.hf_quantizer = other = object()
    wo.nn.quantize_model(model, group_size=64)
    assert model.hf_quantizer is other
    assert not hasattr(model.config, "quantization_config")
