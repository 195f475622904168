"""A small Llama model in every format: saved in shards, loaded, converted, read back; its logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests import formats_llama as llama
from tests.formats_reference import write_checkpoint

import weightonly as wo
from weightonly.formats import PlainTensor, QuantizedLayer, Record, convert, load_checkpoint

TOKENS = torch.tensor([3, 14, 15, 92, 65, 35, 89, 79, 32, 38])

every_format = pytest.mark.parametrize("name", llama.MODELS)


def by_name(records: list[Record]) -> tuple[dict[str, QuantizedLayer], dict[str, torch.Tensor]]:
    """(quantized layers, other tensors) by their names, each of which is there once."""
    layers = {record.name: record for record in records if isinstance(record, QuantizedLayer)}
    plain = {record.name: record.tensor for record in records if isinstance(record, PlainTensor)}
    assert len(layers) + len(plain) == len(records)
    return layers, plain


def run(layers: dict[str, QuantizedLayer], plain: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits in fp32, through `weightonly.gemm`."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        layer = layers[name]
        bias = None if layer.bias is None else layer.bias.float()
        zeros = None if layer.zeros is None else layer.zeros.float()
        return wo.gemm(x, layer.weight, layer.scales.float(), zeros=zeros, bias=bias, perm=layer.perm)

    return llama.logits(TOKENS, plain, linear)


def reference(model: llama.Quantized) -> torch.Tensor:
    """The logits in fp64, from the dense weights that the format's own package or definition gives."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        y = x.double() @ model.dense[name].double()
        return y + model.bias[name].double() if name in model.bias else y

    plain = {name: tensor for name, tensor in model.tensors.items() if name in PLAIN_NAMES}
    return llama.logits(TOKENS, plain, linear)


PLAIN_NAMES = set(llama.plain_tensors(torch.Generator()))


def check_same(one: list[Record], other: list[Record]) -> None:
    """Both have the same records, to the bit."""
    (layers, plain), (other_layers, other_plain) = by_name(one), by_name(other)
    assert layers.keys() == other_layers.keys() and plain.keys() == other_plain.keys()
    for name, tensor in plain.items():
        assert tensor.dtype == other_plain[name].dtype and torch.equal(tensor, other_plain[name])
    for name, layer in layers.items():
        check_same_layer(layer, other_layers[name])


def check_same_layer(layer: QuantizedLayer, other: QuantizedLayer) -> None:
    for part in ("scales", "zeros", "bias", "perm"):
        mine, its = getattr(layer, part), getattr(other, part)
        assert (mine is None) == (its is None), part
        assert mine is None or (mine.dtype == its.dtype and torch.equal(mine, its)), part
    assert layer.weight.fields == other.weight.fields
    assert torch.equal(layer.weight.data, other.weight.data)


@every_format
def test_load_run_convert_and_read_back(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    model = llama.MODELS[name](generator)
    config = llama.CONFIG | {"quantization_config": model.config}
    source = write_checkpoint(tmp_path / "source", model.tensors, config, shards=3)
    (source / "tokenizer.json").write_text("{}")

    records = list(load_checkpoint(source, arch="sm90"))
    layers, plain = by_name(records)
    assert layers.keys() == llama.LINEARS.keys()
    assert plain.keys() == PLAIN_NAMES
    for layer_name, layer in layers.items():
        assert torch.equal(layer.dequantize(), model.dense[layer_name])
        assert (layer.bias is not None) == (layer_name in model.bias)
        assert layer.bias is None or torch.equal(layer.bias, model.bias[layer_name])
        assert ("act_order" in name) == (layer.perm is not None)
    for tensor_name, tensor in plain.items():
        assert torch.equal(tensor, model.tensors[tensor_name])

    expected = reference(model)
    got = run(layers, plain)
    assert got.dtype == torch.float32
    assert (got.double() - expected).abs().max() < 1e-5 * expected.abs().max()

    convert(source, tmp_path / "converted", arch="sm90", shard_bytes=100_000)
    assert len(list((tmp_path / "converted").glob("*.safetensors"))) > 1
    assert (tmp_path / "converted" / "tokenizer.json").read_text() == "{}"
    written = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert written.pop("quantization_config")["source"] == model.config
    guard = written.pop("fusion_config")  # transformers without weightonly.hf stops at it
    assert [name for name in guard if "import weightonly.hf" in name] == list(guard)
    assert written == llama.CONFIG
    check_same(records, list(load_checkpoint(tmp_path / "converted")))

    # For another GPU: from the converted folder, the same as from the source. Volta has no kernels for codes.
    if name.startswith("bitsandbytes"):
        with pytest.raises(ValueError, match="expected sm75"):
            convert(tmp_path / "converted", tmp_path / "volta", arch="sm70")
        return
    convert(tmp_path / "converted", tmp_path / "volta", arch="sm70")
    of_volta = list(load_checkpoint(source, arch="sm70"))
    check_same(of_volta, list(load_checkpoint(tmp_path / "volta")))
    check_same(of_volta, list(load_checkpoint(tmp_path / "converted", arch="sm70")))
    volta = json.loads((tmp_path / "volta" / "config.json").read_text())["quantization_config"]
    assert volta["arch"] == "sm70" and volta["source"] == model.config
