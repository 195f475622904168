"""Folders of 4-bit floats, made by the tests: compressed-tensors' mxfp4 and nvfp4, and gpt-oss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import formats_reference as ref
from tests.formats_layers import folder_of

import weightonly as wo
from weightonly.formats import QuantizedLayer

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


def write(path: Path, name: str, g: torch.Generator, **weights: Any) -> Path:
    if name == "gpt-oss":
        return ref.write_checkpoint(path / "model", gpt_oss_tensors(g), {"quantization_config": GPT_OSS})
    return folder_of(path, LAYERS[name], options(name, **weights), g)


def layers_of(folder: Path, **arguments: Any) -> dict[str, QuantizedLayer]:
    return {r.name: r for r in wo.load_checkpoint(folder, **arguments) if isinstance(r, QuantizedLayer)}
