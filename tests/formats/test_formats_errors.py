"""load_checkpoint: what is wrong with a folder is an error that names the file and the tensor."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests import formats_reference as ref
from tests.formats_layers import AWQ, BNB, CT, GPTQ, KNOWN, K, N, awq_layer, folder_of, gptq_layer, model

import weightonly as wo
from weightonly.formats.shards import Shards

# --- errors: folders and files -----------------------------------------------------------------------------


def fails(folder: Path, message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=message):
        wo.load_checkpoint(folder)


def test_missing_folder(tmp_path: Path) -> None:
    fails(tmp_path / "nothing", "nothing: expected the folder of a checkpoint, got none", FileNotFoundError)


def test_the_name_of_a_hub_model_that_was_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^TheBloke/Llama-2-7B-AWQ: expected a folder, or a model"):
        wo.load_checkpoint("TheBloke/Llama-2-7B-AWQ")


@pytest.mark.parametrize("name", ["nothing", "../org/model", "a/b/c", "./org/model", "org/x.gguf"])
def test_other_missing_folders_are_no_hub_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected the folder of a checkpoint, got none$"):
        wo.load_checkpoint(name)


def test_folder_without_weights(tmp_path: Path) -> None:
    fails(tmp_path, "expected safetensors files, got none", FileNotFoundError)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_loaded(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    fails(tmp_path, rf"expected safetensors files, got pickles \({name}\).* never opened here")


def test_index_that_names_pickles(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator, shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "pytorch_model.bin"}}))
    fails(folder, "index.json: x: expected a safetensors file, got 'pytorch_model.bin'")


def test_no_quantization_at_all(tmp_path: Path) -> None:
    folder = ref.write_checkpoint(tmp_path / "model", {"a.weight": torch.ones(4, 4)}, {"model_type": "llama"})
    fails(folder, "model: expected a checkpoint of awq, gptq, .*got one without a quantization config")


def test_gptq_without_a_config_is_not_guessed(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, gptq_layer, None, generator)
    fails(folder, r"a\.(up|down)\.qweight: expected quantize_config.json .*look like GPTQ, whose two versions")


def test_config_without_its_tensors(tmp_path: Path) -> None:
    folder = ref.write_checkpoint(tmp_path / "model", {"a.weight": torch.ones(4, 4)}, {"quantization_config": GPTQ})
    fails(folder, r"model: expected tensors \*\.qweight as config.json says, got none")


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "aqlm"}, "quant_method: expected one of awq, gptq, .*got 'aqlm'"),
    "no method": ({"bits": 4}, "quant_method: expected one of awq, .*got ''"),
    "kind of method": ({"quant_method": 4}, "quant_method: expected str, got 4"),
    "awq bits": (AWQ | {"bits": 3}, "bits: expected 4 for AWQ, got 3"),
    "kind of bits": (AWQ | {"bits": "4"}, "bits: expected int, got '4'"),
    "awq version": (AWQ | {"version": "gemv"}, "version: expected 'gemm', got 'gemv'"),
    "gptq bits": (GPTQ | {"bits": 2}, "bits: expected 4 or 8 for GPTQ, got 2"),
    "no bits": ({"quant_method": "gptq"}, "bits: expected 4 or 8 for GPTQ, got None"),
    "gptq format": (
        GPTQ | {"checkpoint_format": "marlin"},
        "checkpoint_format: expected one of gptq, gptq_v2, got 'marlin'",
    ),
    "marlin": (GPTQ | {"is_marlin_format": True}, "is_marlin_format: expected false, got true"),
    "pattern": (GPTQ | {"dynamic": {"+:(": {}}}, r"dynamic: expected regular expressions, got '\+:\('"),
    "ct format": (
        CT | {"format": "marlin-24", "config_groups": {}},
        "format: expected 'pack-quantized', .* or 'mxfp8-quantized', got 'marlin",
    ),
    "ct group": (
        CT | {"config_groups": {"g": {"format": "marlin-24"}}},
        "config_groups.g.format: expected 'pack-quantized', .* or 'mxfp8-quantized', got 'marlin-24'",
    ),
    "ct bits": (
        CT | {"config_groups": {"g": {"weights": {"num_bits": 3}}}},
        "config_groups.g.weights: expected int of 4 or 8 bits, got 'int' of 3",
    ),
    "ct floats": (
        CT | {"config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}},
        "config_groups.g.weights: expected int of 4 or 8 bits, got 'float' of 8",
    ),
    "ct transforms": (CT | {"transform_config": {"config_groups": {"r": {}}}}, "transform_config: expected none, got"),
    "llm.int8": (BNB | {"load_in_8bit": True}, "load_in_8bit: expected 4-bit weights, got true"),
    "converted": ({"quant_method": "weightonly", "format_version": 1}, "format_version: expected 3, got 1"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_configs_that_are_not_read(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    options, message = BAD_CONFIGS[case]
    folder = folder_of(tmp_path, awq_layer, options, generator)
    fails(folder, rf"config\.json: {message}")


@pytest.mark.parametrize("text", ["{", "[1]", ""], ids=["truncated", "list", "empty"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_damaged_json(file: str, text: str, tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator, shards=2)
    (folder / file).write_text(text)
    fails(folder, rf"{file}: expected (a JSON object|JSON), got")


def test_index_of_another_form(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator, shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    fails(folder, "index.json: weight_map: expected names and files, got None")
    index.write_text(json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}}))
    fails(folder, "index.json: x: expected the name of a file beside the index, got '../elsewhere.safetensors'")


def test_index_that_names_a_missing_shard(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    fails(
        folder,
        r"index.json: [\w.]+: expected in model-00002-of-00003.safetensors, which does not exist",
        FileNotFoundError,
    )


def test_index_that_names_a_tensor_of_another_shard(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator, shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["norm.weight"] = content["weight_map"]["embed.weight"]
    index.write_text(json.dumps(content))
    fails(folder, r"model-00001-of-00002.safetensors: norm.weight: expected in this file as .*index.json says")


def test_a_tensor_in_two_files(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    save_file({"norm.weight": torch.ones(4)}, folder / "other.safetensors")
    fails(folder, "other.safetensors: norm.weight: expected in one file, got it in model.safetensors too")


@pytest.mark.parametrize("kept", [0, 5, 8, 40])
def test_truncated_header(kept: int, tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    fails(folder, rf"model.safetensors: expected a safetensors file, got {kept} bytes without its header")


@pytest.mark.parametrize("shards", [1, 3])
def test_truncated_data_names_the_tensor(shards: int, tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, gptq_layer, GPTQ, generator, shards)
    file = sorted(folder.glob("*.safetensors"))[0]
    length = struct.unpack("<Q", file.read_bytes()[:8])[0]
    header = json.loads(file.read_bytes()[8 : 8 + length])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    file.write_bytes(file.read_bytes()[:-1])
    fails(folder, rf"{file.name}: {last}: expected \d+ bytes .*: the file is truncated")


def test_file_that_shrinks_while_it_is_read(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    records = wo.load_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(
        ValueError, match=r"model.safetensors: [\w.]+: expected \d+ bytes, got .*: the file is truncated"
    ):
        list(records)


def test_a_tensor_that_is_larger_than_memory(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file takes no disk: its header may claim what no machine has."""
    records = wo.load_checkpoint(folder_of(tmp_path, awq_layer, AWQ, generator))

    def empty(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(OSError, match=r"model.safetensors: [\w.]+: no memory for its \d+ bytes"):
        list(records)


def test_rows_are_read_in_as_many_calls_as_it_takes(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads 2 GiB at most in a call."""
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    shards = Shards(folder)
    name = next(name for name, info in shards.tensors.items() if len(info.shape) == 2)
    whole = shards.read(name)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, spans, at: preadv(fd, [spans[0][:5]], at))
    for rows, columns in ((slice(1, 3), slice(None)), (slice(0, 2), slice(1, 3))):
        assert torch.equal(shards.read(name, part=(rows, columns)), whole[rows, columns])


@pytest.mark.parametrize("value", ["awq", ["awq"], 3, True])
def test_a_quantization_config_that_is_no_object(value: object, tmp_path: Path, generator: torch.Generator) -> None:
    """Without it, the names of the tensors would tell the format."""
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    (folder / "config.json").write_text(json.dumps({"quantization_config": value}))
    fails(folder, "config.json: quantization_config: expected dict, got")


def test_foreign_file(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    (folder / "model.safetensors").write_bytes(b"PK\3\4" + b"\0" * 100)
    fails(folder, "model.safetensors: expected a safetensors (file|header)")


def header_file(path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 64)


BAD_HEADERS: dict[str, tuple[object, str]] = {
    "list": ([1], "expected a safetensors header, got JSON of another kind"),
    "entry": ({"x": 3}, "x: expected dtype, shape and data_offsets, got 3"),
    "offsets": ({"x": {"dtype": "U8", "shape": [4], "data_offsets": [0]}}, "x: expected dtype, shape and data_offsets"),
    "negative": ({"x": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}}, "x: expected dtype, shape"),
    "dtype": ({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 4]}}, "x: expected a dtype of .*got 'F4'"),
    "bytes": (
        {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}},
        r"x: expected 16 bytes for F32 \[4\], got 4",
    ),
    "metadata": ({"__metadata__": 3}, "__metadata__: expected an object of strings, got 3"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_damaged_headers(case: str, tmp_path: Path) -> None:
    header, message = BAD_HEADERS[case]
    header_file(tmp_path / "model.safetensors", header)
    fails(tmp_path, rf"model\.safetensors: {message}")


@settings(max_examples=150, deadline=None)
@given(
    method=st.sampled_from(sorted(KNOWN)),
    seed=st.integers(0, 2**31),
    place=st.integers(0, 10**6),
    byte=st.integers(0, 255),
    removed=st.integers(0, 5),
)
def test_any_change_of_a_header_is_harmless(method: str, seed: int, place: int, byte: int, removed: int) -> None:
    """The folder reads as something else, or raises a documented error that names it."""
    layer, options = KNOWN[method]
    with tempfile.TemporaryDirectory() as path:
        folder = folder_of(Path(path), layer, options, torch.Generator().manual_seed(seed), shards=2)
        for file in folder.iterdir():
            content = file.read_bytes()
            length = 8 + struct.unpack("<Q", content[:8])[0] if file.suffix == ".safetensors" else len(content)
            begin = place % length
            file.write_bytes(content[:begin] + bytes([byte]) + content[begin + removed :])
            problem = ""
            try:
                list(wo.load_checkpoint(folder))
            except (ValueError, FileNotFoundError) as error:
                problem = str(error)
            assert not problem or str(folder) in problem
            file.write_bytes(content)


# --- errors: tensors ---------------------------------------------------------------------------------------

Tensors = dict[str, torch.Tensor]

BAD_TENSORS: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "awq zeros missing": ("awq", lambda t: t.pop("a.up.qzeros"), "a.up.qweight needs a.up.qzeros, which is not"),
    "awq weight missing": ("awq", lambda t: t.pop("a.up.qweight"), "a.up.qzeros needs a.up.qweight, which is not"),
    "gptq scales missing": ("gptq", lambda t: t.pop("a.up.scales"), "a.up.qweight needs a.up.scales"),
    "gptq order missing": (
        "gptq",
        lambda t: t.pop("a.up.g_idx"),
        "a.up.g_idx: expected one, as the config says desc_act",
    ),
    "ct shape missing": (
        "compressed-tensors",
        lambda t: t.pop("a.up.weight_shape"),
        "weight_packed needs a.up.weight_shape",
    ),
    "ct weight missing": (
        "compressed-tensors",
        lambda t: t.pop("a.up.weight_packed"),
        "weight_shape needs a.up.weight_packed",
    ),
    "bnb absmax missing": ("bitsandbytes", lambda t: t.pop("a.up.weight.absmax"), "needs a.up.weight.absmax"),
    "bnb state missing": (
        "bitsandbytes",
        lambda t: t.pop("a.up.weight.quant_state.bitsandbytes__nf4"),
        "a.up.weight.absmax needs a.up.weight.quant_state.bitsandbytes__nf4",
    ),
    "awq scales": (
        "awq",
        lambda t: t.update({"a.up.scales": torch.ones(2, 17).half()}),
        r"a.up.scales: expected .*\[groups, 16\], got float16 \[2, 17\]",
    ),
    "awq group size": (
        "awq",
        lambda t: t.update({"a.up.scales": torch.ones(4, 16).half(), "a.up.qzeros": torch.zeros(4, 2).int()}),
        "a.up.scales: expected groups of 32 rows as the config says, got 16",
    ),
    "gptq order out of range": (
        "gptq",
        lambda t: t["a.up.g_idx"].fill_(7),
        r"a.up.g_idx: expected groups within 0..1 as scales has, got 7..7",
    ),
    "gptq rows": (
        "gptq",
        lambda t: t.update({"a.down.qweight": torch.zeros(9, N).int()}),
        r"a.down.qweight: expected int32 \[8, 16\], got int32 \[9, 16\]",
    ),
    "ct bits": (
        "compressed-tensors",
        lambda t: t.update({"a.up.weight_packed": torch.zeros(N, K // 4).int()}),
        r"a.up.weight_packed: expected int32 \[N, 8 \(4 bit\)\] for K = 64, got \[16, 16\]",
    ),
    "bnb state": (
        "bitsandbytes",
        lambda t: t["a.up.weight.quant_state.bitsandbytes__nf4"].fill_(0),
        "a.up.weight.quant_state.bitsandbytes__nf4: ",
    ),
    "bnb codebook": (
        "bitsandbytes",
        lambda t: t["a.up.weight.quant_map"].fill_(float("nan")),
        "a.up.weight.quant_map: code: expected finite values within",
    ),
    "bnb weight": (
        "bitsandbytes",
        lambda t: t.update({"a.up.weight": torch.zeros(3, 1).byte()}),
        "a.up.weight: expected 512 bytes .*got 3",
    ),
    "bias": (
        "gptq",
        lambda t: t.update({"a.up.bias": torch.zeros(N + 1)}),
        r"a.up.bias: expected .*\[16\], got float32 \[17\]",
    ),
    "kind of bias": ("awq", lambda t: t.update({"a.up.bias": torch.zeros(N).int()}), r"a.up.bias: expected float16 or"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_that_do_not_fit(case: str, shards: int, tmp_path: Path, generator: torch.Generator) -> None:
    method, change, message = BAD_TENSORS[case]
    layer, options = KNOWN[method]
    tensors = model(layer, generator)
    change(tensors)
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": options}, shards)
    with pytest.raises(ValueError, match=message) as failed:
        wo.load_checkpoint(folder)
    # The file it names is the one that has the tensor.
    file = str(failed.value).partition(": ")[0]
    assert Path(file).parent == folder
    named = [name for name in load_file(file) if name in str(failed.value)]
    assert named or "order missing" in case


def test_awq_config_with_gptq_tensors(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, gptq_layer, AWQ, generator)
    fails(folder, r"a\.(up|down)\.\w+")
