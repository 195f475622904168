"""Which layers a pattern names, and what is asked of single ones.

A pattern is a name ("lm_head"), in which `*` matches as in a file name ("model.layers.0.*"). One that matches no whole
name is the end of one, after a dot: "down_proj", "mlp.*".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..activation_dtype import WHOLE
from .recipe import Recipe


def named(argument: str, patterns: object, names: Collection[str]) -> dict[str, set[str]]:
    """Pattern -> those of `names` that it matches.

    Raises TypeError for `patterns` that are a str or no strings, ValueError for one that matches no name.
    """
    if isinstance(patterns, str):
        raise TypeError(f"{argument}: expected a collection of names, got the str {patterns!r}")
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{argument}: expected names or a function, got {type(patterns).__name__}")
    found: dict[str, set[str]] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument}: expected names, got {type(pattern).__name__}")
        whole = {name for name in names if fnmatchcase(name, pattern)}
        found[pattern] = whole or {name for name in names if fnmatchcase(name, f"*.{pattern}")}
        if not found[pattern]:
            raise ValueError(f"{argument}: expected names of layers, got {pattern!r}, which matches none")
    return found


def check_own(layers: object, recipe: Recipe) -> None:
    """Raises TypeError or ValueError, naming the pattern, unless `layers` is what `recipe_of` takes."""
    if not isinstance(layers, Mapping):
        raise TypeError(f"layers: expected patterns of names and what these layers have, got {type(layers).__name__}")
    for pattern, own in layers.items():
        if not isinstance(pattern, str) or not isinstance(own, Mapping):
            raise TypeError(f"layers: expected a pattern and what its layers have, got {pattern!r}: {own!r}")
        if unknown := own.keys() - {"format", "group_size", "symmetric", "activations"}:
            expected = "format, group_size, symmetric and activations"
            raise ValueError(f"layers[{pattern!r}]: expected {expected}, got {', '.join(map(repr, sorted(unknown)))}")
        try:
            found = recipe.with_own(**own)
            if found.group_size != -1:
                found.check_k(found.group_size * 2)  # some K that it divides, and is not K itself
        except (TypeError, ValueError) as error:
            is_fp8 = recipe.activations is not None and own.get("activations") is None
            cure = f"; 'activations': {WHOLE!r} leaves x of these layers as it is" if is_fp8 else ""
            raise type(error)(f"layers[{pattern!r}]: {error}{cure}") from error


def recipe_of(
    recipe: Recipe, layers: Mapping[str, Mapping[str, Any]], names: Collection[str]
) -> Callable[[Iterable[str]], Recipe]:
    """(the names of a layer) -> its recipe: `recipe`, but for what `layers` says by the last pattern that matches.

    Raises ValueError for a pattern that matches none of `names`.
    """
    found = named("layers", layers, names)
    own = {name: recipe.with_own(**layers[pattern]) for pattern, matched in found.items() for name in matched}
    return lambda of_layer: next((own[name] for name in of_layer if name in own), recipe)
