"""`weightonly export`: what other quantizers' code, and our readers, find in the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import formats_reference as ref
from tests.formats_layers import BNB, GPTQ, bnb_layer, folder_of, gptq_layer
from tests.formats_llama import MODELS

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import PlainTensor, QuantizedLayer, convert, export, load_checkpoint, open_checkpoint
from weightonly.formats.checkpoint import Checkpoint
from weightonly.formats.converted import shape_of
from weightonly.formats.converted import tensors_of as tensors_of_record
from weightonly.formats.layers import LayerShape
from weightonly.formats.packed_config import METHOD, VERSION, options_of
from weightonly.formats.writers import TARGETS

HELD: dict[str, tuple[str, ...]] = {
    "awq": ("compressed-tensors", "gptq", "awq"),
    "gptq-4bit-v1-sym": ("compressed-tensors", "gptq", "awq"),
    "gptq-4bit-v1-act_order": ("compressed-tensors", "gptq"),
    "gptq-8bit-v2-sym-act_order": ("compressed-tensors", "gptq"),
    "gptq-8bit-v2": ("compressed-tensors", "gptq"),
    "compressed_tensors-4bit-sym": ("compressed-tensors", "gptq", "awq"),
    "compressed_tensors-4bit": ("compressed-tensors", "gptq", "awq"),
    "compressed_tensors-4bit-act_order": ("compressed-tensors", "gptq"),
    "compressed_tensors-8bit-sym-channel": ("compressed-tensors", "gptq"),
    "compressed_tensors-8bit": ("compressed-tensors", "gptq"),
    "bitsandbytes-nf4": (),
}
CASES = [pytest.param(name, to, id=f"{name} to {to}") for name, targets in HELD.items() for to in targets]


def packed_folder(folder: Path, name: str, generator: torch.Generator) -> Path:
    """A folder of ours."""
    model = MODELS[name](generator)
    folder.mkdir(exist_ok=True)
    ref.write_checkpoint(folder / "source", model.tensors, {"quantization_config": model.config})
    convert(folder / "source", folder / "ours", "cpu", progress=False)
    return folder / "ours"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    assert "fusion_config" not in config
    quantization: dict[str, Any] = config["quantization_config"]
    return quantization


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)


def check_same(source: Path, target: Path) -> None:
    """Codes, scales, zeros, biases, order of rows and dense tensors, bit for bit."""
    records = [{r.name: r for r in load_checkpoint(f, "cpu", progress=False)} for f in (source, target)]
    assert records[0].keys() == records[1].keys()
    for name, a in records[0].items():
        b = records[1][name]
        if isinstance(a, PlainTensor):
            assert isinstance(b, PlainTensor) and same(a.tensor, b.tensor), name
            continue
        assert isinstance(b, QuantizedLayer) and a.weight.format == b.weight.format
        assert same(wo.unpack(a.weight), wo.unpack(b.weight)), name
        assert same(a.zeros, b.zeros) and same(a.bias, b.bias) and same(a.perm, b.perm), name
        is_float = a.weight.format in ("mxfp4", "nvfp4")
        assert torch.equal(a.scales.float(), b.scales.float()) if is_float else same(a.scales, b.scales), name


def decoded(tensors: dict[str, torch.Tensor], name: str, config: dict[str, Any]) -> torch.Tensor:
    """A layer [K, N] by the formulas of the formats, or by compressed-tensors' own code."""
    inside = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
    inside.pop("bias", None)
    if config["quant_method"] == "awq":
        return ref.awq_weight(**inside)
    if config["quant_method"] == "gptq":
        version = {"gptq": 1, "gptq_v2": 2}[config["checkpoint_format"]]
        group = inside.pop("g_idx").numpy()
        return ref.gptq_weight(**inside, group=group, bits=config["bits"], version=version)
    quantization = pytest.importorskip("compressed_tensors.quantization")
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    scheme = quantization.QuantizationConfig(**config).config_groups["group_0"]
    inside["weight_scale"] = inside["weight_scale"].float()
    dense: torch.Tensor = packing.PackedQuantizationCompressor.decompress(inside, scheme)["weight"].t()
    return dense


@pytest.mark.parametrize(("name", "to"), CASES)
def test_readers_of_the_format_find_the_same_numbers(
    name: str, to: str, tmp_path: Path, generator: torch.Generator
) -> None:
    source, target = packed_folder(tmp_path, name, generator), tmp_path / "out"
    export(source, target, to, shard_bytes=20_000, progress=False)
    check_same(source, target)
    assert open_checkpoint(target).methods == (to,) and len([*target.glob("*.safetensors")]) > 2
    tensors, config = tensors_of(target), config_of(target)
    for record in load_checkpoint(source, "cpu", progress=False):
        if isinstance(record, QuantizedLayer):
            assert torch.equal(decoded(tensors, record.name, config), record.dequantize()), record.name


