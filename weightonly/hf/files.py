"""Packed folders as transformers loads them: the files' headers against config.json, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..formats.checkpoint import Checkpoint, open_checkpoint
from .modules import Plan, linear_shape


class Names:
    """The names that a model gives to the tensors of its checkpoint: transformers renames some, and prefixes others."""

    def __init__(self, model: PreTrainedModel) -> None:
        conversions = get_model_conversion_mapping(model)
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._prefix = model.base_model_prefix
        self.tensors = model.state_dict()

    def of_layer(self, layer: str) -> tuple[str, str | None]:
        """(the module of layer `layer` of the checkpoint, None), or (a parameter that it is a part of, how).

        The name may be one that the model does not have.
        """
        name = f"{layer}.weight"
        found, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.tensors)
        if found not in self.tensors and name in self.tensors:
            found, pattern = name, None
        return (found.removesuffix(".weight") if pattern is None else found), pattern

    def of_tensor(self, name: str) -> str:
        """The name in the model of a tensor that is not quantized; one that the model does not have, maybe."""
        found, _ = rename_source_key(name, self._renamings, self._converters, self._prefix, self.tensors)
        return name if found not in self.tensors and name in self.tensors else found


class SeparateExpertsError(ValueError):
    """A packed folder has a layer for each expert, and the model one parameter for all of them."""


def plan_of_files(model: PreTrainedModel, options: Mapping[str, Any], files: Sequence[str] | None) -> Plan:
    """The layers of a folder that `convert` or `save_pretrained` wrote.

    options: its quantization config. files: its safetensors files.

    Raises ValueError, naming file and tensor, for files that contradict the config or each other, and, naming the
    layer, for a layer of the model that the files do not have. Raises SeparateExpertsError for experts that `convert`
    packed one by one.
    """
    checkpoint = _open(files)
    names = Names(model)
    plan = Plan()
    for layer, shape in checkpoint.shapes.items():
        name, pattern = names.of_layer(layer)
        if pattern is not None and name in names.tensors:
            raise SeparateExpertsError(
                f"{checkpoint.folder}: {layer}: expected {name}, which holds every expert, got one of them; "
                "weightonly.hf.load_model puts them together"
            )
        if f"{name}.weight" in names.tensors:
            plan.layers[name] = shape
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


def check_complete(model: PreTrainedModel, plan: Plan, found: set[str], folder: Path) -> None:
    """Fills plan.dense. Raises ValueError for a linear layer that is neither packed nor among the tensors `found`.

    A head on the base model is not asked for: transformers makes a new one where there is none."""
    prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
    tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
    for name, module in model.named_modules():
        if name in plan.layers or (not isinstance(module, torch.nn.Linear) and linear_shape(module) is None):
            continue
        weight = f"{name}.weight"
        is_head = bool(prefix) and not name.startswith(f"{prefix}.")  # transformers makes a new one, and says so
        if weight not in found and weight not in tied and not is_head:
            raise ValueError(f"{folder}: expected {name}.qweight or {weight}, as the model has this layer, got neither")
        plan.dense[name] = "dense in the checkpoint"


def codebooks_of_version_2(model: PreTrainedModel, files: Sequence[str] | None) -> dict[str, torch.Tensor]:
    """Module -> int32 [16]: codebooks that stand in the metadata of the files."""
    checkpoint = _open(files)
    names = Names(model)
    layers = [layer for layer, shape in checkpoint.shapes.items() if shape.format == "code4"]
    codes = {layer: checkpoint.read_layer(layer, None).weight.code for layer in layers}
    return {names.of_layer(layer)[0]: torch.tensor(code).view(torch.int32) for layer, code in codes.items()}


def _open(files: Sequence[str] | None) -> Checkpoint:
    if not files:
        raise ValueError("state_dict: expected the folder of a packed model, got a state dict alone")
    return open_checkpoint(Path(files[0]).parent)
