"""torchao's weights, in memory, and as `save_pretrained` of transformers writes them with TorchAoConfig.

A weight "x.weight" [N, K] of a class of torchao is stored as the tensors that it is made of, "x._weight_NAME". The
metadata of the file has JSON under "x.weight": the class (`_type`) and its attributes (`_data`).

Int4Tensor                qdata  int8 [N, K / 2]: q, two's complement of 4 bits, the even element in the low nibble
                          scale, zero_point  float [K / g, N];  w = scale * q + zero_point
Int4TilePackedTo4dTensor  qdata  int32 [N' / 8, K' / 128, 32, 4]: u, in the order of a tensor core's operand; N' and K'
                          are N and K, padded to whole tiles and more
                          scale_and_zero  float [K' / g, N', 2];  w = scale * (u - 8) + zero
Int8Tensor,               qdata  int8 [N, K]: q, of 8 bits or of those of target_dtype
IntxUnpackedToInt8Tensor  scale, zero_point  float, int8 or float [N / b, K / g] for a block_size of [b, g]; zero_point
                          may be missing;  w = scale * (q - zero_point)
Float8Tensor              qdata  float8_e4m3fn [N, K];  scale  float [N / b, K / g], or one number;  w = scale * q

Activations that a class quantizes when it runs are not quantized here. Definitions: torchao/quantization/quantize_ and
torchao/prototype/safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..storage import parse_json
from .expect import FLOATS, TensorError, expect, option
from .fp8 import METHOD as FP8
from .fp8 import TENSOR, Block, read_fp8
from .layers import LayerFormat, LayerShape, Tensors, check_bias
from .plain import CodeWeight, IntWeight
from .words import to_signed, unpack_words

METHOD = "torchao"
ANCHOR = "_weight_qdata"
_ZERO = "_weight_zero_point"
_INT4, _TILES, _INTX = "Int4Tensor", "Int4TilePackedTo4dTensor", "IntxUnpackedToInt8Tensor"
_FLOAT8 = "Float8Tensor"
_KINDS = (_INT4, _TILES, "Int8Tensor", _INTX, _FLOAT8)
_WITHOUT_USE = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")
"""Known scales of activations."""


@dataclass(frozen=True)
class Kind:
    """What the metadata says of a weight. block: the values of N and K that share a scale. size: N, K."""

    name: str
    format: str
    block: Block
    size: tuple[int, int] | None


def read_torchao(weight: torch.Tensor) -> IntWeight | CodeWeight:
    """A weight [N, K] of a class of torchao, in memory, such as `quantize_` puts into a torch.nn.Linear.

    Its numbers are those of the weight's `dequantize()`, which rounds them to the weight's dtype; activations that it
    quantizes when it runs are not quantized here.

    Args:
        weight: Int4Tensor, Int4TilePackedTo4dTensor, Int8Tensor, IntxUnpackedToInt8Tensor or Float8Tensor [N, K].

    Raises:
        ValueError: classes and tensors that are not read.
    """
    data = {
        "block_size": list(getattr(weight, "block_size", None) or ()),
        "shape": list(weight.shape),
        "target_dtype": {"_data": str(getattr(weight, "target_dtype", None)).removeprefix("torch.")},
    }
    kind = _kind_of(type(weight).__name__, data)
    names = [*getattr(weight, "tensor_data_names", ()), *getattr(weight, "optional_tensor_data_names", ())]
    found = {f"_weight_{name}": value for name in names if (value := getattr(weight, name)) is not None}
    _shape(kind, found)
    zero = found.get(_ZERO)
    return _weight(kind, found, zero if zero is not None and bool(zero.any()) else None)


def torchao_format(options: Mapping[str, Any], metadata: Mapping[Any, Mapping[str, str]]) -> LayerFormat:
    """The format: what describes a weight is in the `metadata` of the files (file -> name -> text)."""
    texts = {name: text for found in metadata.values() for name, text in found.items()}

    def kind_of(layer: str) -> Kind:
        try:
            return _kind(texts.get(f"{layer}.weight"))
        except ValueError as error:
            raise TensorError(ANCHOR, f"metadata of {layer}.weight: {error}") from error

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        kind = kind_of(layer)
        n, k = _shape(kind, tensors)
        check_bias(tensors, n)
        symmetric = None if _ZERO in tensors else kind.name != _TILES
        return LayerShape(kind.format, k, n, k if kind.block[1] == -1 else kind.block[1], symmetric, act_order=False)

    def zero_points(shape: LayerShape, layer: str, zero: torch.Tensor) -> torch.Tensor | None:
        return zero if bool(zero.any()) else None

    return LayerFormat(
        name=METHOD,
        anchors=(ANCHOR,),
        required=(),
        optional=("_weight_scale", _ZERO, "_weight_scale_and_zero", "_weight_act_pre_scale", *_WITHOUT_USE, "bias"),
        owned=(_ZERO, "_weight_scale_and_zero"),
        small=(),
        describe=describe,
        read=lambda layer, tensors, zero: _weight(kind_of(layer), tensors, zero),
        zeros=_ZERO,
        zero_points=zero_points,
    )


def _kind(text: str | None) -> Kind:
    """Raises ValueError for a class or attributes that are not read."""
    if text is None:
        raise ValueError("expected JSON with the class of the weight, got none")
    fields = parse_json(text.encode())
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, got {fields!r:.200}")
    return _kind_of(option(fields, "_type", str), option(fields, "_data", dict, {}))


def _kind_of(name: str | None, data: Mapping[str, Any]) -> Kind:
    """The kind of a class with these attributes; see `_kind`."""
    if name not in _KINDS:
        cure = "quantize the original model again with Int4WeightOnlyConfig or Int8WeightOnlyConfig, or to int4 or nf4"
        raise ValueError(f"_type: expected one of {', '.join(_KINDS)}, got {name!r}; {cure}")
    if name == _FLOAT8:  # without block_size one scale is for all
        return Kind(name, FP8, _sizes(data, "block_size") if data.get("block_size") else TENSOR, None)
    block, size = _sizes(data, "block_size"), _sizes(data, "shape") if name in (_INT4, _TILES) else None
    if name == _INTX:
        target = option(option(data, "target_dtype", dict, {}), "_data", str)
        if target not in {f"int{bits}" for bits in range(1, 9)}:
            raise ValueError(f"target_dtype: expected int1 .. int8, got {target!r}")
        bits = 4 if target <= "int4" else 8
    else:
        bits = 8 if size is None else 4
    return Kind(name, f"int{bits}", block, size)


def _sizes(data: Mapping[str, Any], key: str) -> tuple[int, int]:
    sizes = option(data, key, list, [])
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size < 1 << 31 for size in sizes):
        raise ValueError(f"{key}: expected two sizes, got {sizes!r:.80}")
    return sizes[0], sizes[1]


def _shape(kind: Kind, tensors: Tensors) -> tuple[int, int]:
    """(N, K). Raises TensorError for tensors that do not fit."""
    wanted = {"_weight_scale_and_zero"} if kind.name == _TILES else {"_weight_scale"}
    wanted |= {_ZERO} if kind.name in (_INT4, _INTX) else set()
    allowed = {ANCHOR, "bias", *wanted, *_WITHOUT_USE, *([_ZERO] if kind.size is None and kind.name != _FLOAT8 else [])}
    for name in sorted(wanted ^ (tensors.keys() & wanted) | tensors.keys() - allowed):
        there = ("it", "none") if name in wanted else ("none", "it")
        raise TensorError(
            name if name in tensors else ANCHOR, f"{name}: expected {there[0]} for {kind.name}, got {there[1]}"
        )
    qdata, (b, g) = tensors[ANCHOR], kind.block
    if kind.size is None:
        expect(ANCHOR, qdata, torch.float8_e4m3fn if kind.name == _FLOAT8 else torch.int8, ["N", "K"])
        n, k = qdata.shape
        b, g = (n if b == -1 else b), (k if g == -1 else g)
    else:
        n, k = kind.size
    if k % g or n % b or (kind.size is not None and b != 1):
        raise TensorError(ANCHOR, f"block_size: expected sizes that divide N, K = {n}, {k}, got {b}, {g}")
    if kind.name == _TILES:
        expect(ANCHOR, qdata, torch.int32, ["N / 8", "K / 128", 32, 4])
        n_padded, k_padded = qdata.shape[0] * 8, qdata.shape[1] * 128
        if n_padded < n or k_padded < k or k_padded % g:
            raise TensorError(ANCHOR, f"expected tiles of 8 x 128 for N, K = {n}, {k}, got {list(qdata.shape)}")
        name = "_weight_scale_and_zero"
        expect(name, tensors[name], FLOATS, [k_padded // g, n_padded, 2])
        return n, k
    if kind.name == _INT4:
        expect(ANCHOR, qdata, torch.int8, [n, k // 2])
    scales = [k // g, n] if kind.name == _INT4 else [n // b, k // g]
    scale = tensors["_weight_scale"]
    is_one = kind.name == _FLOAT8 and scales == [1, 1] and scale.dim() == 0
    expect("_weight_scale", scale, FLOATS, [] if is_one else scales)
    if _ZERO in tensors:
        expect(_ZERO, tensors[_ZERO], FLOATS if kind.name == _INT4 else (torch.int8, *FLOATS), scales)
    return n, k


def _weight(kind: Kind, tensors: Tensors, zero: torch.Tensor | None) -> IntWeight | CodeWeight:
    """zero: as in the file; None: all are 0."""
    if kind.name == _FLOAT8:
        return read_fp8(tensors[ANCHOR], tensors["_weight_scale"], kind.block, name="_weight_scale")
    qdata, (b, g) = tensors[ANCHOR], kind.block
    if kind.name == _TILES:
        assert kind.size is not None
        n, k = kind.size
        both = tensors["_weight_scale_and_zero"][: k // g, :n].float()
        return _shifted(to_signed(_from_tiles(qdata)[:n, :k], 4), both[..., 0], both[..., 1])
    if kind.name == _INT4:
        q = torch.stack((qdata << 4 >> 4, qdata >> 4), dim=-1).flatten(1)
        return _shifted(q, tensors["_weight_scale"].float(), None if zero is None else zero.float())
    if kind.format == "int4" and not -8 <= int(qdata.min()) <= int(qdata.max()) <= 7:
        raise TensorError(ANCHOR, "expected values of target_dtype, within -8 .. 7, got others")
    scale = tensors["_weight_scale"]
    scales, zeros = (None if x is None else x.to(scale).t().repeat_interleave(b, 1) for x in (scale, zero))
    assert scales is not None
    return IntWeight(qdata.t().contiguous(), int(kind.format.removeprefix("int")), scales.contiguous(), zeros, None)


def _shifted(q: torch.Tensor, scales: torch.Tensor, shift: torch.Tensor | None) -> IntWeight:
    """w = scales * q + shift: q int8 [N, K]; scales, shift fp32 [groups, N]. Zeros, in units of q, are rounded to fp32.

    Raises TensorError for groups whose numbers are one and the same, so far from 0 that float16 holds no such zeros.
    """
    zeros = None
    if shift is not None:
        zeros = torch.where(shift == 0, shift, -shift / scales)
        if bool((zeros.abs() > torch.finfo(torch.float16).max).any()):
            raise TensorError(ANCHOR, "expected zero points within 65504 scales, got larger ones")
    return IntWeight(q.t().contiguous(), 4, scales.contiguous(), zeros, None)


def _from_tiles(words: torch.Tensor) -> torch.Tensor:
    """int32 [N / 8, K / 128, 32, 4] -> uint8 [N, K].

    A lane 4 n + c of 32 has column n of a tile and, of each 16 rows, 2 c, 2 c + 1, 2 c + 8 and 2 c + 9; a word has
    those of two times 16 rows, even rows in its low half.
    """
    tiles_n, tiles_k = words.shape[:2]
    nibbles = unpack_words(words.reshape(-1, 1), 4, dim=1).view(tiles_n, tiles_k, 8, 4, 4, 2, 2, 2)
    # (tile of N, tile of K, n, c, 32 rows, odd, 16 rows, 8 rows)
    return nibbles.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(tiles_n * 8, tiles_k * 128)