def test_versions_of_gptq_and_what_configs_say(tmp_path: Path, generator: torch.Generator) -> None:
    for name, version, symmetric in (("awq", "gptq_v2", False), ("compressed_tensors-4bit-sym", "gptq", True)):
        source = packed_folder(tmp_path / name, name, generator)
        export(source, tmp_path / name / "gptq", "gptq", progress=False)
        config = config_of(tmp_path / name / "gptq")
        assert (config["checkpoint_format"], config["sym"], config["desc_act"]) == (version, symmetric, False)
        assert (config["bits"], config["group_size"], config["lm_head"]) == (4, 32, False)
    export(source, tmp_path / "awq" / "to", "awq", progress=False)
    config = config_of(tmp_path / "awq" / "to")
    assert config["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]


def mixed_folder(folder: Path) -> Path:
    """int4 in two group sizes, one with zero points, and int8 per channel."""
    torch.manual_seed(0)
    kinds: dict[str, dict[str, Any]] = {
        "a": {"group_size": 32},
        "b": {"group_size": 64, "symmetric": False, "search": "whole"},
        "c": {"format": "int8", "group_size": -1},
        "d": {"group_size": 128},  # of K = 128
    }
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, LayerShape] = {}
    for name, kind in kinds.items():
        layer = wo.nn.Linear.from_linear(torch.nn.Linear(128, 64).half(), arch="cpu", **kind)
        record = QuantizedLayer(name, layer.packed, layer.scales, layer.zeros, layer.bias)
        tensors |= {key: tensor.detach().clone() for key, tensor in tensors_of_record(record).items()}
        shapes[name] = shape_of(record)
    options = {"quant_method": METHOD, "format_version": VERSION, **options_of(shapes)}
    tensors["gate.weight"] = torch.randn(4, 128)
    ref.write_checkpoint(folder, tensors, {"quantization_config": options})
    return folder


def test_layers_of_several_kinds(tmp_path: Path) -> None:
    source = mixed_folder(tmp_path / "ours")
    for to in ("compressed-tensors", "gptq"):
        export(source, tmp_path / to, to, progress=False)
        check_same(source, tmp_path / to)
    groups = config_of(tmp_path / "compressed-tensors")["config_groups"].values()
    assert [group["targets"] for group in groups] == [["a"], ["b"], ["c"], ["d"]]
    assert [group["weights"]["strategy"] for group in groups] == ["group", "group", "channel", "channel"]
    dynamic = config_of(tmp_path / "gptq")["dynamic"]
    assert dynamic["-:^gate$"] == {} and dynamic["+:^c$"] == {"bits": 8, "group_size": -1}
    with pytest.raises(
        ValueError, match=r"^c: expected a layer that awq can hold, got one with format int8; compressed-"
    ):
        export(source, tmp_path / "awq", "awq", progress=False)


# --- what cannot be held ------------------------------------------------------------------------------------------


def changed(folder: Path, **changes: Any) -> Path:
    """A folder of ours with other tensors: name inside of the layers -> what becomes of it."""
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, change in changes.items():
        for key in [key for key in tensors if key.endswith(f".{name}")]:
            tensors[key] = change(tensors[key])
    ref.write_checkpoint(folder.parent / "changed", tensors, json.loads((folder / "config.json").read_text()))
    return folder.parent / "changed"


def refused(tmp_path: Path, source: Path, to: str) -> str:
    with pytest.raises(ValueError, match=": ") as error:
        export(source, tmp_path / "out", to, progress=False)
    assert not (tmp_path / "out").exists() and not [*tmp_path.glob(".*")]
    return str(error.value)


def test_codes_are_held_by_none(tmp_path: Path, generator: torch.Generator) -> None:
    source = packed_folder(tmp_path, "bitsandbytes-nf4", generator)
    for to in TARGETS:
        message = refused(tmp_path, source, to)
        assert "got one with format nf4; none of compressed-tensors, gptq, awq holds it" in message


def test_act_order_is_not_held_by_awq(tmp_path: Path, generator: torch.Generator) -> None:
    message = refused(tmp_path, packed_folder(tmp_path, "gptq-4bit-v1-act_order", generator), "awq")
    assert "that awq can hold, got one with its rows in act-order; compressed-tensors and gptq can hold it" in message


