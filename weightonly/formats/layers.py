"""Finds the quantized layers of a checkpoint by the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .expect import FLOATS, expect
from .plain import CodeWeight, IntWeight
from .records import QuantizedLayer

Tensors: TypeAlias = Mapping[str, torch.Tensor]
"""The tensors of one layer by their names inside it ("qweight", "weight.absmax")."""


@dataclass(frozen=True)
class LayerShape:
    """What is known of a layer without reading its weight.

    format: one of those of `PackedWeight`.
    group_size: rows of K that share a scale.
    symmetric: whether there are no zero points; None: only the tensor of zero points would tell.
    act_order: whether rows are sorted by group, and x is to be permuted.
    layout: of a converted layer; None for others.
    experts: how many weights [K, N] are stacked; None: a single one.
    activations: "fp8" where the folder asks for x in E4M3, a scale for each row. x of layers of other quantizers stays
        as it is nevertheless, unless the caller of `load_model` says "fp8", too.
    """

    format: str
    k: int
    n: int
    group_size: int
    symmetric: bool | None
    act_order: bool
    layout: str | None = None
    experts: int | None = None
    activations: str | None = None


@dataclass(frozen=True)
class Axis:
    """What a dimension of a tensor counts. kind: rows "k", columns "n" or groups "g"; values: of them in one index."""

    kind: str
    values: int = 1


@dataclass(frozen=True)
class LayerFormat:
    """One checkpoint format.

    name: as a quantization config has it.
    anchors: suffixes that tell a layer: "x.qweight" makes "x" a layer.
    required, optional: suffixes of its other tensors. All of them are read together and yielded as one record.
    owned: suffixes that only a layer has: such a tensor without its anchor is an error.
    small: suffixes of tensors whose contents `describe` needs; it gets the others on the meta device, without data.
    describe: (layer, tensors) -> its shape; checks dtypes and shapes.
    read: (layer, tensors, zero points) -> the plain weight, or the layer itself where the file has it packed.
    Both raise TensorError for a tensor that does not fit.
    zeros: suffix of the tensor of zero points that `read` gets apart from the others, where `describe` does not tell
        whether any is not 0.
    zero_points: (shape, layer, that tensor) -> int8 [groups, N], or what else `read` takes; None where all are 0.
    axes: bits -> suffix of a tensor -> its dimensions, or the first of them, for reading a part of a layer (parts.py);
        for that of zero points, those of int8 [groups, N]. A tensor that is not named there is read as a whole. None:
        every layer is, as are codes in any case.
    separator: between the name of a layer and a suffix.
    shared: anchors that other modules have, too: without all of `required` they tell no layer.
    """

    name: str
    anchors: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    owned: tuple[str, ...]
    small: tuple[str, ...]
    describe: Callable[[str, Tensors], LayerShape]
    read: Callable[[str, Tensors, torch.Tensor | None], IntWeight | CodeWeight | QuantizedLayer]
    zeros: str | None = None
    zero_points: Callable[[LayerShape, str, torch.Tensor], torch.Tensor | None] | None = None
    axes: Callable[[int], Mapping[str, tuple[Axis, ...]]] | None = None
    separator: str = "."
    shared: tuple[str, ...] = ()


class MissingTensorError(ValueError):
    """A layer has the tensor `present`, but not `missing`, which it needs, too."""

    def __init__(self, missing: str, present: str) -> None:
        super().__init__(f"{present} needs {missing}, which is not in the checkpoint")
        self.missing = missing
        self.present = present


@dataclass(frozen=True)
class Layer:
    """A layer that was found. tensors: name inside the layer -> name in the checkpoint."""

    name: str
    format: LayerFormat
    tensors: Mapping[str, str]


def find_layers(names: Collection[str], formats: Iterable[LayerFormat]) -> dict[str, Layer]:
    """Layer name -> layer, in the order of `names`.

    Raises MissingTensorError for a layer without one of its tensors.
    """
    known = set(names)
    layers: dict[str, Layer] = {}
    for form in formats:
        for name in names:
            layer, anchor = split_name(name, form.anchors, form.separator)
            prefix = f"{layer}{form.separator}"
            is_other = anchor in form.shared and not all(prefix + suffix in known for suffix in form.required)
            if anchor and layer not in layers and not is_other:
                layers[layer] = _collect(layer, anchor, form, known)
        for name in names:
            layer, owned = split_name(name, form.owned, form.separator)
            if owned and layer not in layers:
                raise MissingTensorError(f"{layer}{form.separator}{form.anchors[0]}", name)
    return layers


def split_name(name: str, suffixes: Iterable[str], separator: str = ".") -> tuple[str, str]:
    """("x", "weight.absmax") for "x.weight.absmax" if that suffix is among them, else ("", "")."""
    for suffix in suffixes:
        if name.endswith(f"{separator}{suffix}") and len(name) > len(suffix) + 1:
            return name[: -len(suffix) - 1], suffix
    return "", ""


def _collect(layer: str, anchor: str, form: LayerFormat, known: set[str]) -> Layer:
    prefix = f"{layer}{form.separator}"
    for suffix in form.required:
        if prefix + suffix not in known:
            raise MissingTensorError(prefix + suffix, prefix + anchor)
    present = [s for s in (anchor, *form.required, *form.optional) if prefix + s in known]
    return Layer(layer, form, {suffix: prefix + suffix for suffix in present})


def check_bias(tensors: Tensors, n: int) -> None:
    """Raise TensorError for a bias that is not [N]."""
    if "bias" in tensors:
        expect("bias", tensors["bias"], FLOATS, [n])
