"""A small model of the Llama architecture with random weights, in plain torch, and its quantized checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests import formats_reference as ref
from torch.nn.functional import embedding, silu

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, VOCABULARY = 128, 4, 2, 256, 2, 96
HEAD = HIDDEN // HEADS
GROUP = 32

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
}

SHAPES = {  # [K, N] of the linear layers of a block
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, FFN),
    "mlp.up_proj": (HIDDEN, FFN),
    "mlp.down_proj": (FFN, HIDDEN),
}
BIASED = ("q_proj", "k_proj", "v_proj")

LINEARS = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}

Linear = Callable[[str, torch.Tensor], torch.Tensor]
"""(name of a linear layer, x [tokens, K]) -> [tokens, N]"""


def plain_tensors(g: torch.Generator) -> dict[str, torch.Tensor]:
    """Embedding, norms and lm_head in fp16."""
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=g),
        "model.norm.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=g),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN, generator=g) / math.sqrt(HIDDEN),
    }
    for i in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=g)
    return {name: tensor.half() for name, tensor in tensors.items()}


def logits(tokens: torch.Tensor, plain: dict[str, torch.Tensor], linear: Linear) -> torch.Tensor:
    """The model of Touvron et al. (https://arxiv.org/abs/2302.13971): tokens [T] -> [T, VOCABULARY]."""
    dtype = linear("model.layers.0.self_attn.q_proj", torch.zeros(1, HIDDEN)).dtype
    weight = {name: tensor.to(dtype) for name, tensor in plain.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight[f"{name}.weight"]

    hidden = embedding(tokens, weight["model.embed_tokens.weight"])
    for i in range(LAYERS):
        block = f"model.layers.{i}"
        x = norm(hidden, f"{block}.input_layernorm")
        hidden = hidden + attention(x, block, linear)
        x = norm(hidden, f"{block}.post_attention_layernorm")
        inner = silu(linear(f"{block}.mlp.gate_proj", x)) * linear(f"{block}.mlp.up_proj", x)
        hidden = hidden + linear(f"{block}.mlp.down_proj", inner)
    return norm(hidden, "model.norm") @ weight["lm_head.weight"].t()


def attention(x: torch.Tensor, block: str, linear: Linear) -> torch.Tensor:
    tokens = len(x)
    q, k, v = (linear(f"{block}.self_attn.{name}_proj", x).view(tokens, -1, HEAD) for name in "qkv")
    q, k = rotate(q), rotate(k)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))  # (T, HEADS, HEAD)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(tokens, HIDDEN)
    return linear(f"{block}.self_attn.o_proj", mixed)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: x (T, heads, HEAD)."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), frequencies)[:, None]  # (T, 1, HEAD / 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


# --- quantized checkpoints ---------------------------------------------------------------------------------


@dataclass
class Quantized:
    """tensors: of the checkpoint. dense: layer -> fp32 [K, N]. bias: layer -> fp16 [N]. config: of the quantizer."""

    tensors: dict[str, torch.Tensor]
    dense: dict[str, torch.Tensor]
    bias: dict[str, torch.Tensor]
    config: dict[str, Any]


Packer = Callable[[int, int, torch.Generator], tuple[dict[str, torch.Tensor], torch.Tensor]]
"""(K, N, generator) -> (tensors of a layer by their names inside it, the dense weight that they stand for)"""


def quantized_model(packer: Packer, config: dict[str, Any], g: torch.Generator) -> Quantized:
    model = Quantized(plain_tensors(g), {}, {}, config)
    for name, (k, n) in LINEARS.items():
        tensors, model.dense[name] = packer(k, n, g)
        if name.endswith(BIASED):
            tensors["bias"] = model.bias[name] = (torch.randn(n, generator=g) / 4).half()
        model.tensors |= {f"{name}.{inside}": tensor for inside, tensor in tensors.items()}
    return model


def _random_integers(
    k: int, n: int, groups: int, bits: int, symmetric: bool, g: torch.Generator
) -> tuple[ref.Ints, ref.Ints, torch.Tensor]:
    """(u [K, N], z [groups, N], scales) of a weight whose values are about 1 / sqrt(K)."""
    levels, middle = 1 << bits, 1 << (bits - 1)
    u = torch.randint(0, levels, (k, n), generator=g).numpy()
    spread = torch.randint(-2, 3, (groups, n), generator=g).numpy()
    z = np.full((groups, n), middle) + (0 if symmetric else spread)
    scales = (torch.rand(groups, n, generator=g) + 0.5) * 3 / (levels * math.sqrt(k))
    return u, z, scales.half()