def test_fractional_zeros_are_held_by_none(tmp_path: Path, generator: torch.Generator) -> None:
    def move(zeros: torch.Tensor) -> torch.Tensor:
        zeros[0, 3] += 0.5
        return zeros

    source = changed(packed_folder(tmp_path, "awq", generator), zeros=move)
    for to in TARGETS:
        message = refused(tmp_path, source, to)
        assert "zeros: expected whole numbers in -8 .. 7, got" in message and "which no target holds" in message
        assert "search='whole' (weightonly quantize --whole-zeros)" in message
        assert message.startswith("model.layers.")


def test_scales_of_other_dtypes_are_held_by_compressed_tensors(tmp_path: Path, generator: torch.Generator) -> None:
    source = changed(
        packed_folder(tmp_path, "awq", generator), scales=lambda t: t.bfloat16(), zeros=lambda t: t.bfloat16()
    )
    for to in ("gptq", "awq"):
        message = refused(tmp_path, source, to)
        assert f"that {to} can hold, got one with scales in torch.bfloat16, not torch.float16; compressed-" in message
    export(source, tmp_path / "out", "compressed-tensors", progress=False)
    check_same(source, tmp_path / "out")


def test_group_sizes_of_awq_are_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    q = [wo.quantize(torch.randn(128, 64).half(), 4, group) for group in (32, 64)]
    tensors: dict[str, torch.Tensor] = {}
    for number, (codes, scales, _) in enumerate(q):
        tensors |= {f"{number}.weight_packed": ref.pack_rows((codes + 8).numpy(), 4).t().contiguous()}
        tensors |= {
            f"{number}.weight_scale": scales.t().contiguous(),
            f"{number}.weight_shape": torch.tensor([64, 128]),
        }
    weights = [{"num_bits": 4, "type": "int", "symmetric": True, "group_size": group} for group in (32, 64)]
    groups = {f"g{i}": {"targets": [str(i)], "weights": one} for i, one in enumerate(weights)}
    options = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    ref.write_checkpoint(tmp_path / "in", tensors, {"quantization_config": options})
    message = refused(tmp_path, tmp_path / "in", "awq")
    assert message.startswith("1: group_size: expected 32, as other layers have, got 64; gptq and compressed-tensors")


def test_names_that_awq_does_not_tell_apart(tmp_path: Path, generator: torch.Generator) -> None:
    source = packed_folder(tmp_path, "awq", generator)
    [file] = source.glob("*.safetensors")
    tensors = load_file(file) | {"model.layers.0.mlp.gate.weight": torch.ones(4, 8)}
    ref.write_checkpoint(tmp_path / "changed", tensors, json.loads((source / "config.json").read_text()))
    message = refused(tmp_path, tmp_path / "changed", "awq")
    assert message.startswith("model.layers.0.mlp.gate_proj: expected a name without that of the dense layer model.lay")


def test_wrong_arguments(tmp_path: Path, generator: torch.Generator) -> None:
    source = folder_of(tmp_path, gptq_layer, GPTQ, generator)
    with pytest.raises(ValueError, match=r"^to: expected one of compressed-tensors, gptq, awq, got 'exl2'"):
        export(source, tmp_path / "out", "exl2")
    with pytest.raises(ValueError, match=r"^shard_bytes: expected at least 1, got 0"):
        export(source, tmp_path / "out", "gptq", shard_bytes=0)
    with pytest.raises(FileExistsError, match="expected a folder that does not exist yet, got an existing one"):
        export(source, source, "gptq")


def test_a_run_that_fails_leaves_nothing(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, records = packed_folder(tmp_path, "awq", generator), Checkpoint.records

    def broken(self: Checkpoint, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for number, record in enumerate(records(self, *args, **kwargs)):
            if number == 5:
                raise OSError("the disk is gone")
            yield record

    monkeypatch.setattr(Checkpoint, "records", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        export(source, tmp_path / "out", "gptq", shard_bytes=1000, progress=False)
    assert not (tmp_path / "out").exists() and not [*tmp_path.glob(".*")]


def test_the_command(tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = folder_of(tmp_path, gptq_layer, GPTQ, generator), tmp_path / "out"
    assert command.main(["export", str(source), str(target), "--to", "compressed-tensors"]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: compressed-tensors (from config.json)")
    check_same(source, target)
    (tmp_path / "nf4").mkdir()
    nf4 = folder_of(tmp_path / "nf4", bnb_layer, BNB, generator)
    assert command.main(["export", str(nf4), str(tmp_path / "no"), "--to", "awq"]) == 1
    assert "format nf4; none of compressed-tensors, gptq, awq holds it" in capsys.readouterr().err
