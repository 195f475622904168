"""Readers of 4-bit floats: compressed-tensors' mxfp4 and nvfp4, and gpt-oss, against their own libraries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests import ROOT
from tests import formats_reference as ref
from tests.formats.fp4_cases import (
    EXPERTS,
    LAYERS,
    K,
    N,
    Tensors,
    both,
    folders,
    gpt_oss_tensors,
    layers_of,
    mxfp4_layer,
    nvfp4_layer,
    options,
    write,
)

import weightonly as wo
from weightonly import __main__ as command
from weightonly.codebooks import CODEBOOKS
from weightonly.formats import convert, open_checkpoint, read_compressed_fp4, read_gpt_oss
from weightonly.formats.e2m1 import e8m0_scales
from weightonly.nn.grouped import GroupedLinear

CHECKPOINTS = Path(os.environ.get("WEIGHTONLY_CHECKPOINTS", ROOT.parent / "shared/checkpoints"))
needs_checkpoints = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason=f"no {CHECKPOINTS}")


def decompressed(tensors: Tensors) -> torch.Tensor:
    """By compressed-tensors itself: bfloat16 [K, N]."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor

    compressor: Any = NVFP4PackedCompressor if "weight_global_scale" in tensors else MXFP4PackedCompressor
    return compressor.decompress(dict(tensors), None)["weight"].t()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Zeros have a sign, too."""
    return a.dtype == b.dtype == torch.bfloat16 and torch.equal(
        a.contiguous().view(torch.int16), b.contiguous().view(torch.int16)
    )


# --- bit for bit ------------------------------------------------------------------------------------------------


@both
def test_a_layer_is_that_of_compressed_tensors(format: str, generator: torch.Generator) -> None:
    tensors = LAYERS[format](generator)
    weight = read_compressed_fp4(**tensors)
    assert weight.format == format and weight.codes.shape == (K, N)
    assert weight.scales.dtype == (torch.bfloat16 if format == "mxfp4" else torch.float32)
    assert same_bits(weight.dequantize(), decompressed(tensors))
    scale = tensors["weight_scale"]
    exact = (
        torch.exp2(scale.double() - 127)
        if format == "mxfp4"
        else scale.double() / tensors["weight_global_scale"].double()
    )
    w = torch.tensor(CODEBOOKS[format]).double()[weight.codes.long()] * exact.t().repeat_interleave(
        K // scale.shape[1], 0
    )
    # of nvfp4 the quotient and the product are rounded to fp32
    bound = 0 if format == "mxfp4" else 2.0**-23 * 1.01
    assert ((weight.dequantize(torch.float32).double() - w).abs() <= bound * w.abs()).all()


def test_experts_are_those_of_transformers(generator: torch.Generator) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tensors = gpt_oss_tensors(generator)
    blocks, scales = (tensors[f"a.experts.down_proj_{name}"] for name in ("blocks", "scales"))
    weight = read_gpt_oss(blocks, scales)
    assert weight.codes.shape == (EXPERTS, 96, 40) and weight.scales.shape == (EXPERTS, 3, 40)
    assert same_bits(weight.dequantize(), mxfp4.convert_moe_packed_tensors(blocks, scales))


def test_all_exponents() -> None:
    exponents = torch.arange(253).to(torch.uint8)
    scales = e8m0_scales("scales", exponents)
    assert scales.dtype == torch.bfloat16
    assert torch.equal(scales.double(), torch.exp2(exponents.double() - 127))
    if hasattr(torch, "float8_e8m0fnu"):
        assert torch.equal(e8m0_scales("scales", exponents.view(torch.float8_e8m0fnu)), scales)


@needs_checkpoints
@pytest.mark.parametrize("name", ["ct_mxfp4", "ct_nvfp4"])
def test_real_checkpoints(name: str, tmp_path: Path) -> None:
    """What llm-compressor wrote, as compressed-tensors decompresses it, and again after `convert`."""
    records = layers_of(CHECKPOINTS / name)
    assert len(records) == 14
    with safe_open(CHECKPOINTS / name / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for layer, record in records.items():
        inside = {key.removeprefix(f"{layer}."): t for key, t in tensors.items() if key.startswith(f"{layer}.")}
        assert same_bits(record.dequantize(torch.bfloat16), decompressed(inside))
    convert(CHECKPOINTS / name, tmp_path / "packed", progress=False)
    for layer, record in layers_of(tmp_path / "packed", verify=True).items():
        assert torch.equal(record.dequantize(), records[layer].dequantize())
        assert record.weight.fields == records[layer].weight.fields


@needs_checkpoints
def test_gptq_in_groups_of_16(tmp_path: Path, generator: torch.Generator, no_groups_of_16: None) -> None:
    records = layers_of(CHECKPOINTS / "gptq4_g16")
    convert(CHECKPOINTS / "gptq4_g16", tmp_path / "packed", progress=False)
    again = layers_of(tmp_path / "packed")
    for name, record in records.items():
        assert record.weight.group_size == 16
        x = torch.randn(3, record.weight.k, generator=generator)
        torch.testing.assert_close(record(x), x @ record.dequantize(), rtol=1e-4, atol=1e-4)
        assert torch.equal(again[name](x), record(x))
        assert torch.equal(record.to_linear(torch.float32)(x), record(x))
    with pytest.raises(ValueError, match=r"group_size must be .* on a GPU; got 16, .*14 of 14 layers have such groups"):
        convert(CHECKPOINTS / "gptq4_g16", tmp_path / "for_sm80", arch="sm80")


# --- folders ----------------------------------------------------------------------------------------------------


@folders
def test_folders(name: str, tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    """load_checkpoint, inspect and convert; what is multiplied is what is dequantized."""
    folder = write(tmp_path, name, generator)
    records = layers_of(folder)
    assert set(records) == (
        {"a.up", "a.down"} if name in LAYERS else {f"a.experts.{p}_proj" for p in ("gate_up", "down")}
    )
    arch = None if name == "nvfp4" else "sm90"
    convert(folder, tmp_path / "packed", arch=arch, progress=False)
    again = layers_of(tmp_path / "packed", verify=True)
    for layer, record in records.items():
        other = again[layer]
        assert arch is None or other.weight.layout == "tiled"
        assert record.weight.fields | {"layout": other.weight.layout} == other.weight.fields
        assert torch.equal(wo.unpack(record.weight), wo.unpack(other.weight))
        assert torch.equal(record.scales, other.scales)
        assert torch.equal(record.dequantize(), other.dequantize())
        if name in LAYERS:
            x = torch.randn(3, K, generator=generator)
            w = record.dequantize()
            assert ((record(x) - x @ w).abs() <= 1e-5 * (x.abs() @ w.abs())).all()
            assert torch.equal(record.to_linear(torch.float32)(x), record(x))
    assert command.main(["inspect", str(folder)]) == command.main(["inspect", str(tmp_path / "packed")]) == 0
    printed = capsys.readouterr().out
    assert f"{EXPERTS} x {K} x {N}" in printed if name == "gpt-oss" else f"{K} x {N}" in printed
    assert open_checkpoint(tmp_path / "packed").shapes.keys() == records.keys()


@folders
def test_without_a_config(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    """The names and dtypes of the tensors tell the format."""
    folder = write(tmp_path, name, generator)
    expected = layers_of(folder)
    (folder / "config.json").unlink()
    for layer, record in layers_of(folder).items():
        assert torch.equal(record.dequantize(), expected[layer].dequantize())


def test_stacked_experts_multiply(tmp_path: Path, generator: torch.Generator) -> None:
    record = layers_of(write(tmp_path, "gpt-oss", generator))["a.experts.gate_up_proj"]
    assert record.weight.experts == EXPERTS and record.bias is not None
    x, offs = torch.randn(6, K, generator=generator), torch.tensor([2, 2, 6], dtype=torch.int32)
    layer = GroupedLinear.from_quantized(record.weight, record.scales.float(), bias=record.bias.float())
    w, bias = record.dequantize(), record.bias.float()
    expected = torch.cat([x[:2] @ w[0] + bias[0], x[2:] @ w[2] + bias[2]])
    magnitude = torch.cat([x[:2].abs() @ w[0].abs() + bias[0].abs(), x[2:].abs() @ w[2].abs() + bias[2].abs()])
    assert ((layer(x, offs) - expected).abs() <= 1e-5 * magnitude).all()
    with pytest.raises(ValueError, match=r"a\.experts\.gate_up_proj: weight: expected one weight .* 3 stacked experts"):
        record.to_linear()


@both
def test_activations_of_the_config_are_not_used(format: str, tmp_path: Path, generator: torch.Generator) -> None:
    """W4A4 checkpoints: the weight is what is read."""
    tensors = {f"a.up.{name}": tensor for name, tensor in LAYERS[format](generator).items()}
    expected = read_compressed_fp4(**{n.removeprefix("a.up."): t for n, t in tensors.items()}).dequantize()
    config = options(format)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "type": "float", "dynamic": "local"}
    tensors["a.up.input_global_scale"] = torch.tensor([3.0])
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": config})
    assert torch.equal(layers_of(folder)["a.up"].dequantize(torch.bfloat16), expected)


def test_formats_may_differ_by_layer(tmp_path: Path, generator: torch.Generator) -> None:
    tensors = {f"a.up.{name}": tensor for name, tensor in mxfp4_layer(generator).items()}
    tensors |= {f"a.down.{name}": tensor for name, tensor in nvfp4_layer(generator).items()}
    groups = {}
    for format, layer in (("mxfp4", "up"), ("nvfp4", "down")):
        groups[format] = options(format)["config_groups"]["group_0"] | {"targets": [f"re:.*{layer}"]}
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": config})
    assert {name: record.weight.format for name, record in layers_of(folder).items()} == {
        "a.up": "mxfp4",
        "a.down": "nvfp4",
    }
