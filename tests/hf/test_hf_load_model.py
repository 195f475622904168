"""load_model: folders of real quantizers and of `convert` as running models of transformers."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests import ROOT
from tests.formats_llama import MODELS as QUANTIZED
from tests.formats_llama import gptq
from tests.hf_models import (
    MODELS,
    TOKENS,
    dense_tensors,
    llama,
    logits,
    packed_layers,
    qwen2,
    saved,
    seeded,
    write_model,
)
from tests.spy_reads import Reads
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import QuantizedLayer, convert, open_checkpoint
from weightonly.hf import WeightOnlyConfig, load_model, quantizer, run
from weightonly.hf import checkpoint as checkpoint_module

CHECKPOINTS = Path(os.environ.get("WEIGHTONLY_CHECKPOINTS", ROOT.parent / "shared/checkpoints"))
"""Folders that real quantizers wrote; they are not part of the repository."""

needs_checkpoints = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason=f"{CHECKPOINTS} is not there")


def dense_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The dense model with the numbers of a quantized checkpoint."""
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    cls = getattr(transformers, config.architectures[0])
    return cls.from_pretrained(None, config=config, state_dict=dense_tensors(folder, dtype), dtype=dtype)


@pytest.fixture
def checkpoint(tmp_path: Path, generator: torch.Generator) -> Path:
    """A small GPTQ checkpoint of a Llama: act-order, zero points."""
    return write_model(tmp_path / "gptq", "gptq-4bit-v1-act_order", generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", QUANTIZED)
def test_logits_are_those_of_the_dequantized_weights(
    case: str, dtype: torch.dtype, tmp_path: Path, generator: torch.Generator
) -> None:
    folder = write_model(tmp_path / "model", case, generator)
    model, dense = load_model(folder, dtype=dtype), dense_model(folder)
    records = [record for record in wo.load_checkpoint(folder) if isinstance(record, QuantizedLayer)]
    assert set(packed_layers(model)) == {record.name for record in records}
    for record in records:
        layer = model.get_submodule(record.name)
        assert (layer.zeros is None, layer.perm is None) == (record.zeros is None, record.perm is None)
    tokens = TOKENS % model.config.vocab_size
    expected = logits(dense, tokens)
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype] * float(expected.abs().max())
    torch.testing.assert_close(logits(model, tokens).float(), expected, rtol=0, atol=bound)


CASES = ("awq", "bnb_nf4", "ct_w4a16", "gptq4", "gptq4_moe", "ct_moe", "ct_mxfp4")
ON_CPU_ALONE = ("ct_nvfp4", "gptq4_g16")
"""Groups of 16."""


@needs_checkpoints
@pytest.mark.parametrize("name", [*CASES, *ON_CPU_ALONE])
def test_real_checkpoints(name: str, tmp_path: Path) -> None:
    arch = None if name in ON_CPU_ALONE else "sm90"
    folder = CHECKPOINTS / name
    model = load_model(folder, dtype=torch.float32)
    expected = logits(dense_model(folder))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    convert(folder, tmp_path / "packed", arch=arch, progress=False)
    for other in (tmp_path / "packed", folder):
        again = load_model(other, torch.float32, arch=arch)
        torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(load_model(tmp_path / "packed", torch.float32)), expected, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))


@needs_checkpoints
@pytest.mark.parametrize("name", ON_CPU_ALONE)
def test_real_checkpoints_that_no_gpu_runs(name: str, tmp_path: Path, no_groups_of_16: None) -> None:
    message = r"on a GPU; got 16, .*14 of 14 layers have such groups.*model again with group_size 32, 64 or 128"
    with pytest.raises(ValueError, match=message):
        load_model(CHECKPOINTS / name, arch="sm90")
    with pytest.raises(ValueError, match=message):
        convert(CHECKPOINTS / name, tmp_path / "packed", arch="sm90")


