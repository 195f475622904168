"""The linear layers of a model: which are quantized, why others are not, and a packed one in the place of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from ..formats.layers import LayerShape
from ..heuristics.arch import ARCHS, Arch
from ..layout import CPU
from ..nn import Linear
from ..nn.recipe import Recipe
from ..packing import layout_for_arch
from ..quantize import resolve_group_size


@dataclass
class Plan:
    """What becomes of the linear layers of a model.

    layers: name -> the shape of the packed layer. dense: name -> why it is left as it is.
    """

    layers: dict[str, LayerShape] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)


def linear_shape(module: Any) -> tuple[int, int] | None:
    """(K, N) of a module that is y = x @ w + bias, and None for others, subclasses of torch.nn.Linear among them."""
    if type(module) is torch.nn.Linear:
        return module.in_features, module.out_features
    if type(module) is Conv1D:
        return module.nx, module.nf
    return None


def plan_quantization(model: PreTrainedModel, skip: Sequence[str], recipe: Recipe, layout: str) -> Plan:
    """Which layers of a dense model become packed ones.

    skip: names and patterns of those that stay dense, as transformers matches them.
    """
    plan = Plan()
    for name, module in model.named_modules():
        shape = linear_shape(module)
        if shape is None:
            if isinstance(module, torch.nn.Linear):
                plan.dense[name] = f"its owner may use the weight of a {type(module).__name__}"
            elif any(p.dim() == 3 and p.is_floating_point() for p in module.parameters(recurse=False)):
                plan.dense[name] = "experts in 3-D parameters: quantize_model packs them, after loading"
            continue
        k, n = shape
        if not should_convert_module(name, list(skip)):
            plan.dense[name] = "an output embedding, tied, or in modules_to_not_convert"
            continue
        if n == 1:
            plan.dense[name] = "N = 1: a gate"
            continue
        try:
            recipe.check_k(k)
        except ValueError as error:
            plan.dense[name] = str(error)
            continue
        rows = resolve_group_size(recipe.group_size, k)
        plan.layers[name] = LayerShape(recipe.format, k, n, rows, recipe.symmetric, False, layout)
    return plan


def check_layer(model: PreTrainedModel, name: str, shape: LayerShape) -> None:
    """Raises ValueError unless module `name` of the model is a linear layer of this shape."""
    found = linear_shape(model.get_submodule(name))
    if found is None:
        kind = type(model.get_submodule(name)).__name__
        raise ValueError(f"{name}: expected a linear layer, as the checkpoint has one, got {kind} in the model")
    if found != (shape.k, shape.n):
        raise ValueError(
            f"{name}: expected K x N = {found[0]} x {found[1]} as the model's config says, "
            f"got {shape.k} x {shape.n} in the checkpoint"
        )


def replace_layers(model: PreTrainedModel, layers: Mapping[str, LayerShape], dtype: torch.dtype) -> set[str]:
    """Put an empty packed layer, on the meta device, in the place of each. Returns the names that were Conv1D."""
    conv1d = set()
    for name, shape in layers.items():
        old = model.get_submodule(name)
        if isinstance(old, Conv1D):
            conv1d.add(name)
        layer = Linear(
            shape.k,
            shape.n,
            bias=old.bias is not None,
            format=shape.format,
            group_size=shape.group_size,
            symmetric=shape.symmetric is not False,
            dtype=dtype,
            device="meta",
            arch=_arch_of(shape.layout),
            act_order=shape.act_order,
        )
        layer.layer_name = name
        model.set_submodule(name, layer.train(old.training))
        owner = model.get_submodule(name.rpartition(".")[0])
        if not [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]:
            # Some models' _init_weights reach from here for the `weight` of the layer, which is gone.
            owner._is_hf_initialized = True
    return conv1d


def _arch_of(layout: str | None) -> Arch:
    archs: tuple[Arch, ...] = (*ARCHS, CPU)
    return next(arch for arch in archs if layout_for_arch(arch) == layout)
