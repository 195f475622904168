"""What a quantization config says of single layers: GPTQModel's `dynamic`, AutoRound's `extra_config`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from .expect import TensorError, option
from .patterns import Budget, Pattern, PatternError

Settings = Mapping[str, Any]

_SPECIAL = frozenset("*+?^$()[]{}|\\")
"""Characters that tell a pattern from a name, in which "." is a dot."""


class LayerSettings:
    """Settings of single layers. entry: of the config. find: name -> its settings, None where it is not quantized."""

    def __init__(self, entry: str, is_empty: bool, find: Callable[[str], Settings | None]) -> None:
        self.is_empty = is_empty
        self._entry = entry
        self._find = functools.cache(find)

    def option(self, layer: str, key: str, kind: type, default: Any) -> Any:
        """The setting `key` of `layer`; `default` where it has none.

        Raises TensorError, which is met with the layer, for a value of another kind, for patterns that take too
        long, and for a layer that is not quantized, as the config says.
        """
        try:
            found = self._find(layer)
            if found is None:
                raise ValueError("expected no quantized layer, as a negative pattern says, got one")
            return option(found, key, kind, default)
        except ValueError as error:
            raise TensorError("qweight", f"{self._entry}: {error}") from error


NO_SETTINGS = LayerSettings("", True, lambda layer: {})


def dynamic_settings(dynamic: Mapping[str, Any]) -> LayerSettings:
    """GPTQModel's `dynamic`: the settings of the first pattern that matches the start of a layer's name.

    "-:PATTERN" is of layers that are not quantized. Raises ValueError for a pattern that is none.
    """
    budget = Budget()
    rules = [(_pattern("dynamic", text, budget, 2 * text.startswith(("+:", "-:"))), text) for text in dynamic]

    def find(layer: str) -> Settings | None:
        text = next((text for pattern, text in rules if pattern.matches_start(layer)), None)
        if text is not None and text.startswith("-:"):
            return None
        found = None if text is None else dynamic[text]
        return found if isinstance(found, dict) else {}

    return LayerSettings("dynamic", not dynamic, find)


def extra_settings(extra: Mapping[str, Any]) -> LayerSettings:
    """AutoRound's `extra_config`: the settings under a layer's name, or else the first whose name is that of a module
    that it is in, or whose pattern matches a part of its name.

    Raises ValueError for a pattern that is none, and for settings that are no objects.
    """
    budget = Budget()
    patterns = {text: _pattern("extra_config", text, budget) for text in extra if _SPECIAL.intersection(text)}
    place = {text: number for number, text in enumerate(extra)}
    for text in extra:
        option(extra, text, dict)

    def find(layer: str) -> Settings:
        if layer in extra:
            return extra[layer] or {}
        parts = layer.split(".")
        ends = range(1, len(parts) + 1)
        texts = [".".join(parts[begin:end]) for end in ends for begin in range(end)]
        found = [text for text in texts if text in extra]
        found += [text for text, pattern in patterns.items() if pattern.matches_part(layer)][:1]
        return (extra[min(found, key=place.__getitem__)] or {}) if found else {}

    return LayerSettings("extra_config", not extra, find)


def _pattern(entry: str, text: str, budget: Budget, begin: int = 0) -> Pattern:
    """The one that `text` is from `begin` on."""
    try:
        return Pattern(text[begin:], budget)
    except PatternError as error:
        raise ValueError(f"{entry}: expected regular expressions, got {text!r:.200} ({error})") from error
