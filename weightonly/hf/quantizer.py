"""WeightOnlyQuantizer: what transformers' `from_pretrained` and `save_pretrained` call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, apply_renamings
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.utils import logging

from ..device import check_visible, device_arch
from ..formats.packed_config import METHOD, VERSION, guard_of, options_of, unguarded
from ..heuristics.arch import ARCHS
from ..heuristics.problem import CODE_FORMATS
from ..kernels import check_kernels
from ..layout import CPU, stored_shape
from ..nn import Linear
from ..packing import code_layout, layout_for_arch
from ..parallel.linear import DENSE, OWN, PACKED, WHOLE, ParallelLinear
from ..quantize import WEIGHT_DTYPES
from .config import WeightOnlyConfig
from .files import codebooks_of_version_2, plan_of_files
from .modules import Plan, check_layer, plan_quantization, replace_layers
from .tensors import CutPart, LayerTensors, converters, whole_state_dict

logger = logging.get_logger(__name__)


@register_quantizer(METHOD)
class WeightOnlyQuantizer(HfQuantizer):
    """Packs the linear layers of a model while transformers loads it, or loads layers that are packed already.

    Empty packed layers take the place of the dense ones before any weight is read. Then each weight is read,
    quantized and packed by itself: one is in memory in full precision at a time.

    After loading, `plan` says which layers are packed and why others are not.
    """

    requires_calibration = False
    quantization_config: WeightOnlyConfig

    def __init__(self, quantization_config: WeightOnlyConfig, **kwargs: Any) -> None:
        super().__init__(copy.copy(quantization_config), **kwargs)
        self.plan = Plan()
        self.conv1d: set[str] = set()
        """Packed layers that were Conv1D, whose weight is the transpose of that of torch.nn.Linear."""
        self._is_parallel = False
        self._codebooks: dict[str, torch.Tensor] = {}
        self._unprefixed: set[str] = set()
        """Names of packed layers as files of the base model alone, or of a model with a head, have them."""

    # --- before loading -------------------------------------------------------------------------------------

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises ValueError for devices that no kernel runs on, RuntimeError for a GPU that the build leaves out."""
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
        config = self.quantization_config
        if not self.pre_quantized:
            self.plan = plan_quantization(model, self._left_dense(model), config.recipe(dtype), self._layout())
            if not self.plan.layers:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.plan.dense.items())[:3])
                raise ValueError(f"{type(model).__name__}: expected a linear layer to quantize, got none ({reasons})")
        elif config.weights is not None:
            self.plan = config.weights.plan(model)
        else:
            self.plan = plan_of_files(model, vars(config), checkpoint_files)
            if config.format_version != VERSION:
                self._codebooks = codebooks_of_version_2(model, checkpoint_files)
        for name, shape in self.plan.layers.items():
            check_layer(model, name, shape)
        prefix = f"{model.base_model_prefix}."
        self._unprefixed = {name.removeprefix(prefix) for name in self.plan.layers} | {
            prefix + name for name in self.plan.layers
        }
        self.conv1d = replace_layers(model, self.plan.layers, dtype or torch.get_default_dtype())
        distributed = getattr(model.config, "distributed_config", None)
        self._is_parallel = distributed is not None and distributed.tp_size > 1
        for name in self.plan.layers:
            model.get_submodule(name).reads = self._reads(name)
        for name, reason in self.plan.dense.items():
            logger.info(f"weightonly leaves {name} dense: {reason}")

    def _left_dense(self, model: PreTrainedModel) -> list[str]:
        given = self.quantization_config.modules_to_not_convert or []
        return self.get_modules_to_not_convert(model, given, model._keep_in_fp32_modules, add_default_skips=True)

    def _layout(self) -> str:
        """The layout to pack for. Raises ValueError for codes on a visible GPU that does not read them."""
        config = self.quantization_config
        arch: Any = config.arch
        if arch is None and torch.cuda.is_available() and device_arch(torch.cuda.current_device()) in ARCHS:
            arch = device_arch(torch.cuda.current_device())
        if config.format in CODE_FORMATS:
            return code_layout(config.format, arch)
        return layout_for_arch(CPU if arch is None else arch)

    def _reads(self, name: str) -> str:
        """Whose tensors transformers cuts where the layer is parallel; see `parallel.linear`."""
        config = self.quantization_config
        if not self.pre_quantized:
            return WHOLE if name in self.conv1d else DENSE
        if config.weights is not None:
            return OWN
        return WHOLE if config.format_version != VERSION else PACKED

    # --- loading --------------------------------------------------------------------------------------------

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether `param_name`, a name of the model after its layers were replaced, is read as a dense weight."""
        name, _, tensor = param_name.rpartition(".")
        return not self.pre_quantized and tensor == "qweight" and name in self.plan.layers

    def get_quantize_ops(self) -> ConversionOps:
        """What transformers puts between a dense weight and the model."""
        return _Quantize(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """How tensors of the files find their layer: a dense weight becomes `qweight`."""
        layers = set(self.plan.layers) | self._unprefixed
        if not self.pre_quantized:
            converter = LayerTensors("weight$", "qweight", [_Keep()])
            converter.layers, converter.tensor = layers, "weight"
            return [converter, *(converters(layers, ("bias",)) if self._is_parallel else ())]
        if self._is_parallel:
            return converters(layers)
        return [] if self._reads("") == PACKED else converters(layers, ("qweight",))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name in self.plan.layers:
            model.get_submodule(name).reads = None
            for parameter in model.get_submodule(name).parameters():
                parameter.requires_grad_(False)
        for name, codebook in self._codebooks.items():
            model.get_submodule(name).codebook = codebook.to(model.get_submodule(name).codebook.device)
        # What read dense weights cannot be undone when the model is saved.
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [c for c in conversions if not _is_of_packed(c)]
        self.describe(model)
        return model

    def describe(self, model: PreTrainedModel) -> None:
        """Write to the config of `model` what its packed layers are, so that the saved model can be loaded."""
        config = copy.copy(self.quantization_config)
        config.format_version, config.weights = VERSION, None
        for name, value in options_of(self.plan.layers).items():
            setattr(config, name, value)
        config.modules_to_not_convert = sorted(self.plan.dense)
        self.quantization_config = model.config.quantization_config = config
        guard = guard_of({"fusion_config": getattr(model.config, "fusion_config", None)})
        model.config.fusion_config = guard["fusion_config"]
        model.weightonly_plan = self.plan

    # --- a loaded model -------------------------------------------------------------------------------------

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """Called by `save_pretrained`: the config then names layers as the files do, and layers are whole."""
        renamings = [
            conversion.reverse_transform()
            for conversion in (model._weight_conversions or [])[::-1]
            if isinstance(conversion, WeightRenaming)
        ]

        def in_file(name: str) -> str:
            return apply_renamings(f"{name}.qweight", renamings).removesuffix(".qweight")

        config = model.config.quantization_config
        shapes = {in_file(name): shape for name, shape in self.plan.layers.items()}
        config.layers = options_of(shapes)["layers"]
        config.modules_to_not_convert = sorted(map(in_file, self.plan.dense))
        return whole_state_dict(model), {}

    @torch.no_grad()
    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        for name, module in list(model.named_modules()):
            if not isinstance(module, Linear):
                continue
            if isinstance(module, ParallelLinear):
                raise ValueError(f"{name}: expected a whole layer to dequantize, got a part of one, cut for its rank")
            if module.qweight.is_meta:
                raise ValueError(f"{name}: expected a weight in memory to dequantize, got one that is offloaded")
            w = module.dequantize(dtype)
            dense: Any
            if name in self.conv1d:
                dense = torch.nn.Module.__new__(Conv1D)
                torch.nn.Module.__init__(dense)
                dense.nx, dense.nf = module.in_features, module.out_features
                dense.weight = torch.nn.Parameter(w)
            else:
                dense = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
                dense.weight = torch.nn.Parameter(w.t().contiguous())
            dense.bias = None if module.bias is None else torch.nn.Parameter(module.bias.detach().to(w.dtype))
            model.set_submodule(name, dense.train(module.training))
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


class _Keep(ConversionOps):
    """The tensor as it is: a converter needs an operation, and the quantization follows it."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return input_dict


