"""Tells the format of a folder from its config files, else from the names and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..shown import shown
from .auto_round import METHODS as AUTO_ROUND
from .auto_round import auto_round_format
from .awq import awq_format
from .bitsandbytes import ANCHORS, bitsandbytes_format
from .compressed_tensors import compressed_tensors_formats
from .converted import INCOMPLETE, converted_format
from .expect import option
from .foreign import MODELOPT_CONFIG, NOT_READ, check_foreign
from .fp8 import FBGEMM, fbgemm_format, fp8_format
from .fp8 import METHOD as FP8
from .gguf import METHOD as GGUF
from .gguf import gguf_format
from .gpt_oss import METHOD as GPT_OSS
from .gpt_oss import gpt_oss_format
from .gptq import gptq_format
from .hqq import hqq_format
from .layers import LayerFormat, split_name
from .modelopt import METHODS as MODELOPT
from .modelopt import modelopt_format
from .packed_config import METHOD
from .quark import METHOD as QUARK
from .quark import quark_format
from .shards import CONFIG, Shards
from .torchao import METHOD as TORCHAO
from .torchao import torchao_format

_SEPARATE_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Config files of quantizers, older than the entry in config.json -> the method, if the file does not say it."""

_READERS: dict[str, Callable[[Mapping[str, Any]], LayerFormat | tuple[LayerFormat, ...]]] = {
    "awq": awq_format,
    "gptq": gptq_format,
    "compressed-tensors": compressed_tensors_formats,
    "bitsandbytes": bitsandbytes_format,
    GPT_OSS: gpt_oss_format,
    FP8: fp8_format,
    FBGEMM: fbgemm_format,
    **dict.fromkeys(MODELOPT, modelopt_format),
    "hqq": hqq_format,
    QUARK: quark_format,
    **dict.fromkeys(AUTO_ROUND, auto_round_format),
    METHOD: converted_format,
    GGUF: gguf_format,
}
"""Method of a quantization config -> what makes the format, or formats, of its layers of the options."""

METHODS = (*_READERS, TORCHAO)


def quantization_config(shards: Shards) -> tuple[str, dict[str, Any]]:
    """(file name, options) of the quantization config; options have a "quant_method". ("", {}) where there is none.

    Raises ValueError, naming the file, for one that is damaged or no object, and for two files that disagree.
    """
    source, options = _first_config(shards)
    if source != MODELOPT_CONFIG and (beside := _modelopt_options(shards)):
        if not source:
            return MODELOPT_CONFIG, beside
        for key in ("quant_method", "quant_algo", "quantized_layers"):
            if (found := options.get(key)) != beside.get(key) and not (key == "quant_method" and found in MODELOPT):
                raise ValueError(
                    f"{shards.folder / MODELOPT_CONFIG}: {key}: expected {shown(repr(found))} as {source} says, "
                    f"got {shown(repr(beside.get(key)))}"
                )
    return source, options


def _first_config(shards: Shards) -> tuple[str, dict[str, Any]]:
    folder = shards.folder
    if shards.own is not None:
        return shards.own
    if (config := shards.config(CONFIG)) is not None:
        inner = config.get("text_config")  # some multimodal models have it there
        for holder in (config, inner if isinstance(inner, dict) else {}):
            # compression_config is older: transformers did not know compressed-tensors then.
            for key, method in (("quantization_config", None), ("compression_config", "compressed-tensors")):
                try:
                    options = option(holder, key, dict)
                except ValueError as error:
                    raise ValueError(f"{folder / CONFIG}: {error}") from error
                if options is not None:
                    return CONFIG, {"quant_method": method} | options
    for name, method in _SEPARATE_CONFIGS.items():
        if (separate := shards.config(name)) is not None:
            return name, {"quant_method": method, **separate}
    return "", {}


def _modelopt_options(shards: Shards) -> dict[str, Any]:
    """What ModelOpt's own file says; {} where there is none, or it names no algorithm."""
    try:
        found = option(shards.config(MODELOPT_CONFIG) or {}, "quantization", dict, {})
        return {"quant_method": MODELOPT[0], **found} if option(found, "quant_algo", str) is not None else {}
    except ValueError as error:
        raise ValueError(f"{shards.folder / MODELOPT_CONFIG}: {error}") from error


def recognize(shards: Shards) -> tuple[str, tuple[LayerFormat, ...]]:
    """(what told the format, the formats that the layers of this folder may have).

    Raises ValueError, naming the folder or the config file, for an unknown format or a config that is refused.
    """
    folder = shards.folder
    if (folder / INCOMPLETE).exists():
        raise ValueError(f"{folder}: expected a complete checkpoint, got one whose conversion was stopped")
    source, options = quantization_config(shards)
    if not source:
        found = _from_tensors(shards)
        return "tensor names", found if isinstance(found, tuple) else (found,)
    try:
        method = option(options, "quant_method", str, "")
        if method == TORCHAO:
            return source, (torchao_format(options, shards.metadata),)
        if method not in _READERS:
            cure = f"; {NOT_READ[method]}" if method in NOT_READ else ""
            raise ValueError(f"quant_method: expected one of {', '.join(METHODS)}, got {method!r}{cure}")
        found = _READERS[method](options)
        return source, found if isinstance(found, tuple) else (found,)
    except ValueError as error:
        raise ValueError(f"{folder / source}: {shown(error)}") from error


def is_dense(shards: Shards) -> bool:
    """Whether nothing says that the tensors of this folder are quantized: neither a config nor their names."""
    anchors = (*ANCHORS, "qweight", "weight_packed", "W_q")
    if quantization_config(shards)[0]:
        return False
    return not any(split_name(name, anchors)[0] or name.endswith("_blocks") for name in shards.tensors)


def _from_tensors(shards: Shards) -> LayerFormat | tuple[LayerFormat, ...]:
    """The format of a folder without a quantization config, where names and shapes tell enough."""
    for name, info in shards.tensors.items():
        if split_name(name, ANCHORS)[0]:
            return bitsandbytes_format({})
        if name.endswith(".weight_packed"):
            return compressed_tensors_formats({})
        if split_name(name, ["blocks"], "_")[0] and len(info.shape) == 4:
            return gpt_oss_format({})
        if name.endswith(".W_q"):
            return hqq_format({})
        scales = shards.tensors.get(f"{split_name(name, ['qweight'])[0]}.scales")
        if name.endswith(".qweight") and scales is not None and len(info.shape) == len(scales.shape) == 2:
            if info.shape[1] * 8 == scales.shape[1]:
                return awq_format({})
            raise ValueError(
                f"{shards.folder}: {name}: expected quantize_config.json or a quantization_config in config.json, "
                "got neither; the tensors look like GPTQ, whose two versions store other zero points"
            )
    check_foreign(shards, shards.tensors, {})
    raise ValueError(
        f"{shards.folder}: expected a checkpoint of {', '.join(METHODS)}, "
        "got one without a quantization config and without tensors of these formats; a dense model is quantized by "
        "`weightonly quantize`, or while it loads: from_pretrained(folder, "
        "quantization_config=weightonly.hf.WeightOnlyConfig(format='int4')), and save_pretrained(OUT) writes it packed"
    )
