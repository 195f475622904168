"""A LoRA training step, by PEFT on transformers' own model: forward, backward, and AdamW on the adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

RANK = 16


def training_step(model: Any, batch: int, tokens: int) -> Callable[[], torch.Tensor]:
    """Puts adapters on all linears of the decoder layers of `model`, and returns a step, which returns its loss.

    Each step reads the same random tokens [batch, tokens]. Eager, without checkpointing. Needs the package peft.
    """
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(target_modules="all-linear", r=RANK, lora_alpha=2 * RANK, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, adapters).train()
    device = model.lm_head.weight.device
    lines = torch.randint(0, model.config.vocab_size, (batch, tokens), device=device)  # [batch, tokens]
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-4)

    def step() -> torch.Tensor:
        loss: torch.Tensor = adapted(input_ids=lines, labels=lines, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
