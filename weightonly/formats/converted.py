"""Checkpoints of packed layers, which `convert` and `save_pretrained` wrote. A layer "x" is what `nn.Linear` holds:

x.qweight          uint8, a packed weight as a matrix (`layout.stored_shape`); config.json says what its bytes are
x.scales, x.zeros  [groups, N]
x.bias             [N]
x.perm             int32 [K]
x.codebook         int32 [16], the bits of the fp32 numbers of a codebook; "code4" alone

Of stacked experts they are what `nn.GroupedLinear` holds: all but the codebook have a dimension [E] before their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..heuristics.problem import CODE_FORMATS
from ..layout import padded_shape, stored_shape
from ..packed import PackedWeight, format_bits
from ..storage import parse_json
from ..tensor_file import DIGEST_KEY
from .expect import FLOATS, TensorError, expect, option
from .layers import LayerFormat, LayerShape, Tensors
from .packed_config import METHOD, check_version, fields_of
from .records import PlainTensor, QuantizedLayer, Record
from .shards import Shards

INCOMPLETE = "INCOMPLETE"
"""A file that `convert` removes last: a folder that has it was not finished, and is not read."""


def converted_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format of a converted folder. Raises ValueError for another version."""
    check_version(option(options, "format_version", int))

    def packed(layer: str, tensors: Tensors) -> tuple[PackedWeight, str | None]:
        try:
            fields = fields_of(options, layer)
            return _packed(tensors, fields), fields["activations"]
        except TensorError:
            raise
        except (TypeError, ValueError) as error:
            raise TensorError("qweight", str(error)) from error

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        weight, activations = packed(layer, tensors)
        return shape_of(QuantizedLayer(layer, weight, **_beside(tensors)), activations)

    def read(layer: str, tensors: Tensors, _: torch.Tensor | None) -> QuantizedLayer:
        record = QuantizedLayer(layer, packed(layer, tensors)[0], **_beside(tensors))
        order = torch.arange(record.weight.k, device=record.scales.device)
        if record.perm is not None and not torch.equal(record.perm.sort().values, order.expand_as(record.perm)):
            raise TensorError("perm", f"expected a permutation of 0..{len(order) - 1}, got another set of numbers")
        return record

    return LayerFormat(
        name=METHOD,
        anchors=("qweight",),
        required=("scales",),
        optional=("zeros", "perm", "codebook", "bias"),
        owned=(),
        small=("codebook",),
        describe=describe,
        read=read,
    )


def tensors_of(record: Record) -> dict[str, torch.Tensor]:
    """What is written for a record: name in the checkpoint -> tensor."""
    if isinstance(record, PlainTensor):
        return {record.name: record.tensor}
    weight = record.weight
    rows = stored_shape(weight.k_padded, weight.n_padded, weight.bits, weight.layout)
    stack = () if weight.experts is None else (weight.experts,)
    inside: dict[str, torch.Tensor | None] = {
        "qweight": weight.data.view(*stack, *rows),
        "scales": record.scales,
        "zeros": record.zeros,
        "bias": record.bias,
        "perm": record.perm,
        "codebook": codebook_bits(weight.code) if weight.format == "code4" else None,
    }
    return {f"{record.name}.{name}": tensor for name, tensor in inside.items() if tensor is not None}


def codebook_bits(code: Sequence[float] | None) -> torch.Tensor:
    """int32 [16]: the bits of the fp32 numbers of a codebook."""
    return torch.tensor(code, dtype=torch.float32).view(torch.int32)


def shape_of(record: QuantizedLayer, activations: str | None = None) -> LayerShape:
    """The shape of a layer that has been read. activations: None or "fp8", which no record says."""
    weight = record.weight
    group_size = weight.k // record.scales.shape[-2]
    symmetric, act_order = record.zeros is None, record.perm is not None
    return LayerShape(
        weight.format, weight.k, weight.n, group_size, symmetric, act_order, weight.layout, weight.experts, activations
    )


def _beside(tensors: Tensors) -> dict[str, Any]:
    """All but the weight of a `QuantizedLayer`."""
    return {name: tensors.get(name) for name in ("scales", "zeros", "bias", "perm")}


def _packed(tensors: Tensors, fields: Mapping[str, Any]) -> PackedWeight:
    """The weight that the config describes. Raises TensorError for tensors that contradict it, or each other."""
    qweight, scales, group_size = tensors["qweight"], tensors["scales"], fields["group_size"]
    stack = ["E"] if scales.dim() == 3 else []
    expect("scales", scales, FLOATS, [*stack, "groups", "N"])
    *experts, groups, n = scales.shape
    k = groups * group_size
    for name, field, is_there in (("zeros", "symmetric", False), ("perm", "act_order", True)):
        if (name in tensors) != (fields[field] is is_there):
            there = "it" if name in tensors else "none"
            raise TensorError(name, f"expected what the config says ({field}: {fields[field]}), got {there}")
    bits = format_bits(fields["format"])
    rows = stored_shape(*padded_shape(k, n, bits, fields["layout"]), bits, fields["layout"])
    expect("qweight", qweight, torch.uint8, [*experts, *rows])
    if "zeros" in tensors:
        if fields["format"] in CODE_FORMATS:
            raise TensorError("zeros", f"expected none for a weight of format {fields['format']}, got it")
        expect("zeros", tensors["zeros"], scales.dtype, scales.shape)
    if "perm" in tensors:
        expect("perm", tensors["perm"], torch.int32, [*experts, k])
    if "bias" in tensors:
        expect("bias", tensors["bias"], FLOATS, [*experts, n])
    code = None
    if fields["format"] == "code4":
        if "codebook" not in tensors:
            raise TensorError("qweight", "expected a codebook beside it for code4, got none")
        expect("codebook", tensors["codebook"], torch.int32, [16])
        code = tensors["codebook"].view(torch.float32)
    return PackedWeight(
        qweight.reshape(-1),
        k,
        n,
        fields["format"],
        fields["layout"],
        code,
        group_size=group_size,
        has_zeros="zeros" in tensors,
        has_perm="perm" in tensors,
        experts=experts[0] if experts else None,
    )


def digests_of(shards: Shards) -> dict[str, str]:
    """Tensor -> the SHA-256 that `convert` wrote. Raises ValueError, naming the file, where one is missing."""
    digests: dict[str, str] = {}
    for file, texts in shards.metadata.items():
        try:
            digests |= parse_json(texts.get(DIGEST_KEY, "{}").encode())
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}: {DIGEST_KEY}: expected an object of digests, got {error}") from error
    for name, info in shards.tensors.items():
        if not isinstance(digests.get(name), str):
            raise ValueError(f"{info.file}: {name}: expected a digest to verify, as `convert` writes them, got none")
    return digests
