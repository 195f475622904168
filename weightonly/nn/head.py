"""The output embeddings of a model, which are quantized only where `quantize_head` says so."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from .recipe import Recipe


def head_names(model: Any) -> list[str]:
    """The names of the output embeddings.

    Raises ValueError for a model that has none, and for one whose forward asks whether they are tied, as
    SwitchTransformers does: it would compute something else once they have a weight of their own.
    """
    getter: Any = getattr(model, "get_output_embeddings", None)
    try:
        head = getter() if callable(getter) else None
    except (NotImplementedError, AttributeError):
        head = None
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is head]
    if head is None or not names:
        raise ValueError(f"quantize_head: expected a model with output embeddings, got a {type(model).__name__}")
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if is_tied and "tie_word_embeddings" in _source(type(model).forward):
        raise ValueError(
            f"quantize_head: expected a model that computes the same with a head of its own, got "
            f"{type(model).__name__}, whose forward asks for config.tie_word_embeddings"
        )
    ties = model.get_expanded_tied_weights_keys(all_submodels=False) if is_tied else {}
    if more := [key for key in ties if key.rpartition(".")[0] in names and not key.endswith(".weight")]:
        raise ValueError(
            f"quantize_head: expected output embeddings that share a weight alone, got {more[0]} shared, too"
        )
    return names


def _source(function: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


def head_recipe(recipe: Recipe, format: str, k: int) -> Recipe:
    """How output embeddings with K rows are quantized beside layers of `recipe`: x as it is, in groups of the usual
    size, or, where that does not divide K, of all of K."""
    own = Recipe.of(None, format, None, True, recipe.dtype, recipe.arch)
    if k % own.group_size and not own.is_code:
        own = replace(own, group_size=-1)
    return replace(own, search=recipe.search if recipe.search != "whole" else True)
