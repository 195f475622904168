"""Folders of 4-bit floats that are refused: configs, tensors, experts and scales that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests import formats_reference as ref
from tests.formats.fp4_cases import (
    GPT_OSS,
    LAYERS,
    K,
    N,
    Tensors,
    gpt_oss_tensors,
    layers_of,
    mxfp4_layer,
    nvfp4_layer,
    options,
    write,
)

import weightonly as wo
from weightonly.formats import convert

CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "group size of mxfp4": ("mxfp4", {"group_size": 16}, "group_size: expected 32 for mxfp4-pack-quantized, got 16"),
    "group size of nvfp4": (
        "nvfp4",
        {"group_size": 32},
        "weights.group_size: expected 16 for nvfp4-pack-quantized, got 32",
    ),
    "channels": ("mxfp4", {"strategy": "channel"}, "weights.group_size: expected 32 .*got -1"),
    "integers": ("mxfp4", {"type": "int"}, "weights: expected float of 4 bits, got 'int' of 4"),
    "bits": ("nvfp4", {"num_bits": 8}, "weights: expected float of 4 bits, got 'float' of 8"),
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
