"""The tensors of packed layers between files and models: each rank's part of them, and all parts as one again."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..nn.linear import Linear
from ..parallel import ParallelLinear


def converters() -> list[WeightConverter]:
    """What cuts the tensors of packed layers that come whole."""
    return [LayerTensors(f"{name}$", name, [CutPart()]) for name in ("qweight", "scales", "zeros", "perm", "bias")]


class LayerTensors(WeightConverter):
    """Tensors of one name."""


class CutPart(ConversionOps):
    """This rank's part of a tensor of a packed layer; the tensor as it is, if another module has one of that name."""

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        name, _, inside = full_layer_name.rpartition(".")
        layer = model.get_submodule(name)
        is_whole = isinstance(layer, ParallelLinear) and not layer.comes_cut(inside)
        return {full_layer_name: (layer.cut(inside, tensor) if is_whole else tensor).contiguous()}


def whole_state_dict(model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """The state dict of a model with every tensor gathered; None where none is parallel or fused. All ranks call it.

    transformers would gather tied tensors one by one, and write them twice. It takes no views of columns.
    """
    fused = {name for name, module in model.named_modules() if isinstance(module, Linear) and module._fused is not None}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ParallelLinear)}
    if not layers:
        if not fused:
            return None
        state = model.state_dict()
        return {key: t.contiguous() if key.rpartition(".")[0] in fused else t for key, t in state.items()}
    state = {}
    gathered: dict[int, torch.Tensor] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        owner = next((name for name in _owners(key) if name in layers), None)
        if owner is None:
            if id(tensor) not in gathered:
                whole = tensor.detach()
                gathered[id(tensor)] = (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu()
            state[key] = gathered[id(tensor)]
        elif f"{owner}.qweight" not in state:
            found = layers[owner].gather().state_dict()
            state |= {f"{owner}.{name}": value.cpu() for name, value in found.items()}
    return state


def _owners(key: str) -> list[str]:
    """The modules that a name of a state dict may be in, the innermost first."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
