"""Layers that a model of transformers keeps in fp32, whatever its dtype."""

from __future__ import annotations

import re
from typing import Any

import torch


def kept_in_fp32(model: torch.nn.Module) -> dict[str, str]:
    """Name of a module -> the class that keeps its weight in fp32, such as T5 that of `wo`, which overflows in fp16."""
    found: dict[str, str] = {}
    for owner, module in model.named_modules():
        patterns: list[Any] = [
            *_names(module, "_keep_in_fp32_modules"),
            *_names(module, "_keep_in_fp32_modules_strict"),
        ]
        if not patterns:
            continue
        pattern = re.compile(rf"(?:^|\.)(?:{'|'.join(map(str, patterns))})(?:\.|$)")
        for name, _ in module.named_modules(remove_duplicate=False):
            if pattern.search(f"{name}.weight"):
                found.setdefault(".".join(part for part in (owner, name) if part), type(module).__name__)
    return found


def _names(module: torch.nn.Module, attribute: str) -> Any:
    return module.__dict__.get(attribute) or getattr(type(module), attribute, None) or ()
