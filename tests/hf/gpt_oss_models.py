"""Tiny gpt-oss models in folders as openai/gpt-oss has them: experts in MXFP4, all else in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tests.hf_version  # noqa: F401
import torch
from tests import formats_reference as ref
from transformers import GptOssConfig, GptOssForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "swiglu_limit": 0.5,  # clamps have an effect
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""K of the experts are multiples of 32, and not of 64."""

QUANTIZATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TOKENS = torch.arange(24).view(2, 12) * 7 % 96


def write(folder: Path, generator: torch.Generator, shards: int = 1, **sizes: Any) -> GptOssForCausalLM:
    """A random model in `folder`. Returns it, dense and in fp32: what the folder means."""
    config = GptOssConfig(**SIZES | sizes)
    torch.manual_seed(generator.initial_seed())
    model = GptOssForCausalLM(config).eval()
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 3:
                blocks, scales, w = random_experts(parameter.shape, generator)
                tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
                parameter.copy_(w)
                continue
            std = {"_bias": 0.5, "sinks": 1.0, ".bias": 0.1}.get(name[-5:], 0.05)
            value = torch.randn(parameter.shape, generator=generator).mul(std).bfloat16()
            value = value + 1 if "norm" in name else value
            tensors[name] = value
            parameter.copy_(value)
    options = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": QUANTIZATION}
    del options["dtype"]  # the config of openai/gpt-oss names none
    ref.write_checkpoint(folder, tensors, options, shards)
    return model


def random_experts(
    shape: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(blocks uint8 [E, N, K / 32, 16], scales uint8 [E, N, K / 32], w fp32 [E, K, N], the numbers that they are)."""
    experts, k, n = shape
    codes = torch.randint(0, 16, (experts, n, k // 32, 32), generator=generator)
    exponents = torch.randint(118, 122, (experts, n, k // 32), generator=generator)
    w = NUMBERS[codes] * torch.exp2(exponents.float() - 127).unsqueeze(-1)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), exponents.to(torch.uint8), w.flatten(2).transpose(1, 2)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """fp32, on the CPU."""
    return model(TOKENS.to(model.device)).logits.float().cpu()
