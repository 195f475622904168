"""The names that checkpoints of a model have for the layers of each expert of a mixture, as transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..extras import missing_packages_named

NamesOfExperts = Callable[[str], list[str] | None]
"""Name in files of stacked experts -> those of the layers of one expert that they are made of, in the order in which
they are stacked, "*" for its number; None: it has none."""


def names_of_experts(folder: Path) -> NamesOfExperts:
    """Those of the model that config.json of `folder` names. Raises ImportError without transformers."""
    with missing_packages_named():
        import torch
        import transformers
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    name = (config.architectures or ("",))[0]
    with torch.device("meta"):
        made = getattr(transformers, name, None) or transformers.AutoModelForCausalLM.from_config
        converters = [c for c in get_model_conversion_mapping(made(config)) if isinstance(c, WeightConverter)]

    def of_stack(stack: str) -> list[str] | None:
        for converter in converters:
            (target, *others), sources = converter._original_target_patterns, converter._original_source_patterns
            if not others and stack.endswith(target) and all("*" in source for source in sources):
                return [stack.removesuffix(target) + source.removesuffix(".weight") for source in sources]
        return None

    return of_stack
