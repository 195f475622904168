"""Packed folders as transformers loads them: the files' headers against config.json, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..formats.checkpoint import Checkpoint, open_checkpoint
from ..nn.experts import expert_products, why_not_experts
from .experts import plan_experts
from .modules import Plan, linear_shape
from .names import Names


class SeparateExpertsError(ValueError):
    """A packed folder has a layer for each expert, and these cannot be stacked for the one layer of the model."""


def plan_of_files(model: PreTrainedModel, options: Mapping[str, Any], checkpoint: Checkpoint, stacks: bool) -> Plan:
    """The layers of a folder that `convert` or `save_pretrained` wrote.

    options: its quantization config. stacks: whether experts may be packed.

    Raises ValueError, naming file and tensor, for files that contradict the config or each other, and, naming the
    layer, for a layer of the model that the files do not have. Raises SeparateExpertsError for experts that cannot be
    stacked: their shapes, formats or groups differ.
    """
    names = Names(model)
    plan = Plan()
    biased = biased_layers(checkpoint)
    experts = plan_experts(names, checkpoint.shapes, biased, plan, stacks)
    for layer, shape in checkpoint.shapes.items():
        if layer in experts:
            continue
        name, pattern = names.of_layer(layer)
        if pattern is not None and name in names.tensors:
            plan.densified.setdefault(name, "the model stores several layers of the checkpoint in one parameter")
        if f"{name}.weight" in names.tensors:
            plan.layers[name] = shape
    check_stacked(plan, checkpoint)
    found = {names.of_tensor(name) for name in checkpoint.plain}
    check_complete(model, plan, found, checkpoint.folder)
    declared = {names.of_layer(name)[0] for name in options.get("modules_to_not_convert") or ()}
    wrong = sorted(declared & plan.layers.keys())
    if wrong:
        raise ValueError(
            f"{checkpoint.folder / 'config.json'}: modules_to_not_convert: expected layers that are not packed, "
            f"got {wrong[0]}, which is packed in the files"
        )
    return plan


def check_stacked(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raises SeparateExpertsError for quantized layers of the checkpoint that cannot stay packed."""
    for name, reason in plan.densified.items():
        raise SeparateExpertsError(
            f"{checkpoint.folder}: expected layers that can be put together to {name}, got others ({reason}); "
            "weightonly.hf.load_model makes them dense"
        )


def biased_layers(checkpoint: Checkpoint) -> set[str]:
    """Layers that have a bias."""
    return {name for name, layer in checkpoint.layers.items() if "bias" in layer.tensors}


def check_complete(model: PreTrainedModel, plan: Plan, found: set[str], folder: Path) -> None:
    """Fills plan.dense. Raises ValueError for a layer of the model that is neither packed nor in the tensors `found`.

    A head on the base model is not asked for: transformers makes a new one where there is none."""
    prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
    tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
    for name, module in model.named_modules():
        for product in expert_products(module) if why_not_experts(module) is None else ():
            weight = f"{name}.{product}"
            if weight not in plan.stacks and weight not in found and weight not in plan.densified:
                raise ValueError(f"{folder}: expected the experts of {weight}, as the model has this layer, got none")
        if name in plan.layers or (not isinstance(module, torch.nn.Linear) and linear_shape(module) is None):
            continue
        weight = f"{name}.weight"
        is_head = bool(prefix) and not name.startswith(f"{prefix}.")  # transformers makes a new one, and says so
        if weight not in found and weight not in tied and not is_head:
            raise ValueError(f"{folder}: expected {name}.qweight or {weight}, as the model has this layer, got neither")
        plan.dense[name] = "dense in the checkpoint"


def codebooks_of_version_2(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Module -> int32 [16]: codebooks that stand in the metadata of the files."""
    names = Names(model)
    layers = [layer for layer, shape in checkpoint.shapes.items() if shape.format == "code4"]
    codes = {layer: checkpoint.read_layer(layer, None).weight.code for layer in layers}
    return {names.of_layer(layer)[0]: torch.tensor(code).view(torch.int32) for layer, code in codes.items()}


def open_files(files: Sequence[str] | None) -> Checkpoint:
    """The checkpoint that has these files. Raises ValueError for no files, and what `open_checkpoint` raises."""
    if not files:
        raise ValueError("state_dict: expected the folder of a packed model, got a state dict alone")
    return open_checkpoint(Path(files[0]).parent)
