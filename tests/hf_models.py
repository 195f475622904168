"""Tiny models of transformers, made by the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tests.hf_version  # noqa: F401
import torch
import transformers
from tests import formats_reference as ref
from tests.formats_llama import FFN, HEADS, HIDDEN, KV_HEADS, LAYERS
from tests.formats_llama import MODELS as QUANTIZED
from tests.formats_llama import VOCABULARY as QUANTIZED_VOCABULARY
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import weightonly as wo
from weightonly.formats import QuantizedLayer
from weightonly.hf import WeightOnlyConfig

VOCABULARY = 96
TOKENS = torch.arange(24).view(2, 12) * 7 % VOCABULARY
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(**options: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES | options))


def qwen2(**options: Any) -> PreTrainedModel:
    """Attention with biases; the head is tied."""
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | {"tie_word_embeddings": True} | options))


def phi3() -> PreTrainedModel:
    """The gate and the other half of its feed-forward network are one layer."""
    return Phi3ForCausalLM(Phi3Config(**SIZES | {"intermediate_size": 256, "pad_token_id": 0}))


def gpt2() -> PreTrainedModel:
    """Conv1D, and a tied head."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=128, n_layer=2, n_head=4, n_positions=64))


def opt() -> PreTrainedModel:
    """Biases everywhere, a tied head."""
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            ffn_dim=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=128,
        )
    )


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"Llama": llama, "Qwen2": qwen2, "GPT-2": gpt2, "OPT": opt}


def seeded(make: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """A model whose weights, biases among them, are random numbers of this seed."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model.eval()


def saved(folder: Path, make: Callable[[], PreTrainedModel], dtype: torch.dtype = torch.float32) -> Path:
    """A folder that transformers wrote of `seeded(make)`."""
    seeded(make).to(dtype).save_pretrained(folder)
    return folder


def quantized(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    config = WeightOnlyConfig(**{"group_size": 64} | options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def dense_and_packed(path: Path) -> tuple[Path, Path, torch.Tensor]:
    """A dense folder, a packed one, and the logits of the packed one."""
    model = quantized(saved(path / "dense", llama))
    model.save_pretrained(path / "packed")
    return path / "dense", path / "packed", logits(model)


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    return model(tokens.to(model.device)).logits


def packed_layers(model: torch.nn.Module) -> dict[str, wo.nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, wo.nn.Linear)}


def dense_tensors(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The state dict of a dense model with the numbers of a quantized checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for record in wo.load_checkpoint(folder, progress=False):
        if isinstance(record, QuantizedLayer):
            tensors[f"{record.name}.weight"] = record.dequantize(dtype).t().contiguous()
            if record.bias is not None:
                tensors[f"{record.name}.bias"] = record.bias.to(dtype)
        else:
            tensors[record.name] = record.tensor
    return tensors


def dense_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The dense model with the numbers of a quantized checkpoint."""
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    cls = getattr(transformers, config.architectures[0])
    return cls.from_pretrained(None, config=config, state_dict=dense_tensors(folder, dtype), dtype=dtype)


def same_state(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    a, b = model.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def write_model(folder: Path, case: str, generator: torch.Generator) -> Path:
    """A checkpoint of formats_llama.py with the config.json of its model."""
    model = QUANTIZED[case](generator)
    options: dict[str, Any] = {
        # Qwen2 has biases where these checkpoints may have them.
        "architectures": ["Qwen2ForCausalLM" if model.bias else "LlamaForCausalLM"],
        "model_type": "qwen2" if model.bias else "llama",
        "vocab_size": QUANTIZED_VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    return ref.write_checkpoint(folder, model.tensors, options | {"quantization_config": model.config})
