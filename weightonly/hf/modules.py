"""The layers of a model: which are packed, why others are not, and a packed one in the place of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from ..dense import resolve_group_size
from ..formats.layers import LayerShape
from ..heuristics.arch import ARCHS, Arch
from ..heuristics.problem import is_read
from ..layout import CPU, TILED_FP8
from ..nn.experts import Experts, ModuleGate, expert_products, expert_weights, why_not_experts
from ..nn.grouped import GroupedLinear
from ..nn.handlers import is_linear
from ..nn.kept import kept_in_fp32
from ..nn.linear import Linear
from ..nn.recipe import Recipe
from ..packing import layout_for_arch
from ..parallel import ParallelLinear
from .dense import Dense


@dataclass(frozen=True)
class Stack:
    """One product of the experts of a mixture, which `GroupedLinear` computes.

    experts: how many. shape: of one of them. parts: for each expert the layers of a checkpoint whose columns are put
    side by side, such as gate and up; ((layer,),) for one that has all experts; () where there is no such checkpoint.
    """

    experts: int
    shape: LayerShape
    parts: tuple[tuple[str, ...], ...] = ()


@dataclass
class Plan:
    """What becomes of the layers of a model.

    layers: name -> the shape of the packed layer. stacks: name, such as "model.layers.0.mlp.experts.down_proj" -> the
    packed experts. dense: name -> why it is left as it is. densified: parameters that hold quantized layers of a
    checkpoint, and cannot be packed -> how they are made.
    """

    layers: dict[str, LayerShape] = field(default_factory=dict)
    stacks: dict[str, Stack] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    densified: dict[str, Dense] = field(default_factory=dict)

    def leave_experts(self, reason: str) -> None:
        """Lets every mixture of experts stay dense."""
        self.dense |= {name.rpartition(".")[0]: reason for name in self.stacks}
        self.stacks.clear()

    @property
    def left(self) -> list[str]:
        """Modules that are not packed: `modules_to_not_convert` of the config."""
        return sorted({*self.dense, *(name.removesuffix(".weight") for name in self.densified)})

    def in_files(self) -> dict[str, LayerShape]:
        """Every packed layer as files have it: each expert by itself."""
        alone = {
            expert_name(name, expert): stack.shape
            for name, stack in self.stacks.items()
            for expert in range(stack.experts)
        }
        return self.layers | alone


def expert_name(stack: str, expert: int) -> str:
    """The name in files of one of stacked experts: "experts.3.down_proj" of "experts.down_proj"."""
    experts, _, product = stack.rpartition(".")
    return f"{experts}.{expert}.{product}"


def linear_shape(module: Any) -> tuple[int, int] | None:
    """(K, N) of a module that is y = x @ w + bias, and None for others: see `is_linear`."""
    if is_linear(module):
        return module.in_features, module.out_features
    if type(module) is Conv1D:
        return module.nx, module.nf
    return None


def quantizable(model: torch.nn.Module) -> dict[str, dict[str, tuple[int, int]]]:
    """Linear layers and experts of a dense model -> the names of their weights' layers, and (K, N) of each.

    Of a linear layer that is its own name, of experts one for each product; {} where there are none that are packed.
    """
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, module in model.named_modules():
        if (shape := linear_shape(module)) is not None:
            found[name] = {name: shape}
        elif isinstance(module, torch.nn.Linear):
            found[name] = {}
        elif any(p.dim() == 3 and p.is_floating_point() for p in module.parameters(recurse=False)):
            shapes = expert_shapes(module) if why_not_experts(module) is None else {}
            found[name] = {f"{name}.{product}": (k, n) for product, (_, k, n) in shapes.items()}
    return found


def plan_quantization(
    model: PreTrainedModel,
    skip: Sequence[str],
    recipe_of: Callable[[Iterable[str]], Recipe],
    layout_of: Callable[[Recipe], str],
    left: Mapping[str, str],
) -> Plan:
    """Which layers of a dense model become packed ones.

    skip: names and patterns of those that stay dense, as transformers matches them. recipe_of: names of a layer -> how
    it is quantized. layout_of: recipe -> layout. left: layers that stay dense -> why.
    """
    plan, kept = Plan(), kept_in_fp32(model)
    for name, shapes in quantizable(model).items():
        module = model.get_submodule(name)
        recipes = {inside: recipe_of((inside, name)) for inside in shapes}
        if not shapes:
            reason = why_not_experts(module)
            plan.dense[name] = (
                f"its owner may use the weight of a {type(module).__name__}"
                if isinstance(module, torch.nn.Linear)
                else f"weights of three dimensions, and {reason}"
            )
        elif name in left:
            plan.dense[name] = left[name]
        elif not all(should_convert_module(inside, list(skip)) for inside in (name, *shapes)):
            plan.dense[name] = "an output embedding, tied, or in modules_to_not_convert"
        elif name in kept:
            plan.dense[name] = f"{kept[name]} keeps it in fp32"
        elif shapes.get(name, (0, 0))[1] == 1:
            plan.dense[name] = "N = 1: a gate"
        elif (unfit := _why_unfit(recipes, shapes, model.dtype, layout_of)) is not None:
            plan.dense[name] = unfit
        else:
            for inside, (k, n) in shapes.items():
                recipe = recipes[inside]
                rows = resolve_group_size(recipe.group_size, k)
                packed = LayerShape(
                    recipe.format,
                    k,
                    n,
                    rows,
                    recipe.symmetric,
                    act_order=False,
                    layout=layout_of(recipe),
                    activations=recipe.activations,
                )
                if inside == name:
                    plan.layers[inside] = packed
                else:
                    plan.stacks[inside] = Stack(count_experts(module), packed)
    return plan


def _why_unfit(
    recipes: Mapping[str, Recipe],
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    layout_of: Callable[[Recipe], str],
) -> str | None:
    try:
        for inside, (k, _) in shapes.items():
            recipe = recipes[inside]
            recipe.check_k(k)
            recipe.check_dtype(dtype, layout_of(recipe) == TILED_FP8)
    except ValueError as error:
        return str(error)
    return None


def expert_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Product -> (E, K, N) of dense experts, the first product first."""
    return {product: tuple(expert_weights(module, product).shape) for product in expert_products(module)}


