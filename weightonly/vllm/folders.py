"""vLLM's quantization method "weightonly", for every folder that `load_checkpoint` reads, and its loader.

The loader brings the layers of all formats to one form, which vLLM can cut along N and K for tensor parallelism:

qweight     uint8 [N, K * bits / 8], see rows.py; of a converted folder its packed bytes, where ranks can cut these
            (blocks.py): not in act-order, not inside of a group or a block of the layout, not of experts
scales      [N, groups]
zeros       like scales, in units of signed integers; absent where the file says that the weight is symmetric
row_groups  int32 [K]: the group of each row, in the order of x; with act-order alone. vLLM drops tensors named g_idx.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ..formats import CodeWeight, IntWeight, QuantizedLayer, open_checkpoint
from ..formats.checkpoint import Checkpoint
from ..formats.converted import METHOD
from ..formats.layers import LayerShape
from ..formats.plain import unsort_rows
from ..heuristics.problem import CODE_FORMATS, FORMATS
from ..hub import model_folder
from ..packing import unpack
from .blocks import in_blocks
from .linear_method import WeightOnlyLinearMethod
from .rows import LOADED_FORMATS, pack_rows
from .support import VARIABLE, experts_wanted

logger = init_logger(f"vllm.{__name__}")

_FP8 = {"fp8", "fbgemm_fp8", "deepseek_v4_fp8", "float-quantized", "naive-quantized"}
_FP8 |= {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"}
"""What a config.json calls its quant_method, format or quant_algo where weights are FP8: see fp8_kernels.py."""

_LEFT_TO_VLLM = {"experts_int8", "torchao", "int-quantized", "mxfp8-quantized", "MXFP8"}
"""The same where it has nothing for our kernels."""


class WeightOnlyConfig(QuantizationConfig):
    """What is quantized in a folder, and how: read from its files, because formats say it in configs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, LayerShape] = {}
        self.names: dict[str, str] = {}
        """Layer of vLLM's model -> its name in the folder, where that is another one."""
        self._checkpoint: Checkpoint | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_checkpoint": None}  # other processes read the headers themselves

    def checkpoint(self, folder: str) -> Checkpoint:
        """The folder, whose headers have been read, once: what is loaded after may be other files."""
        found, self._checkpoint = self._checkpoint or open_checkpoint(folder), None
        return found

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantize_config.json", "quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WeightOnlyConfig:
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Folders of other methods are taken where the user asks for it: `--quantization weightonly`. vLLM shows every
        config here; the log names those that have little or nothing for our kernels."""
        if user_quant == METHOD:
            return METHOD
        keys = ("quant_method", "format", "quant_algo")
        named = [str(hf_quant_cfg[key]) for key in keys if hf_quant_cfg.get(key)]
        if not (_FP8 | _LEFT_TO_VLLM).isdisjoint(named):
            but = ", but for linear ones where it would take Marlin" if not _FP8.isdisjoint(named) else ""
            logger.info_once("Layers of %s are left to vLLM's kernels%s", ", ".join(named), but)
        return None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Reads the headers of the folder `model_name`.

        Raises what `load_checkpoint` raises at once, and ValueError for a quantized head that vLLM would not read.
        """
        self._checkpoint = open_checkpoint(model_folder(model_name, revision))
        self.shapes = self._checkpoint.shapes
        if getattr(hf_config, "tie_word_embeddings", False):
            for head in (name for name in self.shapes if name.rpartition(".")[2] == "lm_head"):
                raise ValueError(
                    f"{head}: expected no quantized head, as config.json says tie_word_embeddings, got one; vLLM would "
                    "take the embedding in its place: weightonly.hf.load_model reads the folder"
                )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Names of layers in the folder become those in vLLM's model."""
        mapped = {name: hf_to_vllm_mapper.apply_list([name]) for name in self.shapes}
        self.names = {new: self.names.get(name, name) for name, news in mapped.items() for new in news}
        self.shapes = {new: self.shapes[name] for name, news in mapped.items() for new in news}

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Raises ValueError for a quantized layer that is not linear, and for parts that do not fit together."""
        if not isinstance(layer, LinearBase):
            return self._experts_or_none(layer, prefix)
        parent, _, last = prefix.rpartition(".")
        names = [f"{parent}.{part}" if parent else part for part in self.packed_modules_mapping.get(last, [last])]
        if prefix in self.shapes:  # fused in the file as it is in vLLM
            names = [prefix]
        parts = [self.shapes.get(name) for name in names]
        if not any(parts):
            return UnquantizedLinearMethod()
        kinds = {None if p is None else (p.format, p.k, p.group_size, p.symmetric is True, p.act_order) for p in parts}
        first = parts[0]
        if first is None or len(kinds) > 1:
            got = dict(zip(names, parts, strict=True))
            raise ValueError(f"{prefix}: expected its parts to be quantized alike, got {got}")
        if any(part != first and part and part.layout != first.layout for part in parts):
            first = dataclasses.replace(first, layout=None)  # their bytes do not lie side by side
        method = WeightOnlyLinearMethod(prefix, first)
        method.folder, method.layers = self, tuple(self.names.get(name, name) for name in names)
        return method

    def _experts_or_none(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """The method of experts; None for a layer that is not quantized."""
        inside = [name for name in self.shapes if f"{name}.".startswith(f"{prefix}.")] if prefix else []
        if not inside:
            return None
        # Imported here: where no experts are quantized, nothing depends on vLLM's fused MoE layers.
        from vllm.model_executor.layers.fused_moe import RoutedExperts

        if not isinstance(layer, RoutedExperts):
            raise ValueError(
                f"{prefix}: expected quantized layers to be linear or experts, got {inside[0]} in "
                f"{type(layer).__name__}; the method weightonly has no embeddings"
            )
        if not experts_wanted():
            raise ValueError(f"{prefix}: has quantized experts, which {VARIABLE}=off leaves to vLLM")
        from .expert_layer import why_no_experts
        from .expert_tensors import of_rows
        from .experts import WeightOnlyExpertsMethod

        projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        first, down = (
            _one_kind(
                prefix,
                {
                    f"{expert}.{name}": self.shapes.get(f"{prefix}.{expert}.{name}")
                    for expert in range(layer.moe_config.num_experts)
                    for name in names
                    if name is not None  # experts without a gate have one first projection
                },
            )
            for names in (projections[:2], projections[2:])
        )
        kinds = {(shape.format, shape.symmetric is True, shape.activations) for shape in (first, down)}
        if len(kinds) > 1:
            raise ValueError(f"{prefix}: expected its products to be quantized alike, got {first} and {down}")
        if first.format not in LOADED_FORMATS or first.act_order or down.act_order:
            expected = f"one of {', '.join(LOADED_FORMATS)} without act-order"
            raise ValueError(f"{prefix}: expected {expected}, got {first} and {down}")
        has_zeros = first.symmetric is not True and first.format not in CODE_FORMATS
        tensors = of_rows(first.format, first.group_size, down.group_size, has_zeros, first.activations)
        if first.activations is not None and why_no_experts(layer, tensors) is not None:  # as linear layers do
            tensors = dataclasses.replace(tensors, activations=None)
        return WeightOnlyExpertsMethod(prefix, layer, tensors)


def _one_kind(prefix: str, shapes: dict[str, LayerShape | None]) -> LayerShape:
    """What all of them are. Raises ValueError where they are not quantized alike."""
    kinds = {
        None if p is None else (p.format, p.k, p.n, p.group_size, p.symmetric is True, p.act_order)
        for p in shapes.values()
    }
    first = next(iter(shapes.values()))
    if first is None or len(kinds) > 1:
        other = next((name for name, p in shapes.items() if p != first), "")
        raise ValueError(
            f"{prefix}: expected its experts to be quantized alike, got {first} and {other} {shapes.get(other)}"
        )
    return first


class WeightOnlyLoader(DefaultModelLoader):
    """`--load-format weightonly`: reads a folder in any format that `load_checkpoint` knows."""

    def download_model(self, model_config: ModelConfig) -> None:
        open_checkpoint(model_config.model)  # raises for what is no folder on this machine

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the folder, those of quantized layers in the form at the top of this module, or dequantized
        where vLLM has a dense layer: routers."""
        found = [getattr(module, "quant_method", None) for module in model.modules()]
        methods = [method for method in found if isinstance(method, WeightOnlyLinearMethod)]
        folder = next((method.folder for method in methods if method.folder is not None), WeightOnlyConfig())
        checkpoint = folder.checkpoint(model_config.model)
        packed = {layer for method in methods if method.takes_blocks for layer in method.layers}
        places, parameters = {old: new for new, old in folder.names.items()}, dict(model.named_parameters())
        dense = [name for name in checkpoint.layers if f"{places.get(name, name)}.weight" in parameters]
        if dense:
            logger.warning("%s and %d more are dense in vLLM's model: dequantized", dense[0], len(dense) - 1)
        for name in checkpoint.plain:
            if name not in checkpoint.unused:
                yield name, checkpoint.shards.read(name)
        for layer in checkpoint.layers.values():
            weight, bias = checkpoint.read(layer)
            if layer.name in dense:
                yield f"{layer.name}.weight", weight.dequantize(torch.float32).t()
            else:
                for suffix, tensor in loadable(weight, checkpoint.shapes[layer.name], layer.name in packed).items():
                    yield f"{layer.name}.{suffix}", tensor
            if bias is not None:
                yield f"{layer.name}.bias", bias