class _Quantize(ConversionOps):
    """A dense weight [N, K], or [K, N] of a Conv1D, becomes the tensors of its packed layer."""

    def __init__(self, hf_quantizer: WeightOnlyQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        (tensors,) = input_dict.values()
        weight = tensors[0] if isinstance(tensors, list) else tensors
        name = full_layer_name.removesuffix(".qweight")
        target = model.get_submodule(name)
        shape = self.hf_quantizer.plan.layers[name]
        weight = weight.t() if name in self.hf_quantizer.conv1d else weight
        is_cut = isinstance(target, ParallelLinear) and target.comes_cut("qweight")
        k, n = (target.in_features, target.out_features) if is_cut else (shape.k, shape.n)
        if weight.shape != (n, k):
            raise ValueError(f"{name}.weight: expected [{n}, {k}], got {list(weight.shape)}")
        if not weight.numel():  # this rank has no part of it
            return {f"{name}.{tensor}": value for tensor, value in _empty(target).items()}
        recipe = self.hf_quantizer.quantization_config.recipe(target.scales.dtype)
        try:
            packed, scales, zeros = recipe.quantize(weight.t())
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
        rows = stored_shape(packed.k_padded, packed.n_padded, packed.bits, packed.layout)
        inside = {"qweight": packed.data.view(rows), "scales": scales, "zeros": zeros}
        if isinstance(target, ParallelLinear) and not is_cut:
            inside = {tensor: None if value is None else target.cut(tensor, value) for tensor, value in inside.items()}
        return {f"{name}.{tensor}": value for tensor, value in inside.items() if value is not None}


def _empty(layer: ParallelLinear) -> dict[str, torch.Tensor]:
    """The tensors of a layer that has no elements."""
    tensors = {"qweight": layer.qweight, "scales": layer.scales, "zeros": layer.zeros}
    return {name: torch.empty_like(t, device="cpu") for name, t in tensors.items() if t is not None}


def _is_of_packed(conversion: Any) -> bool:
    operations = getattr(conversion, "operations", ())
    return any(isinstance(operation, (_Keep, CutPart)) for operation in operations)