def count_experts(module: torch.nn.Module) -> int:
    """E of dense experts."""
    return next(iter(expert_shapes(module).values()))[0]


def plan_of_model(model: torch.nn.Module) -> Plan:
    """The packed layers that a model has."""
    plan = Plan()
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            plan.layers[name] = _shape_of(module)
        elif isinstance(module, GroupedLinear):
            plan.stacks[name] = Stack(module.num_experts, _shape_of(module))
        elif isinstance(module, torch.nn.Linear) or linear_shape(module) is not None:
            plan.dense[name] = "dense in the model"
    return plan


def _shape_of(module: Linear | GroupedLinear) -> LayerShape:
    k = module.in_features
    rows = k // module.scales.shape[-2]
    act_order = module.perm is not None
    return LayerShape(
        module.format,
        k,
        module.out_features,
        rows,
        module.symmetric,
        act_order,
        module.layout,
        activations=module.activations,
    )


def check_layers(model: PreTrainedModel, plan: Plan) -> None:
    """Raises ValueError unless each packed layer is a layer of this shape in the model."""
    for name, shape in plan.layers.items():
        found = linear_shape(model.get_submodule(name))
        assert found is not None
        check_size(name, found, (shape.k, shape.n))
    for name, stack in plan.stacks.items():
        experts, _, product = name.rpartition(".")
        _, k, n = expert_shapes(model.get_submodule(experts))[product]
        check_size(name, (k, n), (stack.shape.k, stack.shape.n))


