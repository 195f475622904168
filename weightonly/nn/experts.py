"""Experts: the experts of a mixture with packed weights, in place of transformers' modules of 3-D Parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.compiler import is_compiling

from ..experts import Multiply, run_experts
from ..gate import Gate
from ..gemm import autocast
from ..grouped import Product
from ..packed import PackedWeight
from ..packing import preprocess, unpack
from ..weight import LooseWeight
from .grouped import GroupedLinear, OneLayer
from .recipe import Recipe

Columns = Callable[[torch.Tensor], torch.Tensor]
"""[..., N] -> the same in another order."""


class Experts(torch.nn.Module):
    """`y[m] = sum_j weights[m, j] * (between(x[m] @ first[e]) @ down[e])`, with `e = ids[m, j]`.

    Takes the place of the experts of transformers' mixtures (`MixtralExperts`, `Qwen3MoeExperts`, `GptOssExperts` and
    others): `forward` has their arguments. `weightonly.fused_experts` says in which order it sums, and what experts of
    other ranks add. A plain attribute beside num_experts is `layer_name`, the name in the model, which errors of
    `forward` begin with, or None.

    Attributes:
        gate_up_proj: GroupedLinear [E, H, 2 I], gates first, also of gpt-oss, which has gate and up in turns; named
            up_proj, [E, H, I], where the experts have no gate.
        down_proj: GroupedLinear [E, I, H].
        between: what is between the two products, (T, 2 I) -> (T, I): a `Gate`, or that of the module it was made from.

    With activations "fp8" of both layers it computes `fused_experts` of what `quantize_activations(x)` returns.
    Gradients are those of products without rounding, as `Linear` has them.

    Examples:
        >>> products = wo.nn.GroupedLinear(4, 256, 1024), wo.nn.GroupedLinear(4, 512, 256)
        >>> experts = wo.nn.Experts(*products, wo.Gate("silu"))
        >>> experts(torch.randn(3, 256).half(), torch.tensor([[0, 3]] * 3), torch.full((3, 2), 0.5)).shape
        torch.Size([3, 256])
    """

    gate_up_proj: GroupedLinear
    up_proj: GroupedLinear
    down_proj: GroupedLinear

    def __init__(self, first: GroupedLinear, down: GroupedLinear, between: Gate | ModuleGate) -> None:
        """From two layers.

        Args:
            first: gate_up_proj, or up_proj.
            down: down_proj.
            between: a `Gate`, or that of a module.

        Raises:
            ValueError: shapes that do not fit each other.
        """
        super().__init__()
        columns = down.in_features * (2 if between.has_gate else 1)
        if first.out_features != columns:
            raise ValueError(
                f"first: expected {columns} columns for down of K = {down.in_features}, got {first.out_features}"
            )
        if first.in_features != down.out_features or first.num_experts != down.num_experts:
            raise ValueError(
                f"down: expected {first.num_experts} experts with N = {first.in_features}, "
                f"got {down.num_experts} with N = {down.out_features}"
            )
        self.num_experts = first.num_experts
        self.between = between
        self.layer_name: str | None = None
        self.add_module("gate_up_proj" if between.has_gate else "up_proj", first)
        self.down_proj = down

    @classmethod
    def from_module(cls, module: torch.nn.Module, recipe: Recipe) -> Experts:
        """Quantize and pack the experts of a module that `why_not_experts` knows; of one on meta a layer on meta.

        Each expert is quantized alone, so that one of them at a time is dense in addition to the module.

        Raises what `quantize` and `preprocess` raise, naming the expert.

        Args:
            module: dense experts in transformers' interface.
            recipe: how each is quantized.

        Raises:
            TypeError: another module.
        """
        if (reason := why_not_experts(module)) is not None:
            raise TypeError(
                f"module: expected experts in transformers' interface, got {type(module).__name__}: {reason}"
            )
        layers = [_quantized(module, name, recipe) for name in expert_products(module)]
        return cls(layers[0], layers[1], ModuleGate.of(module)).train(module.training)

    @classmethod
    def from_quantized(
        cls,
        gate_up: Sequence[OneLayer] | Sequence[tuple[OneLayer, OneLayer]],
        down: Sequence[OneLayer],
        activation: str | Gate | None = "silu",
        *,
        module: torch.nn.Module | None = None,
        dtype: torch.dtype | None = None,
        activations: str | None = None,
    ) -> Experts:
        """From the layers of each expert, such as records of a checkpoint (`weightonly.formats.QuantizedLayer`).

        Args:
            gate_up: for each expert its first layer [H, 2 I], its columns in the order of `module`, without one gates
                first; or the pair (gate, up) of layers [H, I].
            down: for each expert its second layer [I, H].
            activation: as in `weightonly.fused_experts`.
            module: dense experts, which may be on meta: what is between the products is theirs, and `activation`
                unused.
            dtype: of scales, zeros and bias; None: that of the scales.
            activations: "fp8" is that of weights in layout "tiled_fp8" in any case; see `Linear`.

        Raises:
            ValueError: naming the expert, for layers that do not fit each other: other shapes, formats, layouts or
                group sizes, and gate and up of different act-order.
            TypeError: a `module` that is no experts.
        """
        if module is not None and (reason := why_not_experts(module)) is not None:
            raise TypeError(
                f"module: expected experts in transformers' interface, got {type(module).__name__}: {reason}"
            )
        if len(gate_up) != len(down):
            raise ValueError(f"down: expected {len(gate_up)} experts as gate_up has, got {len(down)}")
        between: Gate | ModuleGate
        if module is not None:
            between = ModuleGate.of(module)
            if alternates(module, "gate_up_proj"):
                gate_up = [p if isinstance(p, tuple) else in_order(p, gates_first) for p in gate_up]  # type: ignore[assignment]
        else:
            between = activation if isinstance(activation, Gate) else Gate.of(activation)
        first = stack_parts("gate_up", gate_up, dtype, activations)
        return cls(first, stack_parts("down", down, dtype, activations), between)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *,
        adapters: Mapping[str, Multiply] | None = None,
    ) -> torch.Tensor:
        """x [M, H], experts int [M, top_k], their weights [M, top_k] -> y [M, H] in the dtype of the scales.

        Raises what `weightonly.fused_experts` raises; the message begins with the name of the layer.

        Args:
            adapters: the name of a product -> (its x [T, K] sorted by expert, offs) -> [T, N], which is added to it:
                what LoRA has beside a packed weight.
        """
        if is_compiling():
            return self._run(hidden_states, top_k_index, top_k_weights, adapters or {})
        try:
            return self._run(hidden_states, top_k_index, top_k_weights, adapters or {})
        except (TypeError, ValueError, RuntimeError) as error:
            if type(error) not in (TypeError, ValueError, RuntimeError):
                raise  # one with attributes of its own, such as that of a full memory
            name = "without a name" if self.layer_name is None else repr(self.layer_name)
            raise type(error)(f"layer {name} (weightonly.nn.Experts): {error}") from error

    @property
    def products(self) -> tuple[str, str]:
        """The names of the two layers, the first product first."""
        return expert_products(self.between)

    def _run(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, adapters: Mapping[str, Multiply]
    ) -> torch.Tensor:
        scales, dtype = self.down_proj.scales, self.down_proj.compute_dtype
        is_cast = dtype != scales.dtype and isinstance(x, torch.Tensor)
        rows = x.to(dtype) if is_cast else autocast(x, scales)
        between = self.between if isinstance(self.between, Gate) else self.between.gate or self.between
        first, second = (_with(getattr(self, name).multiply, adapters.get(name)) for name in self.products)
        y = run_experts(rows, ids, weights, self.num_experts, first, between, second)
        return y.to(x.dtype) if is_cast else y

    @torch.no_grad()
    def update_(
        self,
        first: torch.Tensor,
        down: torch.Tensor,
        first_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> Experts:
        """Quantizes other weights into the memory of these; see `QuantizedWeight.update_`.

        Raises what `Linear.update_` raises; errors name the argument and the expert.

        Args:
            first: dense, [E, N, K] as torch.nn.Linear of each expert has it, gates first; for experts that were made
                from a module as its gate_up_proj (or up_proj) and down_proj are: gpt-oss has [E, K, N], and gate and up
                in turns. On any device.
            down: like `first`.
            first_bias: [E, N], as the module has them; None: they stay as they are.
            down_bias: [E, N], as the module has them; None: they stay as they are.

        Returns:
            This module. Nothing is written unless all fits.
        """
        module = self.between.module if isinstance(self.between, ModuleGate) else None
        is_transposed = module is not None and module.is_transposed
        layer = getattr(self, self.products[0])
        in_turns = module is not None and alternates(module, "gate_up_proj")
        writes = [
            *layer.checked_update(first, first_bias, "first", is_transposed=is_transposed, in_turns=in_turns),
            *self.down_proj.checked_update(down, down_bias, "down", is_transposed=is_transposed),
        ]
        for write in writes:
            write()
        return self

    @torch.no_grad()
    def to_dense(self, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Dense experts with the dequantized weights, of the class of the module that these were made from.

        Args:
            dtype: None: that of the scales.

        Raises:
            TypeError: experts that were made without a module.
        """
        if not isinstance(self.between, ModuleGate):
            raise TypeError(f"between: expected experts that were made from a module, got {self.between}")
        dense: Any = copy.copy(self.between.module)
        dense.__dict__["_parameters"] = {}
        for product in expert_products(dense):
            layer = self.get_submodule(product)
            assert isinstance(layer, GroupedLinear)
            w = layer.dequantize(dtype)  # (E, K, N)
            bias = None if layer.bias is None else layer.bias.detach()  # (E, N)
            if alternates(dense, product):
                w, bias = in_turns(w), None if bias is None else in_turns(bias)
            weight = w if dense.is_transposed else w.transpose(1, 2).contiguous()
            setattr(dense, product, torch.nn.Parameter(weight))
            if bias is not None:
                setattr(dense, f"{product}_bias", torch.nn.Parameter(bias.to(w.dtype)))
        return dense.train(self.training)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, between={self.between}"


