"""Folders as transformers loads them: their headers against the model and config.json, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..formats.checkpoint import Checkpoint, open_checkpoint
from ..formats.foreign import check_foreign, foreign, is_buffer, is_small_float, of_activations
from ..formats.packed_config import METHOD
from ..formats.recognize import METHODS, quantization_config
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


def check_used(model: PreTrainedModel, names: Names, shards: Shards, plain: Iterable[str]) -> set[str]:
    """The names in the model of the tensors `plain`, those that it does not have among them.

    Raises ValueError for one that is no float where the model has floats, and for one that nothing uses inside of a
    module of the model: the numbers of this module would not be those of the file. A bias of zeros is none. What
    transformers ignores, masks and tables, and modules that the model does not have are left to it.
    """
    found = {tensor: names.of_tensor(tensor) for tensor in plain}
    for tensor, name in found.items():
        info, own = shards.tensors[tensor], names.tensors.get(name)
        is_float = info.dtype.is_floating_point and not is_small_float(info.dtype)
        if own is not None and own.is_floating_point() and not is_float:
            raise foreign(tensor, info, shards.tensors, f"floats of {type(model).__name__}.{name}")
    spare = {name: tensor for tensor, name in found.items() if name not in names.tensors}
    keys = SimpleNamespace(missing_keys=set(), unexpected_keys=set(spare))
    model._adjust_missing_and_unexpected_keys(keys)
    modules = dict(model.named_modules())
    for name, tensor in spare.items():
        if name not in keys.unexpected_keys:
            continue
        parts = name.split(".")[:-1]
        inside = next(
            (".".join(parts[:end]) for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in modules), ""
        )
        if not inside or not (inside == ".".join(parts) or [*modules[inside].parameters(recurse=False)]):
            continue
        info = shards.tensors[tensor]
        is_bias = name.endswith(".bias") and len(info.shape) == 1
        if shards.read(tensor).any() if is_bias else not is_buffer(name.rpartition(".")[2]):
            kind = f"a tensor that {type(modules[inside]).__name__} {inside} uses"
            raise foreign(tensor, info, {tensor: info}, kind)
    return {name for tensor in found for name in names.of_tensors(tensor)}


def has_bias(module: Any, layer: str, checkpoint: Checkpoint) -> bool:
    """Whether a layer of the checkpoint has the bias of the module that it becomes.

    Raises ValueError for a bias that the module alone has, and for one, other than of zeros, that it does not have.
    """
    tensor, is_wanted = checkpoint.layers[layer].tensors.get("bias"), getattr(module, "bias", None) is not None
    if is_wanted and tensor is None:
        raise ValueError(f"{checkpoint.folder}: expected {layer}.bias, as the model has it, got none")
    if tensor is not None and not is_wanted and checkpoint.shards.read(tensor).any():
        info = checkpoint.shards.tensors[tensor]
        raise ValueError(f"{info.file}: {tensor}: expected none or zeros, as the model has no bias here, got others")
    return is_wanted


def dense_shards(files: Sequence[str] | None) -> Shards | None:
    """The headers of the files of a folder. None of pickles, and of a state dict, which are not looked at."""
    if not files or not all(file.endswith(".safetensors") for file in files):
        return None
    return Shards(Path(files[0]).parent, [Path(file) for file in files])


def check_dense(model: PreTrainedModel, plan: Plan, shards: Shards) -> set[str]:
    """The names in the model of the tensors of a folder. `plan`: what is to be packed.

    Raises ValueError unless there is a dense weight for each layer of it.
    """
    source, options = quantization_config(shards)
    if source:
        raise ValueError(
            f"{shards.folder / source}: quant_method: expected none, of a model to quantize, got "
            f"{options['quant_method']!r}; weightonly.hf.load_model reads {', '.join(METHODS)}"
        )
    unused = of_activations(shards, (source, options))
    plain = [name for name in shards.tensors if name not in unused]
    check_foreign(shards, plain, {})
    found, prefix = check_used(model, Names(model), shards, plain), model.base_model_prefix
    for name in (*(f"{layer}.weight" for layer in plan.layers), *plan.stacks):
        is_head = hasattr(model, prefix) and not name.startswith(f"{prefix}.")
        if name not in found and not is_head:
            raise ValueError(f"{shards.folder}: expected {name}, as the model has this layer, got none")
    return found


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
