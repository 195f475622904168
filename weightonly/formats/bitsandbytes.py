"""bitsandbytes' 4-bit weights, NF4 and FP4, with plain or nested (double-quantized) statistics.

weight                   uint8, (N * K + 1) // 2 bytes: codes of the flattened [N, K] weight, the even element in the
                         high nibble; in any shape, also stored as a 16- or 32-bit dtype (`quant_storage`)
weight.absmax            fp32 [blocks], one per `blocksize` flattened elements; uint8 if nested
weight.quant_map         fp32 [16], the codebook
weight.quant_state.bitsandbytes__nf4 or __fp4
                         uint8, JSON: quant_type, blocksize, dtype, shape [N, K] and, if nested, nested_blocksize,
                         nested_dtype, nested_offset
weight.nested_absmax     fp32 [ceil(blocks / nested_blocksize)]; nested only
weight.nested_quant_map  fp32 [256]; nested only

w = quant_map[code] * absmax;  nested: absmax = nested_quant_map[absmax] * nested_absmax + nested_offset.

A block runs along K. Where blocksize divides K, a block is a group of this library and absmax are the scales. Elsewhere
a block begins in one row of [N, K] and ends in another. The group size is then the greatest common divisor of blocksize
and K: each block is cut at the ends of rows and its absmax repeated, and no weight changes.

Definitions: https://github.com/bitsandbytes-foundation/bitsandbytes (functional.py, QuantState). The idea: QLoRA,
https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..codebooks import BLOCK_FORMATS, codebook, codebook_values
from ..storage import parse_json
from .expect import FLOATS, TensorError, dtype_name, expect, option
from .layers import LayerFormat, LayerShape, Tensors, check_bias
from .plain import CodeWeight
from .words import unpack_nibbles

_STATE = "weight.quant_state.bitsandbytes__"
ANCHORS = tuple(f"{_STATE}{kind}" for kind in BLOCK_FORMATS)
_MAX_STATE_BYTES = 1 << 16


@dataclass(frozen=True)
class QuantState:
    """The JSON beside a weight. nested_blocksize: None without nested statistics; nested_offset has no use then."""

    quant_type: str
    blocksize: int
    dtype: torch.dtype
    n: int
    k: int
    nested_blocksize: int | None = None
    nested_offset: float = 0.0

    @property
    def blocks(self) -> int:
        return -(-self.n * self.k // self.blocksize)

    @property
    def group_size(self) -> int:
        """Rows of K that share a scale, in every column."""
        return math.gcd(self.k, self.blocksize)


def read_bitsandbytes(
    weight: torch.Tensor,
    absmax: torch.Tensor,
    quant_map: torch.Tensor,
    quant_state: torch.Tensor,
    nested_absmax: torch.Tensor | None = None,
    nested_quant_map: torch.Tensor | None = None,
) -> CodeWeight:
    """One 4-bit layer: codes [K, N], the codebook, and absmax as scales in fp32, nested statistics resolved.

    The codebook is the file's `quant_map`. absmax has the bits that bitsandbytes computes: a product and a sum, each
    rounded to fp32. bitsandbytes rounds codebook * absmax to its compute dtype. `gemm` takes scales in the dtype of x:
    rounding absmax to it is one more rounding of the same size. All tensors are on one device, CPU or CUDA.

    Args:
        weight: (N * K + 1) // 2 bytes of any dtype and shape: codes of the flattened [N, K] weight, the even element in
            the high nibble.
        absmax: fp32 [blocks], one per `blocksize` flattened elements; uint8 if nested.
        quant_map: fp32 [16], the codebook.
        quant_state: uint8, JSON: quant_type, blocksize, dtype, shape [N, K] and, if nested, nested_blocksize,
            nested_dtype, nested_offset.
        nested_absmax: fp32 [ceil(blocks / nested_blocksize)]; None: not nested.
        nested_quant_map: fp32 [256]; None: not nested.

    Raises:
        TensorError: a ValueError, tensors that do not fit together and a damaged state.

    Examples:
        >>> import bitsandbytes
        >>> weight, state = bitsandbytes.functional.quantize_4bit(torch.randn(768, 512), quant_type="nf4")
        >>> found = state.as_dict(packed=True)
        >>> about = found["absmax"], found["quant_map"], found["quant_state.bitsandbytes__nf4"]
        >>> wo.formats.read_bitsandbytes(weight, *about).codes.shape
        torch.Size([512, 768])
    """
    state = parse_state(quant_state)
    _check(state, weight, absmax, quant_map, nested_absmax, nested_quant_map)
    codes = unpack_nibbles(weight.contiguous().view(-1).view(torch.uint8), state.n * state.k)
    if state.nested_blocksize is not None:
        assert nested_absmax is not None and nested_quant_map is not None
        scale = nested_absmax[torch.arange(state.blocks, device=absmax.device) // state.nested_blocksize]
        absmax = nested_quant_map[absmax.int()] * scale
        absmax += torch.tensor(state.nested_offset, dtype=torch.float32, device=absmax.device)
    groups = state.k // state.group_size
    begins = torch.arange(state.n * groups, device=absmax.device) * state.group_size  # of the flattened [N, K]
    return CodeWeight(
        codes.view(state.n, state.k).t().contiguous(),
        quant_map,
        absmax[begins // state.blocksize].view(state.n, groups).t().contiguous(),
        _codebook_format(state.quant_type, quant_map),
        state.dtype,
    )


def _codebook_format(quant_type: str, quant_map: torch.Tensor) -> str:
    """The format of a weight with this codebook. Raises TensorError for numbers that cannot be a codebook."""
    if torch.equal(quant_map, codebook(quant_type, quant_map.device)):
        return quant_type
    try:
        codebook_values(quant_map)
    except ValueError as error:
        raise TensorError("weight.quant_map", str(error)) from error
    return "code4"


def bitsandbytes_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format: what describes a weight lies beside it, not in the config. Raises ValueError for 8-bit weights."""
    if option(options, "load_in_8bit", bool, option(options, "_load_in_8bit", bool, False)):
        raise ValueError("load_in_8bit: expected 4-bit weights, got true; LLM.int8() is not read")

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        state = parse_state(_state_of(tensors), _state_name(tensors))
        _check(
            state,
            tensors["weight"],
            tensors["weight.absmax"],
            tensors["weight.quant_map"],
            tensors.get("weight.nested_absmax"),
            tensors.get("weight.nested_quant_map"),
        )
        check_bias(tensors, state.n)
        form = _codebook_format(state.quant_type, tensors["weight.quant_map"])
        return LayerShape(form, state.k, state.n, state.group_size, symmetric=True, act_order=False)

    def read(layer: str, tensors: Tensors, _: torch.Tensor | None) -> CodeWeight:
        return read_bitsandbytes(
            tensors["weight"],
            tensors["weight.absmax"],
            tensors["weight.quant_map"],
            _state_of(tensors),
            tensors.get("weight.nested_absmax"),
            tensors.get("weight.nested_quant_map"),
        )

    nested = ("weight.nested_absmax", "weight.nested_quant_map")
    return LayerFormat(
        name="bitsandbytes",
        anchors=ANCHORS,
        required=("weight", "weight.absmax", "weight.quant_map"),
        optional=(*nested, "bias"),
        owned=("weight.absmax", "weight.quant_map", *nested),
        small=(*ANCHORS, "weight.quant_map"),
        describe=describe,
        read=read,
    )


