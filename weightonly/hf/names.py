"""The names that transformers gives to the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..nn.experts import why_not_experts


@dataclass(frozen=True)
class OtherExperts:
    """Experts without the interface of `why_not_experts`, such as Llama4's: w [E, N, K], or [E, K, N] if transposed."""

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    is_transposed: bool
    has_gate: bool = True
    has_bias: bool = False

    @classmethod
    def of(cls, module: torch.nn.Module) -> OtherExperts | None:
        """None for other modules: the shapes of the two weights, which have to fit each other, tell which way."""
        found = dict(module.named_parameters())
        if found.keys() != {"gate_up_proj", "down_proj"} or any(weight.dim() != 3 for weight in found.values()):
            return None
        (_, a, b), (_, c, d) = found["gate_up_proj"].shape, found["down_proj"].shape
        for is_transposed, fits in ((True, (a, b) == (d, 2 * c)), (False, (b, a) == (c, 2 * d))):
            if fits:
                return cls(found["gate_up_proj"], found["down_proj"], is_transposed)
        return None


class Names:
    """The names that a model gives to the tensors of its checkpoint: transformers renames some, and prefixes others."""

    def __init__(self, model: PreTrainedModel) -> None:
        conversions = get_model_conversion_mapping(model)
        self.renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self.converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self.model = model
        self._prefix = model.base_model_prefix
        self.tensors = model.state_dict()
        self.experts: dict[str, Any] = {
            name: module for name, module in model.named_modules() if why_not_experts(module) is None
        }
        """Modules with the weights of all experts of a mixture, which `nn.Experts` can replace."""
        self.others: dict[str, OtherExperts] = {
            name: others
            for name, module in model.named_modules()
            if name not in self.experts and (others := OtherExperts.of(module)) is not None
        }
        """Those that it cannot replace, but that have their weights in the same form."""

    def of_layer(self, layer: str) -> tuple[str, str | None]:
        """(the module of layer `layer` of the checkpoint, None), or (a parameter that it is a part of, how).

        The name may be one that the model does not have.
        """
        name = f"{layer}.weight"
        found, pattern = rename_source_key(name, self.renamings, self.converters, self._prefix, self.tensors)
        if found not in self.tensors and name in self.tensors:
            found, pattern = name, None
        return (found.removesuffix(".weight") if pattern is None else found), pattern

    def targets(self, name: str, pattern: str) -> list[str]:
        """The parameters that a converter makes of the layer of which `of_layer` gave `name` and `pattern`."""
        converter = next(c for c in self.converters if pattern in c.source_patterns)
        first = converter.target_patterns[0]
        return [name.replace(first, target) for target in converter.target_patterns]

    def of_tensor(self, name: str) -> str:
        """The name in the model of a tensor that is not quantized; one that the model does not have, maybe."""
        found, _ = rename_source_key(name, self.renamings, self.converters, self._prefix, self.tensors)
        return name if found not in self.tensors and name in self.tensors else found

    def of_tensors(self, name: str) -> list[str]:
        """The same, all of those that a converter makes of the tensor."""
        found, pattern = rename_source_key(name, self.renamings, self.converters, self._prefix, self.tensors)
        if pattern is None or (found not in self.tensors and name in self.tensors):
            return [self.of_tensor(name)]
        return self.targets(found, pattern)

    def has_experts(self, name: str) -> bool:
        """Whether `name`, maybe with another prefix, is that of a module in `experts`."""
        return any(self.stack_of(f"{name}.{product}") for product in ("gate_up_proj", "up_proj"))

    def stack_of(self, name: str) -> str | None:
        """The name in the model of stacked weights of experts, which has another prefix than `name`, maybe; or None."""
        return next(
            (full for full in self.parameters(name) if full.rpartition(".")[0] in self.experts | self.others), None
        )

    def parameters(self, name: str) -> list[str]:
        """The tensors of the model whose name is `name`, maybe with another prefix."""
        bare = name.removeprefix(f"{self._prefix}.")
        return [full for full in (name, bare, f"{self._prefix}.{bare}") if full in self.tensors]
