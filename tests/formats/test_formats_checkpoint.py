"""load_checkpoint: recognizing a format, what it yields, and how much it holds."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import formats_reference as ref
from tests.formats_layers import (
    ALL_NAMES,
    AWQ,
    BNB,
    CT,
    GPTQ,
    GROUP,
    KNOWN,
    K,
    Layer,
    N,
    awq_layer,
    bnb_layer,
    ct_layer,
    folder_of,
    gptq_layer,
    model,
    names,
)

import weightonly as wo
from weightonly.formats import PlainTensor, QuantizedLayer, open_checkpoint
from weightonly.formats.shards import Shards

# --- recognizing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", KNOWN)
@pytest.mark.parametrize("shards", [1, 4])
def test_recognized_by_config_json(method: str, shards: int, tmp_path: Path, generator: torch.Generator) -> None:
    layer, options = KNOWN[method]
    folder = folder_of(tmp_path, layer, options, generator, shards)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.methods, checkpoint.source) == ((method,), "config.json")
    assert checkpoint.layers.keys() == {"a.up", "a.down"}
    assert set(checkpoint.plain) == {"embed.weight", "norm.weight"}
    assert names(folder) == ALL_NAMES


@pytest.mark.parametrize("method", ["awq", "compressed-tensors", "bitsandbytes"])
def test_recognized_by_tensor_names(method: str, tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, KNOWN[method][0], None, generator)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.methods, checkpoint.source) == ((method,), "tensor names")
    assert names(folder) == ALL_NAMES


@pytest.mark.parametrize(
    ("file", "layer", "options", "method"),
    [
        (
            "quant_config.json",
            awq_layer,
            {"w_bit": 4, "q_group_size": GROUP, "zero_point": True, "version": "GEMM"},
            "awq",
        ),
        ("quantize_config.json", gptq_layer, {"bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}, "gptq"),
    ],
    ids=["awq", "gptq"],
)
def test_recognized_by_the_quantizers_own_file(
    file: str, layer: Layer, options: dict[str, Any], method: str, tmp_path: Path, generator: torch.Generator
) -> None:
    folder = folder_of(tmp_path, layer, None, generator)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / file).write_text(json.dumps(options))
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.methods, checkpoint.source) == ((method,), file)
    assert names(folder) == ALL_NAMES


def test_config_of_a_text_model_inside_another(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, gptq_layer, None, generator)
    (folder / "config.json").write_text(json.dumps({"text_config": {"quantization_config": GPTQ}}))
    assert open_checkpoint(folder).methods == ("gptq",)


def test_old_key_of_compressed_tensors(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, ct_layer, None, generator)
    options = {key: value for key, value in CT.items() if key != "quant_method"}
    (folder / "config.json").write_text(json.dumps({"compression_config": options}))
    assert open_checkpoint(folder).methods == ("compressed-tensors",)


def test_scales_of_an_activation_are_a_plain_tensor(tmp_path: Path, generator: torch.Generator) -> None:
    """AutoAWQ stores some activations with a tensor of scales."""
    tensors = model(awq_layer, generator) | {"a.act.scales": torch.ones(3)}
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": AWQ})
    assert names(folder) == ALL_NAMES | {"a.act.scales"}


def test_bits_of_single_layers(tmp_path: Path, generator: torch.Generator) -> None:
    """GPTQModel's `dynamic` gives layers that match a pattern other bits."""
    tensors = model(gptq_layer, generator)
    tensors["a.down.qweight"] = ref.random_words(K // 4, N, generator)
    tensors["a.down.qzeros"] = ref.random_words(K // GROUP, N // 4, generator)
    options = GPTQ | {"dynamic": {"-:.*lm_head": {}, r"+:.*\.down$": {"bits": 8}}}
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": options})
    shapes = open_checkpoint(folder).shapes
    assert (shapes["a.up"].format, shapes["a.down"].format) == ("int4", "int8")
    down = next(record for record in wo.load_checkpoint(folder) if record.name == "a.down")
    assert isinstance(down, QuantizedLayer)
    group = tensors["a.down.g_idx"].numpy()
    layer = {name: tensors[f"a.down.{name}"] for name in ("qweight", "scales", "qzeros")}
    assert torch.equal(down.dequantize(), ref.gptq_weight(**layer, group=group, bits=8, version=1))


def test_bits_of_groups(tmp_path: Path, generator: torch.Generator) -> None:
    tensors = model(ct_layer, generator)
    tensors["a.down.weight_packed"] = ref.random_words(N, K // 4, generator)
    groups = CT["config_groups"] | {"group_1": {"targets": ["re:.*down"], "weights": {"num_bits": 8}}}
    options = CT | {"config_groups": groups}
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": options})
    shapes = open_checkpoint(folder).shapes
    assert (shapes["a.up"].format, shapes["a.down"].format) == ("int4", "int8")
    assert names(folder) == ALL_NAMES


# --- records and streaming ---------------------------------------------------------------------------------


def test_records_are_packed_for_the_arch(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, gptq_layer, GPTQ, generator)
    x = torch.randn(3, K, generator=generator)
    for arch in ("sm70", "sm80", "sm90"):
        expected = wo.preprocess(torch.zeros(1, 1, dtype=torch.int8), arch=arch).layout
        layers = [record for record in wo.load_checkpoint(folder, arch=arch) if isinstance(record, QuantizedLayer)]
        assert len(layers) == 2
        for layer in layers:
            assert isinstance(layer.weight, wo.PackedWeight)
            assert layer.weight.layout == expected
            assert layer.perm is not None and layer.scales is not None and layer.zeros is not None
            sorted_w = wo.dequantize(layer.weight, layer.scales.float(), layer.zeros.float())
            torch.testing.assert_close(x[:, layer.perm] @ sorted_w, x @ layer.dequantize())


def test_unknown_arch_is_an_error_at_once(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    with pytest.raises(ValueError, match=r"arch: expected one of .*got 'sm50'"):
        wo.load_checkpoint(folder, arch="sm50")


def test_one_layer_is_in_memory_at_a_time(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for i in range(12):
        tensors |= {f"l{i}.{inside}": tensor for inside, tensor in awq_layer(generator, 256, 64).items()}
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": AWQ}, shards=5)
    alive: dict[int, int] = {}  # bytes of the tensors that were read and still exist
    read = Shards.read

    def counted(self: Shards, name: str, device: torch.device | str = "cpu", sha256: str | None = None) -> torch.Tensor:
        tensor = read(self, name, device, sha256)
        key = len(alive)
        alive[key] = tensor.nbytes
        weakref.finalize(tensor, alive.__setitem__, key, 0)
        return tensor

    layer_bytes = open_checkpoint(folder).layer_bytes("l0")
    monkeypatch.setattr(Shards, "read", counted)
    previous: weakref.ref[Any] | None = None
    count = 0
    for record in wo.load_checkpoint(folder):
        gc.collect()
        assert sum(alive.values()) <= layer_bytes
        assert previous is None or previous() is None
        previous = weakref.ref(record)
        count += 1
        del record
    assert count == 12
    assert len(alive) == 36  # every tensor was read once


def test_dropping_the_iterator_leaves_no_file_open(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator, shards=3)
    records = wo.load_checkpoint(folder)
    next(records)
    open_files = [file.resolve() for file in Path("/proc/self/fd").iterdir() if file.exists()]
    assert not [file for file in open_files if file.is_relative_to(tmp_path.resolve())]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()  # nor mapped


def test_progress_counts_all_bytes(tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class Bar:
        def __init__(self, total: int, disable: bool | None, **others: Any) -> None:
            self.total, self.done, self.disable, self.closed = total, 0, disable, False
            bars.append(self)

        def update(self, count: int) -> None:
            self.done += count

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            assert text in ALL_NAMES

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("tqdm.tqdm", Bar)
    folder = folder_of(tmp_path, bnb_layer, BNB, generator, shards=2)
    assert len(list(wo.load_checkpoint(folder))) == 4
    assert len(list(wo.load_checkpoint(folder, progress=False))) == 4
    (shown,) = bars  # none without progress: a hidden one takes a lock of all forked processes
    assert shown.total == shown.done == open_checkpoint(folder).total_bytes and shown.closed
    assert shown.disable is None  # tqdm: on a terminal only


def test_tensors_that_are_not_in_the_index_are_an_error(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator, shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"norm.weight: expected in this file by .*index.json, too, got another or none"
    ):
        wo.load_checkpoint(folder)


def test_several_files_without_an_index(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert names(folder) == ALL_NAMES


def test_plain_tensors_are_as_stored(tmp_path: Path, generator: torch.Generator) -> None:
    stored = {
        "half": torch.randn(3, 5, generator=generator).half(),
        "bf16": torch.randn(2, generator=generator).bfloat16(),
        "int": torch.arange(7),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }
    tensors = stored | {f"a.{name}": tensor for name, tensor in awq_layer(generator).items()}
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": AWQ})
    plain = {r.name: r.tensor for r in wo.load_checkpoint(folder) if isinstance(r, PlainTensor)}
    assert plain.keys() == stored.keys()
    for name, tensor in stored.items():
        assert plain[name].dtype == tensor.dtype and torch.equal(plain[name], tensor)
