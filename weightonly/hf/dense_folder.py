"""A folder of a dense model that is quantized without being loaded: what of it, and how far its numbers move."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ..formats.shards import Shards
from ..nn.choice import named
from ..nn.recipe import Recipe
from ..weight import QuantizedWeight

_BLOCK_ELEMS = 1 << 20


@dataclass
class DenseFolder:
    """What `quantize_folder` lets a `WeightOnlyQuantizer` know beside its config.

    shards: the tensors of the folder. skip, only: as for `quantize_model`; `only` leaves output embeddings, too.
    found: the names in the model of the tensors, once the model has been planned.
    """

    shards: Shards
    skip: Sequence[str] = ()
    only: Sequence[str] | None = None
    found: set[str] = field(default_factory=set)
    chosen: set[str] = field(default_factory=set)
    """Layers that `only` names, and `skip` does not."""
    problems: list[Exception] = field(default_factory=list)
    """Why a layer could not be quantized: transformers reports that, and raises another error."""
    _squares: dict[str, list[float]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> DenseFolder:
        return self  # transformers copies configs

    def left(self, layers: Mapping[str, Collection[str]]) -> dict[str, str]:
        """Layer -> why the caller leaves it. layers: of the model, and the names of the weights of each.

        Raises ValueError for a pattern that matches none of them.
        """
        names = names_of(layers)
        skipped = _all(named("skip", self.skip, names))
        only = names if self.only is None else _all(named("only", self.only, names))
        left = {}
        for layer, inside in layers.items():
            if not skipped.isdisjoint((layer, *inside)):
                left[layer] = "skip"
            elif only.isdisjoint((layer, *inside)):
                left[layer] = "not in only"
        self.chosen = set() if self.only is None else layers.keys() - left.keys()
        return left

    def check_chosen(self, dense: Mapping[str, str]) -> None:
        """Raises ValueError for a layer that `only` names among those that stay dense. dense: layer -> why."""
        for name in sorted(self.chosen & dense.keys()):
            raise ValueError(f"only: expected layers that can be quantized, got layer {name!r}: {dense[name]}")

    @contextlib.contextmanager
    def problems_raised(self) -> Iterator[None]:
        """Raises the first of `problems` in the place of what transformers makes of it."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if not self.problems:
                raise
            raise self.problems[0] from error

    def measured(self, layer: str, recipe: Recipe) -> Recipe:
        """A recipe whose errors are added to those of `layer`."""
        squares = self._squares.setdefault(layer, [0.0, 0.0])

        def add(w: torch.Tensor, quantized: QuantizedWeight) -> None:
            rows = max(1, _BLOCK_ELEMS // w.shape[1])
            for dense, found in zip(w.split(rows), quantized.dequantize().split(rows), strict=True):
                dense = dense.float()
                squares[0] += float(torch.linalg.vector_norm(found.float() - dense)) ** 2
                squares[1] += float(torch.linalg.vector_norm(dense)) ** 2

        return _Measured(**{part.name: getattr(recipe, part.name) for part in fields(recipe)}, add=add)

    def error(self, layers: Collection[str]) -> float:
        """The norm of what the weights of `layers` lost, as a part of their norm."""
        lost, whole = (sum(self._squares[layer][i] for layer in layers) for i in (0, 1))
        return math.sqrt(lost / whole) if whole else 0.0


def names_of(layers: Mapping[str, Collection[str]]) -> set[str]:
    """The names of layers, and of the weights of each."""
    return {*layers, *(name for inside in layers.values() for name in inside)}


def _all(found: Mapping[str, set[str]]) -> set[str]:
    return {name for names in found.values() for name in names}


def _ignore(w: torch.Tensor, quantized: QuantizedWeight) -> None:
    pass


@dataclass(frozen=True)
class _Measured(Recipe):
    add: Callable[[torch.Tensor, QuantizedWeight], None] = _ignore

    def quantize(self, w: torch.Tensor) -> QuantizedWeight:
        quantized = super().quantize(w)
        self.add(w, quantized)
        return quantized
