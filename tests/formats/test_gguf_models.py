"""Models out of GGUF files, beside dense ones with the numbers of package gguf's `dequantize`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.gguf_files import COMMON, HIDDEN, MODELS, VOCAB, VOCABULARY, tiny_model, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import QuantizedLayer, convert, open_checkpoint
from weightonly.formats.describe import describe
from weightonly.formats.gguf_blocks import TYPES
from weightonly.formats.parts import read_part
from weightonly.hf import load_model
from weightonly.hf.tokenizer import load_tokenizer
from weightonly.nn.base import PackedLayer

TOKENS = torch.arange(24).view(2, 12) * 7 % VOCAB

MIXED = {"ffn_down": "Q6_K", "attn_v": "Q5_0", "token_embd": "Q6_K", "attn_q": "Q4_1", "attn_k": "Q8_0", "": "Q4_K"}
"""As files called Q4_K_M have it: several types in one."""


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS.to(model.device)).logits.float()


def assert_same(model: Any, dense: Any, error: float = 2e-5) -> None:
    got, expected = logits(model), logits(dense)
    assert expected.std() > 0.05
    torch.testing.assert_close(got, expected, rtol=0, atol=error * float(expected.abs().max()))


@pytest.mark.parametrize("model_type", MODELS)
def test_families(model_type: str, tmp_path: Path) -> None:
    dense = write_gguf(tmp_path / "x.gguf", tiny_model(model_type), MIXED)
    model = load_model(tmp_path / "x.gguf", dtype=torch.float32)
    expected = "llama" if model_type == "mistral" else model_type
    assert model.config.model_type == expected and not model.training
    assert_same(model, dense)
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLayer)}
    assert "model.layers.1.self_attn.q_proj" in packed
    assert model.get_input_embeddings().weight.dtype == torch.float32


@pytest.mark.parametrize("kinds", [{"token_embd": "F16", "": "Q4_0"}, {"token_embd": "Q6_K", "": "Q4_K"}], ids=str)
def test_a_tied_head_as_autoround_writes_it(kinds: dict[str, str], tmp_path: Path) -> None:
    """No output.weight, as in Llama 3.2; the metadata of llama.cpp's converter, which AutoRound calls."""
    file = tmp_path / "tiny-7.6M-instruct-Q4_K_M.gguf"
    metadata = {"general.type": "model", "general.size_label": "7.6M", "general.file_type": 15}
    metadata |= {"general.quantization_version": 2, "general.tags": ["a", "b"], "llama.vocab_size": VOCAB}
    dense = write_gguf(file, tiny_model("llama", tie_word_embeddings=True), kinds, metadata)
    convert(file, tmp_path / "out", progress=False)
    for path, error in ((file, 2e-5), (tmp_path / "out", 1e-3)):
        model = load_model(path, dtype=torch.float32)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert_same(model, dense, error)


@pytest.mark.parametrize("kind", TYPES)
def test_types(kind: str, tmp_path: Path) -> None:
    dense = write_gguf(tmp_path / "x.gguf", tiny_model("llama"), kind)
    assert_same(load_model(tmp_path / "x.gguf", dtype=torch.float32), dense)
    model = load_model(tmp_path / "x.gguf")
    assert model.dtype == (torch.bfloat16 if kind == "MXFP4" else torch.float16)
    assert_same(model, dense, 0.05)
    layer = model.model.layers[0].mlp.down_proj
    assert (layer.format, layer.group_size) == (TYPES[kind].format, TYPES[kind].group_size)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_dense_files(kind: str, tmp_path: Path) -> None:
    for model_type in ("mixtral", "gemma2"):
        file = tmp_path / f"{model_type}.gguf"
        dense = write_gguf(file, tiny_model(model_type), kind)
        assert_same(load_model(file, dtype=torch.float32), dense)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        assert load_model(file).dtype == dtype


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_beside_transformers(model_type: str, tmp_path: Path) -> None:
    """transformers' own reader makes the same file dense; it asks for the tokens for their number."""
    metadata = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)], "general.name": "x"}
    write_gguf(tmp_path / "x.gguf", tiny_model(model_type), MIXED, metadata)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="x.gguf")
    if model_type == "qwen3":
        config.head_dim = COMMON["head_dim"]  # it does not read it
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", config=config, dtype=torch.float32)
    assert_same(load_model(tmp_path / "x.gguf", dtype=torch.float32), theirs)


