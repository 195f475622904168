"""HQQ's checkpoints, 4 and 8 bit, grouped along K (Badri and Shaji, https://mobiusml.github.io/hqq_blog/).

W_q          uint8 [G / 2, g] for 4 bits: u of group r in the high nibbles of row r, of group G / 2 + r in the low ones;
             [G, g] for 8 bits; g values in a group, G = N * K / g groups of the flattened [N, K] weight; also viewed as
             floats of another width (`view_as_float`)
scale, zero  float [G, 1]; zeros may be fractions
shape        int64 [2]: N, K
nbits, group_size, axis, packing, view_as_float, quant_scale, quant_zero, ...
             a tensor for each setting: a number, or the characters of a word as uint8

w = scale * (u - zero). The class HQQLinear of the package writes this (hqq/core/quantize.py), for `save_pretrained` of
transformers and `save_to_safetensors` of hqq. Where g does not divide K, a group begins in one row of [N, K] and ends
in another; it is cut at the ends of rows, as blocks of bitsandbytes.py are, and no weight changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .expect import FLOATS, INTEGERS, TensorError, expect
from .layers import LayerFormat, LayerShape, Tensors, check_bias
from .plain import IntWeight
from .words import to_signed

_PACKINGS = {4: "4bit_u8", 8: "8bit_u8"}
_NUMBERS = ("nbits", "group_size", "axis", "view_as_float", "quant_scale", "quant_zero")
_WITHOUT_USE = (
    "unpack_view_dtype",
    "compute_dtype",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
)
"""They say how the numbers were found, or how hqq computes."""


def read_hqq(
    W_q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *, shape: tuple[int, int], bits: int, group_size: int
) -> IntWeight:
    """One HQQ layer in the library's conventions: q = u - 2^(bits-1), zeros = zero - 2^(bits-1).

    Scales and zeros come in fp32, which holds them exactly. All tensors are on one device, CPU or CUDA.

    Args:
        W_q: uint8 [G / 2, g] for 4 bits, group r in the high nibbles of row r, group G / 2 + r in the low ones; [G, g]
            for 8 bits; G = N * K / g groups of the flattened [N, K] weight.
        scale: float16, bfloat16 or float32 [G, 1].
        zero: like scale; fractions are allowed.
        shape: (N, K).
        bits: 4 or 8.
        group_size: g.

    Raises:
        TensorError: a ValueError, tensors that do not fit together.
        ValueError: other bits.

    Examples:
        >>> codes, scale = torch.randint(256, (3072, 64), dtype=torch.uint8), torch.rand(6144, 1).half()
        >>> wo.formats.read_hqq(codes, scale, scale, shape=(768, 512), bits=4, group_size=64).zeros.shape
        torch.Size([8, 768])
    """
    if bits not in _PACKINGS:
        raise ValueError(f"bits: expected 4 or 8 for HQQ, got {bits}")
    rows = _rows(W_q, scale, zero, shape, bits, group_size)
    n, k = shape
    words = W_q.contiguous().view(torch.uint8)
    u = words if bits == 8 else torch.cat((words >> 4, words & 15))
    begins = torch.arange(n * k // rows, device=scale.device) * rows  # of the flattened [N, K]
    scales, zeros = (
        tensor.float().view(-1)[begins // group_size].view(n, k // rows).t().contiguous() for tensor in (scale, zero)
    )
    zeros -= 1 << (bits - 1)
    return IntWeight(to_signed(u.view(n, k).t().contiguous(), bits), bits, scales, zeros, None)


def hqq_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format: what describes a weight lies beside it, not in the config."""

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        shape, bits, group_size = _settings(tensors)
        rows = _rows(tensors["W_q"], tensors["scale"], tensors["zero"], shape, bits, group_size)
        n, k = shape
        check_bias(tensors, n)
        return LayerShape(f"int{bits}", k, n, rows, symmetric=False, act_order=False)

    def read(layer: str, tensors: Tensors, _: torch.Tensor | None) -> IntWeight:
        shape, bits, group_size = _settings(tensors)
        return read_hqq(
            tensors["W_q"], tensors["scale"], tensors["zero"], shape=shape, bits=bits, group_size=group_size
        )

    return LayerFormat(
        name="hqq",
        anchors=("W_q",),
        required=("scale", "zero", "shape", "nbits", "group_size", "axis", "packing"),
        optional=("view_as_float", "quant_scale", "quant_zero", *_WITHOUT_USE, "bias"),
        owned=("encoded_state_dict", "stores_quant_config"),
        small=("shape", "packing", *_NUMBERS),
        describe=describe,
        read=read,
    )


def _settings(tensors: Tensors) -> tuple[tuple[int, int], int, int]:
    """((N, K), bits, group size). Raises TensorError for settings that are not read."""
    found = {name: _number(name, tensors[name]) for name in _NUMBERS if name in tensors}
    if found["nbits"] not in _PACKINGS:
        raise TensorError("nbits", f"expected 4 or 8 for HQQ, got {found['nbits']}")
    bits, group_size = found["nbits"], found["group_size"]
    if found["axis"] != 1:
        cure = "quantize the original model again with axis=1, or to int4 or nf4"
        raise TensorError("axis", f"expected 1, groups along K, got {found['axis']}; {cure}")
    for name in ("quant_scale", "quant_zero"):
        if found.get(name):
            raise TensorError(name, "expected 0, scales and zeros that are not quantized themselves, got 1")
    packing = tensors["packing"]
    expect("packing", packing, torch.uint8, ["characters"])
    if len(packing) > 16 or bytes(packing.tolist()) != _PACKINGS[bits].encode():
        raise TensorError(
            "packing", f"expected {_PACKINGS[bits]!r} for {bits} bits, got {bytes(packing[:16].tolist())!r}"
        )
    if group_size < 1:
        raise TensorError("group_size", f"expected at least 1, got {group_size}")
    expect("shape", tensors["shape"], INTEGERS, [2])
    n, k = tensors["shape"].tolist()
    if not (1 <= n < 1 << 31 and 1 <= k < 1 << 31):
        raise TensorError("shape", f"expected N, K >= 1, got {n}, {k}")
    return (n, k), bits, group_size


def _number(name: str, tensor: torch.Tensor) -> int:
    expect(name, tensor, (torch.uint8, torch.bool, *INTEGERS), [])
    return int(tensor.item())


def _rows(
    W_q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
) -> int:
    """The rows of K that share a scale in every column. Raises TensorError for tensors that do not fit together."""
    n, k = shape
    groups, rest = divmod(n * k, group_size)
    if rest or groups * bits % 8:
        even = "" if bits == 8 else "an even number of "
        raise TensorError("group_size", f"expected {even}whole groups in N * K = {n} * {k}, got groups of {group_size}")
    packed = groups * bits // 8
    row_bytes = W_q.shape[-1] * W_q.element_size() if W_q.dim() == 2 else 0
    if W_q.dtype not in (torch.uint8, *FLOATS) or W_q.shape[:1] != (packed,) or row_bytes != group_size:
        expect("W_q", W_q, torch.uint8, [packed, group_size])
        raise TensorError("W_q", f"expected {packed} rows of {group_size} bytes, got {list(W_q.shape)}")
    expect("scale", scale, FLOATS, [groups, 1])
    expect("zero", zero, FLOATS, [groups, 1])
    return math.gcd(k, group_size)