def loadable(
    weight: IntWeight | CodeWeight | QuantizedLayer, shape: LayerShape, as_blocks: bool = False
) -> dict[str, torch.Tensor]:
    """A layer in the form at the top of this module. as_blocks: qweight as the folder has it, in blocks of its layout.

    Raises ValueError for zero points that `shape` denies.
    """
    zeros, perm = getattr(weight, "zeros", None), getattr(weight, "perm", None)
    if as_blocks:
        assert isinstance(weight, QuantizedLayer)
        qweight = in_blocks(weight.weight)
    else:
        if isinstance(weight, CodeWeight):
            unsigned = weight.codes
        else:
            q = unpack(weight.weight) if isinstance(weight, QuantizedLayer) else weight.q
            middle = 0 if shape.format in CODE_FORMATS else 1 << FORMATS[shape.format] - 1
            unsigned = unsort_rows(q, perm).view(torch.uint8) + middle  # wraps: -8 is 248, and becomes 0
        qweight = pack_rows(unsigned.t(), shape.format)
    tensors = {"qweight": qweight, "scales": weight.scales.t().contiguous()}
    if zeros is not None and shape.symmetric:
        raise ValueError("zeros: expected none, as the config says symmetric, got zero points")
    if shape.symmetric is not True:
        zeros = torch.zeros_like(weight.scales) if zeros is None else zeros
        tensors["zeros"] = zeros.t().contiguous()
    if shape.act_order:
        groups = torch.arange(shape.k, dtype=torch.int32) // (shape.k // len(weight.scales))
        tensors["row_groups"] = groups if perm is None else torch.empty_like(groups).index_copy_(0, perm.long(), groups)
    return tensors
