"""GGUF files of tiny models: package gguf writes and quantizes them, names from its own table, in llama.cpp's order."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

HIDDEN, VOCAB = 256, 96

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "mistral": ("llama", {"tie_word_embeddings": False, "sliding_window": None}),
    "mixtral": ("llama", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2moe", EXPERTS | {"shared_expert_intermediate_size": 512, "norm_topk_prob": False}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3moe", EXPERTS | {"norm_topk_prob": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 64, "sliding_window": 8}),
    "gemma3_text": ("gemma3", {"query_pre_attn_scalar": 64, "sliding_window": 8}),
}
"""model_type -> (architecture in GGUF, entries of its config)."""

_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "attention.sliding_window": "sliding_window",
}


def blocks_of(kind: str, weight: np.ndarray[Any, Any], seed: int = 0) -> np.ndarray[Any, Any]:
    """uint8 [..., row bytes]: weights [..., K] quantized, or, where package gguf cannot, blocks of about their size."""
    number = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quantize(weight.astype(np.float32), number)
    except NotImplementedError:
        return random_blocks(kind, weight.shape, float(np.abs(weight).mean()), seed)


def random_blocks(kind: str, shape: tuple[int, ...], size: float = 0.02, seed: int = 0) -> np.ndarray[Any, Any]:
    """uint8 [..., row bytes] of any codes, whose scales make weights of about `size`."""
    rng = np.random.default_rng(seed)
    values, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, length), dtype=np.uint8)

    def half(at: int, low: float, high: float) -> None:
        drawn = rng.uniform(low * size, high * size, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., at : at + 2] = drawn.view(np.uint8)

    if kind in ("Q4_1", "Q5_1"):
        half(0, 0.05, 0.3)
        half(2, -3, 0.2)
    elif kind in ("Q4_K", "Q5_K"):
        half(0, 0.002, 0.01)
        half(2, 0.02, 0.06)
    elif kind == "Q6_K":
        half(208, -0.001, 0.001)
    elif kind == "MXFP4":
        blocks[..., 0] = rng.integers(117, 121, blocks.shape[:-1])
    else:
        half(0, -0.01 if kind == "IQ4_XS" else -0.1, 0.1 if kind != "IQ4_XS" else 0.01)
    return blocks.reshape(*shape[:-1], -1)


WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [*WORDS, "he", "ll", "hell", "hello", "\u2581hello"],
    "tokenizer.ggml.scores": [-float(rank) for rank in range(len(WORDS) + 5)],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 32,
    "tokenizer.chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
}
"""A tokenizer as SentencePiece has it, in the metadata of a file."""


def tiny_model(model_type: str, **entries: Any) -> Any:
    """A random model in fp32, whose norms are not those that it was made with."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **MODELS[model_type][1], **entries})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            if "embed" in name:
                parameter *= 3
    return model


def write_gguf(
    file: Path,
    model: Any,
    kinds: Mapping[str, str] | str = "Q8_0",
    metadata: Mapping[str, Any] | None = None,
    split: int = 1,
) -> Any:
    """Write a model, and return one with the numbers of the file.

    kinds: part of a name in GGUF ("ffn_down") -> type of its matrices, "" for the others; or one type for all.
    metadata: other values, None to leave one out.
    """
    kinds = {"": kinds} if isinstance(kinds, str) else kinds
    model_type = model.config.model_type
    arch, config = MODELS[model_type][0], model.config
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    dense = copy.deepcopy(model)
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=split if split > 1 else 0)
    values = {f"{arch}.{key}": getattr(config, name, None) for key, name in _KEYS.items()}
    if model_type == "mixtral":
        values[f"{arch}.expert_count"] = config.num_local_experts
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values |= {
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
    }
    for key, value in (values | dict(metadata or {})).items():
        _add(writer, key, value)
    state = dense.state_dict()
    seed = 0
    with torch.no_grad():
        for name, parameter in state.items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            for own, part in _parts(name, parameter):
                base, suffix = own.rsplit(".", 1)
                stem = names.get_name(base)
                assert stem is not None, own
                forward, back = _forms(model_type, stem, config)
                weight = forward(part).contiguous().numpy()
                is_matrix = part.dim() > 1 and "inp" not in stem
                kind = next(kind for key, kind in kinds.items() if key in stem) if is_matrix else "F32"
                seed += 1
                if kind not in ("F32", "F16"):
                    data = blocks_of(kind, weight, seed)
                    writer.add_tensor(f"{stem}.{suffix}", data, raw_dtype=_type(kind))
                    weight = gguf.dequantize(data, _type(kind))
                else:
                    weight = weight.astype({"F32": np.float32, "F16": np.float16}[kind])
                    writer.add_tensor(f"{stem}.{suffix}", weight)
                part.copy_(back(torch.from_numpy(weight.astype(np.float32))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


def _type(kind: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def _parts(name: str, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A parameter, or what llama.cpp has of the experts of one: views."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = parameter.chunk(2, dim=1)
        base = name.removesuffix("gate_up_proj")
        return [(f"{base}gate_proj.weight", gate), (f"{base}up_proj.weight", up)]
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, parameter)]


def _forms(model_type: str, stem: str, config: Any) -> tuple[Any, Any]:
    """(what llama.cpp's converter makes of a tensor, its inverse)."""
    if model_type in ("llama", "mistral", "mixtral") and stem.endswith(("attn_q", "attn_k")):
        heads = config.num_attention_heads if stem.endswith("q") else config.num_key_value_heads

        def turns(w: torch.Tensor) -> torch.Tensor:
            return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)

        def halves(w: torch.Tensor) -> torch.Tensor:
            return w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)

        return turns, halves
    if model_type.startswith("gemma") and stem.endswith("norm"):
        return lambda w: w + 1, lambda w: w - 1
    return lambda w: w, lambda w: w
