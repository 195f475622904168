"""What of a LoraConfig has no meaning beside packed weights."""

from __future__ import annotations

from peft import LoraConfig

_INITIALIZATIONS = (True, False, "gaussian")
"""`init_lora_weights` that do not look at the dense weight."""


def check_config(config: LoraConfig, title: str) -> None:
    """Raises ValueError for DoRA, and initializations that need the dense weight. title: of the layer, in errors."""
    if config.use_dora:
        raise ValueError(f"use_dora: expected False for {title}, got True: DoRA needs the dense weight in every step")
    if config.init_lora_weights not in _INITIALIZATIONS:
        raise ValueError(
            f"init_lora_weights: expected one of {', '.join(map(repr, _INITIALIZATIONS))} for {title}, "
            f"got {config.init_lora_weights!r}, which needs the dense weight"
        )
