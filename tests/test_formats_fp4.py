"""Readers of 4-bit floats: compressed-tensors' mxfp4 and nvfp4, and gpt-oss, against their own libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import formats_reference as ref
import pytest
import torch
from formats_layers import folder_of
from safetensors import safe_open

import weightonly as wo
from weightonly import __main__ as command
from weightonly.codebooks import CODEBOOKS
from weightonly.formats import QuantizedLayer, convert, open_checkpoint, read_compressed_fp4, read_gpt_oss
from weightonly.formats.e2m1 import e8m0_scales
from weightonly.nn.grouped import GroupedLinear

CHECKPOINTS = Path(os.environ.get("WEIGHTONLY_CHECKPOINTS", Path(__file__).parents[2] / "shared/checkpoints"))
K, N, EXPERTS = 64, 24, 3

Tensors = dict[str, torch.Tensor]


def bytes_of(*shape: int, g: torch.Generator, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=g).to(torch.uint8)


def mxfp4_layer(g: torch.Generator) -> Tensors:
    return {"weight_packed": bytes_of(N, K // 2, g=g), "weight_scale": bytes_of(N, K // 32, g=g, low=90, high=150)}


def nvfp4_layer(g: torch.Generator) -> Tensors:
    """Every number of E4M3 but its two NaN may be among the scales."""
    scale = bytes_of(N, K // 16, g=g, high=254)
    scale[scale == 127] = 126
    tensors = {"weight_packed": bytes_of(N, K // 2, g=g), "weight_scale": scale.view(torch.float8_e4m3fn)}
    return tensors | {"weight_global_scale": 1000 * torch.rand(1, generator=g) + 1}


def gpt_oss_tensors(g: torch.Generator) -> Tensors:
    tensors = {"norm.weight": torch.ones(4), "a.experts.router.weight": torch.randn(3, 4, generator=g)}
    for name, (k, n) in {"gate_up_proj": (K, N), "down_proj": (96, 40)}.items():
        tensors |= {
            f"a.experts.{name}_blocks": bytes_of(EXPERTS, n, k // 32, 16, g=g),
            f"a.experts.{name}_scales": bytes_of(EXPERTS, n, k // 32, g=g, low=90, high=150),
            f"a.experts.{name}_bias": torch.randn(EXPERTS, n, generator=g).bfloat16(),
        }
    return tensors


def options(format: str, **weights: Any) -> dict[str, Any]:
    said = {"num_bits": 4, "type": "float", "group_size": 32 if format == "mxfp4" else 16, "symmetric": True, **weights}
    form = f"{format}-pack-quantized"
    group = {"targets": ["Linear"], "weights": said, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
LAYERS: dict[str, Callable[[torch.Generator], Tensors]] = {"mxfp4": mxfp4_layer, "nvfp4": nvfp4_layer}
FOLDERS = [*LAYERS, "gpt-oss"]

both = pytest.mark.parametrize("format", LAYERS)
folders = pytest.mark.parametrize("name", FOLDERS)
needs_checkpoints = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason=f"no {CHECKPOINTS}")


def write(path: Path, name: str, g: torch.Generator, **weights: Any) -> Path:
    if name == "gpt-oss":
        return ref.write_checkpoint(path / "model", gpt_oss_tensors(g), {"quantization_config": GPT_OSS})
    return folder_of(path, LAYERS[name], options(name, **weights), g)


def layers_of(folder: Path, **arguments: Any) -> dict[str, QuantizedLayer]:
    return {r.name: r for r in wo.load_checkpoint(folder, **arguments) if isinstance(r, QuantizedLayer)}


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
def test_gptq_in_groups_of_16(tmp_path: Path, generator: torch.Generator) -> None:
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


# --- what does not fit ------------------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "group size of mxfp4": ("mxfp4", {"group_size": 16}, "group_size: expected 32 for mxfp4-pack-quantized, got 16"),
    "group size of nvfp4": (
        "nvfp4",
        {"group_size": 32},
        "weights.group_size: expected 16 for nvfp4-pack-quantized, got 32",
    ),
    "channels": ("mxfp4", {"strategy": "channel"}, "weights.group_size: expected 32 .*got -1"),
    "integers": ("mxfp4", {"type": "int"}, "weights: expected float of 4 bits, got int of 4"),
    "bits": ("nvfp4", {"num_bits": 8}, "weights: expected float of 4 bits, got float of 8"),
    "zero points": (
        "mxfp4",
        {"symmetric": False},
        "weights.symmetric: expected true for mxfp4-pack-quantized, got false",
    ),
    "act-order": (
        "nvfp4",
        {"actorder": "group"},
        "weights.actorder: expected none for nvfp4-pack-quantized, got group",
    ),
    "dtype of scales": (
        "mxfp4",
        {"scale_dtype": "torch.float8_e4m3fn"},
        r"a\.\w+\.weight_scale: expected torch.float8_e4m3fn as the config says, got torch.uint8",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_are_refused(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    format, weights, message = CONFIGS[case]
    with pytest.raises(ValueError, match=message):
        wo.load_checkpoint(write(tmp_path, format, generator, **weights))


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return edit


def added(**tensors: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda all_of_them: all_of_them.update(tensors)


def removed(name: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[name]

    return edit


def another_format(tensors: Tensors) -> None:
    tensors.clear()
    tensors.update(nvfp4_layer(torch.Generator()))


def first_set(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).view(-1)[0] = value
        return tensor

    return change


BAD: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "no scales": ("mxfp4", removed("weight_scale"), "weight_packed needs a.up.weight_scale"),
    "scales alone": ("nvfp4", removed("weight_packed"), "weight_global_scale needs a.up.weight_packed"),
    "no factor": ("nvfp4", removed("weight_global_scale"), "weight_packed: expected a weight_global_scale beside it"),
    "factor of mxfp4": (
        "mxfp4",
        added(weight_global_scale=torch.ones(1)),
        "weight_global_scale: expected none for mxfp4",
    ),
    "two factors": ("nvfp4", added(weight_global_scale=torch.ones(2)), r"weight_global_scale: expected float32 \[1\]"),
    "factor 0": (
        "nvfp4",
        added(weight_global_scale=torch.zeros(1)),
        "weight_global_scale: expected a positive number, got 0",
    ),
    "factor NaN": (
        "nvfp4",
        added(weight_global_scale=torch.ones(1) * float("nan")),
        "expected a positive number, got nan",
    ),
    "factor too small": (
        "nvfp4",
        added(weight_global_scale=torch.tensor([1e-38])),
        "expected one that keeps weights within fp32",
    ),
    "scale NaN": ("nvfp4", replaced("weight_scale", first_set(0x7F)), "weight_scale: expected numbers, got NaN"),
    "exponent NaN": (
        "mxfp4",
        replaced("weight_scale", first_set(255)),
        "weight_scale: .*0..252 of E8M0, got 255, which is NaN",
    ),
    "large exponent": (
        "mxfp4",
        replaced("weight_scale", first_set(253)),
        "weight_scale: .*got 253, which makes weights beyond",
    ),
    "columns": (
        "mxfp4",
        replaced("weight_packed", lambda t: t[:, 1:]),
        "expected K to be a multiple of 32 for mxfp4, got 62",
    ),
    "rows of scales": (
        "nvfp4",
        replaced("weight_scale", lambda t: t[1:]),
        r"weight_scale: expected .*\[24, 4\], got .*\[23, 4\]",
    ),
    "scales of floats": (
        "mxfp4",
        replaced("weight_scale", torch.Tensor.half),
        "weight_scale: expected .*, got float16",
    ),
    "signed bytes": (
        "mxfp4",
        replaced("weight_packed", lambda t: t.view(torch.int8)),
        "weight_packed: expected mxfp4-pack-quantized as the config says, got tensors of pack-quantized",
    ),
    "zero points": (
        "mxfp4",
        added(weight_zero_point=torch.zeros(3, 2).int()),
        "weight_zero_point: expected none for mxfp4",
    ),
    "shape": (
        "nvfp4",
        added(weight_shape=torch.tensor([N, K])),
        "weight_shape: expected none for nvfp4-pack-quantized",
    ),
    "g_idx": ("mxfp4", added(weight_g_idx=torch.zeros(K).int()), "weight_g_idx: expected none for mxfp4"),
    "bias": ("mxfp4", added(bias=torch.zeros(N + 1)), r"bias: expected .*\[24\], got float32 \[25\]"),
    "another format": (
        "mxfp4",
        another_format,
        "weight_packed: expected mxfp4-pack-quantized as the config says, got tensors of nvfp4",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_tensors_that_do_not_fit(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    format, edit, message = BAD[case]
    tensors = LAYERS[format](generator)
    edit(tensors)
    tensors = {f"a.up.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": options(format)})
    with pytest.raises(ValueError, match=message) as caught:
        list(wo.load_checkpoint(folder))
    assert str(folder) in str(caught.value) and "a.up." in str(caught.value)


def test_floats_where_the_config_says_integers(tmp_path: Path, generator: torch.Generator) -> None:
    tensors = {f"a.up.{name}": tensor for name, tensor in mxfp4_layer(generator).items()}
    groups = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": config})
    with pytest.raises(
        ValueError, match="weight_packed: expected pack-quantized as the config says, got tensors of mxfp4"
    ):
        wo.load_checkpoint(folder)


BAD_EXPERTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = {
    "no scales": ("down_proj_scales", None, "down_proj_blocks needs a.experts.down_proj_scales"),
    "no blocks": ("down_proj_blocks", None, "down_proj_scales needs a.experts.down_proj_blocks"),
    "blocks of 8": (
        "down_proj_blocks",
        lambda t: t[..., :4],
        r"down_proj_blocks: expected uint8 \[E, N, K / 32, 16\], got",
    ),
    "blocks of a matrix": ("down_proj_blocks", lambda t: t[0], "down_proj_blocks: expected uint8"),
    "experts": (
        "down_proj_scales",
        lambda t: t[1:],
        r"down_proj_scales: expected uint8 \[3, 40, 3\], got uint8 \[2, 40, 3\]",
    ),
    "dtype": ("down_proj_scales", torch.Tensor.float, "down_proj_scales: expected uint8"),
    "NaN": ("down_proj_scales", first_set(255), "down_proj_scales: expected exponents 0..252 of E8M0, got 255"),
    "bias": ("down_proj_bias", lambda t: t[:, 1:], r"down_proj_bias: expected .*\[3, 40\], got bfloat16 \[3, 39\]"),
}


@pytest.mark.parametrize("case", BAD_EXPERTS)
def test_experts_that_do_not_fit(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    name, change, message = BAD_EXPERTS[case]
    tensors = gpt_oss_tensors(generator)
    tensor = tensors.pop(f"a.experts.{name}")
    if change is not None:
        tensors[f"a.experts.{name}"] = change(tensor).contiguous()
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": GPT_OSS})
    with pytest.raises(ValueError, match=message) as caught:
        list(wo.load_checkpoint(folder))
    assert str(folder) in str(caught.value) and "a.experts." in str(caught.value)


def test_scales_that_float16_does_not_hold(tmp_path: Path, generator: torch.Generator) -> None:
    tensors = mxfp4_layer(generator)
    tensors["weight_scale"][0, 0] = 80
    folder = ref.write_checkpoint(
        tmp_path / "model", {f"a.up.{n}": t for n, t in tensors.items()}, {"quantization_config": options("mxfp4")}
    )
    record = layers_of(folder)["a.up"]
    message = r"scales: expected powers of two in 2\^-23 .. 2\^13 for mxfp4 in torch.float16"
    with pytest.raises(ValueError, match=f"a.up: {message}"):
        record.to_linear(torch.float16)
    with pytest.raises(ValueError, match=message):
        record(torch.ones(1, K).half())
    assert record.to_linear().scales.dtype == torch.bfloat16


def test_converted_experts_that_do_not_fit(tmp_path: Path, generator: torch.Generator) -> None:
    convert(write(tmp_path, "gpt-oss", generator), tmp_path / "packed", progress=False)
    (file,) = (tmp_path / "packed").glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    tensors["a.experts.down_proj.scales"] = tensors["a.experts.down_proj.scales"][1:].contiguous()
    folder = ref.write_checkpoint(tmp_path / "other", tensors, config)
    with pytest.raises(ValueError, match=r"a\.experts\.down_proj\.qweight: expected uint8 \[2, "):
        wo.load_checkpoint(folder)
