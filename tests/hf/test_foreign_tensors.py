"""Nothing is dense because nobody recognized it: tensors of quantizers that are not read, on every route."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import expert_models, hf_models, unknown_cases
from tests.formats_llama import CONFIG, HIDDEN
from tests.formats_llama import MODELS as QUANTIZED
from tests.unknown_cases import CASES, LAYER, Case, awq, dense, write
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertForMaskedLM

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import convert
from weightonly.hf import WeightOnlyConfig, load_model


def from_pretrained(folder: Path, cls: Any = AutoModelForCausalLM) -> Any:
    return cls.from_pretrained(folder, quantization_config=WeightOnlyConfig(group_size=32))


ROUTES: dict[str, Callable[[Path], object]] = {
    "load_model": load_model,
    "from_pretrained": from_pretrained,
    "convert": lambda folder: convert(folder, folder.parent / "packed", progress=False),
    "load_checkpoint": lambda folder: [*wo.load_checkpoint(folder, progress=False)],
}


def refused(folder: Path, message: str, capsys: pytest.CaptureFixture[str] | None = None) -> None:
    for route in ROUTES.values():
        with pytest.raises(ValueError, match=message):
            route(folder)
    if capsys is not None:
        assert command.main(["inspect", str(folder)]) == 1
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(("base", "shards"), [(dense, 1), (awq, 3)], ids=["dense", "awq"])
@pytest.mark.parametrize("name", CASES)
def test_every_route(
    name: str, base: Any, shards: int, tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    places = "|".join(re.escape(place) for place in (LAYER, *case.more))
    folder = write(tmp_path / "model", case, base, generator, shards)
    where = "hf_quant_config.json: quant_method" if base is dense and case.files else rf"({places})[.:_].*expected"
    refused(folder, f"{where}.*{case.error}", capsys)


@pytest.mark.parametrize("name", expert_models.MODELS)
@pytest.mark.parametrize("what", ["int8", "float8", "scale"])
def test_dense_experts(what: str, name: str, tmp_path: Path) -> None:
    expert_models.make(name).half().save_pretrained(tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    expert = [
        tensor for tensor in tensors if re.search(r"experts\.(3\.w1\.weight|3\.up_proj\.weight|down_proj$)", tensor)
    ][-1]
    if what == "scale":
        tensors[f"{expert}_scale_inv"] = torch.ones(2)
    else:
        tensors[expert] = tensors[expert].to(torch.int8 if what == "int8" else torch.float8_e4m3fn)
    save_file(tensors, file, {"format": "pt"})
    refused(tmp_path / "model", rf"{re.escape(expert)}(_scale_inv)?: expected")


@pytest.mark.parametrize("base", [dense, awq])
@pytest.mark.parametrize(
    "extra", [f"{LAYER}.extra", f"{LAYER}.bias", "model.layers.0.self_attn.extra", "model.norm.extra"]
)
def test_a_tensor_that_nothing_uses(extra: str, base: Any, tmp_path: Path, generator: torch.Generator) -> None:
    folder = write(tmp_path / "model", Case(more={extra: torch.ones(128)}), base, generator)
    for route in (load_model, from_pretrained):
        with pytest.raises(ValueError, match=rf"{re.escape(extra)}: expected"):
            route(folder)


def test_a_tensor_that_no_reader_knows(tmp_path: Path, generator: torch.Generator) -> None:
    folder = write(tmp_path / "model", Case(more={f"{LAYER}.extra": torch.ones(3)}), awq, generator)
    refused(folder, rf"{LAYER}.extra: expected none beside the tensors of {LAYER}, got float32 \[3\]")


def test_a_weight_that_is_not_there(tmp_path: Path, generator: torch.Generator) -> None:
    tensors = {name: tensor for name, tensor in dense(generator).items() if name != f"{LAYER}.weight"}
    folder = write(tmp_path / "model", Case(), lambda g: tensors, generator)
    with pytest.raises(ValueError, match=rf"got none for {LAYER}.weight"):
        load_model(folder)
    with pytest.raises(ValueError, match=rf"expected {LAYER}.weight, as the model has this layer, got none"):
        from_pretrained(folder)


def test_a_bias_that_is_not_there(tmp_path: Path, generator: torch.Generator) -> None:
    folder = hf_models.write_model(tmp_path / "model", "gptq-4bit-v1-sym", generator)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected model\.layers\.1\.self_attn\.q_proj\.bias, as the model has it"):
        from_pretrained(folder)


def test_a_quantized_folder_is_not_quantized_again(tmp_path: Path, generator: torch.Generator) -> None:
    quantizer = {"quant_method": "modelopt", "quant_algo": "FP8"}
    for name, config, files in (
        ("config.json", {"quantization_config": quantizer}, {}),
        ("quantize_config.json", {}, {"quantize_config.json": {"bits": 4, "group_size": 32}}),
        ("hf_quant_config.json", {}, {"hf_quant_config.json": unknown_cases.MODELOPT}),
    ):
        folder = write(tmp_path / name.partition(".")[0], Case(config=config, files=files), dense, generator)
        with pytest.raises(ValueError, match=f"{name}: quant_method: expected none, of a model to quantize, got '"):
            from_pretrained(folder)


def test_gguf(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model-Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"expected safetensors files, got a GGUF file"):
        load_model(tmp_path)


# --- what is no quantizer's -------------------------------------------------------------------------------------

KV = {f"model.layers.{i}.self_attn.{name}_scale": torch.ones(1) for i in range(2) for name in "kv"}
KV_ALONE = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
HARMLESS = {
    "rotary tables": Case(more={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}),
    "positions": Case(more={"model.position_ids": torch.arange(64)[None]}),
    "masks": Case(more={"model.layers.0.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}),
    "a bias of zeros": Case(more={f"{LAYER}.bias": torch.zeros(128)}),
    "layers that the model does not have": Case(more={"model.mtp.layers.0.eh_proj.weight": torch.ones(4, 4)}),
    "scales of a KV cache": Case(more=KV, files={"hf_quant_config.json": KV_ALONE}),
}


@pytest.mark.parametrize("base", [dense, awq])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless(name: str, base: Any, tmp_path: Path, generator: torch.Generator) -> None:
    folder = write(tmp_path / "model", HARMLESS[name], base, generator)
    plain = write(tmp_path / "plain", Case(), base, generator.manual_seed(generator.initial_seed()))
    write(folder, HARMLESS[name], base, generator.manual_seed(generator.initial_seed()))
    for route in (load_model, from_pretrained):
        assert torch.equal(hf_models.logits(route(folder)), hf_models.logits(route(plain)))


@pytest.mark.parametrize("more", [KV, {f"{LAYER}.input_scale": torch.ones(1)}], ids=["kv", "activations"])
def test_what_the_config_declares(more: dict[str, torch.Tensor], tmp_path: Path, generator: torch.Generator) -> None:
    model = QUANTIZED["compressed_tensors-4bit-sym"](generator)
    tensors = {name: tensor for name, tensor in model.tensors.items() if not name.endswith("proj.bias")} | more
    folder = unknown_cases.write(
        tmp_path / "model", Case(config={"quantization_config": model.config}), lambda g: tensors, generator
    )
    refused(folder, "KV cache, which the config does not declare")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    (folder / "config.json").write_text(json.dumps(config))
    convert(folder, tmp_path / "packed", arch="cpu", progress=False)
    models = [load_model(folder), from_pretrained(folder), load_model(tmp_path / "packed")]
    first, *others = map(hf_models.logits, models)
    assert all(torch.equal(first, other) for other in others)


def test_modules_that_a_class_does_not_have(tmp_path: Path, generator: torch.Generator) -> None:
    for base in (dense, awq):
        from_pretrained(write(tmp_path / base.__name__, Case(), base, generator), AutoModel)
    sizes = {"vocab_size": 96, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=64)).save_pretrained(tmp_path / "bert")
    file = tmp_path / "bert/model.safetensors"
    more = {
        "cls.seq_relationship.weight": torch.ones(2, HIDDEN),
        "bert.pooler.dense.weight": torch.ones(HIDDEN, HIDDEN),
    }
    save_file(load_file(file) | more, file, {"format": "pt"})
    load_model(tmp_path / "bert")
