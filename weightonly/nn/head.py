"""The output embeddings of a model, which are quantized only where `quantize_head` says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .recipe import Recipe


def head_names(model: torch.nn.Module) -> list[str]:
    """The names of the output embeddings. Raises ValueError for a model that has none."""
    getter: Any = getattr(model, "get_output_embeddings", None)
    try:
        head = getter() if callable(getter) else None
    except (NotImplementedError, AttributeError):
        head = None
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is head]
    if head is None or not names:
        raise ValueError(f"quantize_head: expected a model with output embeddings, got a {type(model).__name__}")
    return names


def head_recipe(recipe: Recipe, format: str) -> Recipe:
    """How output embeddings are quantized beside layers of `recipe`: in groups of the usual size, x as it is."""
    own = Recipe.of(None, format, None, True, recipe.dtype, recipe.arch)
    return replace(own, search=recipe.search if recipe.search != "whole" else True)