def _with(multiply: Multiply, adapter: Multiply | None) -> Multiply:
    return multiply if adapter is None else lambda x, offs: multiply(x, offs) + adapter(x, offs)


@dataclass(frozen=True, repr=False)
class ModuleGate:
    """What dense experts compute between their products, gates first; `module` is them without their weights."""

    module: Any
    has_gate: bool
    gate: Gate | None
    """The same, where it is one."""

    @classmethod
    def of(cls, module: Any) -> ModuleGate:
        shell = copy.copy(module)
        shell.__dict__["_parameters"] = {}
        made = cls(shell, module.has_gate, None)
        columns = expert_weights(module, expert_products(module)[0]).shape[2]
        return cls(shell, module.has_gate, _same_gate(made, columns))

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        if not self.has_gate:
            return self.module.act_fn(y)
        return self.module._apply_gate(in_turns(y) if alternates(self.module, "gate_up_proj") else y)

    def __repr__(self) -> str:
        return type(self.module).__name__


@torch.no_grad()
def _same_gate(between: ModuleGate, columns: int) -> Gate | None:
    """The gate that computes what a module does: it gives the module's numbers, in fp32, beyond its limits too."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, max(1, 4096 // columns), columns, generator=generator, dtype=torch.float32, device="cpu")
    limit = _number(between.module, "limit")
    z[0], z[1] = 2 * z[0], max(8.0, 2 * (limit or 0.0)) * z[1]
    z = z.flatten(0, 1)
    try:
        y = between(z)
        found = (gate for gate in _gates(between) if torch.allclose(gate(z), y, rtol=1e-5, atol=1e-5))
        return next(found, None)
    except (RuntimeError, TypeError):  # of a module that computes on other devices or dtypes alone
        return None


def _gates(between: ModuleGate) -> Iterator[Gate]:
    """Gates with the limit and the alpha that a module has as attributes, or without."""
    names = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")
    if not between.has_gate:
        yield from (Gate(name, has_gate=False) for name in names)
        return
    limit, alpha = (_number(between.module, name) for name in ("limit", "alpha"))
    for bound in dict.fromkeys((limit, None)):
        yield from (Gate(name, bound) for name in names)
        yield from (Gate("silu", bound, alpha, shift) for shift in (1.0, 0.0))


def _number(module: Any, name: str) -> float | None:
    """The limit or the alpha of a gate, as transformers' models call them."""
    for attribute in (name, f"swiglu_{name}"):
        value = getattr(module, attribute, None)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
    return None


