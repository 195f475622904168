"""Folders of quantizers that this library does not read: tiny Llamas with the tensors that these leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests import formats_llama as llama
from tests import formats_reference as ref

LAYER = "model.layers.1.mlp.down_proj"
"""What is changed, K = 256, N = 128."""

K, N = llama.SHAPES["mlp.down_proj"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Tensors = dict[str, torch.Tensor]


@dataclass
class Case:
    """inside: the tensors of LAYER, by their names inside of it, in the place of its own; none: it stays.

    error: what it says of the first wrong tensor. more: other tensors. config: entries of config.json. files: others.
    """

    inside: Tensors = field(default_factory=dict)
    error: str = ""
    more: Tensors = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)


def _f(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5


def _int(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


_W8, _U8, _WORDS = _int(torch.int8, N, K), _int(torch.uint8, N, K // 2), _int(torch.int32, N, K // 8)
_F8, _W16 = _f(N, K).to(E4M3), _f(N, K).half()
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}

CASES: dict[str, Case] = {
    "fp8": Case({"weight": _F8}, "FP8"),
    "fp8-e5m2": Case({"weight": _f(N, K).to(E5M2)}, "FP8"),
    "fp8-e8m0": Case({"weight": _f(N, K).to(torch.float8_e8m0fnu)}, "FP8"),
    "fp8-scale": Case({"weight": _F8, "weight_scale": _f(1)}, "FP8"),
    "fp8-scale-beside-the-weight's-name": Case({"weight": _F8, "scale": _f(1)}, "FP8"),
    "fp8-block": Case({"weight": _F8, "weight_scale_inv": _f(1, 2)}, "block"),
    "fp8-block-that-was-cast": Case({"weight": _W16, "weight_scale_inv": _f(1, 2)}, "block"),
    "fbgemm": Case({"weight": _F8, "weight_scale": _f(N, 1), "input_scale_ub": _f(1)}, "FP8"),
    "fp8-comfy": Case({"weight": _F8, "scale_weight": _f(1)}, "FP8"),
    "int8": Case({"weight": _W8}, "int"),
    "int8-scale": Case({"weight": _W8, "weight_scale": _f(N, 1)}, "int"),
    "eetq": Case({"weight": _W8, "weight_scales": _f(N)}, "EETQ"),
    "llm.int8": Case({"weight": _W8, "SCB": _f(N), "weight_format": _int(torch.uint8)}, r"LLM.int8"),
    "llm.int8-statistics-alone": Case({"weight": _W16, "SCB": _f(N)}, r"LLM.int8"),
    "quark": Case({"weight": _W8, "weight_scale": _f(N, 8), "weight_zero_point": _int(torch.int8, N, 8)}, "int"),
    "quark-words": Case({"weight": _WORDS, "weight_scale": _f(N, 8), "weight_zero_point": _WORDS[:, :8]}, "int"),
    "quark-quantizers": Case({"weight": _W16, "weight_quantizer.scale": _f(1)}, "Quark"),
    "nvfp4-modelopt": Case({"weight": _U8, "weight_scale": _f(N, K // 16).to(E4M3), "weight_scale_2": _f(1)}, "NVFP4"),
    "mxfp4-uint8": Case({"weight": _U8, "weight_scale": _int(torch.uint8, N, K // 32)}, "int"),
    "hqq": Case(
        {"W_q": _U8, "scale": _f(N * 4, 1), "zero": _f(N * 4, 1), "shape": torch.tensor([N, K]), "packing": _U8[0, :7]}
        | {"nbits": torch.tensor(4), "group_size": torch.tensor(64), "axis": torch.tensor(0)},
        "(HQQ|groups along K)",
    ),
    "torchao": Case({"_weight_qdata": _W8, "_weight_scale": _f(N, 1)}, "torchao"),
    "torchao-beside-the-weight": Case({"weight": _W16, "weight._scale": _f(N, 1)}, "quanto"),
    "quanto": Case({"weight._data": _W8, "weight._scale": _f(N, 1), "input_scale": _f()}, "quanto"),
    "bnb-without-a-state": Case({"weight": _U8, "weight.absmax": _f(N * 4)}, "bitsandbytes"),
    "absmax": Case({"weight": _U8, "absmax": _f(N * 4)}, "bitsandbytes"),
    "absmax-of-the-weight": Case({"weight": _W16, "weight_absmax": _f(N * 4)}, "bitsandbytes"),
    "mlx": Case({"weight": _WORDS.view(torch.uint32), "scales": _f(N, 4).half(), "biases": _f(N, 4).half()}, "MLX"),
    "aqlm": Case({"codes": _int(torch.int8, N, 8, 2), "codebooks": _f(2, 16, 1, 8), "scales": _f(N, 1, 1, 1)}, "AQLM"),
    "exl2": Case({"q_weight": _WORDS, "q_scale": _WORDS[:, :2], "q_groups": _int(torch.int16, 8)}, "ExLlama"),
    "exl3": Case({"trellis": _int(torch.int16, 8, 8, 64), "suh": _f(K).half(), "svh": _f(N).half()}, "ExLlama"),
    "quip": Case({"Qidxs": _int(torch.int16, N, K // 8), "SU": _f(K), "SV": _f(N)}, "QuIP"),
    "vptq": Case({"centroids": _f(1, 16, 8), "indices": _int(torch.int16, 1, N, 8)}, "VPTQ"),
    "bitnet": Case({"weight": _U8[: N // 4], "weight_scale": _f(1)}, "int"),
    "bytes-in-a-row": Case({"weight": _W16, "data": _U8.flatten()}, "integers"),
    "trt-llm": Case({"weight": _W16, "weights_scaling_factor": _f(1)}, "ModelOpt"),
    "words-of-another-name": Case({"weight": _W16, "packed": _WORDS}, "integers"),
    "scale-without-the-weight's-name": Case({"weight": _W16, "scale": _f(N, 1)}, "none beside the weight of"),
    "scale-of-a-16-bit-weight": Case({"weight": _W16, "weight_scale": _f(N, 1)}, "quantizer's"),
    "zero-points-of-a-16-bit-weight": Case({"weight": _W16, "weight_zero_point": _f(N, 1)}, "quantizer's"),
    "embedding": Case({}, "int", {"model.embed_tokens.weight": _int(torch.int8, llama.VOCABULARY, llama.HIDDEN)}),
    "head": Case({}, "FP8", {"lm_head.weight": _f(llama.VOCABULARY, llama.HIDDEN).to(E4M3)}),
    "norm": Case({}, "FP8", {"model.norm.weight": _f(llama.HIDDEN).to(E4M3)}),
    "kv-scale-that-nothing-declares": Case(
        {}, "KV cache, which the config does not declare", {"model.layers.0.self_attn.k_scale": _f(1)}
    ),
}


def dense(g: torch.Generator) -> Tensors:
    tensors = llama.plain_tensors(g)
    for name, (k, n) in llama.LINEARS.items():
        tensors[f"{name}.weight"] = (torch.randn(n, k, generator=g) / k**0.5).half()
    return tensors


def awq(g: torch.Generator) -> Tensors:
    tensors = llama.plain_tensors(g)
    for name, (k, n) in llama.LINEARS.items():
        tensors |= {f"{name}.{inside}": tensor for inside, tensor in llama.awq(k, n, g)[0].items()}
    return tensors


def write(
    folder: Path, case: Case, base: Callable[[torch.Generator], Tensors], g: torch.Generator, shards: int = 1
) -> Path:
    """A folder of `base`, `dense` or `awq`, in which one layer is that of the case."""
    tensors = {name: tensor for name, tensor in base(g).items() if not (case.inside and name.startswith(f"{LAYER}."))}
    tensors |= {f"{LAYER}.{inside}": tensor.clone() for inside, tensor in case.inside.items()} | case.more
    config = llama.CONFIG | {"torch_dtype": "float16"} | case.config
    if base is awq:
        config |= {"quantization_config": llama.AWQ_CONFIG}
    ref.write_checkpoint(folder, tensors, config, shards)
    for name, content in case.files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
