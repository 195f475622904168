"""Which modules `quantize_model` knows: what each of them holds, why it may be left, and what replaces it."""

from __future__ import annotations

from typing import Protocol

import torch

from .base import PackedLayer
from .experts import Experts, expert_weights, why_not_experts
from .linear import Linear
from .recipe import Recipe


class Handler(Protocol):
    """One kind of module. `HANDLERS` has them all; the first that owns a module decides."""

    kind: str

    def owns(self, module: torch.nn.Module) -> bool:
        """Whether the module is of this kind."""

    def shape(self, module: torch.nn.Module) -> tuple[int, ...]:
        """(K, N), or (E, K, N) of the largest weight: for the summary."""

    def why_left(self, module: torch.nn.Module, recipe: Recipe) -> str | None:
        """Why it cannot be quantized by this recipe, or None. For nothing that depends on the values."""

    def quantize(self, module: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
        """What replaces the module. Its weights may be on meta: then so is the result."""


def is_linear(module: torch.nn.Module) -> bool:
    """Whether it is a torch.nn.Linear, or the subclass of Falcon, which computes the same."""
    cls = type(module)
    return cls is torch.nn.Linear or (cls.__name__ == "FalconLinear" and cls.__module__.startswith("transformers."))


def library_of(module: torch.nn.Module) -> str | None:
    """Who quantized a linear layer in memory, of those whose layers `pack_model` takes: torchao or bitsandbytes."""
    cls = type(module)
    if cls is torch.nn.Linear:
        return "torchao" if type(module.weight).__module__.partition(".")[0] == "torchao" else None
    is_4bit = cls.__name__ == "Linear4bit" and cls.__module__.partition(".")[0] == "bitsandbytes"
    return "bitsandbytes" if is_4bit else None


class DenseHandler:
    """Layers with one weight, which is a matrix."""

    kind = "Linear"

    def owns(self, module: torch.nn.Module) -> bool:
        return is_linear(module)

    def weight(self, module: torch.nn.Module) -> torch.Tensor:
        """w [K, N]"""
        assert isinstance(module.weight, torch.Tensor)
        return module.weight.detach().t()

    def shape(self, module: torch.nn.Module) -> tuple[int, ...]:
        return tuple(self.weight(module).shape)

    def why_left(self, module: torch.nn.Module, recipe: Recipe) -> str | None:
        k, n = self.shape(module)
        if n == 1:
            return "N = 1: a gate"
        try:
            weight = self.weight(module)
            recipe.check_k(k, weight.is_cuda)
            recipe.check_dtype(weight.dtype, weight.is_cuda)
        except ValueError as error:
            return str(error)
        return None

    def quantize(self, module: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
        bias = module.bias
        assert bias is None or isinstance(bias, torch.Tensor)
        layer = Linear.from_weight(self.weight(module), bias, recipe).train(module.training)
        layer.is_conv1d = self.kind == "Conv1D"
        return layer


class QuantizedHandler(DenseHandler):
    """Linear layers that another library quantized: left alone."""

    kind = "quantized Linear"

    def owns(self, module: torch.nn.Module) -> bool:
        return library_of(module) is not None

    def shape(self, module: torch.nn.Module) -> tuple[int, ...]:
        assert isinstance(module, torch.nn.Linear)
        return module.in_features, module.out_features

    def why_left(self, module: torch.nn.Module, recipe: Recipe) -> str | None:
        return f"{library_of(module)} quantized it; weightonly.nn.pack_model packs its numbers as they are"


class Conv1DHandler(DenseHandler):
    """GPT-2's Conv1D of transformers: a linear layer whose weight is [K, N]."""

    kind = "Conv1D"

    def owns(self, module: torch.nn.Module) -> bool:
        return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")

    def weight(self, module: torch.nn.Module) -> torch.Tensor:
        assert isinstance(module.weight, torch.Tensor)
        return module.weight.detach()


class SubclassHandler(DenseHandler):
    """Subclasses of torch.nn.Linear, such as the out_proj of torch.nn.MultiheadAttention: left alone."""

    kind = "subclass of Linear"

    def owns(self, module: torch.nn.Module) -> bool:
        return isinstance(module, torch.nn.Linear)

    def why_left(self, module: torch.nn.Module, recipe: Recipe) -> str | None:
        return f"{type(module).__name__} is a subclass of torch.nn.Linear, whose owner may use the weight itself"


class ExpertsHandler:
    """Experts of a mixture, stacked in 3-D Parameters: quantized where they are in transformers' interface."""

    kind = "experts"

    def owns(self, module: torch.nn.Module) -> bool:
        return any(p.dim() == 3 and p.is_floating_point() for p in module.parameters(recurse=False))

    def shape(self, module: torch.nn.Module) -> tuple[int, ...]:
        return tuple(max(module.parameters(recurse=False), key=torch.Tensor.numel).shape)

    def why_left(self, module: torch.nn.Module, recipe: Recipe) -> str | None:
        if (reason := why_not_experts(module)) is not None:
            return f"weights of three dimensions, and {reason}"
        try:
            for name, parameter in module.named_parameters():
                if parameter.dim() == 3:
                    recipe.check_k(expert_weights(module, name).shape[1], parameter.is_cuda)
                    recipe.check_dtype(parameter.dtype, parameter.is_cuda)
        except ValueError as error:
            return str(error)
        return None

    def quantize(self, module: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
        return Experts.from_module(module, recipe)


class PackedHandler:
    """Layers of this library: they stay as they are."""

    kind = "packed layer"

    def owns(self, module: torch.nn.Module) -> bool:
        return isinstance(module, PackedLayer)

    def shape(self, module: torch.nn.Module) -> tuple[int, ...]:
        assert isinstance(module, PackedLayer)
        experts = () if module._experts is None else (module._experts,)
        return (*experts, module.in_features, module.out_features)

    def why_left(self, module: torch.nn.Module, recipe: Recipe) -> str | None:
        assert isinstance(module, PackedLayer)
        groups = "per channel" if module.group_size == -1 else f"groups of {module.group_size}"
        rest = ("" if module.symmetric else ", with zero points") + ("" if module.activations is None else ", x in fp8")
        return f"it is {module.format} already, {groups}{rest}"

    def fits(self, module: torch.nn.Module, recipe: Recipe) -> bool:
        """Whether it is what the recipe would make of it."""
        assert isinstance(module, PackedLayer)
        rows, asked = (module.in_features if size == -1 else size for size in (module.group_size, recipe.group_size))
        return (module.format, module.symmetric, rows, module.activations) == (
            recipe.format,
            recipe.symmetric,
            asked,
            recipe.activations,
        )

    def quantize(self, module: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
        raise TypeError("module: expected a dense layer, got one that is packed")


PACKED = PackedHandler()
HANDLERS: list[Handler] = [
    PACKED,
    QuantizedHandler(),
    DenseHandler(),
    Conv1DHandler(),
    SubclassHandler(),
    ExpertsHandler(),
]


def handler_of(module: torch.nn.Module) -> Handler | None:
    """The handler that owns a module, or None."""
    return next((handler for handler in HANDLERS if handler.owns(module)), None)