def alternates(module: Any, product: str) -> bool:
    """Whether dense experts have gates, and what they are multiplied with, in turns in the columns of a product."""
    return product == "gate_up_proj" and module.has_gate and not getattr(module, "is_concatenated", True)


def gates_first(columns: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """[g0, u0, g1, u1, ...] along `dim` -> [g0, g1, ..., u0, u1, ...]"""
    order = torch.arange(columns.shape[dim], device=columns.device).view(-1, 2).t().flatten()
    return columns.index_select(dim, order)


def in_turns(columns: torch.Tensor) -> torch.Tensor:
    """The inverse, of the last dimension."""
    order = torch.arange(columns.shape[-1], device=columns.device).view(2, -1).t().flatten()
    return columns.index_select(-1, order)


def in_order(layer: OneLayer, columns: Columns) -> Product:
    """A layer, or all of stacked experts, with its columns in another order."""
    w, bias = layer.operand, layer.bias
    zeros = None if w.zeros is None else columns(w.zeros)
    operand = LooseWeight(repacked(w.packed, columns), columns(w.scales), zeros, w.perm)
    return Product(operand, None if bias is None else columns(bias))


def repacked(weight: PackedWeight, columns: Columns) -> PackedWeight:
    """The same weight, or stacked ones, with its columns in another order. One expert at a time is unpacked."""
    each = [weight] if weight.experts is None else weight
    data = torch.cat([packed_like(weight, columns(unpack(one))).data for one in each])
    return PackedWeight(data, **weight.fields)


def packed_like(weight: PackedWeight, q: torch.Tensor) -> PackedWeight:
    """One matrix in the format and the layout of `weight`."""
    return preprocess(
        q,
        weight.bits,
        layout=weight.layout,
        format=weight.format,
        code=weight.fields.get("code"),
        group_size=weight.group_size,
        zeros=weight.has_zeros,
        perm=weight.has_perm,
    )


def why_not_experts(module: torch.nn.Module) -> str | None:
    """Why a module is no experts that `Experts` can replace, or None.

    It is recognized by what transformers' decorator `use_experts_implementation` gives it: gate_up_proj (or up_proj)
    and down_proj, Parameters [E, N, K], or [E, K, N] if is_transposed; their biases [E, N] if has_bias; and the method
    _apply_gate.
    """
    flags = {name: getattr(module, name, None) for name in ("has_gate", "has_bias", "is_transposed")}
    if not all(isinstance(flag, bool) for flag in flags.values()) or not callable(getattr(module, "_apply_gate", None)):
        return "it has not the attributes of transformers' use_experts_implementation"
    names = set(expert_products(module))
    names |= {f"{name}_bias" for name in names} if flags["has_bias"] else set()
    found = {name: parameter.dim() for name, parameter in module.named_parameters()}
    if (
        found != {name: 2 if name.endswith("_bias") else 3 for name in names}
        or next(module.buffers(), None) is not None
    ):
        return f"it has tensors other than {', '.join(sorted(names))}"
    if getattr(module, "has_post_expert_norm", False):
        return "it has a norm after each expert"
    return None


def expert_products(module: Any) -> tuple[str, str]:
    """The names of the two products of experts, the first product first."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def expert_weights(module: Any, name: str) -> torch.Tensor:
    """The weights `name` of dense experts as w [E, K, N], a view."""
    weights = getattr(module, name).detach()
    return weights if module.is_transposed else weights.transpose(1, 2)


def _quantized(module: Any, name: str, recipe: Recipe) -> GroupedLinear:
    weights = expert_weights(module, name)
    bias = getattr(module, f"{name}_bias").detach() if module.has_bias else None  # [E, N]
    columns = gates_first if alternates(module, name) else None
    if weights.is_meta:
        dtype = weights.dtype if recipe.dtype is None else recipe.dtype
        recipe.check_k(weights.shape[1])
        experts, k, n = weights.shape
        return GroupedLinear(
            experts,
            k,
            n,
            bias=bias is not None,
            format=recipe.format,
            group_size=recipe.group_size,
            symmetric=recipe.symmetric,
            dtype=dtype,
            device="meta",
            arch=recipe.arch,
            activations=recipe.activations,
        )
    return quantize_stack(weights, recipe, name, bias if bias is None or columns is None else columns(bias), columns)


def quantize_stack(
    weights: torch.Tensor,
    recipe: Recipe,
    name: str,
    bias: torch.Tensor | None = None,
    columns: Columns | None = None,
) -> GroupedLinear:
    """The layer of weights w [E, K, N] with biases [E, N], each expert quantized by itself. columns: the order of N.

    Raises what `quantize` and `preprocess` raise, naming the layer and the expert.
    """
    dtype = weights.dtype if recipe.dtype is None else recipe.dtype
    parts = []
    for expert, w in enumerate(weights):
        try:
            operand = recipe.quantize(w if columns is None else columns(w))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}, expert {expert}: {error}") from error
        parts.append(Product(operand, None if bias is None else bias[expert]))
    return GroupedLinear.from_parts(parts, dtype, recipe.activations)


def stack_parts(
    argument: str,
    parts: Sequence[OneLayer] | Sequence[tuple[OneLayer, ...]],
    dtype: torch.dtype | None,
    activations: str | None = None,
) -> GroupedLinear:
    """The layers of all experts, stacked; of a tuple of two, such as gate and up, their columns side by side.

    dtype: of scales, zeros and bias; None: that of the scales. Raises TypeError and ValueError that begin with
    `argument` and name the expert, for layers that do not fit each other.
    """
    whole: list[OneLayer] = []
    for expert, part in enumerate(parts):
        if isinstance(part, tuple):
            whole.append(_side_by_side(argument, expert, *part) if len(part) == 2 else part[0])
        else:
            whole.append(cast(OneLayer, part))
    try:
        return GroupedLinear.from_parts(whole, dtype, activations)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {error}") from error


def _side_by_side(argument: str, expert: int, gate: OneLayer, up: OneLayer) -> Product:
    """One layer with the columns of both."""
    a, b = gate.operand, up.operand
    if a.packed.fields != b.packed.fields or (a.zeros is None, gate.bias is None) != (b.zeros is None, up.bias is None):
        raise ValueError(
            f"{argument}: expert {expert}: expected gate and up of one kind, got {a.packed} and {b.packed}"
        )
    if a.scales.shape != b.scales.shape:
        shapes = f"{list(a.scales.shape)} and {list(b.scales.shape)}"
        raise ValueError(f"{argument}: expert {expert}: expected gate and up of one group size, got scales {shapes}")
    perms = [perm for perm in (a.perm, b.perm) if perm is not None]
    if len(perms) == 1 or (perms and not torch.equal(*perms)):
        raise ValueError(f"{argument}: expert {expert}: expected one act-order for gate and up, got different ones")

    def both(of_gate: torch.Tensor | None, of_up: torch.Tensor | None) -> Any:
        return None if of_gate is None or of_up is None else torch.cat([of_gate, of_up], dim=-1)

    packed = packed_like(a.packed, both(unpack(a.packed), unpack(b.packed)))
    operand = LooseWeight(packed, both(a.scales, b.scales), both(a.zeros, b.zeros), a.perm)
    return Product(operand, both(gate.bias, up.bias))