def parse_state(quant_state: torch.Tensor, name: str = "weight.quant_state") -> QuantState:
    """The state in a uint8 tensor of JSON. Raises TensorError, naming `name`, if it is damaged or lacks a field."""
    expect(name, quant_state, torch.uint8, ["bytes"])
    if len(quant_state) > _MAX_STATE_BYTES:
        raise TensorError(name, f"expected at most {_MAX_STATE_BYTES} bytes of JSON, got {len(quant_state)}")
    try:
        fields = parse_json(bytes(quant_state.tolist()))
        if not isinstance(fields, dict):
            raise ValueError(f"expected a JSON object, got {fields!r}")
        shape = _required(fields, "shape", list)
        if len(shape) != 2 or not all(type(size) is int and 1 <= size < 1 << 31 for size in shape):
            raise ValueError(f"shape: expected [N, K], got {shape!s:.80}")
        quant_type = _required(fields, "quant_type", str)
        if quant_type not in BLOCK_FORMATS:
            raise ValueError(f"quant_type: expected nf4 or fp4, got {quant_type!r}")
        blocksize, dtype = _size(fields, "blocksize"), _float_dtype(fields, "dtype")
        nested_blocksize, nested_offset = _nested(fields)
        if name in ANCHORS and name != f"{_STATE}{quant_type}":
            raise ValueError(f"quant_type: expected that of the tensor's name, got {quant_type!r}")
    except ValueError as error:
        raise TensorError(name, str(error)) from error
    return QuantState(quant_type, blocksize, dtype, shape[0], shape[1], nested_blocksize, nested_offset)


