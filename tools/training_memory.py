"""What fine-tuning a mixture needs memory for, model by model: a table of docs/guides/finetune_mixture.md.

Models are made on meta by transformers, quantized by `quantize_model` and adapted by PEFT as the page says, and their
bytes are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import weightonly as wo

RANK = 16
TOKENS = 4 * 512

_ADAM_BYTES = 16
"""Of an adapter's number: itself, its gradient, and two moments of AdamW, in fp32."""

_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3-30B-A3B": (
        "Qwen3Moe",
        "int4",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": False,
        },
    ),
    "Mixtral-8x7B": (
        "Mixtral",
        "int4",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt-oss-20b": (
        "GptOss",
        "mxfp4",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
    ),
}
"""Name -> (transformers' class without its ending, format, sizes of its config)."""


@dataclass(frozen=True)
class Needs:
    """Bytes. dense: all weights in bf16. packed: with attention and experts packed. adapters: with AdamW. kept: by the
    experts of one layer for its backward pass, of TOKENS."""

    dense: int
    packed: int
    adapters: int
    kept: int


def needs(name: str) -> Needs:
    """Of a model of the table."""
    import transformers
    from peft import LoraConfig, get_peft_model

    import weightonly.hf  # noqa: F401  (makes packed layers known to PEFT)

    family, format, sizes = _MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model = wo.nn.quantize_model(model, format=format)
    summary: Any = model.weightonly_summary
    targets = LoraConfig(
        r=RANK,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    adapted = get_peft_model(model, targets, low_cpu_mem_usage=True)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    experts = next(module for module in model.modules() if isinstance(module, wo.nn.Experts))
    inner, hidden = experts.down_proj.in_features, experts.down_proj.out_features
    # The rows of x and of down, gate and up, act(gate), and what down multiplies.
    kept = 2 * TOKENS * config.num_experts_per_tok * (2 * hidden + 4 * inner)
    return Needs(summary.bytes_before, summary.bytes_after, trained * _ADAM_BYTES, kept)


def training_memory_table() -> str:
    """Markdown, in GB of 10^9 bytes."""
    lines = [
        f"| GB | dense bf16 | packed | adapters of rank {RANK}, with AdamW | kept by the experts of one layer |",
        "|---|---|---|---|---|",
    ]
    for name, (_, format, _) in _MODELS.items():
        n = needs(name)
        numbers = " | ".join(f"{count / 1e9:.1f}" for count in (n.dense, n.packed, n.adapters))
        lines.append(f"| {name}, {format} | {numbers} | {n.kept / 1e9:.2f} |")
    return "\n".join(lines)