def check_size(name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
    """Raises ValueError unless the sizes (K, N) of a layer in the model and in the checkpoint are the same."""
    if expected != got:
        raise ValueError(
            f"{name}: expected K x N = {' x '.join(map(str, expected))} as the model's config says, "
            f"got {' x '.join(map(str, got))} in the checkpoint"
        )


def check_names(model: torch.nn.Module) -> None:
    """Raises ValueError for modules, which some models name as their config says, with names that do not print."""
    for name, _ in model.named_modules():
        if not name.isprintable():
            raise ValueError(f"{type(model).__name__}: expected printable names of modules, got {name!r}")


def replace_layers(model: PreTrainedModel, plan: Plan, dtype: torch.dtype) -> set[str]:
    """Put an empty packed layer, on the meta device, in the place of each. Returns the names that were Conv1D."""
    conv1d = set()
    for name, shape in plan.layers.items():
        old = model.get_submodule(name)
        layer = Linear(shape.k, shape.n, bias=old.bias is not None, **_arguments(shape, dtype))
        layer.is_conv1d = isinstance(old, Conv1D)
        if layer.is_conv1d:
            conv1d.add(name)
        _replace(model, name, layer)
    for name in dict.fromkeys(stack.rpartition(".")[0] for stack in plan.stacks):
        old = model.get_submodule(name)
        products = []
        for product in expert_products(old):
            stack = plan.stacks[f"{name}.{product}"]
            shape = stack.shape
            arguments = _arguments(shape, dtype)
            products.append(GroupedLinear(stack.experts, shape.k, shape.n, bias=bool(old.has_bias), **arguments))
        _replace(model, name, Experts(products[0], products[1], ModuleGate.of(old)))
    return conv1d


def untie(model: PreTrainedModel, plan: Plan) -> list[str]:
    """Ends the ties of packed layers, which have weights of their own. Returns those that were tied.

    Where nothing else is tied, the model's config says so, too: it is saved, and others read it.
    """
    packed = {f"{name}.weight" for name in plan.layers}
    model.all_tied_weights_keys = _without(model.all_tied_weights_keys, packed)
    found = []
    for prefix, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        own = {weight.removeprefix(f"{prefix}.") for weight in packed}
        ties = module.get_expanded_tied_weights_keys(all_submodels=False)
        left = _without(ties, own)
        if left == ties:
            continue
        module._tied_weights_keys = left
        found += [weight.removesuffix(".weight") for pair in ties.items() for weight in pair if weight in own]
        if not left:
            module.config.tie_word_embeddings = False
    return found


def _without(ties: dict[str, str], packed: set[str]) -> dict[str, str]:
    return {target: source for target, source in ties.items() if not packed.intersection((target, source))}


def _arguments(shape: LayerShape, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "format": shape.format,
        "group_size": shape.group_size,
        "symmetric": shape.symmetric is not False,
        "dtype": dtype,
        "device": "meta",
        "arch": _arch_of(shape.layout),
        "act_order": shape.act_order,
        "activations": shape.activations,
    }


def _replace(model: PreTrainedModel, name: str, layer: Linear | Experts) -> None:
    layer.layer_name = name
    model.set_submodule(name, layer)


def _arch_of(layout: str | None) -> Arch:
    if layout == TILED_FP8:
        return next(arch for arch in ARCHS if is_read(layout, arch))
    archs: tuple[Arch, ...] = (*ARCHS, CPU)
    return next(arch for arch in archs if layout_for_arch(arch) == layout)


def dense_layers(model: torch.nn.Module, conv1d: set[str], dtype: torch.dtype | None) -> Iterator[tuple[str, Any]]:
    """(name, dense module) for each packed layer of a model. conv1d: those that become a Conv1D.

    Raises ValueError, naming the layer, for one whose weight is offloaded.
    """
    for name, module in list(model.named_modules()):
        if not isinstance(module, Linear | Experts):
            continue
        if isinstance(module, ParallelLinear):
            raise ValueError(f"{name}: expected a whole layer to dequantize, got a part of one, cut for its rank")
        if any(parameter.is_meta for parameter in module.parameters()):
            raise ValueError(f"{name}: expected a weight in memory to dequantize, got one that is offloaded")
        if isinstance(module, Experts):
            yield name, module.to_dense(dtype)
            continue
        w = module.dequantize(dtype)
        dense: Any
        if name in conv1d:
            dense = torch.nn.Module.__new__(Conv1D)
            torch.nn.Module.__init__(dense)
            dense.nx, dense.nf = module.in_features, module.out_features
            dense.weight = torch.nn.Parameter(w)
        else:
            dense = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            dense.weight = torch.nn.Parameter(w.t().contiguous())
        dense.bias = None if module.bias is None else torch.nn.Parameter(module.bias.detach().to(w.dtype))
        yield name, dense.train(module.training)
