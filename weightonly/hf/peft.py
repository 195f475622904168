"""LoRA of PEFT on `weightonly.nn.Linear` and `Experts`: what `register` teaches PEFT, which has no hook for it.

After it `get_peft_model`, "all-linear", `target_parameters` of experts and `PeftModel.from_pretrained` take quantized
models as they take dense ones.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners import tuners_utils
from peft.tuners.lora import layer as lora_layer
from peft.tuners.lora import model as lora_model
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils import transformers_weight_conversion
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND

from ..nn.experts import Experts
from ..nn.grouped import GroupedLinear
from ..nn.linear import Linear
from ..parallel import ParallelLinear
from .lora_experts import LoraExperts, inject
from .lora_options import check_config


class LoraLinear(lora_layer.Linear):
    """A `weightonly.nn.Linear` with LoRA adapters: y = base(x) + scaling * B(A(dropout(x))).

    `merge` quantizes the sum of weight and adapters again, in the format of the layer, as PEFT does with bitsandbytes'
    4-bit layers: the result differs from base and adapter side by side by the rounding of the format. `unmerge` brings
    back the bits from before; until then `update_` of the base layer is an error, as it would be undone.

    Raises ValueError for DoRA and other variants, for initializations that need the dense weight, and for a layer with
    an activation.
    """

    def __init__(self, base_layer: torch.nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        inside = _inside(base_layer)
        if isinstance(inside, ParallelLinear):
            raise ValueError(
                f"base_layer: expected a whole layer, got a {type(inside).__name__}; add adapters first, and cut "
                "base_layer, lora_A and lora_B by one plan of parallelize_module after that"
            )
        if inside.activation not in (None, "identity"):
            raise ValueError(f"activation: expected None for a layer with adapters, got {inside.activation!r}")
        config.fan_in_fan_out = False  # a Conv1D was [K, N]; its packed weight is like any other
        super().__init__(base_layer, adapter_name, config=config, **kwargs)
        self._unmerged: dict[str, torch.Tensor] = {}  # the state of the base layer from before a merge

    @property
    def weight(self) -> torch.Tensor:
        """That of the base layer; PEFT would take its qweight, to whose dtype T5 casts x."""
        return _inside(self).weight

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs: Any) -> Any:
        check_config(config, "weightonly.nn.Linear")
        variant = super().resolve_lora_variant(config=config, **kwargs)
        if variant is not None and config.alora_invocation_tokens is None:
            raise ValueError(f"config: expected plain LoRA for weightonly.nn.Linear, got {type(variant).__name__}")
        return variant

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        check_config(config, "weightonly.nn.Linear")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight and quantizes it again. safe_merge: look for NaN and Inf first.

        Raises ValueError for a sum that is not finite, and what `Linear.requantize` raises. Raises NotImplementedError
        for aLoRA.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        if any(name in self.lora_variant for name in names):
            raise NotImplementedError("adapters: expected plain LoRA to merge, got aLoRA")
        base = _inside(self)
        w, bias = base.dequantize(torch.float32), base.bias  # [K, N]
        for name in names:
            w += self.get_delta_weight(name).float().t()
            if self.lora_bias[name]:
                if bias is None:
                    raise ValueError("lora_bias: expected False for a layer without a bias, got True; it has no place")
                bias = bias.float() + self.lora_B[name].bias.float() * self.scaling[name]
        tensors = [w] if bias is None else [w, bias]
        if safe_merge and not all(torch.isfinite(tensor).all() for tensor in tensors):
            raise ValueError(f"adapters: expected finite merged weights, got NaN or Inf with {', '.join(names)}")
        unmerged = self._unmerged or copy.deepcopy(base.state_dict())
        base.requantize(w)
        self._unmerged = unmerged
        base.locked = f"expected a layer without merged adapters, got one with {', '.join(names)}; call unmerge first"
        if base.bias is not None and bias is not None:
            base.bias.copy_(bias)
        warnings.warn(f"adapters are merged into {base.format}: results differ by its rounding", stacklevel=2)
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """Brings back the layer from before the first merge, bit for bit."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        base = _inside(self)
        base.load_state_dict(self._unmerged)
        base.locked = None
        self._unmerged = {}
        self.merged_adapters.clear()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> torch.nn.Module:
        """What PEFT puts in the place of this layer: the base layer, whose weight is its own from now on."""
        if merge:
            self.merge(safe_merge, adapter_names)
        _inside(self).locked = None
        return self.get_base_layer()


def _inside(layer: torch.nn.Module) -> Linear:
    base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    assert isinstance(base, Linear)
    return base


def register() -> None:
    """Makes `weightonly.nn.Linear` and `Experts` known to PEFT: a second call does nothing."""
    cls: Any = lora_model.LoraModel
    if getattr(cls, "_knows_weightonly", False):
        return
    create, include = cls._create_new_module, tuners_utils._maybe_include_all_linear_layers
    of_parameters = cls._inject_parameters

    def create_new_module(
        lora_config: LoraConfig, adapter_name: str, target: torch.nn.Module, **kwargs: Any
    ) -> torch.nn.Module:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, GroupedLinear):
            raise ValueError(
                f"target_modules: expected no {kwargs['target_name']}, which is a layer of all experts; name it in "
                "target_parameters, such as ['experts.gate_up_proj', 'experts.down_proj']"
            )
        if not isinstance(base, Linear | Experts):
            return create(lora_config, adapter_name, target, **kwargs)
        kwargs.pop("device_map", None)
        if isinstance(base, Experts):
            return LoraExperts(target, adapter_name, config=lora_config, **kwargs)
        return LoraLinear(target, adapter_name, config=lora_config, **kwargs)

    def include_all_linear_layers(peft_config: Any, model: torch.nn.Module) -> PeftConfig:
        targets = getattr(peft_config, "target_modules", None)
        wants_all = isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND
        peft_config = include(peft_config, model)
        if wants_all:
            peft_config.target_modules = set(peft_config.target_modules) | _names_of_layers(model)
        return peft_config

    def inject_parameters(
        tuner: Any, peft_config: Any, model: torch.nn.Module, adapter_name: str, low_cpu_mem_usage: bool
    ) -> list[str]:
        arguments = (peft_config, model, adapter_name, low_cpu_mem_usage)
        found: list[str] = of_parameters(tuner, *arguments)
        return found + inject(tuner, *arguments)

    cls._create_new_module = staticmethod(create_new_module)
    cls._inject_parameters = inject_parameters
    cls._knows_weightonly = True
    modules: list[Any] = [tuners_utils, transformers_weight_conversion]
    for module in modules:
        module._maybe_include_all_linear_layers = include_all_linear_layers


def _names_of_layers(model: torch.nn.Module) -> set[str]:
    """The quantized layers of a model that "all-linear" means: all but output embeddings."""
    getter = getattr(model, "get_output_embeddings", None)
    output = getter() if callable(getter) else None
    inside = {id(m.get_base_layer()) for m in model.modules() if isinstance(m, BaseTunerLayer)}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module is not output and id(module) not in inside
    }
