"""Quark's checkpoints, as its `export_safetensors` writes them: FP8, MXFP4, integers of 4 and 8 bits.

fp8_e4m3      weight float8_e4m3fn [N, K]; weight_scale: see fp8.py
fp4           weight uint8 [N, K / 2]; weight_scale uint8 [N, K / 32], exponents of E8M0: MXFP4, see ct_fp4.py
int4, uint4   weight int32 [K, N / 8], per_group; [N, K / 8], per_channel and per_tensor; nibbles in AWQ's order
              (pack_method "reorder"), or lowest bits first ("order")
int8, uint8   weight [K, N], per_group; [N, K], per_channel and per_tensor

Of integers weight_scale is float [K / g, N], [N] or [], weight_zero_point the same, packed along N as the weight is;
w = scale * (q - zero_point). input_scale, output_scale and their zero points are of activations: not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from .awq import unpack_awq
from .ct_fp4 import MODELOPT_FP4, fp4_shape, read_fp4
from .expect import FLOATS, TensorError, expect, option
from .fp8 import CHANNEL, TENSOR, Block, block_option, fp8_layers
from .layers import LayerFormat, LayerShape, Tensors, check_bias
from .plain import CodeWeight, IntWeight
from .words import to_signed, unpack_words

METHOD = "quark"
_INTEGERS = {"int4": torch.int32, "uint4": torch.int32, "int8": torch.int8, "uint8": torch.uint8}
_SCHEMES = ("per_tensor", "per_channel", "per_group", "per_block")
_ZERO = "weight_zero_point"
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


@dataclass(frozen=True)
class _Scheme:
    """What a config says of a weight. group_size: rows of K that share a scale, of per_group. block: of fp8_e4m3."""

    dtype: str
    kind: str
    group_size: int | None
    block: Block | None

    @property
    def bits(self) -> int:
        return int(self.dtype.removeprefix("u").removeprefix("int"))

    def signed(self, values: torch.Tensor, has_order: bool) -> torch.Tensor:
        """Integers as the file has them [rows, columns, maybe in words] -> int8 in the library's convention."""
        if self.bits == 8:
            return values if self.dtype == "int8" else to_signed(values, 8)
        nibbles = unpack_awq(values) if has_order else unpack_words(values, 4, dim=1)
        return to_signed(nibbles if self.dtype == "uint4" else nibbles ^ 8, 4)


