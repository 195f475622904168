"""Folders as transformers loads them: their headers against the model and config.json, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..formats.checkpoint import Checkpoint, open_checkpoint
from ..formats.packed_config import METHOD
from ..formats.recognize import quantization_config
from ..formats.shards import CONFIG, Shards
from ..nn.experts import expert_products, why_not_experts
from .modules import Plan, linear_shape
from .names import Names


class PartsError(ValueError):
    """Converters of transformers put layers of a folder together, or take them apart, which are packed."""


def check_declared(plan: Plan, names: Names, checkpoint: Checkpoint) -> None:
    """Raises ValueError for a packed layer that config.json of a packed folder says to be dense."""
    options = quantization_config(checkpoint.shards)[1]
    dense = options.get("modules_to_not_convert") if METHOD in checkpoint.methods else ()
    wrong = sorted({names.of_layer(name)[0] for name in dense or ()} & plan.layers.keys())
    if wrong:
        raise ValueError(
            f"{checkpoint.folder / CONFIG}: modules_to_not_convert: expected layers that are not packed, "
            f"got {wrong[0]}, which is packed in the files"
        )


def check_whole(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raises PartsError for quantized layers of the checkpoint that are not whole parameters of the model."""
    for name, dense in plan.densified.items():
        if not dense.parts:
            raise PartsError(
                f"{checkpoint.folder}: expected a layer for {name}, got others ({dense.reason}); "
                "weightonly.hf.load_model makes them dense"
            )


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
        if weight in plan.densified:
            continue
        is_head = bool(prefix) and not name.startswith(f"{prefix}.")  # transformers makes a new one, and says so
        if weight not in found and weight not in tied and not is_head:
            raise ValueError(f"{folder}: expected {name}.qweight or {weight}, as the model has this layer, got neither")
        plan.dense[name] = "dense in the checkpoint"


def open_files(files: Sequence[str] | None, options: Mapping[str, Any] | None) -> Checkpoint:
    """The checkpoint that has these files. options: its quantization config, where it has been read.

    Raises ValueError for no files, and what `open_checkpoint` raises.
    """
    if not files:
        raise ValueError("state_dict: expected the folder of a packed model, got a state dict alone")
    shards = Shards(Path(files[0]).parent)
    if options is not None:
        shards.configs[CONFIG] = {"quantization_config": options}
    return open_checkpoint(shards)