def awq(k: int, n: int, g: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    u, z, scales = _random_integers(k, n, k // GROUP, 4, False, g)
    tensors = {"qweight": ref.awq_words(u), "qzeros": ref.awq_words(z), "scales": scales}
    return tensors, ref.weights(u, z, scales, np.arange(k) // GROUP)


def gptq(bits: int, version: int, symmetric: bool, act_order: bool) -> Packer:
    def pack(k: int, n: int, g: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        u, z, scales = _random_integers(k, n, k // GROUP, bits, symmetric, g)
        group = torch.arange(k) // GROUP
        if act_order:
            group = group[torch.randperm(k, generator=g)]
        tensors = {
            "qweight": ref.pack_rows(u, bits),
            "qzeros": ref.pack_columns(z - (version == 1), bits),
            "scales": scales,
            "g_idx": group.to(torch.int32),
        }
        return tensors, ref.weights(u, z, scales, group.numpy())

    return pack


def compressed_tensors(bits: int, symmetric: bool, group_size: int | None, act_order: bool = False) -> Packer:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    strategy = "channel" if group_size is None else "group"
    args = quantization.QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group_size)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)

    def pack(k: int, n: int, g: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        groups = 1 if group_size is None else k // group_size
        local = {
            "weight": torch.randn(n, k, generator=g).half() / math.sqrt(k),
            "weight_scale": torch.full((n, groups), 6 / (math.sqrt(k) * (1 << bits))).half(),
        }
        if not symmetric:
            local["weight_zero_point"] = torch.randint(-2, 3, (n, groups), generator=g).to(torch.int8)
        if act_order:
            local["weight_g_idx"] = (torch.arange(k) // GROUP)[torch.randperm(k, generator=g)].to(torch.int32)
        compressor = packing.PackedQuantizationCompressor
        layer = compressor.compress(local, scheme)
        in_fp32 = layer | {"weight_scale": layer["weight_scale"].float()}
        return dict(layer), compressor.decompress(in_fp32, scheme)["weight"].t()

    return pack


def bitsandbytes(quant_type: str, nested: bool) -> Packer:
    functional = pytest.importorskip("bitsandbytes.functional")

    def pack(k: int, n: int, g: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        w = torch.randn(n, k, generator=g).half() / math.sqrt(k)
        data, state = functional.quantize_4bit(w, blocksize=64, quant_type=quant_type, compress_statistics=nested)
        stored = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        state.dtype = torch.float32
        return {"weight": data, **stored}, functional.dequantize_4bit(data, state).t()

    return pack


def _ct_config(bits: int, symmetric: bool, group_size: int | None) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def _gptq_config(bits: int, version: int, symmetric: bool, act_order: bool) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": act_order,
        "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }


def _bnb_config(quant_type: str, nested: bool) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": nested,
    }


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}

Model = Callable[[torch.Generator], Quantized]


def awq_model(g: torch.Generator) -> Quantized:
    return quantized_model(awq, AWQ_CONFIG, g)


def gptq_model(bits: int, version: int, symmetric: bool, act_order: bool) -> Model:
    config = _gptq_config(bits, version, symmetric, act_order)
    return lambda g: quantized_model(gptq(bits, version, symmetric, act_order), config, g)


def ct_model(bits: int, symmetric: bool, group_size: int | None, act_order: bool = False) -> Model:
    config = _ct_config(bits, symmetric, group_size)
    # The packer inside: it skips the test that asks for it where the package is missing.
    return lambda g: quantized_model(compressed_tensors(bits, symmetric, group_size, act_order), config, g)


def bnb_model(quant_type: str, nested: bool) -> Model:
    return lambda g: quantized_model(bitsandbytes(quant_type, nested), _bnb_config(quant_type, nested), g)


MODELS: dict[str, Model] = {
    "awq": awq_model,
    "gptq-4bit-v1-sym": gptq_model(4, 1, symmetric=True, act_order=False),
    "gptq-4bit-v1-act_order": gptq_model(4, 1, symmetric=False, act_order=True),
    "gptq-8bit-v2-sym-act_order": gptq_model(8, 2, symmetric=True, act_order=True),
    "gptq-8bit-v2": gptq_model(8, 2, symmetric=False, act_order=False),
    "compressed_tensors-4bit-sym": ct_model(4, True, GROUP),
    "compressed_tensors-4bit": ct_model(4, False, GROUP),
    "compressed_tensors-4bit-act_order": ct_model(4, True, GROUP, act_order=True),
    "compressed_tensors-8bit-sym-channel": ct_model(8, True, None),
    "compressed_tensors-8bit": ct_model(8, False, GROUP),
    "bitsandbytes-nf4": bnb_model("nf4", nested=False),
    "bitsandbytes-nf4-nested": bnb_model("nf4", nested=True),
    "bitsandbytes-fp4-nested": bnb_model("fp4", nested=True),
}
"""Name -> the quantized model."""