@needs_checkpoints
@pytest.mark.parametrize("name", ON_CPU_ALONE)
def test_real_checkpoints_for_a_gpu_that_computes_groups_of_16(name: str, tmp_path: Path, groups_of_16: None) -> None:
    folder = CHECKPOINTS / name
    expected = logits(dense_model(folder))
    convert(folder, tmp_path / "packed", arch="sm90", progress=False)
    for other in (tmp_path / "packed", folder):
        model = load_model(other, torch.float32, arch="sm90")
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


@needs_checkpoints
def test_scales_that_float16_does_not_hold(tmp_path: Path) -> None:
    """A checkpoint of bfloat16 with a scale of 2^-47: rounding it to 0 would be silent."""
    shutil.copytree(CHECKPOINTS / "ct_mxfp4", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"][0, 0] = 80
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    name = r"model.layers.1.mlp.up_proj: scales: expected powers of two in 2\^-23 .. 2\^13 for mxfp4 in torch.float16"
    with pytest.raises(Exception, match=name):  # transformers may wrap it
        load_model(tmp_path / "model", torch.float16)
    load_model(tmp_path / "model", torch.bfloat16)


# --- converted folders --------------------------------------------------------------------------------------


def with_own_codebook(folder: Path) -> None:
    """Makes each codebook one that has no name."""
    tensors = load_file(folder / "model.safetensors")
    halved = {name: tensor / 2 for name, tensor in tensors.items() if name.endswith("quant_map")}
    save_file(tensors | halved, folder / "model.safetensors")


@pytest.mark.parametrize("case", ["awq", "gptq-4bit-v1-act_order", "gptq-8bit-v2", "bitsandbytes-nf4-nested", "code4"])
def test_converted_folders_load_in_one_line(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    folder = write_model(tmp_path / "model", case.replace("code4", "bitsandbytes-nf4"), generator)
    if case == "code4":
        with_own_codebook(folder)
    convert(folder, tmp_path / "packed", shard_bytes=1 << 14, progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    tokens = TOKENS % model.config.vocab_size
    assert torch.equal(logits(model, tokens), logits(load_model(folder, torch.float32), tokens))
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again, tokens), logits(model, tokens))


@pytest.mark.parametrize("arch", ["sm70", "sm80", "sm90"])
def test_arch_packs_again(arch: str, checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "packed", arch="sm80", progress=False)
    layout = wo.preprocess(torch.zeros(1, 1, dtype=torch.int8), arch=arch).layout
    models = [load_model(folder, torch.float32, arch=arch) for folder in (checkpoint, tmp_path / "packed")]
    for model in models:
        assert {layer.layout for layer in packed_layers(model).values()} == {layout}
    tokens = TOKENS % models[0].config.vocab_size
    assert torch.equal(logits(models[0], tokens), logits(models[1], tokens))


# --- models and folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_saved_and_dense_folders(kind: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "dense", MODELS[kind])
    dense = load_model(folder)
    assert not packed_layers(dense) and type(dense) is type(seeded(MODELS[kind]))
    assert torch.equal(logits(dense), logits(seeded(MODELS[kind])))
    packed = AutoModelForCausalLM.from_pretrained(folder, quantization_config=WeightOnlyConfig(group_size=64))
    packed.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(load_model(tmp_path / "packed")), logits(packed))


def test_device_map_on_disk(checkpoint: Path, tmp_path: Path) -> None:
    expected = load_model(checkpoint, torch.float32)
    tokens = TOKENS % expected.config.vocab_size
    blocks = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = load_model(
        checkpoint, torch.float32, device_map=blocks | {"model.layers": "disk"}, offload_folder=tmp_path / "offload"
    )
    assert all(layer.qweight.is_meta for layer in packed_layers(model).values())
    assert torch.equal(logits(model, tokens), logits(expected, tokens))
    assert torch.equal(logits(load_model(checkpoint, torch.float32, "auto"), tokens), logits(expected, tokens))


