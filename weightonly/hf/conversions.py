"""What transformers puts between the tensors of files and packed layers: converters and their operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, apply_renamings

from ..formats.checkpoint import Checkpoint
from ..formats.converted import tensors_of
from ..formats.stacks import Part
from ..heuristics.arch import Arch
from ..layout import stored_shape
from ..nn.experts import Experts, gates_first, in_turns, quantize_stack, repacked
from ..nn.recipe import Recipe
from ..packed import PackedWeight
from ..parallel import ParallelLinear
from ..quantize_codes import check_scales_as
from .config import WeightOnlyConfig
from .dense import Dense, tensors_inside
from .experts import in_turns_in_files, read_gates_first, stacked
from .memory import after_packing
from .modules import Plan, expert_name

Sources: TypeAlias = Mapping[str, Sequence[Sequence[str]]]
"""Packed layer of the model -> for each expert (one, where it is a linear layer) the layers of the checkpoint."""


ALL = "all"
"""In the place of the number of an expert."""


class Quantizer(Protocol):
    """What an operation asks a WeightOnlyQuantizer."""

    quantization_config: WeightOnlyConfig
    plan: Plan
    conv1d: set[str]


class Targets:
    """Which tensors of a dense model are packed ones now.

    of_dense: name of a dense tensor, with and without the prefix of the base model -> name of the packed one.
    modules: names of the packed layers.
    """

    def __init__(self, plan: Plan, prefix: str) -> None:
        self.modules = {*plan.layers, *plan.stacks}
        self.of_dense: dict[str, str] = {}
        packed = {f"{name}.weight": f"{name}.qweight" for name in plan.layers}
        for name in plan.stacks:
            packed |= {name: f"{name}.qweight", f"{name}_bias": f"{name}.bias"}
        # Files of the base model alone, or of a model with a head, have other names; transformers puts that right
        # after the converters.
        for dense, target in packed.items():
            bare = (dense.removeprefix(f"{prefix}."), target.removeprefix(f"{prefix}."))
            self.of_dense |= {dense: target, bare[0]: bare[1], f"{prefix}.{bare[0]}": f"{prefix}.{bare[1]}"}

    def __deepcopy__(self, memo: dict[int, Any]) -> Targets:
        return self  # transformers copies converters once for each tensor


class Beside(WeightConverter):
    """A converter of the model, such as the one that stacks the weights of experts, beside packed layers.

    Where its result is packed, it has the name of the packed tensor. Tensors of packed layers are not its own, when
    the model is saved, either.
    """

    __slots__ = ("targets",)
    targets: Targets

    @classmethod
    def of(cls, converter: WeightConverter, targets: Targets, quantize: Quantize | None = None) -> Beside:
        """quantize: what dense weights go through that become packed ones while they are read; None: there are none."""
        sources, patterns = converter._original_source_patterns, converter._original_target_patterns
        operations = converter.operations
        if quantize is not None and len(patterns) > 1:
            operations = [*map(_by_dense_shapes, operations), QuantizeParts(quantize)]
        new = cls(list(sources), list(patterns), operations, **_options(converter))
        new.scope_prefix, new.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
        new.targets = targets
        return new

    def copy(self, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Beside:
        new = super().copy(source_patterns, target_patterns, **kwargs)
        new.targets = self.targets
        return new

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        module, _, tensor = source_key.rpartition(".")
        if module in self.targets.modules and tensor != "weight":
            return source_key, None
        renamed, pattern = super().rename_source_key(source_key)
        if pattern is not None and len(self.source_patterns) > 1 and pattern in source_key:
            beside = [source_key.replace(pattern, other).rpartition(".")[0] for other in self.source_patterns]
            if not self.targets.modules.isdisjoint(beside):
                return source_key, None  # a model is saved, and what would be put beside it is packed
        return self.targets.of_dense.get(renamed, renamed), pattern


def _options(converter: Any) -> dict[str, Any]:
    return {"force_cpu": converter.force_cpu} if hasattr(converter, "force_cpu") else {}


class DenseWeights(WeightConverter):
    """Dense tensors of layers that are packed while they are read, and that no converter of the model makes."""

    __slots__ = ("targets",)
    targets: Targets

    @classmethod
    def of(cls, targets: Targets) -> DenseWeights:
        new = cls("weight$", "qweight", [_Keep()])
        new.targets = targets
        return new

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        found = self.targets.of_dense.get(source_key)
        return (source_key, None) if found is None else (found, self.source_patterns[0])


class _Keep(ConversionOps):
    """The tensor as it is: a converter needs an operation, and the quantization follows it. Biases have none."""

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        tensor = _only(input_dict)
        name, _, inside = full_layer_name.rpartition(".")
        if inside == "bias" and in_turns_in_files(model, name):
            tensor = gates_first(tensor)
        return {full_layer_name: tensor}


class Quantize(ConversionOps):
    """A dense weight [N, K], or [K, N] of a Conv1D, becomes the tensors of its packed layer; so do stacked ones."""

    def __init__(self, hf_quantizer: Quantizer) -> None:
        self.hf_quantizer = hf_quantizer

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        if len(input_dict) > 1:
            return input_dict  # `QuantizeParts` made them
        try:
            return self._quantized(input_dict, full_layer_name, model)
        except (TypeError, ValueError) as error:
            if (dense := self.hf_quantizer.quantization_config.dense) is not None:
                dense.problems.append(error)
            raise

    def _quantized(self, input_dict: dict[str, Any], full_layer_name: str, model: Any) -> dict[str, torch.Tensor]:
        weight, plan = _only(input_dict), self.hf_quantizer.plan
        name = full_layer_name.removesuffix(".qweight")
        target = model.get_submodule(name)
        recipe = self._recipe(name, target.scales.dtype)
        if name in plan.stacks:
            stack = plan.stacks[name]
            experts: Experts = model.get_submodule(name.rpartition(".")[0])
            is_transposed = experts.between.module.is_transposed  # type: ignore[union-attr]
            weight = weight if is_transposed else weight.transpose(1, 2)
            expected = (stack.experts, stack.shape.k, stack.shape.n)
            if weight.shape != expected:
                raise ValueError(f"{name}: expected [E, K, N] = {list(expected)}, got {list(weight.shape)}")
            if weight.is_meta:
                return _without_data(name, target)
            columns = gates_first if in_turns_in_files(model, name) else None
            return after_packing(_tensors(name, quantize_stack(weight, recipe, name, columns=columns)))
        shape = plan.layers[name]
        weight = weight.t() if name in self.hf_quantizer.conv1d else weight
        is_cut = isinstance(target, ParallelLinear) and target.comes_cut("qweight")
        k, n = (target.in_features, target.out_features) if is_cut else (shape.k, shape.n)
        if weight.shape != (n, k):
            raise ValueError(f"{name}.weight: expected [{n}, {k}], got {list(weight.shape)}")
        if weight.is_meta:
            return _without_data(name, target)
        if not weight.numel():  # this rank has no part of it
            return {f"{name}.{tensor}": value for tensor, value in _empty(target).items()}
        try:
            w = recipe.quantize(weight.t())
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
        rows = stored_shape(w.packed.k_padded, w.packed.n_padded, w.packed.bits, w.packed.layout)
        inside = {"qweight": w.packed.data.view(rows), "scales": w.scales, "zeros": w.zeros}
        if isinstance(target, ParallelLinear) and not is_cut:
            inside = {tensor: None if value is None else target.cut(tensor, value) for tensor, value in inside.items()}
        return after_packing({f"{name}.{tensor}": value for tensor, value in inside.items() if value is not None})

    def _recipe(self, name: str, dtype: torch.dtype) -> Recipe:
        """How a layer is quantized, as the plan says."""
        config, plan = self.hf_quantizer.quantization_config, self.hf_quantizer.plan
        shape = plan.layers[name] if name in plan.layers else plan.stacks[name].shape
        recipe = config.recipe(dtype, shape)
        return recipe if config.dense is None else config.dense.measured(name, recipe)


class QuantizeParts(ConversionOps):
    """The weights that a converter of the model makes of one, such as gate and up: some are those of packed layers."""

    def __init__(self, quantize: Quantize) -> None:
        self.quantize = quantize

    def convert(
        self,
        input_dict: dict[str, Any],
        target_patterns: Sequence[str] = (),
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        names = _names_of_parts(full_layer_name, target_patterns)
        found: dict[str, Any] = {}
        for pattern, name in zip(target_patterns, names, strict=False):
            part = {name: input_dict[pattern]}
            is_packed = name in self.quantize.hf_quantizer.plan.layers
            found |= (
                self.quantize.convert(part, full_layer_name=f"{name}.qweight", model=model)
                if is_packed
                else {f"{name}.weight": part[name]}
            )
        return found or input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        return _AsItIs()


class _AsItIs(ConversionOps):
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return input_dict


class _SplitDense(ConversionOps):
    """transformers' Split, which asks the parameters of the model for sizes, of which packed ones have others."""

    def __init__(self, split: Any) -> None:
        self.split = split

    def convert(
        self,
        input_dict: dict[str, Any],
        target_patterns: Sequence[str] = (),
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        names = _names_of_parts(full_layer_name, target_patterns)
        if not names:
            options = {"target_patterns": target_patterns, "full_layer_name": full_layer_name, "model": model}
            cut: dict[str, Any] = self.split.convert(input_dict, **options, **kwargs)
            return cut
        sizes = [model.get_submodule(name).weight.shape[self.split.dim] for name in names]
        parts = torch.split(_only(input_dict), sizes, dim=self.split.dim)
        return {pattern: part.contiguous() for pattern, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        reverse: ConversionOps = self.split.reverse_op
        return reverse


def _by_dense_shapes(operation: ConversionOps) -> ConversionOps:
    return _SplitDense(operation) if type(operation).__name__ == "Split" else operation


def _names_of_parts(full_layer_name: str, target_patterns: Sequence[str]) -> list[str]:
    """The modules whose weights a converter makes; none where it makes other tensors, such as biases."""
    name, _, tensor = full_layer_name.rpartition(".")
    modules = [pattern.removesuffix(".weight") for pattern in target_patterns]
    if tensor not in ("weight", "qweight") or not modules or not name.endswith(modules[0]):
        return []
    prefix = name.removesuffix(modules[0])
    return [prefix + module for module in modules]


def _empty(layer: ParallelLinear) -> dict[str, torch.Tensor]:
    """The tensors of a layer that has no elements."""
    tensors = {"qweight": layer.qweight, "scales": layer.scales, "zeros": layer.zeros}
    return {name: torch.empty_like(t, device="cpu") for name, t in tensors.items() if t is not None}


class ReadLayers(WeightConverter):
    """Tensors of the layers of a checkpoint, in its own format, become those of packed layers, or dense weights.

    places: name of a tensor in the files, renamed as transformers does -> (name of the weight in the model,
    "EXPERT.PART.NAME IN THE LAYER"), with ALL for a stack that stacks.py takes apart. stacks: names of stacked
    experts, which are split when the model is saved.
    """

    __slots__ = ("places", "stacks")
    places: dict[str, tuple[str, str]]
    stacks: set[str]

    @classmethod
    def of(cls, sources: Sources, stacks: Collection[str], renamings: list[Any], read: Read) -> ReadLayers:
        """renamings: those of transformers, which come before."""
        packed, found = read.hf_quantizer.plan, read.checkpoint.layers
        stacks_of = read.stacks_of
        places = {
            apply_renamings(stacks_of.get(tensor, tensor), renamings): (
                name if name in packed.densified else f"{name}.qweight",
                f"{ALL if tensor in stacks_of else expert}.{part}.{inside}",
            )
            for name, layers in sources.items()
            for expert, parts in enumerate(layers)
            for part, layer in enumerate(parts)
            for inside, tensor in tensors_inside(read.checkpoint, layer).items()
            if layer not in found or inside != found[layer].format.zeros  # those have been read
        }
        new = cls(list(dict.fromkeys(pattern for _, pattern in places.values())), "qweight", [read])
        new.places, new.stacks = places, set(stacks)
        return new

    @classmethod
    def split(cls, stacks: Collection[str]) -> ReadLayers:
        """What saves stacked experts, and reads nothing."""
        new = cls("$^", "qweight", [_Split()])
        new.places, new.stacks = {}, set(stacks)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadLayers:
        # transformers copies converters once for each tensor, to collect the tensors of one layer.
        new = type(self)("$^", "qweight", self.operations)
        new.places, new.stacks = self.places, self.stacks
        return new

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self.places.get(source_key, (source_key, None))

    def reverse_transform(self) -> SplitExperts:
        new = SplitExperts("$^", "qweight", [_Split()])
        new.stacks = self.stacks
        return new


class Read(ConversionOps):
    """The tensors of a layer of a checkpoint, or of one for each expert, become those of the packed layer, or dense.

    arch: the GPU to pack for; None: a packed checkpoint keeps its layout.
    """

    def __init__(self, hf_quantizer: Quantizer, checkpoint: Checkpoint, arch: Arch | None, sources: Sources) -> None:
        self.hf_quantizer = hf_quantizer  # transformers then leaves the dtypes of the files alone
        self.checkpoint = checkpoint
        self.arch = arch
        self.sources = sources
        self.parts = {name: info for name, info in checkpoint.shards.tensors.items() if isinstance(info, Part)}
        self.stacks_of = {name: part.stack for name, part in self.parts.items()}
        """Tensor of one expert -> the tensor in the files that has it."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        name = full_layer_name.removesuffix(".qweight")
        given = {key: tensors[0] if isinstance(tensors, list) else tensors for key, tensors in input_dict.items()}
        input_dict.clear()
        plan, sources = self.hf_quantizer.plan, self.sources[name]
        places = {layer: f"{expert}.{part}" for expert, parts in enumerate(sources) for part, layer in enumerate(parts)}
        self._take_apart(places, given)
        if (dense := plan.densified.get(name)) is not None:
            return self._dense(name, dense, places, given)
        is_stack = name in plan.stacks
        in_turns = is_stack and in_turns_in_files(model, name) and len(sources[0]) == 1
        read = read_gates_first if in_turns else Checkpoint.record_of
        activations = (plan.stacks[name].shape if is_stack else plan.layers[name]).activations
        records = [
            tuple(
                read(self.checkpoint, layer, self.arch, self._taken(layer, places, given), activations=activations)
                for layer in parts
            )
            for parts in sources
        ]
        target = model.get_submodule(name)
        dtype, has_bias = target.scales.dtype, target.bias is not None
        if is_stack:
            return after_packing(_tensors(name, stacked(name, plan.stacks[name], records, dtype, has_bias)))
        [[only]] = records
        check_scales_as(only.scales, dtype, only.weight.format)
        tensors = {
            f"{name}.{tensor.removeprefix(f'{only.name}.')}": value for tensor, value in tensors_of(only).items()
        }
        if not has_bias:
            tensors.pop(f"{name}.bias", None)
        return after_packing({key: t.to(dtype) if t.is_floating_point() else t for key, t in tensors.items()})

    def _take_apart(self, places: Mapping[str, str], given: dict[str, torch.Tensor]) -> None:
        """Puts the tensors of each expert in the place of those of all."""
        for layer, place in places.items():
            for inside, tensor in tensors_inside(self.checkpoint, layer).items():
                if tensor in self.parts:
                    stack = given[f"{ALL}.{place.partition('.')[2]}.{inside}"]
                    given[f"{place}.{inside}"] = self.parts[tensor].cut(stack)

    def _taken(
        self, layer: str, places: Mapping[str, str], given: dict[str, torch.Tensor]
    ) -> Callable[[str], torch.Tensor]:
        """(name in the checkpoint of a tensor of `layer`) -> the tensor, which is no longer kept."""
        inside = {tensor: inside for inside, tensor in self.checkpoint.layers[layer].tensors.items()}
        return lambda tensor: given.pop(f"{places[layer]}.{inside[tensor]}")

    def _dense(
        self, name: str, dense: Dense, places: Mapping[str, str], given: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        biases = {layer: given[key] for layer, place in places.items() if (key := f"{place}.bias") in given}

        def weight(layer: str) -> torch.Tensor:
            if layer not in self.checkpoint.layers:
                return given.pop(f"{places[layer]}.weight").t()
            return self.checkpoint.record_of(layer, self.arch, self._taken(layer, places, given)).dequantize()

        found = {name: dense.weight(weight)}
        return found if dense.bias is None else found | {dense.bias: dense.biases(biases.__getitem__)}


class SplitExperts(WeightConverter):
    """Stacked layers become a layer for each expert. stacks: their names."""

    __slots__ = ("stacks",)
    stacks: set[str]

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitExperts:
        new = type(self)("$^", "qweight", self.operations)
        new.stacks = self.stacks
        return new

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        is_packed = source_key.rpartition(".")[0] in self.stacks
        return source_key, self.source_patterns[0] if is_packed else None


class _Split(ConversionOps):
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        stack, _, tensor = full_layer_name.rpartition(".")
        values = _only(input_dict)
        if in_turns_in_files(model, stack):
            if tensor == "qweight":
                weight = PackedWeight(values.reshape(-1), **model.get_submodule(stack).packed.fields)
                values = repacked(weight, in_turns).data.view(values.shape)
            elif tensor in ("scales", "zeros", "bias"):
                values = in_turns(values)
        return {f"{expert_name(stack, expert)}.{tensor}": value for expert, value in enumerate(values)}


def _tensors(name: str, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"{name}.{tensor}": value for tensor, value in layer.state_dict().items()}


def _without_data(name: str, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a dense weight on meta becomes: the tensors of its packed layer, there, too."""
    return {key: tensor for key, tensor in _tensors(name, layer).items() if not key.endswith(".bias")}


def _only(input_dict: dict[str, Any]) -> torch.Tensor:
    (tensors,) = input_dict.values()
    return tensors[0] if isinstance(tensors, list) else tensors


def beside_packed(conversions: Sequence[Any], targets: Targets, quantize: Quantize | None = None) -> list[Any]:
    """The conversions of a model, such that they leave packed layers alone. quantize: as in `Beside.of`."""
    return [c if isinstance(c, WeightRenaming) else Beside.of(c, targets, quantize) for c in conversions]
