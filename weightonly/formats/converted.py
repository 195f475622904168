"""Checkpoints that `convert` wrote: packed weights in the files of `weightonly.save`, and what the config says.

x.qweight          the packed bytes, their fields in the file's metadata
x.scales, x.zeros  [groups, N]
x.bias             [N]
x.perm             int32 [K]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..packed import PackedWeight
from .expect import FLOATS, TensorError, expect, option
from .layers import LayerFormat, LayerShape, Tensors, check_bias
from .records import PlainTensor, QuantizedLayer, Record

METHOD = "weightonly"
"""`quant_method` in the config of a converted checkpoint."""

VERSION = 2

INCOMPLETE = "INCOMPLETE"
"""A file that is in the folder until everything else is: its folder is not read."""

_METADATA_KEY = "weightonly.packed"
"""Where `weightonly.save` puts the fields of a file's packed weights."""


def converted_format(options: Mapping[str, Any], metadata: Mapping[Path, Mapping[str, str]]) -> LayerFormat:
    """The format; `metadata`: of every file. Raises ValueError for another version or damaged metadata."""
    version = option(options, "format_version", int)
    if version != VERSION:
        raise ValueError(f"format_version: expected {VERSION}, got {version}")
    fields_of: dict[str, Mapping[str, Any]] = {}
    for file, texts in metadata.items():
        fields_of |= _packed_fields(file, texts)

    def packed(layer: str, qweight: torch.Tensor) -> PackedWeight:
        name = f"{layer}.qweight"
        if name not in fields_of:
            raise TensorError("qweight", f"expected its fields in the file's {_METADATA_KEY}, got none")
        try:
            return PackedWeight(qweight, **fields_of[name])
        except (TypeError, ValueError) as error:
            raise TensorError("qweight", str(error)) from error

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        weight = packed(layer, tensors["qweight"])
        groups = _check(weight, tensors)
        return LayerShape(
            weight.format,
            weight.k,
            weight.n,
            weight.k // groups,
            symmetric="zeros" not in tensors,
            act_order="perm" in tensors,
            layout=weight.layout,
        )

    def read(layer: str, tensors: Tensors) -> QuantizedLayer:
        weight = packed(layer, tensors["qweight"])
        perm = tensors.get("perm")
        if perm is not None and not torch.equal(perm.sort().values, torch.arange(weight.k, device=perm.device)):
            raise TensorError("perm", f"expected a permutation of 0..{weight.k - 1}, got another set of numbers")
        return QuantizedLayer(layer, weight, tensors["scales"], tensors.get("zeros"), tensors.get("bias"), perm)

    return LayerFormat(
        name=METHOD,
        anchors=("qweight",),
        required=("scales",),
        optional=("zeros", "perm", "bias"),
        owned=(),
        small=(),
        describe=describe,
        read=read,
    )


def entries_of(record: Record) -> dict[str, PackedWeight | torch.Tensor]:
    """What `weightonly.save` is to write for a record: names of the checkpoint -> entries."""
    if isinstance(record, PlainTensor):
        return {record.name: record.tensor}
    inside: dict[str, PackedWeight | torch.Tensor] = {"qweight": record.weight}
    for name in ("scales", "zeros", "bias", "perm"):
        tensor = getattr(record, name)
        if tensor is not None:
            inside[name] = tensor
    return {f"{record.name}.{name}": entry for name, entry in inside.items()}


def _packed_fields(file: Path, texts: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    try:
        packed = json.loads(texts.get(_METADATA_KEY, ""))
        if not isinstance(packed, dict) or not all(isinstance(fields, dict) for fields in packed.values()):
            raise ValueError("not names and fields")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: expected metadata of weightonly.save, got damaged or none ({error})") from error
    return packed


def _check(weight: PackedWeight, tensors: Tensors) -> int:
    """The number of groups. Raises TensorError for tensors that do not fit the weight."""
    expect("scales", tensors["scales"], FLOATS, ["groups", weight.n])
    groups = tensors["scales"].shape[0]
    if weight.k % groups:
        raise TensorError("scales", f"expected a number of groups that divides K = {weight.k}, got {groups}")
    if "zeros" in tensors:
        if weight.code is not None:
            raise TensorError("zeros", f"expected none for a weight of format {weight.format}, got it")
        expect("zeros", tensors["zeros"], tensors["scales"].dtype, [groups, weight.n])
    if "perm" in tensors:
        expect("perm", tensors["perm"], torch.int32, [weight.k])
    check_bias(tensors, weight.n)
    return groups