def test_generation_config_dtype_and_names(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3, "eos_token_id": [1, 2]}))
    model = load_model(checkpoint)
    assert model.dtype == torch.float32  # config.json's
    assert (model.generation_config.max_new_tokens, model.generation_config.eos_token_id) == (3, [1, 2])
    assert model.name_or_path == str(checkpoint)
    assert model.config.quantization_config.quant_method == "weightonly"
    assert not model.training and not any(
        p.requires_grad for m in packed_layers(model).values() for p in m.parameters()
    )


def test_what_transformers_keeps_in_fp32(tmp_path: Path, generator: torch.Generator) -> None:
    """T5's wo: its codes and their order stay integers. The head is tied, and outside of any base model."""
    config = T5Config(vocab_size=96, d_model=64, d_ff=128, d_kv=16, num_layers=1, num_heads=4)
    file = saved(tmp_path, lambda: T5ForConditionalGeneration(config)) / "model.safetensors"
    tensors, name = load_file(file), "encoder.block.0.layer.1.DenseReluDense.wo"
    packed, w = gptq(4, 1, symmetric=False, act_order=True)(128, 64, generator)
    del tensors[f"{name}.weight"]
    save_file(tensors | {f"{name}.{inside}": tensor for inside, tensor in packed.items()}, file)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True})
    layer = load_model(tmp_path, torch.float16).get_submodule(name)
    assert (layer.scales.dtype, layer.perm.dtype, layer.qweight.dtype) == (torch.float32, torch.int32, torch.uint8)
    torch.testing.assert_close(layer.dequantize(torch.float32), w)


def test_one_layer_is_unpacked_at_a_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightonly.formats.checkpoint import Checkpoint

    original, inside, most = Checkpoint.read_layer, [0], [0]

    def counted(*args: Any, **options: Any) -> QuantizedLayer:
        inside[0] += 1
        most.append(inside[0])
        try:
            return original(*args, **options)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(Checkpoint, "read_layer", counted)
    model = load_model(checkpoint)
    assert len(most) == 1 + len(packed_layers(model))  # each is read once
    assert max(most) == 1


