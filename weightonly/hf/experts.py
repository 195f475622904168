"""Experts of a mixture: in a checkpoint a layer for each, or one for all, in the model all of them stacked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, apply_renamings

from ..formats.checkpoint import Checkpoint
from ..formats.gpt_oss import METHOD as GPT_OSS
from ..formats.layers import LayerShape
from ..formats.records import QuantizedLayer
from ..heuristics.arch import Arch
from ..nn.experts import Experts, ModuleGate, alternates, gates_first, in_order, stack_parts, why_not_experts
from ..nn.grouped import GroupedLinear
from ..packed import PackedWeight
from .dense import Dense, check_no_bias, dtype_of, tensors_inside
from .modules import Plan, Stack, check_size, expert_shapes
from .names import Names

Place = tuple[str, int, int]
"""(name of the stack in the model, expert, part): part 0 is gate and 1 is up, where they are layers of their own."""

_PLACES = {
    "gate_up_proj": {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1},
    "up_proj": {"w1": 0},
    "down_proj": {"w2": 0},
}
"""Product -> the names that quantizers, which take experts apart, give its parts, beside its own and the model's."""


def plan_experts(
    names: Names, checkpoint: Checkpoint, shapes: Mapping[str, LayerShape], plan: Plan, may_pack: bool
) -> set[str]:
    """Fills plan.stacks, and plan.densified for experts that cannot be packed. Returns the layers of both.

    shapes: layer of the checkpoint -> its shape. may_pack: whether experts may be packed.

    Raises ValueError, naming the layer, for an expert that is not there while others of its module are, for one that
    the model does not have, for layers and biases that do not fit the model, and for a layer of all experts, which is
    never made dense, that may not be packed.
    """
    whole = _whole_stacks(names, shapes, checkpoint, may_pack)
    places = _places(names, checkpoint, shapes)
    used: set[str] = set()
    for experts, module in (names.experts | names.others).items():
        found = {f"{experts}.{product}": shape for product, shape in expert_shapes(module).items()}
        own = {name: places[name] for name in found if name in places}
        if all(_is_left(names, checkpoint, layer) for layers in own.values() for layer in layers.values()):
            own = {}
        parts = {name: _ordered(name, found[name], layers) for name, layers in own.items()}
        for name, of_each in parts.items():
            _check_parts(checkpoint, shapes, found[name], of_each, bool(module.has_bias))
        shared = {name: _common_shape(shapes, of_each) for name, of_each in parts.items()}
        reasons = [shape for shape in shared.values() if isinstance(shape, str)]
        if experts in names.others:
            reasons.insert(0, why_not_experts(names.model.get_submodule(experts)) or "")
        elif not may_pack:
            reasons.insert(0, "tensor parallel cuts experts that are dense")
        if len(parts) + len(whole.keys() & found.keys()) < len(found):
            reasons.append("the checkpoint has another product of its experts alone")
        used |= {layer for layers in own.values() for layer in layers.values()}
        if not reasons:
            plan.stacks |= {name: whole[name] for name in found if name in whole}
            for name, shape in shared.items():
                assert isinstance(shape, LayerShape)
                plan.stacks[name] = Stack(found[name][0], shape, parts[name])
            continue
        for name in found:
            if name in whole:
                raise ValueError(f"{name}: expected packed layers for all products of its experts, but {reasons[0]}")
        for name, of_each in parts.items():
            plan.densified[name] = Dense(
                reasons[0],
                dtype_of(names.model, name),
                of_each,
                experts=True,
                is_transposed=bool(module.is_transposed),
                alternates=alternates(module, name.rpartition(".")[2]),
                bias=f"{name}_bias" if module.has_bias else None,
            )
    return used | {layer for stack in whole.values() for (layer,) in stack.parts}


def _places(
    names: Names, checkpoint: Checkpoint, shapes: Mapping[str, LayerShape]
) -> dict[str, dict[tuple[int, int], str]]:
    """Stack of the model -> (expert, part) -> the layer, quantized or not. Raises ValueError for two in one place."""
    tensors = checkpoint.shards.tensors
    matrices = [name for name in checkpoint.plain if name.endswith(".weight") and len(tensors[name].shape) == 2]
    layers = [layer for layer, shape in shapes.items() if shape.experts is None]
    places: dict[str, dict[tuple[int, int], str]] = {}
    for layer in (*layers, *(name.removesuffix(".weight") for name in matrices)):
        if (place := place_of(names, layer)) is not None:
            name, *inside = place
            other = places.setdefault(name, {}).setdefault((inside[0], inside[1]), layer)
            if other != layer:
                raise ValueError(f"{layer}: expected one layer for expert {inside[0]} of {name}, got {other}, too")
    return places


