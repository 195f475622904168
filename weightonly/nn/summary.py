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
    format, group_size: of one that was quantized.
    """

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    left: str | None = None
    format: str | None = None
    group_size: int | None = None


@dataclass(frozen=True)
class Summary:
    """What became of a model: `print` shows it.

    format, group_size: of the layers that were quantized, but for those that `layers` names.
    layers: each layer that could have been quantized, in the order of the model.
    bytes_before, bytes_after: of the whole model, shared tensors once.
    """

    format: str
    group_size: int
    layers: tuple[LayerSummary, ...]
    bytes_before: int
    bytes_after: int

    @property
    def quantized(self) -> tuple[LayerSummary, ...]:
        return tuple(layer for layer in self.layers if layer.left is None)

    @property
    def left(self) -> tuple[LayerSummary, ...]:
        return tuple(layer for layer in self.layers if layer.left is not None)

    def __str__(self) -> str:
        counts: Counter[tuple[str | None, int | None]] = Counter(
            (layer.format, layer.group_size) for layer in self.quantized
        )
        kinds = counts or Counter({(self.format, self.group_size): 0})
        lines = [
            "; ".join(f"{in_words(*kind)}: {counted(count, 'layer')} quantized" for kind, count in kinds.items())
            + f", {len(self.left)} left; {megabytes(self.bytes_before)} before, {megabytes(self.bytes_after)} after"
        ]
        return "\n".join([*lines, *describe_left(self.left)])


def in_words(format: str | None, group_size: int | None) -> str:
    """What layers are packed as; -1: all rows share a scale."""
    return f"{format}, {'per channel' if group_size == -1 else f'groups of {group_size}'}"


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
