"""Experts of a mixture: in a checkpoint a layer for each, or one for all, in the model all of them stacked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, apply_renamings

from ..formats.checkpoint import Checkpoint
from ..formats.gpt_oss import METHOD as GPT_OSS
from ..formats.layers import LayerShape
from ..formats.records import QuantizedLayer
from ..heuristics.arch import Arch
from ..nn.experts import Experts, ModuleGate, alternates, gates_first, in_order, stack_parts
from ..nn.grouped import GroupedLinear
from ..packed import PackedWeight
from .modules import Plan, Stack, expert_shapes
from .names import Names

Place = tuple[str, int, int]
"""(name of the stack in the model, expert, part): part 0 is gate and 1 is up, where they are layers of their own."""


def plan_experts(
    names: Names, shapes: Mapping[str, LayerShape], biased: Collection[str], plan: Plan, may_pack: bool
) -> set[str]:
    """Fills plan.stacks, and plan.densified for experts that cannot be stacked. Returns the layers of plan.stacks.

    shapes: layer of a checkpoint -> its shape. biased: those that have a bias. may_pack: whether experts may be
    packed; if not, nothing is filled.

    Raises ValueError, naming the layer, for an expert that is not there while others of its module are, and for a layer
    of all experts, which is never made dense, that does not fit the model or may not be packed.
    """
    whole = _whole_stacks(names, shapes, biased, may_pack)
    if not may_pack:
        return set()
    places: dict[str, dict[tuple[int, int], str]] = {}
    for layer in shapes:
        if shapes[layer].experts is None and (place := place_of(names, layer)) is not None:
            places.setdefault(place[0], {})[place[1:]] = layer
    for experts, module in names.experts.items():
        found = {f"{experts}.{product}": shape for product, shape in expert_shapes(module).items()}
        stacks: dict[str, Stack] = {}
        reason = None
        for name, (count, _, _) in found.items():
            if name in whole:
                stacks[name] = whole[name]
                continue
            layers = places.get(name, {})
            if not layers:
                reason = reason or "the checkpoint has another product of its experts alone"
                continue
            parts = 1 + max(part for _, part in layers)
            for expert in range(count):
                for part in range(parts):
                    if (expert, part) not in layers:
                        other = next(iter(layers.values()))
                        raise ValueError(
                            f"{name}: expected {count} experts, got none for expert {expert} beside such as {other}"
                        )
            ordered = tuple(tuple(layers[expert, part] for part in range(parts)) for expert in range(count))
            shape = _common_shape(shapes, ordered)
            if isinstance(shape, str):
                reason = reason or shape
            elif {layer in biased for layer in layers.values()} != {bool(module.has_bias)}:
                reason = reason or "biases are not where the model has them"
            else:
                stacks[name] = Stack(count, shape, ordered)
        if len(stacks) == len(found):
            plan.stacks |= stacks
            continue
        for name in found:
            if name in whole:
                raise ValueError(f"{name}: expected packed layers for all products of its experts, but {reason}")
        plan.densified |= {name: reason or "" for name in found if name in places}
    alone = {layer for name in plan.stacks for layer in places.get(name, {}).values()}
    return alone | {layer for stack in whole.values() for (layer,) in stack.parts}


def _whole_stacks(
    names: Names, shapes: Mapping[str, LayerShape], biased: Collection[str], may_pack: bool
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
        if name is None:
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
        if (layer in biased) is not bool(module.has_bias):
            expected, got = ("a bias", "none") if module.has_bias else ("no bias", "one")
            raise ValueError(f"{name}: expected {expected}, as the model says, got {got} in the checkpoint")
        whole[name] = Stack(count, dataclasses.replace(shape, experts=None), ((layer,),))
    return whole


def place_of(names: Names, layer: str) -> Place | None:
    """Where `layer` of a checkpoint is among the stacked experts of the model, or None."""
    renamed = apply_renamings(f"{layer}.weight", names.renamings).removesuffix(".weight")
    own = re.fullmatch(r"(.+)\.(\d+)\.(\w+)", renamed)
    if own is not None and (name := names.stack_of(f"{own[1]}.{own[3]}")) is not None:
        return name, int(own[2]), 0
    for converter in names.converters:
        target, pattern = converter.rename_source_key(f"{renamed}.weight")
        if pattern is None:
            continue
        number = re.search(pattern.replace("*.", r"(\d+)\."), f"{renamed}.weight") if "*." in pattern else None
        name = names.stack_of(target)
        if name is None or number is None or not _stacks(converter, names.experts[name.rpartition(".")[0]]):
            return None
        return name, int(number[1]), converter.source_patterns.index(pattern)
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
    first = shapes[parts[0][0]]
    for expert in parts:
        for part, layer in enumerate(expert):
            shape, like = shapes[layer], shapes[parts[0][part]]
            if shape.format == "code4":
                return "each expert has a codebook of its own"
            fields = (shape.format, shape.k, shape.group_size, shape.layout)
            if fields != (first.format, first.k, first.group_size, first.layout) or shape.n != like.n:
                return f"{layer} has another shape, format or group size than {parts[0][0]}"
    everyone = [shapes[layer] for expert in parts for layer in expert]
    return LayerShape(
        first.format,
        first.k,
        sum(shapes[layer].n for layer in parts[0]),
        first.group_size,
        all(shape.symmetric is not False for shape in everyone),
        any(shape.act_order for shape in everyone),
        first.layout,
    )


def in_turns_in_files(model: torch.nn.Module, name: str) -> bool:
    """Whether files have gates, and what they are multiplied with, in turns in the columns of a packed layer."""
    owner, _, product = name.rpartition(".")
    experts = model.get_submodule(owner)
    if not isinstance(experts, Experts) or not isinstance(experts.between, ModuleGate):
        return False
    return alternates(experts.between.module, product)


def read_gates_first(
    checkpoint: Checkpoint, layer: str, arch: Arch | None, read: Callable[[str], torch.Tensor]
) -> QuantizedLayer:
    """`checkpoint.record_of(layer, arch, read)` of columns that are in turns in the file: its gates come first."""
    if (
        checkpoint.layers[layer].format.name == GPT_OSS
    ):  # of its tensors, none of which is packed, N is the second dimension
        return checkpoint.record_of(layer, arch, lambda tensor: gates_first(read(tensor), 1))
    record = checkpoint.record_of(layer, arch, read)
    return QuantizedLayer.of(layer, in_order(record, gates_first))


def stacked(
    name: str, stack: Stack, records: Sequence[tuple[QuantizedLayer, ...]], dtype: torch.dtype
) -> GroupedLinear:
    """The layer of all experts. records: for each of them its layers, or the one of all, as stack.parts names them.

    Where some have zero points or an order of their rows, the others get such that change nothing.
    """
    first = records[0][0]
    if first.weight.experts is not None:
        try:
            product = first.product(dtype)
            return GroupedLinear.from_quantized(product.operand, bias=product.bias)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
    filled = [tuple(_filled(record, stack.shape) for record in expert) for expert in records]
    return stack_parts(name, filled, dtype)


def _filled(record: QuantizedLayer, shape: LayerShape) -> QuantizedLayer:
    weight, scales, zeros, perm = record.weight, record.scales, record.zeros, record.perm
    if shape.symmetric is False and zeros is None:
        zeros = torch.zeros_like(scales)
    if shape.act_order and perm is None:
        perm = torch.arange(weight.k, dtype=torch.int32, device=scales.device)
    plain = PackedWeight(weight.data, weight.k, weight.n, weight.format, weight.layout)
    return QuantizedLayer(record.name, plain, scales, zeros, record.bias, perm)