def _is_left(names: Names, checkpoint: Checkpoint, layer: str) -> bool:
    """Whether transformers itself finds the place of a layer."""
    inside = () if layer in checkpoint.layers else tensors_inside(checkpoint, layer).values()
    return bool(inside) and all(names.of_tensor(tensor) in names.tensors for tensor in inside)


def _ordered(name: str, size: tuple[int, ...], layers: Mapping[tuple[int, int], str]) -> tuple[tuple[str, ...], ...]:
    """For each expert its layers. Raises ValueError for one that is missing, or that the model does not have."""
    count, parts = size[0], 1 + max(part for _, part in layers)
    for (expert, _), layer in layers.items():
        if expert >= count:
            raise ValueError(f"{name}: expected {count} experts as the model's config says, got {layer}")
    for expert in range(count):
        for part in range(parts):
            if (expert, part) not in layers:
                other = next(iter(layers.values()))
                raise ValueError(
                    f"{name}: expected {count} experts, got none for expert {expert} beside such as {other}"
                )
    return tuple(tuple(layers[expert, part] for part in range(parts)) for expert in range(count))


def _check_parts(
    checkpoint: Checkpoint,
    shapes: Mapping[str, LayerShape],
    size: tuple[int, ...],
    parts: Sequence[tuple[str, ...]],
    has_bias: bool,
) -> None:
    """Raises ValueError for layers of another size than the model's experts, and for biases that one of them lacks."""
    _, k, n = size
    for layers in parts:
        for layer in layers:
            if layer in shapes:
                got: tuple[int, ...] = shapes[layer].k, shapes[layer].n
            else:
                got = checkpoint.shards.tensors[f"{layer}.weight"].shape[::-1]
            check_size(layer, (k, n // len(layers)), got)
            if not has_bias:
                check_no_bias(checkpoint, layer)
            elif "bias" not in tensors_inside(checkpoint, layer):
                raise ValueError(f"{layer}.bias: expected a bias, as the model's experts have one, got none")


def _whole_stacks(
    names: Names, shapes: Mapping[str, LayerShape], checkpoint: Checkpoint, may_pack: bool
) -> dict[str, Stack]:
    """Name in the model -> the stack, for layers that have all experts. Raises ValueError as `plan_experts` says."""
    whole = {}
    for layer, shape in shapes.items():
        if shape.experts is None:
            continue
        if not may_pack:
            raise ValueError(
                f"tp_plan: expected none for {layer} of {shape.experts} stacked experts; load the model without, "
                "weightonly.parallel.ExpertParallel cuts them"
            )
        renamed = apply_renamings(layer, names.renamings)
        name = names.stack_of(renamed)
        if name is None or name.rpartition(".")[0] in names.others:
            if names.parameters(renamed) or names.parameters(f"{renamed}.weight"):
                raise ValueError(
                    f"{layer}: expected a parameter of experts that weightonly.nn.Experts replaces, as the checkpoint "
                    f"has {shape.experts} stacked ones, got another in the model"
                )
            continue
        experts, _, product = name.rpartition(".")
        module = names.experts[experts]
        count, _, _ = expert_shapes(module)[product]
        if shape.experts != count:
            raise ValueError(
                f"{name}: expected {count} experts as the model's config says, got {shape.experts} in the checkpoint"
            )
        if ("bias" in checkpoint.layers[layer].tensors) is not bool(module.has_bias):
            expected, got = ("a bias", "none") if module.has_bias else ("no bias", "one")
            raise ValueError(f"{name}: expected {expected}, as the model says, got {got} in the checkpoint")
        whole[name] = Stack(count, dataclasses.replace(shape, experts=None), ((layer,),))
    return whole


def place_of(names: Names, layer: str) -> Place | None:
    """Where `layer` of a checkpoint is among the stacked experts of the model, or None."""
    renamed = apply_renamings(f"{layer}.weight", names.renamings).removesuffix(".weight")
    if (listed := re.fullmatch(r"(.+)\.(\w+)s\.(\d+)", renamed)) is not None and names.has_experts(listed[1]):
        renamed = f"{listed[1]}.{listed[3]}.{listed[2]}"  # "experts.gate_up_projs.3" as others name it
    own = re.fullmatch(r"(.+)\.(\d+)\.(\w+)", renamed)
    if own is not None and (name := names.stack_of(f"{own[1]}.{own[3]}")) is not None:
        return name, int(own[2]), 0
    for converter in names.converters:
        target, pattern = converter.rename_source_key(f"{renamed}.weight")
        if pattern is None:
            continue
        number = re.search(pattern.replace("*.", r"(\d+)\."), f"{renamed}.weight") if "*." in pattern else None
        name = names.stack_of(target)
        module = None if name is None else (names.experts | names.others)[name.rpartition(".")[0]]
        if name is None or number is None or not _stacks(converter, module):
            return None
        return name, int(number[1]), converter.source_patterns.index(pattern)
    if own is not None:
        for product, parts in _PLACES.items():
            if own[3] in parts and (name := names.stack_of(f"{own[1]}.{product}")) is not None:
                return name, int(own[2]), parts[own[3]]
    return None


def _stacks(converter: Any, module: Any) -> bool:
    """Whether a converter stacks the weights [N, K] of experts, and puts gate before up."""
    merge, *concatenate = converter.operations
    if module.is_transposed or type(merge) is not MergeModulelist or merge.dim != 0:
        return False
    if len(converter.source_patterns) == 1:
        return not concatenate
    [last] = concatenate or [None]
    is_pair = len(converter.source_patterns) == 2 and getattr(module, "is_concatenated", True)
    return is_pair and type(last) is Concatenate and last.dim == 1


def _common_shape(shapes: Mapping[str, LayerShape], parts: Sequence[tuple[str, ...]]) -> LayerShape | str:
    """The shape of one expert of a stack, or why there is none."""
    everyone = [layer for expert in parts for layer in expert]
    dense = next((layer for layer in everyone if layer not in shapes), None)
    if dense is not None:
        return f"{dense} is not quantized"
    first = shapes[everyone[0]]
    for layer in everyone:
        shape = shapes[layer]
        if shape.format == "code4":
            return "each expert has a codebook of its own"
        if _kind(shape) != _kind(first):
            return f"{layer} has another format or group size than {everyone[0]}"
    return LayerShape(
        first.format,
        first.k,
        sum(shapes[layer].n for layer in parts[0]),
        first.group_size,
        all(shapes[layer].symmetric is not False for layer in everyone),
        any(shapes[layer].act_order for layer in everyone),
        first.layout,
        activations=first.activations,
    )


def _kind(shape: LayerShape) -> tuple[object, ...]:
    return shape.format, shape.group_size, shape.layout, shape.activations


def in_turns_in_files(model: torch.nn.Module, name: str) -> bool:
    """Whether files have gates, and what they are multiplied with, in turns in the columns of a packed layer."""
    owner, _, product = name.rpartition(".")
    experts = model.get_submodule(owner)
    if not isinstance(experts, Experts) or not isinstance(experts.between, ModuleGate):
        return False
    return alternates(experts.between.module, product)


def read_gates_first(
    checkpoint: Checkpoint,
    layer: str,
    arch: Arch | None,
    read: Callable[[str], torch.Tensor],
    activations: str | None = None,
) -> QuantizedLayer:
    """`checkpoint.record_of(layer, arch, read)` of columns that are in turns in the file: its gates come first."""
    if (
        checkpoint.layers[layer].format.name == GPT_OSS
    ):  # of its tensors, none of which is packed, N is the second dimension
        return checkpoint.record_of(layer, arch, lambda tensor: gates_first(read(tensor), 1), activations=activations)
    record = checkpoint.record_of(layer, arch, read, activations=activations)
    return QuantizedLayer.of(layer, in_order(record, gates_first))


def stacked(
    name: str, stack: Stack, records: Sequence[tuple[QuantizedLayer, ...]], dtype: torch.dtype, has_bias: bool
) -> GroupedLinear:
    """The layer of all experts. records: for each of them its layers, or the one of all, as stack.parts names them.

    Where some have zero points or an order of their rows, the others get such that change nothing. has_bias: whether
    the layer has one; if not, those of the records are zeros.
    """
    first = records[0][0]
    if first.weight.experts is not None:
        try:
            product = first.product(dtype)
            return GroupedLinear.from_quantized(product.operand, bias=product.bias)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
    filled = [tuple(_filled(record, stack.shape, has_bias) for record in expert) for expert in records]
    return stack_parts(name, filled, dtype)


def _filled(record: QuantizedLayer, shape: LayerShape, has_bias: bool) -> QuantizedLayer:
    weight, scales, zeros, perm = record.weight, record.scales, record.zeros, record.perm
    if shape.symmetric is False and zeros is None:
        zeros = torch.zeros_like(scales)
    if shape.act_order and perm is None:
        perm = torch.arange(weight.k, dtype=torch.int32, device=scales.device)
    plain = PackedWeight(weight.data, weight.k, weight.n, weight.format, weight.layout)
    return QuantizedLayer(record.name, plain, scales, zeros, record.bias if has_bias else None, perm)