def test_rope_factors(tmp_path: Path) -> None:
    """Llama 3.1 and later: the file has the factors that transformers computes of the config."""
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    source = tiny_model("llama", rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](source.config, torch.device("cpu"))
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = (plain / scaled).numpy().astype(np.float32)
    assert abs(factors.max() - 8) < 1e-4
    add = gguf.GGUFWriter.add_tensor
    file = tmp_path / "x.gguf"
    with pytest.MonkeyPatch.context() as patch:

        def first(writer: gguf.GGUFWriter, *arguments: Any, **options: Any) -> None:
            patch.undo()
            add(writer, "rope_freqs.weight", factors)
            add(writer, *arguments, **options)

        patch.setattr(gguf.GGUFWriter, "add_tensor", first)
        dense = write_gguf(file, source, "Q8_0")
    model = load_model(file, dtype=torch.float32)
    assert model.config.rope_parameters["rope_type"] == "longrope"
    assert_same(model, dense)
    dense.model.rotary_emb.inv_freq.copy_(plain)
    with pytest.raises(AssertionError):
        assert_same(model, dense)


@pytest.mark.parametrize(
    ("kind", "values"),
    [("linear", {}), ("yarn", {"original_context_length": 128})],
)
def test_scaled_rope(kind: str, values: dict[str, int], tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 128} if values else {}
    metadata = {"type": kind, "factor": 4.0, **values}
    metadata = {f"qwen3.rope.scaling.{key}": value for key, value in metadata.items()}
    dense = write_gguf(tmp_path / "x.gguf", tiny_model("qwen3", rope_parameters=rope), "Q8_0", metadata)
    assert_same(load_model(tmp_path / "x.gguf", dtype=torch.float32), dense)


def test_gemma_27b(tmp_path: Path) -> None:
    """llama.cpp, and the file, know its scale of attention by the number of its layers alone."""
    source = tiny_model("gemma2", num_hidden_layers=46, query_pre_attn_scalar=32, num_attention_heads=8)
    dense = write_gguf(tmp_path / "x.gguf", source, "Q8_0")
    model = load_model(tmp_path / "x.gguf", dtype=torch.float32)
    assert model.config.query_pre_attn_scalar == HIDDEN // 8
    assert_same(model, dense, 1e-4)


def test_gemma_is_bfloat16(tmp_path: Path) -> None:
    dense = write_gguf(tmp_path / "x.gguf", tiny_model("gemma3_text"), MIXED)
    model = load_model(tmp_path / "x.gguf")
    assert model.dtype == torch.bfloat16
    assert_same(model, dense, 0.1)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "mixtral"])
def test_convert(model_type: str, tmp_path: Path) -> None:
    dense = write_gguf(tmp_path / "x.gguf", tiny_model(model_type), MIXED)
    convert(tmp_path / "x.gguf", tmp_path / "out", progress=False)
    assert_same(load_model(tmp_path / "out", dtype=torch.float32), dense, 2e-3)  # embeddings are fp16
    source = {record.name: record for record in wo.load_checkpoint(tmp_path / "x.gguf", progress=False)}
    for record in wo.load_checkpoint(tmp_path / "out", progress=False, verify=True):
        if isinstance(record, QuantizedLayer):
            assert torch.equal(record.dequantize(), source[record.name].dequantize())  # type: ignore[union-attr]
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["source"] == {"quant_method": "gguf"} and config["dtype"] == "float16"
    names = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    assert "model.embed_tokens.weight" in names and ("lm_head.qweight" in names)
    convert(tmp_path / "x.gguf", tmp_path / "sm90", arch="sm90", progress=False)
    assert {shape.layout for shape in open_checkpoint(tmp_path / "sm90").shapes.values()} == {"tiled"}


def test_save_pretrained(tmp_path: Path) -> None:
    dense = write_gguf(tmp_path / "x.gguf", tiny_model("qwen3_moe"), MIXED)
    load_model(tmp_path / "x.gguf", dtype=torch.float32).save_pretrained(tmp_path / "out")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), dense)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q4_0", "IQ4_NL"])
