"""LoRA of PEFT on `weightonly.nn.Experts`, by `target_parameters`, as on transformers' dense experts.

The adapters of a product are one pair of matrices for each expert, named and laid out as PEFT has them for 3-D
Parameters: A [E * r, K], expert by expert, and B [N, r * E], the experts in turns, in the order of N of the dense
experts. So an adapter of packed experts loads into dense ones, and the other way round.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from peft import LoraConfig
from peft.tuners.lora import layer as lora_layer
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils import _get_submodules
from torch.compiler import is_compiling
from transformers.integrations.moe import _grouped_mm

from ..experts import Multiply
from ..nn.experts import Experts, ModuleGate, alternates, gates_first
from ..nn.grouped import GroupedLinear
from ..parallel.experts import ParallelExperts
from .lora_options import check_config

_RANK_ALIGN = 8
"""Ranks are padded to rows of 16 bytes, which grouped_mm reads."""


class LoraExperts(lora_layer.ParamWrapper):
    """One product of `weightonly.nn.Experts` with LoRA adapters for each expert.

    y[t] = base(x)[t] + scaling * (x[t] @ A[e]^T) @ B[e]^T, e being the expert of row t. No matrix of the size of a
    weight is made. For two products one wrapper is around the other, as PEFT has it.

    `merge`, `unmerge` and what is refused are those of `LoraLinear`.
    """

    def __init__(
        self, base_layer: torch.nn.Module, adapter_name: str, parameter_name: str, config: LoraConfig, **kwargs: Any
    ) -> None:
        if isinstance(_inside(base_layer), ParallelExperts):
            raise ValueError("base_layer: expected whole experts, got ParallelExperts, which are cut among ranks")
        if getattr(_inside(base_layer), parameter_name).activations is not None:
            raise ValueError(
                f"target_parameters: expected experts that take x in 16 bits, got {parameter_name} with activations "
                "'fp8', which have no adapters; layers={'experts': {'activations': '16bit'}} leaves their x as it is"
            )
        check_config(config, "weightonly.nn.Experts")
        super().__init__(base_layer, adapter_name, parameter_name, config=config, **kwargs)
        self._unmerged: dict[str, torch.Tensor] = {}  # the state of the product from before a merge

    @property
    def product(self) -> GroupedLinear:
        """The layer that the adapters are beside."""
        layer = _inside(self).get_submodule(self.parameter_name)
        assert isinstance(layer, GroupedLinear)
        return layer

    def get_param(self) -> torch.Tensor:
        """[E, N, K], for code that looks at its shape, dtype and device."""
        return self.product.weight

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        check_config(config, "weightonly.nn.Experts")
        super().update_layer(adapter_name, r, lora_alpha, config=config, **kwargs)

    def forward(
        self, x: torch.Tensor, *args: Any, adapters: Mapping[str, Multiply] | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """`Experts.forward` with these adapters beside those of the wrappers around."""
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        if self.disable_adapters and self.merged:
            self.unmerge()
        adapters = dict(adapters or {})
        names = [name for name in self.active_adapters if name in self.lora_A]
        if names and not self.disable_adapters and not self.merged:
            adapters[self.parameter_name] = partial(self._beside, names)
        y: torch.Tensor = self.base_layer(x, *args, adapters=adapters, **kwargs)
        return y

    def _beside(self, names: list[str], x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """What the adapters add to the product of x [T, K], sorted by expert: [T, N]."""
        # Rows of no expert, which are the last ones, are those of one more expert, whose factors are zeros.
        ends = torch.cat([offs, offs.new_full((1,), x.shape[0])])  # (E + 1)
        parts = []
        with torch.autocast(x.device.type, enabled=False):
            for name in names:
                a, b = self._factors(name, x.dtype)
                parts.append(_grouped_mm(_grouped_mm(x, a, ends), b, ends))
        return sum(parts[1:], parts[0])

    def _factors(self, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A^T [E + 1, K, r] and scaling * B^T [E + 1, r, N] of one adapter, in the order of N of the packed weight."""
        a: Any = self.lora_A[name].weight
        b: Any = self.lora_B[name].weight
        a = a.to(dtype).unflatten(0, (self.num_experts, -1))  # (E, r, K)
        b = (b * self.scaling[name]).to(dtype).unflatten(1, (-1, self.num_experts))  # (N, r, E)
        if self._alternates:
            b = gates_first(b, 0)
        ranks = -a.shape[1] % _RANK_ALIGN
        a = F.pad(a, (0, 0, 0, ranks, 0, 1))  # (E + 1, r, K)
        b = F.pad(b.permute(2, 1, 0), (0, 0, 0, ranks, 0, 1))  # (E + 1, r, N)
        return a.mT, _copied(b) if is_compiling() else b.contiguous()

    @property
    def _alternates(self) -> bool:
        """Whether the dense experts have gates, and what they are multiplied with, in turns in N, as gpt-oss has."""
        between = _inside(self).between
        return isinstance(between, ModuleGate) and alternates(between.module, self.parameter_name)

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weights and quantizes them again, one expert at a time.

        Raises ValueError for a sum that is not finite, with `safe_merge` or without, and what `quantize` raises, naming
        the expert; the weights are then those from before.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        layer = self.product
        before = copy.deepcopy(layer.state_dict())
        factors = [self._factors(name, torch.float32) for name in names]
        try:
            for expert in range(self.num_experts):
                w = layer.operand.expert(expert).dequantize(torch.float32)  # [K, N]
                for a, b in factors:
                    w += a[expert] @ b[expert]
                layer.requantize(expert, w)
        except (TypeError, ValueError) as error:
            layer.load_state_dict(before)
            raise type(error)(f"adapters: {', '.join(names)}: {self.parameter_name}: {error}") from error
        self._unmerged = self._unmerged or before
        layer.locked = f"expected a layer without merged adapters, got one with {', '.join(names)}; call unmerge first"
        warnings.warn(f"adapters are merged into {layer.format}: results differ by its rounding", stacklevel=2)
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """Brings back the weights from before the first merge, bit for bit."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        self.product.load_state_dict(self._unmerged)
        self.product.locked = None
        self._unmerged = {}
        self.merged_adapters.clear()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> torch.nn.Module:
        """What PEFT puts in the place of this layer: the experts, whose weights are their own from now on."""
        experts = super().unload_and_optionally_merge_module(merge, safe_merge, adapter_names)
        assert isinstance(experts, Experts)
        for name in experts.products:
            getattr(experts, name).locked = None
        return experts


# Inductor gives what it computes strides of its own choice, and lowers grouped_mm for those that it reads alone. It
# leaves those of an operator.
@torch.library.custom_op("weightonly::contiguous_copy", mutates_args=(), schema="(Tensor x) -> Tensor")
def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_copied.register_fake
def _result_of_copied(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _gradient_of_copied(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad


_copied.register_autograd(_gradient_of_copied)


def inject(
    tuner: Any, peft_config: Any, model: torch.nn.Module, adapter_name: str, low_cpu_mem_usage: bool
) -> list[str]:
    """Wraps the products of packed experts that `target_parameters` of an adapter names. Returns their names."""
    found = []
    targets = tuple(peft_config.target_parameters)
    for name, product in list(_products(model)):
        key = f"{name}.{product}"
        if key not in targets and not key.endswith(tuple(f".{target}" for target in targets)):
            continue
        parent, outermost, attribute = _get_submodules(model, name)
        target = next((w for w in _wrappers(outermost) if w.parameter_name == product), outermost)
        with init_empty_weights() if low_cpu_mem_usage else nullcontext():
            tuner._create_and_replace(
                peft_config, adapter_name, target, attribute, parent, current_key=key, parameter_name=product
            )
        found.append(key)
    return found


def _products(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """(the experts' name without wrappers, product), the first product first, as dense experts register them."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            for product in module.products:
                yield name.replace(".base_layer", ""), product


def _wrappers(module: torch.nn.Module) -> Iterator[LoraExperts]:
    """Those that experts are in, the outermost first."""
    while isinstance(module, LoraExperts):
        yield module
        module = module.base_layer


def _inside(layer: torch.nn.Module) -> Experts:
    base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    assert isinstance(base, Experts)
    return base
