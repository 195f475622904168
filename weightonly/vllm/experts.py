"""Experts of vLLM (its fused MoE layers) on `fused_experts`.

expert_layer.py has what a layer asks for, expert_tensors.py what checkpoints store.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.utils import replace_parameter

from ..experts import fused_experts
from ..heuristics.arch import Arch
from ..heuristics.problem import FORMATS
from ..ops.quantize_activations import quantize_activations
from ..packed import PackedWeight
from ..packing import preprocess, resolve_layout
from ..quantize_codes import check_scales_as
from ..weight import QuantizedWeight
from .expert_layer import Shard, gate_of, why_no_experts
from .expert_tensors import CONFIGS, ExpertTensors
from .rows import unpack_rows

logger = init_logger(f"vllm.{__name__}")


def take_experts() -> None:
    """Registers configs in place of vLLM's, which differ in one thing: experts that we can compute are ours."""
    for place, (methods, _) in CONFIGS.items():
        try:
            ours = _with_experts(place)
        except (ImportError, AttributeError) as error:
            logger.info("Experts of %s are left to this vLLM: %s", place, error)
            continue
        for method in methods:
            if method in QUANTIZATION_METHODS:
                register_quantization_config(method)(ours)


@functools.cache
def _with_experts(place: str) -> type[QuantizationConfig]:
    """The config of vLLM at a place of `CONFIGS`, with our experts."""
    module, _, name = place.rpartition(".")
    config: type[Any] = getattr(importlib.import_module(f"{quantization.__name__}.{module}"), name)
    _, tensors_of = CONFIGS[place]

    def get_quant_method(self: Any, layer: torch.nn.Module, prefix: str) -> Any:
        is_for_us = isinstance(layer, RoutedExperts) and getattr(self, "online_quantization_config", None) is None
        tensors = tensors_of(self, layer, prefix) if is_for_us else None  # else vLLM quantizes them again
        if tensors is not None:
            try:
                if isinstance(tensors, str):
                    raise ValueError(tensors)
                method = WeightOnlyExpertsMethod(prefix, layer, tensors)
                logger.info_once("Using WeightOnlyExpertsMethod for %s", name)
                return method
            except ValueError as error:  # said once for all layers
                reason = str(error).removeprefix(f"{prefix}: ")
                logger.warning_once("Experts are left to vLLM's kernels: %s", reason)
        return config.get_quant_method(self, layer, prefix)

    def reduce(self: Any) -> Any:  # vLLM sends configs to processes, which find no class like this by its name
        return _sent, (place, vars(self))

    return type(name, (config,), {"get_quant_method": get_quant_method, "__reduce__": reduce})


def _sent(place: str, fields: dict[str, Any]) -> QuantizationConfig:
    sent = object.__new__(_with_experts(place))
    vars(sent).update(fields)
    return sent


