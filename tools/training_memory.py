"""What fine-tuning a mixture needs memory for, model by model: a table of docs/guides/finetune_mixture.md.

Models are made on meta by transformers, quantized by `quantize_model` and adapted by PEFT as the page says, and their
bytes are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import weightonly as wo

from .model_sizes import MODELS

RANK = 16
TOKENS = 4 * 512

_ADAM_BYTES = 16
"""Of an adapter's number: itself, its gradient, and two moments of AdamW, in fp32."""

_FORMATS = {"Qwen3-30B-A3B": "int4", "Mixtral-8x7B": "int4", "gpt-oss-20b": "mxfp4"}
"""Model of `model_sizes` -> format."""


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
    from peft import LoraConfig, get_peft_model

    import weightonly.hf  # noqa: F401  (makes packed layers known to PEFT)

    model: Any = wo.nn.quantize_model(MODELS[name].on_meta(), format=_FORMATS[name])
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
    kept = 2 * TOKENS * model.config.num_experts_per_tok * (2 * hidden + 4 * inner)
    return Needs(summary.bytes_before, summary.bytes_after, trained * _ADAM_BYTES, kept)


def training_memory_table() -> str:
    """Markdown, in GB of 10^9 bytes."""
    lines = [
        f"| GB | dense bf16 | packed | adapters of rank {RANK}, with AdamW | kept by the experts of one layer |",
        "|---|---|---|---|---|",
    ]
    for name, format in _FORMATS.items():
        n = needs(name)
        numbers = " | ".join(f"{count / 1e9:.1f}" for count in (n.dense, n.packed, n.adapters))
        lines.append(f"| {name}, {format} | {numbers} | {n.kept / 1e9:.2f} |")
    return "\n".join(lines)
