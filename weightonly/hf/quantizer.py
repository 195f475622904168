"""WeightOnlyQuantizer: what transformers' `from_pretrained` and `save_pretrained` call."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    PrefixChange,
    WeightRenaming,
    apply_renamings,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

from ..dense import WEIGHT_DTYPES
from ..device import check_visible, device_arch
from ..formats.packed_config import METHOD, VERSION, guard_of, unguarded
from ..heuristics.arch import Arch
from ..kernels import check_kernels
from ..layout import CPU
from ..nn.choice import recipe_of
from ..nn.fuse import fuse_model, unfuse_model
from ..nn.handlers import is_linear
from ..nn.head import head_names, head_recipe
from ..nn.linear import Linear
from ..nn.recipe import Recipe
from ..packing import resolve_layout
from ..parallel.linear import DENSE, OWN, PACKED, WHOLE
from .checkpoint import CheckpointWeights, arch_or_visible
from .config import WeightOnlyConfig, forget_quantizers
from .conversions import Beside, DenseWeights, Quantize, Read, ReadLayers, Targets, beside_packed
from .dense_folder import names_of
from .files import check_dense, check_whole, dense_shards, open_files
from .modules import (
    Plan,
    check_layers,
    check_names,
    dense_layers,
    plan_of_model,
    plan_quantization,
    quantizable,
    replace_layers,
    untie,
)
from .names import Names
from .tensors import LayerTensors, converters, whole_state_dict

logger = logging.get_logger(__name__)


@register_quantizer(METHOD)
class WeightOnlyQuantizer(HfQuantizer):
    """Packs the linear layers of a model while transformers loads it, or loads layers that are packed already.

    Empty packed layers take the place of the dense ones before any weight is read. Then each weight is read, quantized
    and packed by itself: one is in memory in full precision at a time.

    After loading, `plan` says which layers are packed and why others are not.

    Args:
        quantization_config: of the call, or of the folder.
        **kwargs: as transformers gives them.

    Examples:
        >>> import weightonly.hf
        >>> model = weightonly.hf.load_model("Llama-int4")
        >>> isinstance(model.hf_quantizer, WeightOnlyQuantizer)
        True
    """

    requires_calibration = False
    quantization_config: WeightOnlyConfig

    def __init__(self, quantization_config: WeightOnlyConfig, **kwargs: Any) -> None:
        super().__init__(copy.copy(quantization_config), **kwargs)
        self.plan = Plan()
        self.conv1d: set[str] = set()
        """Packed layers that were Conv1D, whose weight is the transpose of that of torch.nn.Linear."""
        self._dtype: torch.dtype | None = None
        """Of the tensors of packed layers."""
        self._read: ReadLayers | None = None
        self._beside: list[Any] = []
        """The conversions of the model while it is loaded."""
        self._is_parallel = False
        asked = quantization_config.asked
        self._is_fused: bool = (
            quantization_config.fuse and asked.get("fuse", True) and quantization_config.dense is None
        )
        self._head: str | None = quantization_config.quantize_head or asked.get("quantize_head")
        self._reads_files = True
        """Whether transformers reads the tensors of a quantized folder; else `CheckpointWeights` gives them."""

    # --- before loading -------------------------------------------------------------------------------------

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises ValueError for devices that no kernel runs on, RuntimeError for a GPU that the build leaves out."""
        if self.quantization_config.dense is not None:  # on meta
            return
        for device in set(device_map.values() if isinstance(device_map, dict) else [device_map]):
            if device is None or device in ("disk", "auto", "balanced", "balanced_low_0", "sequential"):
                continue
            device = torch.device(device)
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"device_map: expected cpu and cuda devices, which have kernels, got {str(device)!r}")
            check_visible(device)
            if device.type == "cuda":
                check_kernels(device_arch(device.index or 0), "device_map")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Raises ValueError for a dtype that kernels do not compute in."""
        if dtype not in WEIGHT_DTYPES:
            names = ", ".join(str(known).removeprefix("torch.") for known in WEIGHT_DTYPES)
            raise ValueError(f"dtype: expected one of {names}, got {str(dtype).removeprefix('torch.')}")
        return dtype

    def update_attn_implementation(self, config: Any) -> Any:
        """The first hook that has the config: takes out what makes transformers refuse it without this library."""
        if getattr(config, "fusion_config", None) is not None:
            config.fusion_config = unguarded(config.fusion_config)
        return config

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, dtype: torch.dtype | None = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        check_names(model)
        config = self.quantization_config
        distributed = getattr(model.config, "distributed_config", None)
        self._is_parallel = distributed is not None and distributed.tp_size > 1
        stacks = not self._is_parallel  # transformers' styles cut dense experts
        if not self.pre_quantized:
            given = config.modules_to_not_convert or []
            for pattern in given:
                if all(should_convert_module(name, [pattern]) for name, _ in model.named_modules()):
                    logger.warning(f"modules_to_not_convert: {pattern!r} matches no layer of {type(model).__name__}")
            dense = self.get_modules_to_not_convert(model, given, add_default_skips=True)
            layers = quantizable(model)
            recipes = recipe_of(config.recipe(dtype), config.layers, names_of(layers))
            left = {} if config.dense is None else config.dense.left(layers)
            if self._head is not None and config.dense is not None:
                heads = head_names(model)
                k = model.get_submodule(heads[0]).in_features
                dense = [name for name in dense if name not in heads]
                left = {name: reason for name, reason in left.items() if name not in heads}
                recipes = _with_heads(recipes, heads, head_recipe(config.recipe(dtype), self._head, k))
            self.plan = plan_quantization(model, dense, recipes, self._layout, left)
            if self._head is not None and config.dense is not None:
                for name in heads:
                    if name in self.plan.dense:
                        problem = "expected output embeddings that can be quantized"
                        raise ValueError(f"quantize_head: {problem}, got {name}: {self.plan.dense[name]}")
            if not stacks:
                self.plan.leave_experts("tensor parallel")
            if config.dense is not None:
                config.dense.check_chosen(self.plan.dense)
            if not self.plan.layers and not self.plan.stacks:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.plan.dense.items())[:3])
                raise ValueError(f"{type(model).__name__}: expected a linear layer to quantize, got none ({reasons})")
            shards = dense_shards(checkpoint_files) if config.dense is None else config.dense.shards
            if shards is not None:
                found = check_dense(model, self.plan, shards)
                if config.dense is not None:
                    config.dense.found = found
        else:
            self._plan_folder(model, checkpoint_files, stacks)
        check_layers(model, self.plan)
        self._dtype = dtype or torch.get_default_dtype()
        for name in untie(model, self.plan):
            logger.warning(f"weightonly: {name} has a weight of its own, though config.json says tie_word_embeddings")
        self.conv1d = replace_layers(model, self.plan, self._dtype)
        for name in self.plan.layers:
            model.get_submodule(name).reads = self._reads(name)
        for name, reason in self.plan.dense.items():
            logger.info(f"weightonly leaves {name} dense: {reason}")

    def _plan_folder(self, model: PreTrainedModel, files: Sequence[str] | None, stacks: bool) -> None:
        config = self.quantization_config
        weights = config.weights
        if weights is None:
            checkpoint = open_files(files, config.folder)
            is_own = METHOD in checkpoint.methods
            weights = CheckpointWeights(
                checkpoint, None if is_own else config.arch, None if is_own else config.activations
            )
        checkpoint, is_packed = weights.checkpoint, weights.pack_arch is None
        config.check_asked(checkpoint.folder, weights.shapes)
        if is_packed:
            config.check_activations(checkpoint.folder, weights.shapes)
        self._reads_files = bool(files)
        if self._reads_files and self._is_parallel and not is_packed:
            raise ValueError("tp_plan: expected none for the folder of another quantizer; load_model takes one")
        self.plan = weights.plan(model, stacks)
        if not self._reads_files:
            return
        check_whole(self.plan, checkpoint)
        self._read = self._reader(model, weights, [] if is_packed else list(checkpoint.layers))
        if is_packed:
            weights.check_scales()  # transformers casts them
        else:
            self.quantization_config = WeightOnlyConfig(**weights.options)
            forget_quantizers(model.config)

    def _layout(self, recipe: Recipe) -> str:
        """The layout to pack for. Raises ValueError for codes, or activations, that the visible GPU does not take."""
        arch = arch_or_visible(self.quantization_config.arch)
        return resolve_layout(recipe.format, arch, activations=recipe.activations)

    def _reads(self, name: str) -> str:
        """Whose tensors transformers cuts where the layer is parallel; see `parallel.linear`."""
        if not self.pre_quantized:
            return WHOLE if name in self.conv1d else DENSE
        return PACKED if self._reads_files else OWN

    # --- loading --------------------------------------------------------------------------------------------

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether `param_name`, a name of the model after its layers were replaced, is read as a dense weight."""
        name, _, tensor = param_name.rpartition(".")
        is_packed = name in self.plan.layers or name in self.plan.stacks
        return not self.pre_quantized and tensor == "qweight" and is_packed

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """What a tensor of a packed folder is cast to: some models keep layers in fp32, which GPUs do not multiply."""
        found: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
        shape = self.plan.layers.get(str(converter.target_patterns[0]).rpartition(".")[0])
        return found if found is None or shape is None or shape.layout == CPU else self._dtype

    def get_quantize_ops(self) -> ConversionOps:
        """What transformers puts between a dense weight and the model."""
        return Quantize(self)

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """How tensors of the files find their layer: the conversions of the model, and those of packed layers."""
        targets = Targets(self.plan, model.base_model_prefix)
        read = [] if self._read is None else [self._read]
        quantize = None if self.pre_quantized else Quantize(self)
        self._beside = [*read, *beside_packed(weight_conversions, targets, quantize), *self._conversions(targets)]
        return self._beside

    def _conversions(self, targets: Targets) -> list[Any]:
        dense = [] if self.pre_quantized else [DenseWeights.of(targets)]
        return [*dense, *(converters() if self._is_parallel else [])]

    def _reader(self, model: PreTrainedModel, weights: CheckpointWeights, layers: Sequence[str]) -> ReadLayers | None:
        """What reads `layers` of a checkpoint, and experts that are stored one by one; None: every tensor is as it is.

        The model has its dense layers yet.
        """
        checkpoint = weights.checkpoint
        zeros = {checkpoint.layers[layer].format.zeros for layer in layers} - {None}
        ignored = {rf"\.{name}$" for name in zeros} | {re.escape(name) for name in checkpoint.unused}
        model._keys_to_ignore_on_load_unexpected = ignored.union(model._keys_to_ignore_on_load_unexpected or ())
        names = Names(model)
        alone = {names.of_layer(layer)[0]: ((layer,),) for layer in layers}
        sources: dict[str, Any] = {name: layer for name, layer in alone.items() if name in self.plan.layers}
        sources |= {name: stack.parts for name, stack in self.plan.stacks.items()}
        sources |= {name: dense.parts for name, dense in self.plan.densified.items()}
        read = Read(self, checkpoint, weights.pack_arch, sources)
        return ReadLayers.of(sources, self.plan.stacks, names.renamings, read) if sources else None

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name in list(self.plan.layers):
            layer = model.get_submodule(name)
            layer.reads = None
            if not (self.pre_quantized or layer.qweight.is_meta or hasattr(layer.qweight, "_is_hf_initialized")):
                self._make_new(model, name, layer)
        for name in (*self.plan.layers, *self.plan.stacks):
            for parameter in model.get_submodule(name).parameters():
                parameter.requires_grad_(False)
        # What read packed tensors cannot be undone when the model is saved; dense experts are taken apart, whoever put
        # them together.
        used = {id(conversion) for conversion in model._weight_conversions or []}
        conversions = [c for c in self._beside if id(c) in used or self._made(c)]
        conversions = [c for c in conversions if not _is_of_packed(c)]
        model._weight_conversions = [*conversions, *self._split()]
        self.describe(model)
        if self._head is not None and self.quantization_config.dense is None:
            pack_head(model, self._head, self.quantization_config.arch)
        if self._is_fused:
            fuse_model(model)
        return model

    def _make_new(self, model: PreTrainedModel, name: str, layer: Linear) -> None:
        """A layer that the files lack, such as a new head, is as transformers makes it: dense, to be trained."""
        k, n, bias, scales = layer.in_features, layer.out_features, layer.bias, layer.scales
        with scales.device:
            dense = Conv1D(n, k) if layer.is_conv1d else torch.nn.Linear(k, n, bias=bias is not None)
        with torch.no_grad():
            model._init_weights(dense.to(scales.dtype))
        model.set_submodule(name, dense)
        del self.plan.layers[name]
        self.plan.dense[name] = "not in the files"

    @classmethod
    def adopt(cls, model: PreTrainedModel, recipe: Recipe, conv1d: set[str]) -> None:
        """Let a model with packed layers save itself as one that `from_pretrained` quantized.

        recipe: how its layers were quantized. conv1d: packed layers that were Conv1D. Of a model that another method
        quantized nothing changes.
        """
        quantizer = getattr(model, "hf_quantizer", None)
        if quantizer is None:
            config = WeightOnlyConfig(
                recipe.format, recipe.group_size, recipe.symmetric, recipe.arch, activations=recipe.activations
            )
            quantizer = cls(config)
        if not isinstance(quantizer, WeightOnlyQuantizer):
            return
        quantizer.plan = plan_of_model(model)
        untie(model, quantizer.plan)
        quantizer.conv1d = quantizer.conv1d | conv1d
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is None:  # what `save_pretrained` takes for a model that was not loaded
            conversions = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [c for c in conversions if not isinstance(c, PrefixChange)]
        conversions = [c for c in conversions if not _is_of_packed(c)]
        targets = Targets(quantizer.plan, model.base_model_prefix)
        loose: Any = model  # its attributes are tensors and modules, as far as types know
        loose._weight_conversions = [*beside_packed(conversions, targets), *quantizer._split()]
        loose.hf_quantizer = quantizer
        quantizer.describe(model)

    def _made(self, conversion: Any) -> bool:
        """Whether it would make a parameter that was made of layers of the checkpoint without it."""
        if not isinstance(conversion, Beside):
            return False
        back = conversion.reverse_transform()
        return any(back.rename_source_key(name)[1] is not None for name in self.plan.densified)

    def _split(self) -> list[Any]:
        """The conversion that saves each expert by itself."""
        return [ReadLayers.split(self.plan.stacks)] if self.plan.stacks else []

    def describe(self, model: PreTrainedModel) -> None:
        """Write to the config of `model` what its packed layers are, so that the saved model can be loaded.

        Where all are dense, the config says nothing of them.
        """
        if not self.plan.in_files():
            forget_quantizers(model.config)
            return
        config = copy.copy(self.quantization_config)
        config.format_version, config.weights, config.folder = VERSION, None, None
        config.tell(self.plan.in_files())
        config.modules_to_not_convert = self.plan.left
        self.quantization_config = model.config.quantization_config = config
        guard = guard_of({"fusion_config": getattr(model.config, "fusion_config", None)})
        model.config.fusion_config = guard["fusion_config"]

    # --- a loaded model -------------------------------------------------------------------------------------

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """Called by `save_pretrained`: the config then says what the model has now, by the names of the files."""
        renamings = [
            conversion.reverse_transform()
            for conversion in (model._weight_conversions or [])[::-1]
            if isinstance(conversion, WeightRenaming)
        ]

        def in_file(name: str) -> str:
            return apply_renamings(f"{name}.qweight", renamings).removesuffix(".qweight")

        config = getattr(model.config, "quantization_config", None)
        if config is None:
            return whole_state_dict(model), {}
        plan = self.plan if self._is_parallel else plan_of_model(model)
        shapes = {in_file(name): shape for name, shape in plan.in_files().items()}
        if shapes:
            config.tell(shapes)
        config.modules_to_not_convert = sorted(map(in_file, self.plan.left))
        return whole_state_dict(model), {}

    @torch.no_grad()
    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        # `save_pretrained` leaves it in the config as text.
        unfuse_model(model)  # the product would keep the packed weights in memory
        given: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for name, dense in dense_layers(model, self.conv1d, given):
            model.set_submodule(name, dense)
        model.config.fusion_config = unguarded(model.config.fusion_config)
        return model

    def is_serializable(self) -> bool:
        """True: `save_pretrained` writes what `from_pretrained` reads."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: gradients of x flow through packed layers, to adapters."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: torch.compile traces packed layers."""
        return True


