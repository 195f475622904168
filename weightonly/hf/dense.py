"""Parameters of a model that stay dense, and whose numbers are those of layers of a checkpoint, dequantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from ..formats.checkpoint import Checkpoint
from ..nn.experts import in_turns

ReadWeight = Callable[[str], torch.Tensor]
"""Layer of a checkpoint, quantized or not -> its weight [K, N], or its bias [N]."""


@dataclass(frozen=True)
class Dense:
    """How such a parameter is made.

    reason: why it is not packed. dtype: what it is kept in.
    parts: for each expert the layers whose columns are put side by side, such as gate and up; ((layer,),) for a single
        weight; () where converters of transformers make it of the dequantized layers.
    experts: whether it is stacked, [E, ...]. is_transposed: whether it is [K, N], not [N, K]. alternates: whether the
        columns of gate and up are in turns. bias: the name of the biases; None where there are none.
    """

    reason: str
    dtype: torch.dtype
    parts: tuple[tuple[str, ...], ...] = ()
    experts: bool = False
    is_transposed: bool = False
    alternates: bool = False
    bias: str | None = None

    def weight(self, read: ReadWeight) -> torch.Tensor:
        """The parameter. One layer at a time is read."""

        def one(layers: tuple[str, ...]) -> torch.Tensor:
            w = self._columns(layers, read)
            return w if self.is_transposed else w.t()

        return self._stack(one)

    def biases(self, read: ReadWeight) -> torch.Tensor:
        """The parameter `bias`, [E, N], or [N]."""
        return self._stack(lambda layers: self._columns(layers, read))

    def _columns(self, layers: tuple[str, ...], read: ReadWeight) -> torch.Tensor:
        both = torch.cat([read(layer).to(self.dtype) for layer in layers], dim=-1)
        return in_turns(both) if self.alternates and len(layers) == 2 else both

    def _stack(self, make: Callable[[tuple[str, ...]], torch.Tensor]) -> torch.Tensor:
        first = make(self.parts[0]).contiguous()
        if not self.experts:
            return first
        stack = first.new_empty(len(self.parts), *first.shape)
        for expert, layers in enumerate(self.parts):
            stack[expert] = first if expert == 0 else make(layers)
        return stack


def tensors_inside(checkpoint: Checkpoint, layer: str) -> Mapping[str, str]:
    """The tensors of a layer, quantized or not: name inside the layer -> name in the checkpoint."""
    if layer in checkpoint.layers:
        return checkpoint.layers[layer].tensors
    names = {inside: f"{layer}.{inside}" for inside in ("weight", "bias")}
    return {inside: name for inside, name in names.items() if name in checkpoint.shards.tensors}


def check_no_bias(checkpoint: Checkpoint, layer: str) -> None:
    """Raises ValueError for a bias of a layer that has none in the model. Some quantizers write zeros there."""
    name = tensors_inside(checkpoint, layer).get("bias")
    if name is not None and bool(checkpoint.shards.read(name).any()):
        raise ValueError(f"{name}: expected none or zeros, as the model has no bias here, got others")


def dtype_of(model: PreTrainedModel, name: str) -> torch.dtype:
    """The dtype that transformers keeps a parameter of a model in, whose tensors have not been read yet."""
    dtype = model.state_dict()[name].dtype
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return dtype
    alternation, groups, _ = build_glob_alternation(list(plan))
    found = alternation.search(name)
    return dtype if found is None or found.lastgroup is None else plan[groups[found.lastgroup]]