class WeightOnlyExpertsMethod(FusedMoEMethodBase):
    """The experts of one layer. After loading its parameters are what `fused_experts` reads, in two sets, w13 and w2:

    the weight  uint8 [bytes], the data of a stacked PackedWeight
    scales      [E, groups, N]; zeros the same, or none; bias [E, N], or none
    """

    arch: Arch | None = None
    """The GPU to pack for; None: that of the weight's device (see `preprocess`)."""

    def __init__(self, name: str, layer: RoutedExperts, tensors: ExpertTensors) -> None:
        """Raises ValueError, naming the layer, for what `fused_experts` cannot compute."""
        super().__init__(layer.moe_config)
        reason = why_no_experts(layer, tensors)
        if reason is not None:
            raise ValueError(f"{name}: {reason}")
        self.name = name
        self.tensors = tensors
        self.gate = gate_of(layer.moe_config)
        self.shards = {stem: Shard(layer, tensors, stem) for stem in ("w13", "w2")}
        self.layouts: dict[str, str] = {}
        self.local_expert = layer._map_global_expert_id_to_local_expert_id
        self.tp_rank = int(layer.moe_config.moe_parallel_config.tp_rank)
        self.loaded_biases: set[str] = set()
        self._made: tuple[tuple[int, ...], tuple[Any, ...]] | None = None

    def maybe_roundup_sizes(self, hidden_size: int, *sizes: Any, **named: Any) -> tuple[int, int]:
        """This rank's rows of the second product, as the loader cuts them."""
        hidden, _ = super().maybe_roundup_sizes(hidden_size, *sizes, **named)
        return hidden, self.tensors.inner(self.moe)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters for the experts of this rank, named as in the file; weights in the form of rows.py."""
        tensors, self.dtype = self.tensors, params_dtype
        of_scales = tensors.scales_dtype or params_dtype
        for stem, shard in self.shards.items():
            width = shard.k * FORMATS[tensors.format] // 8
            shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
                tensors.qweight: ((shard.n, width), torch.uint8),
                tensors.scales: ((shard.n, len(shard.groups)), of_scales),
            }
            if getattr(self.moe, "has_bias", True):  # what is not loaded would delay a reload to its end
                shapes["bias"] = (shard.n,), params_dtype
            if tensors.zeros is not None:
                shapes[tensors.zeros] = shapes[tensors.scales]
            if tensors.factor is not None:
                shapes[tensors.factor] = (shard.parts,), torch.float32
            shapes |= dict.fromkeys(tensors.unread, ((0,), torch.uint8))
            for name, (shape, dtype) in shapes.items():
                data = torch.zeros(num_experts, *shape, dtype=dtype)
                parameter = torch.nn.Parameter(data, requires_grad=False)
                parameter.weight_loader = self.load  # type: ignore[attr-defined]
                layer.register_parameter(f"{stem}_{name}", parameter)

    def load(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Brings one tensor of one projection ("w1" gate, "w3" up, "w2" down) into a parameter, as vLLM's loaders do.

        Raises ValueError for a tensor of another shape than the config says.
        """
        if self.tensors.alternates:
            is_mine = self._load_alternating(param, loaded_weight, weight_name, expert_id)
            return is_mine if return_success else None
        expert = self.local_expert(expert_id)
        if expert == -1:
            return False if return_success else None
        stem = "w2" if shard_id == "w2" else "w13"
        name = weight_name.rpartition(f"{stem}_")[2]
        shard, half = self.shards[stem], 1 if shard_id == "w3" else 0
        columns = shard.n // shard.parts
        place = param.data[expert][half * columns : (half + 1) * columns]
        if name in self.tensors.unread:
            if name.endswith("g_idx") and not bool((loaded_weight[1:] >= loaded_weight[:-1]).all()):
                raise ValueError(f"{self.name}.{name}: expected groups in order, as the config says, got others")
        elif name == self.tensors.factor:
            param.data[expert][half : half + 1].copy_(loaded_weight.reshape(1))
        elif name == "bias":
            self.loaded_biases.add(stem)
            # The ranks' results are added up: one of them brings the bias.
            part = loaded_weight[shard.first_column :][:columns]
            place.copy_(part if stem == "w13" or self.tp_rank == 0 else torch.zeros_like(part))
        else:
            read = self.tensors.read[name](loaded_weight.to(param.device))
            full, begin, end = len(shard.groups), shard.groups.start, shard.groups.stop
            is_weight = name == self.tensors.qweight
            if is_weight:
                bits = FORMATS[self.tensors.format]
                full, begin, end = (k * bits // 8 for k in (shard.full_k, shard.first_row, shard.first_row + shard.k))
            else:
                size = self.tensors.down_group if stem == "w2" else self.tensors.first_group
                full = 1 if size == -1 else shard.full_k // size
            # A weight may fill up its last word; groups are as many as the config says.
            has_columns = read.dim() == 2 and (read.shape[1] >= full if is_weight else read.shape[1] == full)
            if not has_columns or len(read) < shard.full_n:
                raise ValueError(
                    f"{self.name}.{name}: expected [N, K] = [{shard.full_n}, {shard.full_k}] with {full} columns, "
                    f"got {list(read.shape)} of {list(loaded_weight.shape)}"
                )
            place.copy_(read[shard.first_column :][:columns, begin:end])
        return True if return_success else None

    def _load_alternating(
        self, param: torch.nn.Parameter, loaded: torch.Tensor, weight_name: str, expert_id: int | None
    ) -> bool:
        """Brings a tensor of a product of gpt-oss into a parameter: of all experts of this rank, cut for it, or of the
        expert `expert_id`, for all ranks. Returns whether this rank has it."""
        stem, _, name = weight_name.rpartition(".")[2].partition("_")
        shard, data = self.shards[stem], param.data  # (experts, N, ...)
        if expert_id is not None:
            expert = self.local_expert(expert_id)
            if expert == -1:
                return False
            data, loaded = data[expert : expert + 1], loaded[None]
            loaded = loaded.flatten(2) if name == self.tensors.qweight else loaded
            if stem == "w13":
                loaded = loaded[:, 2 * shard.first_column :][:, : shard.n]
            elif name != "bias":
                per_column = shard.k // data.shape[2]
                loaded = loaded[..., shard.first_row // per_column :][..., : data.shape[2]]
            elif self.tp_rank:
                loaded = torch.zeros_like(loaded)
        fits = len(loaded) == len(data) and all(a <= b for a, b in zip(loaded.shape, data.shape, strict=True))
        if not fits:
            raise ValueError(f"{self.name}.{name}: expected {list(data.shape)} at most, got {list(loaded.shape)}")
        if name == "bias":
            self.loaded_biases.add(stem)
        else:
            loaded = self.tensors.read[name](loaded)
        data.zero_()  # the last rank may have fewer
        columns = shard.n // shard.parts
        for part in range(shard.parts):
            mine = loaded[:, part :: shard.parts]
            place = data[:, part * columns :][:, : mine.shape[1]]
            (place[..., : mine.shape[2]] if mine.dim() == 3 else place).copy_(mine)
        return True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the weights, in place of what was loaded. Raises ValueError for scales that do not fit."""
        tensors, self._made = self.tensors, None
        for stem, shard in self.shards.items():
            self._pack(layer, f"{stem}_{tensors.qweight}", stem)
            for name in (tensors.scales, tensors.zeros):
                if name is not None:
                    data = getattr(layer, f"{stem}_{name}").data
                    data = self._scales(layer, stem, data) if name == tensors.scales else data
                    data = data.transpose(1, 2)  # (E, groups, N)
                    data = data if shard.source is None else data[:, shard.source.to(data.device)]
                    _replace(layer, f"{stem}_{name}", data.contiguous())
            if stem not in self.loaded_biases:
                layer.register_parameter(f"{stem}_bias", None)
        names = (f"{stem}_{name}" for stem in self.shards for name in (*tensors.read, "bias"))
        self.held = tuple(name for name in names if getattr(layer, name, None) is not None)

    def _scales(self, layer: Any, stem: str, raw: torch.Tensor) -> torch.Tensor:
        """In the dtype of x. Raises ValueError for those that do not fit."""
        factors, name = None, self.tensors.factor
        if name is not None:
            columns = self.shards[stem].n // self.shards[stem].parts
            factors = getattr(layer, f"{stem}_{name}").data.repeat_interleave(columns, 1)[..., None]  # (E, N, 1)
            layer.register_parameter(f"{stem}_{name}", None)
        try:
            scales = self.tensors.scales_of(raw, factors)
            check_scales_as(scales, self.dtype, self.tensors.format)
        except ValueError as error:
            raise ValueError(f"{self.name}.{stem}_{self.tensors.scales}: {error}") from error
        return scales.to(self.dtype)

    def _pack(self, layer: Any, name: str, stem: str) -> None:
        """One expert at a time, so that no more than one is unpacked."""
        format, activations = self.tensors.format, self.tensors.activations
        rows = getattr(layer, name).data  # (E, N, K * bits / 8)
        stacked = torch.empty(0, dtype=torch.uint8)
        for expert, matrix in enumerate(rows):
            q = unpack_rows(matrix, format)  # (K, N)
            layout = resolve_layout(format, self.arch, None, q.device, activations)
            packed = preprocess(q, FORMATS[format], layout=layout, format=format)
            if expert == 0:
                self.layouts[stem] = packed.layout
                stacked = packed.data.new_empty(len(rows), packed.data.numel())
            stacked[expert] = packed.data
        _replace(layer, name, stacked.view(-1))

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """vLLM's own kernels are not used."""
        return

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [M, H], ids of all ranks' experts -> [M, H], the sum over the experts of this rank."""
        if layer.expert_map is not None:  # (experts of all ranks): the place here, -1: on another rank
            places = layer.expert_map[topk_ids.clamp(min=0).long()]
            topk_ids = torch.where(topk_ids < 0, -1, places)
        if layer.apply_router_weight_on_input:  # top_k is 1
            x = x * topk_weights.to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        first, second = self._weights(layer)
        x_scales = None
        if self.tensors.activations is not None:
            x, x_scales = quantize_activations(x)
        return fused_experts(x, first, second, topk_ids, topk_weights, self.gate, x_scales=x_scales)

    def _weights(self, layer: Any) -> tuple[Any, ...]:
        """w13 and w2, made when they are asked for first, and again where a reload brought others."""
        places = tuple(getattr(layer, name).data_ptr() for name in self.held)
        if self._made is None or self._made[0] != places:
            self._made = places, tuple(self._weight(layer, stem) for stem in self.shards)
        return self._made[1]

    def _weight(self, layer: Any, stem: str) -> tuple[QuantizedWeight, torch.Tensor | None]:
        """The weight and the bias of one product, checked here."""
        tensors, shard = self.tensors, self.shards[stem]
        data = getattr(layer, f"{stem}_{tensors.qweight}").data
        experts = int(layer.local_num_experts)
        packed = PackedWeight(data, shard.k, shard.n, tensors.format, self.layouts[stem], experts=experts)
        scales = getattr(layer, f"{stem}_{tensors.scales}").data
        zeros = None if tensors.zeros is None else getattr(layer, f"{stem}_{tensors.zeros}").data
        bias = getattr(layer, f"{stem}_bias", None)
        return QuantizedWeight(packed, scales, zeros), None if bias is None else bias.data


WeightOnlyExpertsMethod.load.supports_moe_loading = True  # type: ignore[attr-defined]


def _replace(layer: Any, name: str, value: torch.Tensor) -> None:
    replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))