def quark_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format that a quantization config describes. Raises ValueError, naming the entry, for what is not read."""
    whole = _scheme_of(options, "global_quant_config")
    own = option(options, "layer_quant_config", dict, {})
    schemes = {pattern: _scheme_of(own, pattern, "layer_quant_config.") for pattern in own}
    excluded = option(options, "exclude", list, [])
    if not all(isinstance(pattern, str) for pattern in excluded):
        raise ValueError(f"exclude: expected names and patterns, got {excluded!r:.200}")
    if types := options.get("layer_type_quant_config"):
        raise ValueError(f"layer_type_quant_config: expected none, as no file tells types, got {types!r:.200}")
    order = option(option(options, "export", dict, {}), "pack_method", str, "reorder")
    if order not in ("reorder", "order"):
        raise ValueError(f"export.pack_method: expected 'reorder' or 'order', got {order!r}")

    def scheme_of(layer: str) -> _Scheme:
        pattern = next((p for p in excluded if fnmatchcase(layer, p)), None)
        if pattern is not None:
            raise TensorError("weight", f"expected no quantized layer, as exclude says ({pattern!r}), got one")
        found = next((scheme for p, scheme in schemes.items() if fnmatchcase(layer, p)), whole)
        if found is None:
            raise TensorError("weight", "expected a dense layer, as the config says, got a quantized one")
        return found

    def block_of(layer: str) -> Block | None:
        scheme = scheme_of(layer)
        if scheme.dtype != "fp8_e4m3":
            raise TensorError("weight", f"expected {scheme.dtype}, as the config says, got 8-bit floats")
        return scheme.block

    floats = fp8_layers(METHOD, block_of, ("weight_scale",))

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        scheme = scheme_of(layer)
        if tensors["weight"].dtype == torch.float8_e4m3fn:
            return floats.describe(layer, tensors)
        if scheme.dtype not in _INTEGERS:
            if scheme.dtype != "fp4":
                expect("weight", tensors["weight"], torch.float8_e4m3fn, ["N", "K"])
            format, k, n = fp4_shape(tensors["weight"], tensors["weight_scale"], None, MODELOPT_FP4)
            if format != "mxfp4":
                raise TensorError("weight_scale", f"expected exponents of E8M0, as the config says, got {format}")
            check_bias(tensors, n)
            return LayerShape(format, k, n, 32, symmetric=True, act_order=False)
        k, n, rows = _shape(scheme, tensors)
        check_bias(tensors, n)
        return LayerShape(f"int{scheme.bits}", k, n, rows, None if _ZERO in tensors else True, act_order=False)

    def read(layer: str, tensors: Tensors, zeros: torch.Tensor | None) -> IntWeight | CodeWeight:
        scheme, weight, scale = scheme_of(layer), tensors["weight"], tensors["weight_scale"]
        if weight.dtype == torch.float8_e4m3fn:
            return floats.read(layer, tensors, zeros)  # type: ignore[return-value]
        if scheme.dtype == "fp4":
            return read_fp4(weight, scale, None, MODELOPT_FP4)
        _, n, _ = _shape(scheme, tensors)
        q = scheme.signed(weight, order == "reorder")
        q = q[:, :n] if scheme.kind == "per_group" else q.t()
        scales = (scale if scale.dim() == 2 else scale.expand(1, n)).contiguous()
        return IntWeight(q.contiguous(), scheme.bits, scales, None if zeros is None else zeros.to(scales), None)

    def zero_points(shape: LayerShape, layer: str, zero: torch.Tensor) -> torch.Tensor | None:
        scheme = scheme_of(layer)
        if zero.dim() == 0 and scheme.bits == 4:  # one number is no word
            found = (zero - (8 if scheme.dtype == "uint4" else 0)).to(torch.int8).expand(1, shape.n)
        else:
            words = zero if zero.dim() == 2 else zero.reshape(1, -1)
            found = scheme.signed(words.contiguous(), order == "reorder")[:, : shape.n]
        return found.expand(-1, shape.n).contiguous() if bool(found.any()) else None

    return LayerFormat(
        name=METHOD,
        anchors=("weight_scale",),
        required=("weight",),
        optional=(_ZERO, *_OF_ACTIVATIONS, "bias"),
        owned=(_ZERO,),
        small=(),
        describe=describe,
        read=read,
        zeros=_ZERO,
        zero_points=zero_points,
    )


def _scheme_of(options: Mapping[str, Any], key: str, place: str = "") -> _Scheme | None:
    """None where the weight is not quantized. Raises ValueError, naming the entry."""
    try:
        weight = option(option(options, key, dict, {}), "weight", dict)
    except ValueError as error:
        raise ValueError(f"{place}{key}: {error}") from error
    if weight is None:
        return None
    try:
        dtype, kind = option(weight, "dtype", str), option(weight, "qscheme", str)
        group_size = option(weight, "group_size", int)
        if kind not in _SCHEMES or (kind == "per_block" and dtype != "fp8_e4m3"):
            raise ValueError(f"qscheme: expected one of {', '.join(_SCHEMES)}, got {kind!r}")
        if kind == "per_channel" and option(weight, "ch_axis", int, 0) != 0:
            raise ValueError(f"ch_axis: expected 0, a scale for each output, got {weight['ch_axis']}")
        if kind == "per_group" and (group_size is None or not 0 < group_size < 1 << 31):
            raise ValueError(f"group_size: expected 1 to 2^31 - 1, got {group_size!s:.40}")
        if dtype == "fp4":
            found = (kind, group_size, option(weight, "scale_format", str))
            if found != ("per_group", 32, "e8m0"):
                raise ValueError(f"scale_format: expected groups of 32 with scales in e8m0 for fp4, got {found}")
        elif dtype not in (*_INTEGERS, "fp8_e4m3"):
            raise ValueError(f"dtype: expected fp8_e4m3, fp4, {', '.join(_INTEGERS)}, got {dtype!r}")
        assert kind is not None and dtype is not None
        sizes = block_option(weight, "block_size") if kind == "per_block" else None
        if kind == "per_block" and sizes is None:
            raise ValueError("block_size: expected two sizes for per_block, got none")
        known = {"per_tensor": TENSOR, "per_channel": CHANNEL, "per_group": (1, group_size or -1)}
        return _Scheme(dtype, kind, group_size, known.get(kind, sizes))
    except ValueError as error:
        raise ValueError(f"{place}{key}: weight: {error}") from error


def _shape(scheme: _Scheme, tensors: Tensors) -> tuple[int, int, int]:
    """(K, N, rows of a group) of integers. Raises TensorError for tensors that do not fit."""
    weight, scale, dtype = tensors["weight"], tensors["weight_scale"], _INTEGERS[scheme.dtype]
    in_word = 32 // scheme.bits if scheme.bits == 4 else 1
    expect("weight", weight, dtype, ["K", "N"] if scheme.kind == "per_group" else ["N", "K"])
    if scheme.kind == "per_group":
        assert scheme.group_size is not None
        k, rows = weight.shape[0], scheme.group_size
        n = scale.shape[-1] if scale.dim() else 0
        expect("weight_scale", scale, FLOATS, [-(-k // rows), n])
        if k % rows or weight.shape[1] != -(-n // in_word):
            expected = f"K to be a multiple of {rows}, and {-(-n // in_word)} columns for N = {n}"
            raise TensorError("weight", f"expected {expected}, got {list(weight.shape)}")
        zeros = [k // rows, weight.shape[1]]
    else:
        n, k = weight.shape[0], weight.shape[1] * in_word
        rows = k
        expect("weight_scale", scale, FLOATS, [n] if scheme.kind == "per_channel" else [])
        zeros = [-(-n // in_word)] if scheme.kind == "per_channel" else []
    if _ZERO in tensors:
        expect(_ZERO, tensors[_ZERO], dtype, zeros)
    return k, n, rows
