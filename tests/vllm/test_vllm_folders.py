"""Folders of every format as models of vLLM: the quantization method and the load format "weightonly"."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from safetensors.torch import load_file, save_file
from tests import formats_llama as llama
from tests import fp4_cases
from tests.spy_reads import Reads
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_models import built, check, load
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.models.utils import WeightsMapper

import weightonly as wo
from weightonly.formats import IntWeight, QuantizedLayer, open_checkpoint
from weightonly.formats.layers import LayerShape
from weightonly.vllm import folders, register
from weightonly.vllm.folders import WeightOnlyConfig, WeightOnlyLoader, _one_kind, loadable
from weightonly.vllm.linear_method import RowGroups, WeightOnlyLinearMethod
from weightonly.vllm.support import VARIABLE

Packer = Callable[[int, int, torch.Generator], dict[str, torch.Tensor]]


def integers(method: str, bits: int, zeros: bool, act_order: bool, group: int = 32) -> Packer:
    def pack(k: int, n: int, g: torch.Generator) -> dict[str, torch.Tensor]:
        w = cases.weight(g, k, n, bits=bits, group=group, zeros=zeros, dtype=torch.float16)
        if act_order:  # layers of one input have one order, as GPTQ's own have
            w.g_idx = w.g_idx[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        stored = cases.tensors(method, w)
        return stored if method != "gptq" or act_order else {name: t for name, t in stored.items() if name != "g_idx"}

    return pack


def codes(quant_type: str, nested: bool) -> Packer:
    return lambda k, n, g: llama.bitsandbytes(quant_type, nested)(k, n, g)[0]


def floats(format: str) -> Packer:
    return lambda k, n, g: fp4_cases.tensors("compressed-tensors", fp4_cases.weight(g, format, k, n))


def write(folder: Path, packer: Packer, options: dict[str, Any], g: torch.Generator, lm_head: bool = False) -> Path:
    folder.mkdir()
    tensors = llama.plain_tensors(g)
    layers = llama.LINEARS | ({"lm_head": (llama.HIDDEN, llama.VOCABULARY)} if lm_head else {})
    if lm_head:
        del tensors["lm_head.weight"]
    for name, (k, n) in layers.items():
        tensors |= {f"{name}.{inside}": tensor.contiguous() for inside, tensor in packer(k, n, g).items()}
    save_file(tensors, folder / "model.safetensors")
    config = llama.CONFIG | {"quantization_config": options, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": True}
FOLDERS = {
    "gptq-4bit-act-order": (integers("gptq", 4, False, True), GPTQ | {"bits": 4, "sym": True}),
    "gptq-8bit-act-order": (integers("gptq", 8, False, True), GPTQ | {"bits": 8, "sym": True}),
    "gptq-4bit-act-order-zeros": (integers("gptq", 4, True, True), GPTQ | {"bits": 4, "sym": False}),
    "gptq-8bit-act-order-zeros": (integers("gptq", 8, True, True), GPTQ | {"bits": 8, "sym": False}),
    "gptq-4bit-zeros": (integers("gptq", 4, True, False), GPTQ | {"bits": 4, "sym": False, "desc_act": False}),
    "awq-4bit": (integers("awq", 4, True, False), cases.config("awq", 4, 32, True)),
    "ct-8bit-zeros": (integers("compressed-tensors", 8, True, False), cases.config("compressed-tensors", 8, 32, True)),
    "bnb-nf4": (codes("nf4", False), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bnb-nf4-nested": (codes("nf4", True), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bnb-fp4": (codes("fp4", False), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "ct-nvfp4": (floats("nvfp4"), fp4_cases.config("compressed-tensors", "nvfp4")),
    "ct-mxfp4": (floats("mxfp4"), fp4_cases.config("compressed-tensors", "mxfp4")),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_model_of_each_format(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    folder = write(tmp_path / name, *FOLDERS[name], generator)
    check(load(folder), folder, generator)


@pytest.mark.parametrize("name", ["gptq-4bit-act-order-zeros", "bnb-nf4"])
def test_biases(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    folder = write(tmp_path / name, *FOLDERS[name], generator)
    tensors = load_file(folder / "model.safetensors")
    for layer, (_, n) in llama.LINEARS.items():
        if "self_attn" in layer:
            tensors[f"{layer}.bias"] = torch.randn(n, generator=generator).half()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"attention_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    check(load(folder), folder, generator)


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}


def write_mixtral(
    folder: Path, packer: Packer, options: dict[str, Any], g: torch.Generator, routers: bool = False
) -> Path:
    """A model with experts in place of the other's two layers after attention. routers: they are quantized, too."""
    folder.mkdir()
    tensors = llama.plain_tensors(g)
    layers = {name: shape for name, shape in llama.LINEARS.items() if "self_attn" in name}
    for i in range(llama.LAYERS):
        block = f"model.layers.{i}.block_sparse_moe"
        if routers:
            layers[f"{block}.gate"] = (llama.HIDDEN, 4)
        else:
            tensors[f"{block}.gate.weight"] = torch.randn(4, llama.HIDDEN, generator=g).half()
        for e in range(4):
            layers |= {f"{block}.experts.{e}.{name}": (llama.HIDDEN, llama.FFN) for name in ("w1", "w3")}
            layers[f"{block}.experts.{e}.w2"] = (llama.FFN, llama.HIDDEN)
    for name, (k, n) in layers.items():
        tensors |= {f"{name}.{inside}": tensor.contiguous() for inside, tensor in packer(k, n, g).items()}
    save_file(tensors, folder / "model.safetensors")
    config = llama.CONFIG | MIXTRAL | {"quantization_config": options, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "name",
    ["gptq-4bit-zeros", "awq-4bit", "ct-8bit-zeros", "bnb-nf4", "bnb-nf4-nested", "bnb-fp4", "ct-nvfp4", "ct-mxfp4"],
)
def test_experts_of_each_format(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    folder = write_mixtral(tmp_path / name, *FOLDERS[name], generator)
    check(load(folder), folder, generator)


@pytest.mark.parametrize("name", ["ct-8bit-zeros", "bnb-nf4"])
def test_quantized_routers_are_dequantized(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    folder = write_mixtral(tmp_path / name, *FOLDERS[name], generator, routers=True)
    model = load(folder)
    assert model.get_parameter("model.layers.1.block_sparse_moe.gate.weight").abs().max() > 0
    check(model, folder, generator)


def test_converted_experts(tmp_path: Path, generator: torch.Generator) -> None:
    source = write_mixtral(tmp_path / "source", *FOLDERS["ct-8bit-zeros"], generator)
    wo.formats.convert(source, tmp_path / "converted", arch="sm90", progress=False)
    check(load(tmp_path / "converted", quantization=None), source, generator)


def test_refused_experts(tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_mixtral(tmp_path / "order", *FOLDERS["gptq-4bit-act-order"], generator)
    monkeypatch.setenv(VARIABLE, "off")
    with pytest.raises(ValueError, match=f"experts: has quantized experts, which {VARIABLE}=off leaves to vLLM"):
        load(folder)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match=r"experts: expected one of int4, .* without act-order"):
        load(folder)
    packer, options = FOLDERS["gptq-4bit-zeros"]

    folder = write_mixtral(tmp_path / "uneven", packer, options, generator)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3"
    tensors = {key: t for key, t in tensors.items() if not key.startswith(f"{name}.")}
    tensors[f"{name}.weight"] = torch.randn(llama.FFN, llama.HIDDEN, generator=generator).half()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"layers\.1.*experts: expected its experts to be quantized alike, .* 2\.w3 None"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("gptq-4bit-act-order-zeros", "sm80"),
        ("gptq-4bit-act-order-zeros", "sm90"),
        ("gptq-8bit-act-order", "sm80"),
        ("gptq-8bit-act-order", "sm90"),
        ("bnb-nf4-nested", "sm90"),
        ("ct-nvfp4", "sm90"),
        ("ct-mxfp4", "sm80"),
    ],
)
def test_converted_folder(name: str, arch: str, tmp_path: Path, generator: torch.Generator) -> None:
    """vLLM takes the method from the folder; no layout of the file has to be that of the GPU."""
    source = write(tmp_path / "source", *FOLDERS[name], generator)
    wo.formats.convert(source, tmp_path / "converted", arch=arch, progress=False)
    check(load(tmp_path / "converted", quantization=None), source, generator)


