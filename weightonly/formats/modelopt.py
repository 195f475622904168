"""ModelOpt's checkpoints: FP8, MXFP8, NVFP4 and MXFP4. Activations stay in 16 bits.

FP8            weight float8_e4m3fn [N, K]; weight_scale: see fp8.py
MXFP8          weight float8_e4m3fn [N, K]; weight_scale uint8 [N, K / 32], exponents of E8M0
NVFP4          weight uint8 [N, K / 2], E2M1 codes, the even one in the low nibble; weight_scale float8_e4m3fn
               [N, K / 16]; weight_scale_2 fp32 []: w = (weight_scale * weight_scale_2) * number of the code
MXFP4          weight as NVFP4; weight_scale uint8 [N, K / 32], exponents of E8M0
input_scale    of quantized activations: not used

hf_quant_config.json, and newer config.json, name the algorithm of all layers, or of each ("MIXED_PRECISION").
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..heuristics.problem import FORMAT_GROUPS
from .ct_fp4 import MODELOPT_FP4, fp4_shape, read_fp4
from .expect import TensorError, option
from .fp8 import CHANNEL, TENSOR, Block, fp8_layers
from .layers import LayerFormat, LayerShape, Tensors, check_bias

METHODS = ("modelopt", "modelopt_fp4")
"""`quant_method` of config.json."""

_ALGORITHMS: dict[str, Block | str] = {
    "FP8": TENSOR,
    "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL,
    "FP8_PB_WO": (128, 128),
    "MXFP8": (1, 32),
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "W4A8_NVFP4_FP8": "nvfp4",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
}
"""Algorithm -> the blocks of 8-bit floats, or the format of 4-bit ones."""

_OF_X = {
    "pre_quant_scale": "x would be multiplied by it",
    "svdquant_lora_a": "x would have a second product",
    "svdquant_lora_b": "x would have a second product",
}
"""Tensors beside a weight that change x."""


def modelopt_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format of a quantization config. Raises ValueError for algorithms that are not read."""
    whole = option(options, "quant_algo", str, "")
    excluding = "exclude_modules" if options.get("exclude_modules") is not None else "ignore"
    excluded = option(options, excluding, list, [])
    if not all(isinstance(pattern, str) for pattern in excluded):
        raise ValueError(f"{excluding}: expected names and patterns, got {excluded!r:.200}")
    by_name: dict[str, Block | str] = {}
    if whole.upper() == "MIXED_PRECISION":
        layers = option(options, "quantized_layers", dict, {})
        for name in layers:
            try:
                by_name[name] = _algorithm(option(option(layers, name, dict, {}), "quant_algo", str, ""))
            except ValueError as error:
                raise ValueError(f"quantized_layers.{name}: {error}") from error
        of_all = None
    else:
        of_all = _algorithm(whole)

    def algorithm_of(layer: str) -> Block | str:
        pattern = next((p for p in excluded if fnmatchcase(layer, p)), None)
        if pattern is not None:
            raise TensorError("weight", f"expected no quantized layer, as {excluding} says ({pattern!r}), got one")
        if of_all is not None:
            return of_all
        parts = layer.split(".")  # the entry of a layer, or of a module that it is in
        owners = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        found = next((by_name[owner] for owner in owners if owner in by_name), None)
        if found is None:
            raise TensorError("weight", "expected it in quantized_layers, as it is quantized, got no entry")
        return found

    def block_of(layer: str) -> Block | None:
        block = algorithm_of(layer)
        if isinstance(block, str):
            raise TensorError("weight", f"expected uint8 for {block}, as the config says, got 8-bit floats")
        return block

    floats = fp8_layers(METHODS[0], block_of, ("weight_scale",))

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        for name, why in _OF_X.items():
            if name in tensors:
                raise TensorError(name, f"expected none, as {why}, got one")
        if tensors["weight"].dtype != torch.uint8:
            if "weight_scale_2" in tensors:
                raise TensorError("weight_scale_2", "expected none beside 8-bit floats, got one")
            return floats.describe(layer, tensors)
        format, k, n = fp4_shape(tensors["weight"], *_scales(tensors), MODELOPT_FP4)
        expected = algorithm_of(layer)
        if format != expected:
            expected = expected if isinstance(expected, str) else "8-bit floats"
            raise TensorError("weight", f"expected {expected}, as the config says, got {format}")
        check_bias(tensors, n)
        return LayerShape(format, k, n, FORMAT_GROUPS[format], symmetric=True, act_order=False)

    def read(layer: str, tensors: Tensors, zeros: torch.Tensor | None) -> Any:
        if tensors["weight"].dtype != torch.uint8:
            return floats.read(layer, tensors, zeros)
        return read_modelopt_fp4(tensors["weight"], *_scales(tensors))

    return LayerFormat(
        name=METHODS[0],
        anchors=("weight_scale",),
        required=("weight",),
        optional=("weight_scale_2", "input_scale", "bias", *_OF_X),
        owned=("weight_scale_2",),
        small=(),
        describe=describe,
        read=read,
    )


read_modelopt_fp4 = functools.partial(read_fp4, names=MODELOPT_FP4)


def _scales(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    return tensors["weight_scale"], tensors.get("weight_scale_2")


def _algorithm(name: str) -> Block | str:
    found = _ALGORITHMS.get(name.upper())
    if found is None:
        raise ValueError(f"quant_algo: expected one of {', '.join(_ALGORITHMS)} or MIXED_PRECISION, got {name!r}")
    return found
