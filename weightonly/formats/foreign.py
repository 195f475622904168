"""Tensors of quantizers that are not read, or that no config declares, by their names and dtypes.

As dense ones they would be other numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .expect import dtype_name, option
from .layers import Layer
from .shards import Shards, TensorInfo

MODELOPT_CONFIG = "hf_quant_config.json"
"""Of ModelOpt, which earlier wrote nothing to config.json."""

NOT_READ = {
    "eetq": "its bytes lie as the GPU that wrote them wants it, and it does not say which; quantize the original "
    "model: from_pretrained(folder, quantization_config=weightonly.hf.WeightOnlyConfig(format='int8', group_size=-1))",
}
"""Method that is not read -> the way round."""

_LOOKS_LIKE = tuple(
    (re.compile(rf"(?:^|[._])(?:{names})$"), quantizer)
    for names, quantizer in (
        ("SCB|weight_format", "LLM.int8() of bitsandbytes"),
        (r"(?:nested_)?absmax|(?:nested_)?quant_map|quant_state\..*", "bitsandbytes"),
        (r"weight_scale_2|weights_scaling_factor|quantizer\._\w+", "NVFP4 or FP8 of ModelOpt"),
        ("scale_inv", "block FP8, as of DeepSeek"),
        ("input_scale_ub", "FP8 of FBGEMM"),
        ("scale_weight|scale_input|scaled_fp8", "FP8 of ComfyUI"),
        ("W_q", "HQQ"),
        (r"qdata|weight:\w+|tensor_impl(?:\W.*)?", "torchao"),
        (r"weight\._\w+", "quanto"),
        ("weight_scales", "EETQ"),
        (r"quantizer\.\w+", "Quark"),
        ("biases", "MLX"),
        ("codebooks", "AQLM"),
        ("q_weight|q_scale|q_groups|q_invperm", "ExLlamaV2"),
        ("trellis", "ExLlamaV3"),
        ("Qidxs", "QuIP#"),
        ("centroids", "VPTQ"),
        ("weight_packed|weight_shape|weight_global_scale|weight_g_idx", "compressed-tensors"),
        ("qweight|qzeros|g_idx", "AWQ or GPTQ"),
        ("blocks", "MXFP4 of gpt-oss"),
    )
)
"""What a tensor of a layer is called -> whose it is, the surest names first."""

_ALWAYS = re.compile(
    r"(?:^|[._])(?:weight_(?:scales?|scale_inv|scale_\d|zero_points?|absmax|packed|shape|g_idx|global_scale|format)"
    r"|weight(?:\._\w+|:\w+|\.(?:nested_)?(?:absmax|quant_map)|\.quant_state\..*)"
    r"|(?:nested_)?absmax|SCB|W_q|qweight|qzeros|g_idx|qdata|scale_weight|scale_input|scale_inv|input_scale_ub|weights_scaling_factor"
    r"|(?:weight|input|output)_quantizer\..*)$"
)
"""Names that no model has."""

_BESIDE = re.compile(r"^(.+?)[._](?:weight_)?(?:scales?|scale_\d|zeros?|zero_points?|amax|qmax|biases)$")
"""Names that a quantizer gives to what stands beside a weight, and a model to other things, too."""

_OF_KV_CACHE = re.compile(r"(?:^|[._])(?:[kvq]|kv|prob)_(?:scale|zero_point)$|[kv]_proj\.output_(?:scale|zero_point)$")
_OF_ACTIVATIONS = re.compile(r"\.(?:input|output)_(?:scale|zero_point)$")

_BUFFERS = re.compile(r"mask|ids?$|idx$|index|eid$|position|buckets|tracked|inv_freq$|version$|^bias$")
"""Masks, indices and tables that models have, or had in earlier versions of transformers."""


_OF_ROUTERS = {"e_score_correction_bias"}
"""Tensors that models have beside the weight of a router, which may be quantized."""


def check_foreign(shards: Shards, plain: Iterable[str], layers: Mapping[str, Layer]) -> None:
    """Raises ValueError for the first of the tensors `plain`, which are in none of `layers`, that a quantizer wrote."""
    beside = {f"{layer}{found.format.separator}" for layer, found in layers.items()}
    for name in plain:
        info = shards.tensors[name]
        stem, _, last = name.rpartition(".")
        problem, near = None, {name: info} if f"{stem}." in beside else shards.tensors
        if is_small_float(info.dtype):
            problem = "weights of 16 bits or more"
        elif not info.dtype.is_floating_point and _are_numbers(last, info):
            problem = "floats"
        elif _ALWAYS.search(name) or _OF_KV_CACHE.search(name) or _OF_ACTIVATIONS.search(name):
            problem = "no tensor of this name"
        elif (found := _BESIDE.match(name)) and _is_weight(found[1], shards.tensors, layers):
            problem = f"none beside the weight of {found[1]}"
        elif f"{stem}." in beside and last not in _OF_ROUTERS:
            problem = f"none beside the tensors of {stem}"
        if problem is not None:
            raise foreign(name, info, near, problem)


def foreign(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], expected: str) -> ValueError:
    """The error for a tensor that is not what a model or a known format has. tensors: of the folder."""
    got = f"{dtype_name(info.dtype)} {list(info.shape)}"
    return ValueError(f"{info.file}: {name}: expected {expected}, got {got}; {looks_like(name, tensors)}")


def looks_like(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    """Whose tensor it may be, by its name and those of the same layer."""
    layer = re.sub(r"(?:\.weight|\.\w+_quantizer)?[.:][^.]*$", "", name)
    parts = (layer, f"{layer}.weight", f"{layer}.weight_quantizer")
    names = [name, *(other for other in tensors if other.rpartition(".")[0] in parts or other.startswith(f"{name}_"))]
    for pattern, quantizer in _LOOKS_LIKE:
        if any(pattern.search(other) for other in names):
            return f"it looks like {quantizer}, and the folder is not read as such"
    dtypes = {tensors[other].dtype for other in names}
    if any(map(is_small_float, dtypes)):
        return "it looks like FP8 of ModelOpt, compressed-tensors or FBGEMM, and the folder is not read as such"
    if any(not dtype.is_floating_point for dtype in dtypes):
        return "it looks like integers of compressed-tensors, Quark or another quantizer, which are not read"
    if _OF_KV_CACHE.search(name) or _OF_ACTIVATIONS.search(name):
        return "it looks like one of quantized activations or of a KV cache, which the config does not declare"
    return "it may be a quantizer's: nothing would use it"


def is_small_float(dtype: torch.dtype) -> bool:
    """Whether it is a float of 8 bits, or less."""
    return dtype.is_floating_point and dtype.itemsize == 1


def is_buffer(last: str) -> bool:
    """Whether a tensor of this name, without that of its module, may be a mask or a table: no weights."""
    return _BUFFERS.search(last) is not None


def _are_numbers(last: str, info: TensorInfo) -> bool:
    """Whether integers may be those of a weight: not indices, masks or counters. last: of the name."""
    if last == "weight":
        return True
    wide = info.dtype in (torch.bool, torch.int64)
    return not wide and len(info.shape) > 0 and not is_buffer(last)


def _is_weight(stem: str, tensors: Mapping[str, TensorInfo], layers: Mapping[str, Layer]) -> bool:
    found = tensors.get(stem) or tensors.get(f"{stem}.weight")
    return stem in layers or (found is not None and len(found.shape) > 1)


def of_activations(shards: Shards, config: tuple[str, Mapping[str, Any]] = ("", {})) -> frozenset[str]:
    """Tensors of quantized activations and of a quantized KV cache that the config declares: neither is quantized here.

    config: (file name, the quantization config of the folder). Raises ValueError, naming the file, for entries of
    another kind.
    """
    file, options = config
    try:
        options = option(options, "source", dict, options)
        groups = [group for group in option(options, "config_groups", dict, {}).values() if isinstance(group, dict)]
        file, own = MODELOPT_CONFIG, shards.config(MODELOPT_CONFIG) or {}
        modelopt = option(own, "quantization", dict, {})
    except ValueError as error:
        raise ValueError(f"{shards.folder / file}: {error}") from error
    patterns = []
    if any(group.get("input_activations") or group.get("output_activations") for group in groups):
        patterns.append(_OF_ACTIVATIONS)
    if options.get("kv_cache_scheme") or options.get("kv_cache_quant_config") or modelopt.get("kv_cache_quant_algo"):
        patterns.append(_OF_KV_CACHE)
    return frozenset(name for name in shards.tensors if any(pattern.search(name) for pattern in patterns))