def _nested(fields: Mapping[str, Any]) -> tuple[int | None, float]:
    if "nested_blocksize" not in fields:
        return None, 0.0
    if _float_dtype(fields, "nested_dtype") != torch.float32:
        raise ValueError(f"nested_dtype: expected float32, got {fields['nested_dtype']}")
    offset: float = _required(fields, "nested_offset", (int, float))
    if not abs(offset) <= torch.finfo(torch.float32).max:  # NaN is not, either
        raise ValueError(f"nested_offset: expected a finite number of fp32, got {offset!s:.40}")
    return _size(fields, "nested_blocksize"), float(offset)


def _required(fields: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    value = option(fields, key, kind)
    if value is None:
        raise ValueError(f"{key}: expected in the JSON, but it is missing")
    return value


def _size(fields: Mapping[str, Any], key: str) -> int:
    value: int = _required(fields, key, int)
    if value < 1:
        raise ValueError(f"{key}: expected at least 1, got {value}")
    if value >= 1 << 31:
        raise ValueError(f"{key}: expected less than 2^31, got {value!s:.40}")
    return value


def _float_dtype(fields: Mapping[str, Any], key: str) -> torch.dtype:
    name = _required(fields, key, str)
    names = {dtype_name(dtype): dtype for dtype in FLOATS}
    if name not in names:
        raise ValueError(f"{key}: expected one of {', '.join(names)}, got {name!r}")
    return names[name]


def _check(
    state: QuantState,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    quant_map: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_quant_map: torch.Tensor | None,
) -> None:
    """Raise TensorError for tensors that do not fit the state."""
    expected_bytes, got_bytes = (state.n * state.k + 1) // 2, weight.numel() * weight.element_size()
    if weight.dtype not in (torch.uint8, *FLOATS) or got_bytes != expected_bytes:
        raise TensorError(
            "weight",
            f"expected {expected_bytes} bytes for [N, K] = [{state.n}, {state.k}], "
            f"got {got_bytes} as {dtype_name(weight.dtype)} {list(weight.shape)}",
        )
    nested = state.nested_blocksize is not None
    expect("weight.absmax", absmax, torch.uint8 if nested else torch.float32, [state.blocks])
    expect("weight.quant_map", quant_map, torch.float32, [16])
    for name, tensor in (("nested_absmax", nested_absmax), ("nested_quant_map", nested_quant_map)):
        if nested == (tensor is None):
            expected, got = ("it", "none") if nested else ("none", "it")
            raise TensorError(f"weight.{name}", f"expected {expected} as the state's nested_blocksize says, got {got}")
    if state.nested_blocksize is not None:
        assert nested_absmax is not None and nested_quant_map is not None
        expect("weight.nested_absmax", nested_absmax, torch.float32, [-(-state.blocks // state.nested_blocksize)])
        expect("weight.nested_quant_map", nested_quant_map, torch.float32, [256])


def _state_name(tensors: Tensors) -> str:
    return next(name for name in ANCHORS if name in tensors)


def _state_of(tensors: Tensors) -> torch.Tensor:
    return tensors[_state_name(tensors)]