def test_parts(kind: str, tmp_path: Path) -> None:
    """What a rank of tensor parallelism reads; rows of q come in another order than those of the file."""
    write_gguf(tmp_path / "x.gguf", tiny_model("llama"), kind)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        whole = checkpoint.read_layer(layer, "cpu").dequantize()
        k = len(whole)
        before = checkpoint.shards.bytes_read
        part = read_part(checkpoint, layer, "cpu", (k // 2, k), [(64, 192)])
        assert torch.equal(part.dequantize(), whole[k // 2 :, 64:192])
        if layer.endswith("down_proj") and not kind.startswith("IQ"):
            assert checkpoint.shards.bytes_read - before <= checkpoint.layer_bytes(layer) // 3


def test_split_files(tmp_path: Path) -> None:
    dense = write_gguf(tmp_path / "x.gguf", tiny_model("llama"), MIXED, split=8)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == 3 and files[0].name == "x-00001-of-00003.gguf"
    assert_same(load_model(files[0], dtype=torch.float32), dense)
    with pytest.raises(ValueError, match=r"x-00002-of-00003.gguf: .*00001-of-00003"):
        open_checkpoint(files[1])
    files[2].unlink()
    with pytest.raises(FileNotFoundError, match=r"x-00003-of-00003\.gguf"):
        open_checkpoint(files[0])
    shutil.copy(files[1], files[2])
    with pytest.raises(ValueError, match=r"x-00003.*: expected in one file, got it in x-00002"):
        open_checkpoint(files[0])


def test_old_experts(tmp_path: Path) -> None:
    """Older files of Mixtral have each expert by itself."""
    dense = write_gguf(tmp_path / "new.gguf", tiny_model("mixtral"), "Q8_0")
    reader = gguf.GGUFReader(tmp_path / "new.gguf")
    writer = gguf.GGUFWriter(tmp_path / "old.gguf", "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if tensor.name.endswith("_exps.weight"):
            for expert, data in enumerate(tensor.data):
                name = tensor.name.replace("_exps.weight", f".{expert}.weight")
                writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same(load_model(tmp_path / "old.gguf", dtype=torch.float32), dense)


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "x.gguf", tiny_model("qwen3_moe"), MIXED)
    text = describe(open_checkpoint(tmp_path / "x.gguf"))
    assert "x.gguf: gguf (from its header: Q4_K x 7, Q6_K x 3, Q4_1 x 2, Q8_0 x 2, Q5_0 x 2)" in text
    assert re.search(r"\n +8 +int8 +16 +none +no +256 x 256", text)  # an expert's down_proj each
    assert command.main(["inspect", str(tmp_path)]) == 1
    assert f"got a GGUF file; give the file itself: {tmp_path / 'x.gguf'}" in capsys.readouterr().err
    assert command.main(["explain", str(tmp_path / "x.gguf"), "--arch", "sm90"]) == 0


def test_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out, count = tmp_path / "x.gguf", tmp_path / "out", len(VOCABULARY["tokenizer.ggml.tokens"])
    write_gguf(file, tiny_model("llama", vocab_size=count), MIXED, VOCABULARY)
    tokenizer = load_tokenizer(file)
    tokens = tokenizer("hello abc")["input_ids"]
    assert tokens[:2] == [1, count - 1] and tokenizer.decode(tokens, skip_special_tokens=True) == "hello abc"
    assert command.main(["convert", str(file), str(out), "--arch", "cpu"]) == 0
    again = AutoTokenizer.from_pretrained(out)
    assert again("hello abc")["input_ids"] == tokens and again.chat_template == tokenizer.chat_template
    texts = []
    for place in (file, out):
        capsys.readouterr()
        assert (
            command.main(["run", str(place), "--prompt", "hello", "--max-new-tokens", "4", "--dtype", "float32"]) == 0
        )
        texts.append(capsys.readouterr().out.splitlines()[0])
    assert texts[0].startswith("hello") and texts[0] == texts[1]
    assert command.main(["run", str(file), "--prompt", "hello", "--chat", "--max-new-tokens", "2"]) == 0


def test_a_tokenizer_that_transformers_does_not_make(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The weights are converted all the same."""
    file = tmp_path / "x.gguf"
    write_gguf(file, tiny_model("llama"), "Q8_0", {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]})
    with pytest.raises(ValueError, match=r"x\.gguf: expected a tokenizer that transformers makes, got another"):
        load_tokenizer(file)
    convert(file, tmp_path / "out", progress=False)
    assert "no tokenizer is written" in caplog.text
    assert not list((tmp_path / "out").glob("tokenizer*")) and len(load_model(tmp_path / "out").model.layers) == 2