def test_scales_beyond_fp16(tmp_path: Path, generator: torch.Generator) -> None:
    def packer(k: int, n: int, g: torch.Generator) -> dict[str, torch.Tensor]:
        w = fp4_cases.weight(g, "mxfp4", k, n)
        w.raw[0, 0] = 200
        return fp4_cases.tensors("compressed-tensors", w)

    folder = write(tmp_path / "folder", packer, FOLDERS["ct-mxfp4"][1], generator)
    with pytest.raises(ValueError, match=r"qkv_proj\.scales: expected powers of two .* for mxfp4 in torch\.float16"):
        load(folder)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name", ["gptq-act-order", "gptq-act-order-zeros", "groups-of-32", "groups-of-64", "per-channel", "nf4"]
)
def test_shards_of_k(
    name: str, ranks: int, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of a row-parallel layer's ranks add up. K = 192 cuts groups, and act-order scatters them."""
    packer: Packer
    packer, options = {
        "gptq-act-order": (integers("gptq", 4, False, True, 64), GPTQ | {"bits": 4, "sym": True, "group_size": 64}),
        "gptq-act-order-zeros": (
            integers("gptq", 8, True, True, 64),
            GPTQ | {"bits": 8, "sym": False, "group_size": 64},
        ),
        "groups-of-32": FOLDERS["gptq-4bit-zeros"],
        "groups-of-64": (integers("gptq", 4, True, False, 64), GPTQ | {"bits": 4, "sym": False, "desc_act": False}),
        "per-channel": (integers("gptq", 4, True, False, -1), GPTQ | {"bits": 4, "sym": False, "desc_act": False}),
        "nf4": FOLDERS["bnb-nf4"],
    }[name]
    if name == "groups-of-64":
        options |= {"group_size": 64}
    if name == "per-channel":
        options |= {"group_size": -1}
    register()
    k, n = 192, 72
    folder = tmp_path / "layer"
    folder.mkdir()
    save_file(
        {f"down.{inside}": t.contiguous() for inside, t in packer(k, n, generator).items()}, folder / "a.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"quantization_config": options}))
    (record,) = wo.load_checkpoint(folder, progress=False)
    assert isinstance(record, wo.formats.QuantizedLayer)
    x = torch.randn(5, k, generator=generator).half()
    dense = record.dequantize(torch.float64)
    total = torch.zeros(5, n, dtype=torch.float64)
    with cases.serving():
        for rank in range(ranks):
            layer = shard_of(folder, k, n, rank, ranks, monkeypatch)
            total += layer(x.chunk(ranks, dim=1)[rank].contiguous())[0].double()
    scale = (x.double().abs() @ dense.abs()).max()
    assert (total - x.double() @ dense).abs().max() < 2e-3 * scale


def shard_of(folder: Path, k: int, n: int, rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> RowParallelLinear:
    """One rank's row-parallel layer `down` of the folder, without the sum over ranks."""
    config = get_quantization_config("weightonly").from_config({})
    config.maybe_update_config(str(folder))
    layer = RowParallelLinear.__new__(RowParallelLinear)
    cases.rank_of(monkeypatch, rank, ranks)
    RowParallelLinear.__init__(layer, k, n, bias=False, reduce_results=False, quant_config=config, prefix="down")
    parameters = dict(layer.named_parameters())
    checkpoint = open_checkpoint(folder)
    weight, _ = checkpoint.read(checkpoint.layers["down"])
    for name, tensor in loadable(weight, checkpoint.shapes["down"]).items():
        parameters[name].weight_loader(parameters[name], tensor)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def layer_folder(folder: Path, k: int, n: int, g_idx: torch.Tensor, generator: torch.Generator) -> Path:
    """A folder with one layer, `down`, whose rows are in these groups of 32."""
    w = cases.weight(generator, k, n, bits=4, group=32, zeros=False, dtype=torch.float16)
    w.g_idx = g_idx
    folder.mkdir()
    tensors = {f"down.{inside}": tensor.contiguous() for inside, tensor in cases.tensors("gptq", w).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": GPTQ | {"bits": 4, "sym": True}}))
    return folder


def test_an_order_that_changes_nothing_here_is_kept(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that are loaded next may have another one, and graphs hold its address."""
    register()
    folder = layer_folder(tmp_path / "layer", 192, 72, (torch.arange(192) % 96 // 16).int(), generator)
    with cases.serving():
        layers = [shard_of(folder, 192, 72, rank, 2, monkeypatch) for rank in range(2)]
    assert all(torch.equal(layer.perm, torch.arange(96, dtype=torch.int32)) for layer in layers)


@pytest.mark.parametrize("k", [160, 224])
def test_another_k(k: int, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    folder = layer_folder(tmp_path / "layer", 192, 72, (torch.arange(192) // 32).int(), generator)
    with (
        cases.serving(),
        pytest.raises(ValueError, match=f"down: expected K = {k} as the model has, got 192 in the folder"),
    ):
        shard_of(folder, k, 72, 0, 1, monkeypatch)


def test_layers_that_are_not_loaded() -> None:
    """A format without rows, groups of 4-bit floats that ranks cut, and groups of another number of rows."""
    method = WeightOnlyLinearMethod("up", LayerShape("code4", 64, 64, 32, symmetric=True, act_order=False))
    with pytest.raises(ValueError, match="up: expected one of int4, int8, nf4, fp4, mxfp4, nvfp4, got code4"):
        method.create_weights(torch.nn.Module(), 64, [64], 64, 64, torch.float16, weight_loader=None)
    method = WeightOnlyLinearMethod("up", LayerShape("mxfp4", 96, 64, 32, symmetric=True, act_order=False))
    with pytest.raises(ValueError, match="up: expected K of a rank in whole groups of 32, got 48"):
        method.create_weights(torch.nn.Module(), 48, [64], 96, 64, torch.float16, weight_loader=None)
    groups = RowGroups(data=torch.zeros(64, dtype=torch.int32), weight_loader=None)
    with pytest.raises(ValueError, match=r"row_groups: expected \[64\], got \[1\]"):
        groups.load_column_parallel_weight(torch.zeros(1, dtype=torch.int32))


def test_merged_layers_of_different_act_order(tmp_path: Path, generator: torch.Generator) -> None:
    def packer(k: int, n: int, g: torch.Generator) -> dict[str, torch.Tensor]:
        w = cases.weight(g, k, n, bits=4, group=32, zeros=False, dtype=torch.float16, act_order=True)
        return cases.tensors("gptq", w)

    folder = write(tmp_path / "folder", packer, FOLDERS["gptq-4bit-act-order"][1], generator)
    with pytest.raises(ValueError, match=r"qkv_proj: expected one act-order for its 3 merged layers"):
        load(folder)


def test_refused(tmp_path: Path, generator: torch.Generator, no_groups_of_16: None) -> None:
    packer, options = FOLDERS["bnb-nf4"]
    folder = write(tmp_path / "head", packer, options, generator, lm_head=True)
    tied = SimpleNamespace(tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head: expected no quantized head, as config.json says tie_word"):
        WeightOnlyConfig().maybe_update_config(str(folder), hf_config=tied)
    with pytest.raises(ValueError, match=r"lm_head: expected quantized layers to be linear"):
        load(folder)
    packer, options = integers("gptq", 4, False, False, 16), GPTQ | {"bits": 4, "sym": True, "group_size": 16}
    folder = write(tmp_path / "group", packer, options | {"desc_act": False}, generator)
    with pytest.raises(ValueError, match=r"qkv_proj: group_size must be .* got 16"):
        load(folder)


# --- packed bytes of converted folders --------------------------------------------------------------------------

ARCH_OF = {"row_major": "sm70", "interleaved": "sm80", "tiled": "sm90", "cpu": "cpu"}
MERGES = {"merged": ("a", "b"), "qkv": ("q", "k", "v")}


def converted_layers(
    folder: Path, layout: str, format: str, sizes: dict[str, tuple[int, int]], g: torch.Generator, group: int = 64
) -> Path:
    """A converted folder in `layout` of layers in groups; sizes: name -> (K, N)."""
    packer = codes("nf4", False) if format == "nf4" else integers("gptq", int(format[3:]), True, False, group)
    options = FOLDERS["bnb-nf4"][1]
    if format != "nf4":
        options = GPTQ | {"bits": int(format[3:]), "sym": False, "desc_act": False, "group_size": group}
    source = folder / "source"
    source.mkdir()
    tensors = {
        f"{name}.{inside}": t.contiguous() for name, (k, n) in sizes.items() for inside, t in packer(k, n, g).items()
    }
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"quantization_config": options}))
    wo.formats.convert(source, folder / "packed", arch=ARCH_OF[layout], progress=False)
    return folder / "packed"


def rank_layer(kind: str, n: int, config: WeightOnlyConfig) -> LinearBase:
    arguments: dict[str, Any] = {"bias": False, "quant_config": config, "prefix": kind}
    if kind == "row":
        return RowParallelLinear(256, n, reduce_results=False, **arguments)
    if kind == "merged":
        return MergedColumnParallelLinear(256, [n, n], **arguments)
    if kind == "qkv":
        return QKVParallelLinear(256, 64, n // 64, 2, **arguments)
    return ColumnParallelLinear(256, n, **arguments)


def loaded_part(
    folder: Path, kind: str, n: int, arch: str, rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> LinearBase:
    """One rank's layer of the folder, by our own loader."""
    monkeypatch.setattr(WeightOnlyLinearMethod, "arch", arch)
    config = WeightOnlyConfig()
    config.packed_modules_mapping = {name: list(parts) for name, parts in MERGES.items()}
    config.maybe_update_config(str(folder))
    cases.rank_of(monkeypatch, rank, ranks)
    layer = rank_layer(kind, n, config)
    parameters = dict(layer.named_parameters())
    loader = WeightOnlyLoader(LoadConfig(load_format="weightonly"))
    for name, tensor in loader.get_all_weights(SimpleNamespace(model=str(folder)), layer):
        source, _, inside = name.rpartition(".")
        shard = {"a": (0,), "b": (1,), "q": ("q",), "k": ("k",), "v": ("v",)}.get(source, ())
        parameters[inside].weight_loader(parameters[inside], tensor, *shard)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def sizes_of(kind: str, n: int) -> dict[str, tuple[int, int]]:
    if kind == "qkv":
        return {"q": (256, n), "k": (256, 128), "v": (256, 128)}
    return dict.fromkeys(MERGES.get(kind, (kind,)), (256, n))


@pytest.mark.parametrize("kind", ["column", "row", "merged", "qkv"])
@pytest.mark.parametrize(
    ("layout", "format"),
    [
        (layout, format)
        for layout in ARCH_OF
        for format in ("int4", "int8", "nf4")
        if (layout, format) != ("row_major", "nf4")
    ],
)
def test_packed_bytes_are_cut_where_they_lie(
    layout: str, format: str, kind: str, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of unpacked rows that are cut and packed, and nothing is unpacked or packed."""
    register()
    folder = converted_layers(tmp_path, layout, format, sizes_of(kind, 256), generator)
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            with cases.serving(), monkeypatch.context() as patch:
                patch.setattr("weightonly.vllm.linear_method.cuts_bytes", lambda *_: False)
                rows = loaded_part(folder, kind, 256, ARCH_OF[layout], rank, ranks, patch)
            with cases.serving(), monkeypatch.context() as patch:
                for name in ("pack_bytes", "unpack_bytes"):
                    patch.setattr(f"weightonly.packing.{name}", None)
                part = loaded_part(folder, kind, 256, ARCH_OF[layout], rank, ranks, patch)
            assert part.quant_method.takes_blocks and not rows.quant_method.takes_blocks
            expected = dict(rows.named_parameters())
            for name, parameter in part.named_parameters():
                assert torch.equal(parameter, expected.pop(name)), name
            assert not expected


@pytest.mark.parametrize(
    ("kind", "n", "ranks", "group", "in_blocks"),
    [
        ("column", 72, 1, 64, True),
        ("column", 144, 2, 64, False),
        ("merged", 72, 1, 64, False),
        ("row", 72, 2, 64, True),
        ("row", 72, 8, 64, False),
        ("row", 72, 8, 32, False),
    ],
)
def test_parts_that_begin_inside_of_a_block(
    kind: str,
    n: int,
    ranks: int,
    group: int,
    in_blocks: bool,
    tmp_path: Path,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are unpacked; a layer of any width that is not cut is not."""
    register()
    folder = converted_layers(tmp_path, "tiled", "int4", sizes_of(kind, n), generator, group)
    records = [r for r in wo.load_checkpoint(folder, progress=False) if isinstance(r, QuantizedLayer)]
    x = torch.randn(3, 256, generator=generator).half()
    for rank in range(ranks):
        with cases.serving(), monkeypatch.context() as patch:
            layer = loaded_part(folder, kind, n, "sm90", rank, ranks, patch)
            assert layer.quant_method.takes_blocks is in_blocks
            y = layer(x.chunk(ranks, 1)[rank].contiguous() if kind == "row" else x)[0]
        dense = torch.cat(
            [r.dequantize().chunk(ranks, 1)[rank] if kind != "row" else r.dequantize() for r in records], 1
        )
        dense = dense.chunk(ranks)[rank] if kind == "row" else dense
        x_part = x.chunk(ranks, 1)[rank] if kind == "row" else x
        torch.testing.assert_close(y.float(), x_part.float() @ dense, rtol=2e-3, atol=2e-2 * float(dense.abs().max()))


def test_a_layout_of_another_gpu_is_packed_again(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    folder = converted_layers(tmp_path, "interleaved", "int4", sizes_of("row", 256), generator)
    parts = []
    for blocks in (True, False):
        with cases.serving(), monkeypatch.context() as patch:
            if not blocks:
                patch.setattr("weightonly.vllm.linear_method.cuts_bytes", lambda *_: False)
            parts.append(loaded_part(folder, "row", 256, "sm90", 1, 2, patch))
    assert [part.quant_method.takes_blocks for part in parts] == [True, False]
    assert torch.equal(parts[0].qweight, parts[1].qweight)
    part = parts[0]
    w = part.quant_method.held.operand(part.qweight, part.scales, getattr(part, "zeros", None), None)
    assert w.packed.layout == "tiled"


def test_parts_in_several_layouts_are_packed_again(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that was saved after `repack` of some of its layers."""
    register()
    tensors: dict[str, torch.Tensor] = {}
    for name, layout in (("a", "tiled"), ("b", "interleaved")):
        (tmp_path / name).mkdir()
        packed = converted_layers(tmp_path / name, layout, "int4", {name: (256, 128)}, generator)
        tensors |= load_file(next(packed.glob("*.safetensors")))
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["layers"] = {"a": {"layout": "tiled"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    records = [record for record in wo.load_checkpoint(tmp_path, progress=False) if isinstance(record, QuantizedLayer)]
    x = torch.randn(3, 256, generator=generator).half()
    with cases.serving():
        y = loaded_part(tmp_path, "merged", 128, "sm90", 0, 1, monkeypatch)(x)[0]
    dense = torch.cat([record.dequantize() for record in records], 1)
    torch.testing.assert_close(y.float(), x.float() @ dense, rtol=2e-3, atol=2e-2 * float(dense.abs().max()))


@pytest.mark.parametrize("converted", [False, True], ids=["awq", "converted"])
def test_headers_are_read_once(
    converted: bool, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "source", *FOLDERS["awq-4bit"], generator)
    if converted:
        wo.formats.convert(folder, tmp_path / "packed", progress=False)
        folder = tmp_path / "packed"
    reads = Reads(folder, monkeypatch)
    load(folder)
    assert set(reads.headers.values()) == {1} and reads.zero_points() <= {1}


def test_the_headers_stay_in_their_process(tmp_path: Path, generator: torch.Generator) -> None:
    folder = write(tmp_path / "folder", *FOLDERS["awq-4bit"], generator)
    config = WeightOnlyConfig()
    config.maybe_update_config(str(folder))
    sent = pickle.loads(pickle.dumps(config))
    assert sent.shapes == config.shapes and sent.checkpoint(str(folder)).shapes == config.shapes


# --- which layers are quantized, and how -----------------------------------------------------------------------

SHAPE = LayerShape("int4", 64, 32, 32, symmetric=True, act_order=False)
QKV = ("q_proj", "k_proj", "v_proj")


def method_of(shapes: dict[str, LayerShape], prefix: str = "a.qkv_proj") -> Any:
    """What the config of a folder with these layers says for a linear layer of vLLM."""
    config = WeightOnlyConfig()
    config.shapes, config.packed_modules_mapping = shapes, {"qkv_proj": list(QKV)}
    return config.get_quant_method(RowParallelLinear.__new__(RowParallelLinear), prefix)


def test_layers_that_are_merged() -> None:
    """From three of the folder, from one that is merged there, and from none."""
    assert method_of({f"a.{name}": SHAPE for name in QKV}).shape is SHAPE
    assert method_of({"a.qkv_proj": SHAPE}).shape is SHAPE
    assert type(method_of({})) is UnquantizedLinearMethod


@pytest.mark.parametrize("other", [None, dataclasses.replace(SHAPE, group_size=64)], ids=["dense", "group size"])
def test_parts_and_experts_of_several_kinds(other: LayerShape | None) -> None:
    shapes = {f"a.{name}": SHAPE for name in QKV[:2]} | ({} if other is None else {"a.v_proj": other})
    with pytest.raises(ValueError, match=r"a\.qkv_proj: expected its parts to be quantized alike, got"):
        method_of(shapes)
    with pytest.raises(ValueError, match=r"experts: expected its experts to be quantized alike, .* and 1\.up "):
        _one_kind("experts", {"0.up": SHAPE, "1.up": other})


def test_the_method_is_asked_for() -> None:
    asked = [WeightOnlyConfig.override_quantization_method({}, user) for user in ("weightonly", "gptq", None)]
    assert asked == ["weightonly", None, None]


ALL = " are left to vLLM's kernels"
FP8 = f"{ALL}, but for linear ones where it would take Marlin"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "fp8"}, f"fp8{FP8}"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            f"compressed-tensors, float-quantized{FP8}",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, f"modelopt, FP8{FP8}"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, f"compressed-tensors, int-quantized{ALL}"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, None),
        ({"quant_method": "gptq"}, None),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_the_log_names_methods_that_are_not_taken(
    config: dict[str, Any], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(folders.logger, "info_once", lambda text, *values: said.append(text % values))
    assert WeightOnlyConfig.override_quantization_method(config, None) is None
    assert said == ([] if named is None else [f"Layers of {named}"])


def test_layers_have_the_names_of_vllms_model() -> None:
    config = WeightOnlyConfig()
    config.shapes = {"model.up": SHAPE, "lm_head": SHAPE}
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    assert list(config.shapes) == ["language_model.model.up", "lm_head"]


def test_zero_points_as_the_shape_says() -> None:
    """A reader drops zero points that are all 0; vLLM loads them where the folder may have others."""
    q, scales = torch.zeros(64, 32, dtype=torch.int8), torch.ones(2, 32)
    some = dataclasses.replace(SHAPE, symmetric=None)
    assert torch.equal(loadable(IntWeight(q, 4, scales, None, None), some)["zeros"], torch.zeros(32, 2))
    assert "zeros" not in loadable(IntWeight(q, 4, scales, None, None), SHAPE)
    with pytest.raises(ValueError, match="zeros: expected none, as the config says symmetric, got zero points"):
        loadable(IntWeight(q, 4, scales, scales, None), SHAPE)


def test_without_the_load_format(tmp_path: Path, generator: torch.Generator) -> None:
    """vLLM's own loader gives the file's words to the layer, which says what to do."""
    folder = write(tmp_path / "folder", *FOLDERS["gptq-4bit-act-order"], generator)
    with pytest.raises(ValueError, match="--load-format weightonly"):
        load(folder, load_format="auto")


def test_compiled(tmp_path: Path, generator: torch.Generator) -> None:
    folder = write(tmp_path / "folder", *FOLDERS["gptq-4bit-act-order-zeros"], generator)
    layer = dict(load(folder).named_modules())["model.layers.0.mlp.gate_up_proj"]
    compiled = torch.compile(lambda x: layer(x)[0] * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (1, 7, 33):
        x = torch.randn(m, llama.HIDDEN, generator=generator).half()
        assert torch.equal(compiled(x), layer(x)[0] * 2)


@pytest.mark.parametrize("name", ["gptq-4bit-act-order-zeros", "bnb-nf4"])
def test_reload(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    """Weights that are loaded again run from the memory of the first ones, as a CUDA graph needs it."""
    first = write(tmp_path / "first", *FOLDERS[name], generator)
    second = write(tmp_path / "second", *FOLDERS[name], generator)
    model, config = built(first)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    with cases.serving():
        layerwise.initialize_layerwise_reload(model)
        checkpoint = open_checkpoint(second)
        tensors = [(name, checkpoint.shards.read(name)) for name in checkpoint.plain]
        for layer in checkpoint.layers.values():
            weight, _ = checkpoint.read(layer)
            found = loadable(weight, checkpoint.shapes[layer.name])
            tensors += [(f"{layer.name}.{inside}", tensor) for inside, tensor in found.items()]
        model.load_weights(tensors)  # type: ignore[operator]
        layerwise.finalize_layerwise_reload(model, config)
    check(model, second, generator)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