@pytest.fixture
def own_code(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose model, config and tokenizer are code of its own, and a terminal whose user says yes to all."""
    edit_config(
        checkpoint, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    )
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (checkpoint / "own.py").write_text("raise SystemExit('this code ran')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return checkpoint


def test_no_code_of_a_folder_runs(own_code: Path) -> None:
    fails(own_code, "trust_remote_code")


def test_code_of_a_folder_runs_where_the_caller_says_so(own_code: Path) -> None:
    with pytest.raises(SystemExit, match="this code ran"):
        load_model(own_code, trust_remote_code=True)


def test_class_of_a_folder(checkpoint: Path) -> None:
    """A class of its own, of quantized layers, too."""
    edit_config(checkpoint, architectures=["Own"], auto_map={"AutoModelForCausalLM": "own.Own"})
    (checkpoint / "own.py").write_text(
        "from transformers import Qwen2ForCausalLM\n\n\nclass Own(Qwen2ForCausalLM):\n    pass\n"
    )
    model = load_model(checkpoint, dtype=torch.float32, trust_remote_code=True)
    assert type(model).__name__ == "Own" and packed_layers(model)
    fails(checkpoint, r"config\.json: architectures: expected names of classes .*got \['Own'\]")


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", [3], ["Nope"], ["torch"], ["LlamaConfig"]], ids=str)
def test_no_class(names: Any, checkpoint: Path) -> None:
    edit_config(checkpoint, architectures=names)
    fails(checkpoint, rf"^{checkpoint}/config\.json: architectures: expected names of classes of transformers")


@pytest.mark.parametrize("change", [{"hidden_size": "x"}, {"model_type": "nope"}, {"model_type": 5}], ids=str)
def test_config_of_no_model(change: dict[str, Any], checkpoint: Path) -> None:
    edit_config(checkpoint, **change)
    fails(checkpoint, rf"^{checkpoint}/config\.json: .*{next(iter(change)).replace('_', '.')}")


@pytest.mark.parametrize("start", ["--prompt", "--tokens"])
def test_run_runs_no_code_of_a_folder(start: str, own_code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", str(own_code), start, "1", "--device", "cpu"]) == 1
    assert "trust_remote_code" in capsys.readouterr().err


# --- records ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, None], ids=str)
@pytest.mark.parametrize("arch", [None, "sm80", "sm90"])
def test_records_are_layers(arch: str | None, dtype: torch.dtype | None, checkpoint: Path) -> None:
    for record in wo.load_checkpoint(checkpoint):
        if not isinstance(record, QuantizedLayer):
            continue
        layer = record.to_linear(dtype=dtype, arch=arch)
        assert layer.layer_name == record.name
        assert layer.scales.dtype == (record.scales.dtype if dtype is None else dtype)
        x = torch.randn(3, record.weight.k, dtype=layer.scales.dtype)
        assert torch.equal(layer(x), record(x))
        expected = x.float() @ record.dequantize() + (0 if record.bias is None else record.bias.float())
        torch.testing.assert_close(record(x.float()), expected, rtol=1e-4, atol=1e-4)


@needs_checkpoints
def test_records_that_are_no_layers(no_groups_of_16: None) -> None:
    record = next(r for r in wo.load_checkpoint(CHECKPOINTS / "gptq4_g16") if isinstance(r, QuantizedLayer))
    with pytest.raises(ValueError, match=rf"{record.name}: .*group_size must be .* on a GPU; got 16"):
        record.to_linear(arch="sm80")
    nf4 = next(r for r in wo.load_checkpoint(CHECKPOINTS / "bnb_nf4") if isinstance(r, QuantizedLayer))
    with pytest.raises(ValueError, match=rf"{nf4.name}: arch: expected .* for nf4"):
        nf4.to_linear(arch="sm70")
    with pytest.raises(ValueError, match="dtype: expected float16, bfloat16, float32 or None, got float64"):
        nf4.to_linear(torch.float64)


# --- bad input ----------------------------------------------------------------------------------------------


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def fails(folder: Path, message: str, error: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(error, match=message):
        load_model(folder, **options)


def test_folders_that_are_not_there(tmp_path: Path) -> None:
    fails(tmp_path / "nothing", "expected the folder of a checkpoint, got none", FileNotFoundError)


def test_no_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    fails(checkpoint, r"expected config\.json, which says what the model is, got none")


def test_unknown_method(checkpoint: Path) -> None:
    edit_config(checkpoint, quantization_config={"quant_method": "quip"})
    fails(checkpoint, "quant_method: expected one of awq, gptq, .*got 'quip'")


@pytest.mark.parametrize("method", ["weightonly", "gptq"])
def test_unknown_version(method: str, checkpoint: Path) -> None:
    edit_config(
        checkpoint,
        quantization_config={"quant_method": method, "format_version": 9, "bits": 4, "checkpoint_format": "gptq_v9"},
    )
    fails(checkpoint, "format_version: expected 3, got 9" if method == "weightonly" else "got 'gptq_v9'")


@pytest.mark.parametrize("dtype", [torch.float64, "float64", torch.int8])
def test_wrong_dtypes(dtype: Any, checkpoint: Path) -> None:
    fails(checkpoint, "dtype: expected one of float16, bfloat16, float32, got (float64|int8)", dtype=dtype)


def test_wrong_devices(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fails(checkpoint, "device_map: expected cpu and cuda devices", device_map={"": "mps"})
    fails(checkpoint, "device: expected 'cpu', as no CUDA GPU is visible", device_map="cuda")
    fails(checkpoint, "arch: .*'sm50'", arch="sm50")


def test_codes_for_a_gpu_that_does_not_read_them(tmp_path: Path, generator: torch.Generator) -> None:
    folder = write_model(tmp_path / "model", "bitsandbytes-nf4", generator)
    fails(folder, "arch: expected sm75.* got 'sm70'. Leave arch away", arch="sm70")


def test_codes_beside_a_gpu_that_does_not_read_them(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the layout that it dequantizes, and the CPU multiplies by."""
    folder = write_model(tmp_path / "model", "bitsandbytes-nf4", generator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    for module in (checkpoint_module, quantizer):
        monkeypatch.setattr(module, "device_arch", lambda device: 70)  # the function itself caches what it finds
    weights = checkpoint_module.CheckpointWeights(open_checkpoint(folder), None)
    assert {shape.layout for shape in weights.shapes.values()} == {"tiled"}
    with pytest.raises(ValueError, match=r"arch: expected sm75.* for nf4"):  # to quantize is to ask for a kernel
        AutoModelForCausalLM.from_pretrained(
            saved(tmp_path / "dense", llama), quantization_config=WeightOnlyConfig(format="nf4"), device_map="cpu"
        )


def test_another_shape(checkpoint: Path) -> None:
    edit_config(
        checkpoint, num_key_value_heads=json.loads((checkpoint / "config.json").read_text())["num_attention_heads"]
    )
    fails(checkpoint, r"self_attn\.[kv]_proj: expected K x N = .* as the model's config says, got .* in the checkpoint")


def test_a_model_with_more_layers(checkpoint: Path) -> None:
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    edit_config(checkpoint, num_hidden_layers=layers + 1)
    fails(
        checkpoint,
        rf"expected model\.layers\.{layers}\.\S+qweight or .*weight, as the model has this layer, got neither",
    )


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.0.self_attn.q_proj.scales", "lm_head.weight"])
def test_half_of_a_folder(lost: str, checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[lost]
    save_file(tensors, file)
    fails(checkpoint, rf"{lost}")


def test_a_missing_shard(tmp_path: Path) -> None:
    seeded(llama).save_pretrained(tmp_path / "dense", max_shard_size="100KB")
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", quantization_config=WeightOnlyConfig(group_size=64)
    ).save_pretrained(tmp_path / "packed", max_shard_size="50KB")
    for folder in (tmp_path / "dense", tmp_path / "packed"):
        next(folder.glob("model-00002*")).unlink()
        fails(folder, "expected in model-00002", FileNotFoundError)
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


@pytest.mark.parametrize("lost", ["model.layers.0.mlp.up_proj.scales", "model.layers.0.mlp.up_proj.qweight"])
def test_half_of_a_packed_folder(lost: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(
        saved(tmp_path / "dense", llama), quantization_config=WeightOnlyConfig(group_size=64)
    ).save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed/model.safetensors"
    tensors = load_file(file)
    del tensors[lost]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "packed"
    AutoModelForCausalLM.from_pretrained(
        saved(tmp_path / "dense", qwen2), quantization_config=WeightOnlyConfig(group_size=64)
    ).save_pretrained(folder)
    yield folder
    shutil.rmtree(folder)


def test_run_writes_tokens(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", str(packed), "--tokens", "3,5,8", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    tokens, formats, kernels, memory, speed = capsys.readouterr().out.splitlines()
    expected = load_model(packed).generate(torch.tensor([[3, 5, 8]]), max_new_tokens=4, do_sample=False)
    assert list(map(int, tokens.split())) == expected[0].tolist()
    assert speed.startswith(f"{expected.shape[1] - 3} tokens in ") and speed.endswith(" tokens/s")
    assert formats == "format: 14 layers int4, groups of 64; 1 dense"
    assert kernels.startswith("kernels: ") and kernels.endswith(" for the prompt") and "for a token; " in kernels
    assert re.fullmatch(r"memory: .* KiB of weights, at most .*iB in use .*", memory)


def test_run_writes_text(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    letters = [*map(chr, range(33, 127)), "\u0120", "\u010a"]  # the last are a blank and a new line
    words = {letter: number for number, letter in enumerate(letters)}
    transformers.Qwen2Tokenizer(vocab=words, merges=[]).save_pretrained(packed)
    assert command.main(["run", str(packed), "--prompt", "$&)", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    expected = load_model(packed).generate(torch.tensor([[3, 5, 8]]), max_new_tokens=4, do_sample=False)
    assert text.startswith(transformers.AutoTokenizer.from_pretrained(packed).decode(expected[0]) + "\n")


def test_run_writes_letters_of_several_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = transformers.Qwen2Tokenizer(vocab={"a": 0, "\u00c3": 1, "\u00a9": 2}, merges=[])
    printer = run._Printer(tokenizer)
    for token in (0, 1, 2, 0):  # the bytes of \u00e9 are two tokens
        printer.put(torch.tensor([token]))
    printer.end()
    assert capsys.readouterr().out == "a\u00e9a\n"


def test_run_writes_nothing_that_a_terminal_obeys(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither text of the model nor what transformers logs of its config."""
    decoded = "a\x1b]52;c;aGk=\x07\r\u202eb\n"
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: decoded * len(tokens))
    printer = run._Printer(tokenizer)
    printer.put(torch.tensor([3]))
    printer.end()
    assert capsys.readouterr().out == r"a\x1b]52;c;aGk=\x07\r\u202eb" + "\n\n"
    assert command.main(["run", str(packed), "--tokens", "3", "--max-new-tokens", "1", "--device", "cpu"]) == 0
    (handler, *_) = logging.getLogger("transformers").handlers
    text = handler.format(logging.makeLogRecord({"msg": "model type %s", "args": ("\x1b[2J\r",)}))
    assert text.endswith(r"model type \x1b[2J\r")
    assert r"\x1b[2J" in warnings.formatwarning("\x1b[2J", UserWarning, "a.py", 1, "")


WRONG_RUNS = {
    "no numbers": (["--tokens", "1,x"], "--tokens: expected numbers such as 1,2,3, got '1,x'"),
    "not in the vocabulary": (["--tokens", "1,96"], "--tokens: expected at least one token of 0..95, got [1, 96]"),
    "no tokenizer": (["--prompt", "a"], "expected a tokenizer for --prompt, got none; --tokens 1,2,3 gives numbers"),
    "none to write": (["--tokens", "1", "--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
    "dtype": (
        ["--tokens", "1", "--dtype", "float64"],
        "dtype: expected one of float16, bfloat16, float32, got float64",
    ),
    "arch": (["--tokens", "1", "--arch", "sm50"], "'sm50'"),
}


@pytest.mark.parametrize("case", WRONG_RUNS)
def test_run_says_what_is_wrong(case: str, packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG_RUNS[case]
    assert command.main(["run", str(packed), *words, "--device", "cpu"]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]


# --- what is read -------------------------------------------------------------------------------------------

ROUTES: dict[str, Callable[[Path], Any]] = {
    "load_model": load_model,
    "from_pretrained": lambda folder: AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=WeightOnlyConfig()
    ),
    "convert": lambda folder: convert(folder, folder.parent / "out", progress=False),
    "inspect": lambda folder: command.main(["inspect", str(folder)]),
}


@pytest.mark.parametrize("case", ["awq", "gptq-8bit-v2", "compressed_tensors-4bit", "packed"])
@pytest.mark.parametrize("route", ROUTES)
def test_headers_config_and_zero_points_are_read_once(
    route: str, case: str, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", "awq" if case == "packed" else case, generator)
    (folder / "generation_config.json").write_text("{}")  # without it transformers looks for one in config.json
    if case == "packed":
        convert(folder, tmp_path / "packed", shard_bytes=1 << 14, progress=False)
        folder = tmp_path / "packed"
    reads = Reads(folder, monkeypatch)
    ROUTES[route](folder)
    assert set(reads.headers.values()) == {1} and len(reads.headers) == len([*folder.glob("*.safetensors")])
    assert reads.opened["config.json"] == 1
    assert reads.zero_points() <= {1} and (reads.zero_points() or route == "inspect" or case == "packed")
