"""Tiny mixtures of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import tests.hf_version  # noqa: F401
import torch
import transformers

from weightonly.nn import Experts, Linear

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "mixtral": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        {"intermediate_size": 128, "num_local_experts": 5},
    ),
    "qwen2-moe": (
        transformers.Qwen2MoeForCausalLM,
        transformers.Qwen2MoeConfig,
        {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 6},
    ),
    "qwen3-moe": (
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig,
        {"moe_intermediate_size": 64, "num_experts": 6},
    ),
    "gpt-oss": (
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig,
        {"intermediate_size": 96, "num_local_experts": 5, "sliding_window": 8},
    ),
}
models = pytest.mark.parametrize("name", MODELS)
TOKENS = torch.arange(24).view(2, 12)


def make(name: str) -> Any:
    """A random model; biases and clamps have an effect."""
    torch.manual_seed(0)
    model, config, sizes = MODELS[name]
    made = model(config(**SMALL | sizes)).eval()
    for parameter_name, parameter in made.named_parameters():
        if parameter_name.endswith("_bias"):
            parameter.data.normal_()
        if parameter.dim() == 3:
            parameter.data.mul_(20)
    return made


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.float()


def densified(model: Any, original: Any) -> Any:
    """`original` with the dequantized weights of `model`."""
    for name, child in model.named_modules():
        if isinstance(child, Linear):
            original.get_submodule(name).weight.data = child.dequantize().t().contiguous()
        if isinstance(child, Experts):
            dense, same = original.get_submodule(name), child.to_dense()
            for product in ("gate_up_proj", "down_proj"):
                getattr(dense, product).data = getattr(same, product).data
    return original
