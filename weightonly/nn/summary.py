"""Summary: what `quantize_model` quantized and what it left, with bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..shown import counted, shown


@dataclass(frozen=True)
class LayerSummary:
    """One layer.

    names: in the model; several where it is shared.
    kind: "Linear", "Conv1D", "experts", ...
    shape: (K, N), or that of stacked weights.
    bytes_before, bytes_after: of its Parameters and buffers; equal for one that was left.
    left: why it was left, or None.
    format, group_size: of one that was quantized. activations: "fp8" of one that takes x in E4M3.
    """

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    left: str | None = None
    format: str | None = None
    group_size: int | None = None
    activations: str | None = None


@dataclass(frozen=True)
class Summary:
    """What became of a model: `print` shows it.

    format, group_size, activations: of the layers that were quantized, but for those that `layers` names.
    layers: each layer that could have been quantized, in the order of the model.
    bytes_before, bytes_after: of the whole model, shared tensors once.
    """

    format: str
    group_size: int
    layers: tuple[LayerSummary, ...]
    bytes_before: int
    bytes_after: int
    activations: str | None = None

    @property
    def quantized(self) -> tuple[LayerSummary, ...]:
        return tuple(layer for layer in self.layers if layer.left is None)

    @property
    def left(self) -> tuple[LayerSummary, ...]:
        return tuple(layer for layer in self.layers if layer.left is not None)

    def __str__(self) -> str:
        counts: Counter[tuple[str | None, int | None, str | None]] = Counter(
            (layer.format, layer.group_size, layer.activations) for layer in self.quantized
        )
        kinds = counts or Counter({(self.format, self.group_size, self.activations): 0})
        lines = [
            "; ".join(f"{in_words(*kind)}: {counted(count, 'layer')} quantized" for kind, count in kinds.items())
            + f", {len(self.left)} left; {megabytes(self.bytes_before)} before, {megabytes(self.bytes_after)} after"
        ]
        if self.activations is not None:
            whole = [name for layer in self.quantized if layer.activations is None for name in layer.names]
            lines += [shown(f"  x as it is, not in {self.activations}: {some_of(whole)}")] if whole else []
        return "\n".join([*lines, *describe_left(self.left)])


def in_words(format: str | None, group_size: int | None, activations: str | None = None) -> str:
    """What layers are packed as; -1: all rows share a scale."""
    groups = "per channel" if group_size == -1 else f"groups of {group_size}"
    return f"{format}, {groups}" + ("" if activations is None else f", x in {activations}")


def describe_left(left: Iterable[LayerSummary]) -> list[str]:
    """A line for each reason why layers were left."""
    reasons: dict[str, list[LayerSummary]] = {}
    for layer in left:
        reasons.setdefault(f"{layer.kind}: {layer.left}", []).append(layer)
    lines = []
    for reason, layers in reasons.items():
        names = [name for layer in layers for name in layer.names]
        size = megabytes(sum(layer.bytes_after for layer in layers))
        lines.append(shown(f"  left {size}: {some_of(names)} ({reason})"))
    return lines


def some_of(names: Sequence[str]) -> str:
    """The first of many."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def module_bytes(module: torch.nn.Module) -> int:
    """Bytes of the Parameters and buffers of a module, shared ones once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in [*module.parameters(), *module.buffers()])


def megabytes(count: int) -> str:
    """ "12.3 MB"."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
