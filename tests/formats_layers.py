"""Small layers of each checkpoint format, of random bits, and folders that hold two of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests import formats_reference as ref

import weightonly as wo
from weightonly.codebooks import codebook

K, N, GROUP = 64, 16, 32
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True}
BNB: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
CT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
}


def awq_layer(g: torch.Generator, k: int = K, n: int = N) -> dict[str, torch.Tensor]:
    groups = k // GROUP
    return {
        "qweight": ref.random_words(k, n // 8, g),
        "qzeros": ref.random_words(groups, n // 8, g),
        "scales": ref.random_scales(groups, n, torch.float16, g),
    }


def gptq_layer(g: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "qweight": ref.random_words(K // 8, N, g),
        "qzeros": ref.random_words(K // GROUP, N // 8, g),
        "scales": ref.random_scales(K // GROUP, N, torch.float16, g),
        "g_idx": (torch.arange(K) // GROUP)[torch.randperm(K, generator=g)].to(torch.int32),
    }


def ct_layer(g: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": ref.random_words(N, K // 8, g),
        "weight_scale": ref.random_scales(N, K // GROUP, torch.float16, g),
        "weight_shape": torch.tensor([N, K]),
    }


def bnb_layer(g: torch.Generator) -> dict[str, torch.Tensor]:
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float16", "shape": [N, K]}
    return {
        "weight": torch.randint(0, 256, (N * K // 2, 1), generator=g).to(torch.uint8),
        "weight.absmax": torch.rand(N * K // GROUP, generator=g),
        "weight.quant_map": codebook("nf4"),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def own_codebook_layer(g: torch.Generator, blocksize: int = 48) -> dict[str, torch.Tensor]:
    """bitsandbytes' tensors with another codebook. Blocks of 48 run over the ends of rows of [N, K]."""
    state = {"quant_type": "fp4", "blocksize": blocksize, "dtype": "bfloat16", "shape": [N, K]}
    return {
        "weight": torch.randint(0, 256, (N * K // 2, 1), generator=g).to(torch.uint8),
        "weight.absmax": torch.rand(-(-N * K // blocksize), generator=g),
        "weight.quant_map": torch.randn(16, generator=g),
        "weight.quant_state.bitsandbytes__fp4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


Layer = Callable[[torch.Generator], dict[str, torch.Tensor]]


def model(layer: Layer, g: torch.Generator) -> dict[str, torch.Tensor]:
    """Two layers, `a.up` and `a.down`, and two other tensors."""
    tensors = {"embed.weight": torch.randn(5, 4, generator=g), "norm.weight": torch.ones(4)}
    for name in ("a.up", "a.down"):
        tensors |= {f"{name}.{inside}": tensor for inside, tensor in layer(g).items()}
    return tensors


def folder_of(path: Path, layer: Layer, options: dict[str, Any] | None, g: torch.Generator, shards: int = 1) -> Path:
    config = None if options is None else {"quantization_config": options}
    return ref.write_checkpoint(path / "model", model(layer, g), config, shards)


def names(folder: Path) -> set[str]:
    return {record.name for record in wo.load_checkpoint(folder)}


ALL_NAMES = {"embed.weight", "norm.weight", "a.up", "a.down"}

KNOWN: dict[str, tuple[Layer, dict[str, Any]]] = {
    "awq": (awq_layer, AWQ),
    "gptq": (gptq_layer, GPTQ),
    "compressed-tensors": (ct_layer, CT),
    "bitsandbytes": (bnb_layer, BNB),
}
"""Method -> (its layer, its config)."""