def pack_head(model: PreTrainedModel, format: str, arch: Arch | None) -> None:
    """Quantizes the dense output embeddings of a model that is loaded; see `quantize_model`.

    Raises ValueError for packed ones, those that are offloaded or no torch.nn.Linear, and a model cut among ranks.
    """
    recipe = Recipe.of(None, format, None, True, None, arch_or_visible(arch))
    names = head_names(model)
    head: Any = model.get_submodule(names[0])
    if isinstance(head, Linear):
        raise ValueError(f"quantize_head: expected dense output embeddings, got {names[0]} in {head.format}")
    if not is_linear(head):
        raise ValueError(f"quantize_head: expected a torch.nn.Linear, got a {type(head).__name__} at {names[0]!r}")
    if any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in head.parameters()):
        raise ValueError(f"quantize_head: expected a weight in the memory of one device, got {names[0]}, which is not")
    recipe = head_recipe(recipe, format, head.in_features)
    try:
        recipe.check_k(head.in_features)
    except ValueError as error:
        raise ValueError(f"quantize_head: expected output embeddings that can be quantized, got {error}") from error
    layer = Linear.from_weight(head.weight.detach().t(), head.bias, recipe).train(head.training)
    layer.layer_name = names[0]
    for name in names:
        model.set_submodule(name, layer)
    WeightOnlyQuantizer.adopt(model, recipe, set())


def _with_heads(
    recipes: Callable[[Iterable[str]], Recipe], heads: Sequence[str], of_heads: Recipe
) -> Callable[[Iterable[str]], Recipe]:
    return lambda names: of_heads if not set(names).isdisjoint(heads) else recipes(names)


def _is_of_packed(conversion: Any) -> bool:
    return isinstance(conversion, ReadLayers | DenseWeights | LayerTensors)
