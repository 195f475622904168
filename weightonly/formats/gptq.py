"""GPTQ checkpoints of AutoGPTQ and GPTQModel, 4 and 8 bit (GPTQ: Frantar et al., https://arxiv.org/abs/2210.17323).

qweight  int32 [ceil(K * bits / 32), N]; value j of word r (from the lowest bits) is row 32 / bits * r + j
qzeros   int32 [groups, ceil(N * bits / 32)]; value j of word c is column 32 / bits * c + j
scales   float [groups, N]
g_idx    int32 [K]: the group of each row; without it, k // group_size

w = scales * (u - z). Version 1 ("gptq") stores z - 1 in qzeros, version 2 ("gptq_v2") stores z. The difference is
that of the words, 0x11111111 for 4 bit and 0x01010101 for 8 bit: where a z - 1 of -1 has borrowed from the value
above it, the addition gives it back.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .expect import FLOATS, INTEGERS, TensorError, expect, option
from .groups import Grouping, even_groups, group_rows
from .layers import LayerFormat, LayerShape, Tensors, check_bias
from .plain import IntWeight
from .words import signed_zeros, to_signed, unpack_words, words_for

VERSIONS = {"gptq": 1, "gptq_v2": 2}
"""`checkpoint_format` of the config -> version of the zero points."""

_ONES = {4: 0x11111111, 8: 0x01010101}


def read_gptq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    bits: int = 4,
    version: int = 1,
    group_size: int | None = None,
    symmetric: bool = False,
) -> IntWeight:
    """One GPTQ layer in the library's conventions: q = u - 2^(bits-1), zeros = z - 2^(bits-1), rows sorted by group.

    qweight, scales, qzeros, g_idx: as above, on one device, CPU or CUDA; scales float16, bfloat16 or float32.
    bits: 4 or 8. version: of the zero points, 1 or 2.
    group_size: rows of a group where there is no g_idx; -1 is all of K, None is K / groups.
    symmetric: the quantizer's `sym`: every z is the middle, 2^(bits-1). Some checkpoints that say version 1 have
        stored it as version 2 does (vLLM pull request 38966): where only that makes them symmetric, they are
        read so, with a warning.

    A group size that leaves the last group short, or groups of several sizes, become smaller equal groups.
    Raises TensorError (a ValueError) for tensors that do not fit, ValueError for other bits or versions.
    """
    if bits not in _ONES:
        raise ValueError(f"bits: expected 4 or 8 for GPTQ, got {bits}")
    if version not in VERSIONS.values():
        raise ValueError(f"version: expected 1 or 2, got {version}")
    k, n, groups = _shape(qweight, scales, qzeros, g_idx, bits)
    grouping = _grouping(k, groups, g_idx, group_size, scales.device)
    q = to_signed(unpack_words(qweight, bits, dim=0)[:k], bits)
    zeros = signed_zeros(_zero_points(qzeros, n, bits, version, symmetric), bits, scales.dtype)
    return IntWeight(
        grouping.sort(q),
        bits,
        grouping.spread(scales),
        None if zeros is None else grouping.spread(zeros),
        grouping.perm,
    )


def gptq_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format as `options`, a quantization config, has it.

    Raises ValueError for a config without bits, of other bits than 4 and 8, or of another layout than GPTQ's.
    """
    stored = option(options, "checkpoint_format", str, option(options, "format", str, "gptq")).lower()
    if stored not in VERSIONS:
        raise ValueError(f"checkpoint_format: expected one of {', '.join(VERSIONS)}, got {stored!r}")
    if option(options, "is_marlin_format", bool, False):
        raise ValueError("is_marlin_format: expected false, got true; Marlin's order is not read")
    version = VERSIONS[stored]
    default_bits = option(options, "bits", int)
    group_size = option(options, "group_size", int)
    symmetric = option(options, "sym", bool)
    needs_order = option(options, "desc_act", bool, False) and group_size != -1
    dynamic = option(options, "dynamic", dict, {})
    for pattern in dynamic:
        try:
            re.compile(pattern.removeprefix("+:"))
        except re.error as error:
            raise ValueError(f"dynamic: expected regular expressions, got {pattern!r} ({error})") from error

    def bits_of(layer: str) -> int:
        bits = option(_override(dynamic, layer), "bits", int, default_bits)
        if bits not in _ONES:
            raise TensorError("qweight", f"bits: expected 4 or 8 for GPTQ, got {bits} in the config")
        return bits

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        bits, g_idx = bits_of(layer), tensors.get("g_idx")
        k, n, groups = _shape(tensors["qweight"], tensors["scales"], tensors["qzeros"], g_idx, bits)
        check_bias(tensors, n)
        if g_idx is None and needs_order:
            raise TensorError("g_idx", "expected one, as the config says desc_act; there is none")
        grouping = _grouping(k, groups, g_idx, _group_size(layer), torch.device("cpu"))
        return LayerShape(f"int{bits}", k, n, grouping.rows, symmetric, act_order=grouping.perm is not None)

    def read(layer: str, tensors: Tensors) -> IntWeight:
        return read_gptq(
            tensors["qweight"],
            tensors["scales"],
            tensors["qzeros"],
            tensors.get("g_idx"),
            bits=bits_of(layer),
            version=version,
            group_size=_group_size(layer),
            symmetric=bool(symmetric),
        )

    def _group_size(layer: str) -> int | None:
        size = option(_override(dynamic, layer), "group_size", int, group_size)
        return None if size is None else int(size)

    if not dynamic and default_bits not in _ONES:
        raise ValueError(f"bits: expected 4 or 8 for GPTQ, got {default_bits}")
    return LayerFormat(
        name="gptq",
        anchors=("qweight",),
        required=("scales", "qzeros"),
        optional=("g_idx", "bias"),
        owned=("qzeros", "g_idx"),
        small=("g_idx",),
        describe=describe,
        read=read,
    )


def _override(dynamic: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """GPTQModel's `dynamic`: the settings of the first pattern that the layer's name starts with."""
    for pattern, settings in dynamic.items():
        if isinstance(settings, dict) and re.match(pattern.removeprefix("+:"), layer):
            return settings
    return {}


def _shape(
    qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor, g_idx: torch.Tensor | None, bits: int
) -> tuple[int, int, int]:
    """(K, N, groups). Raises TensorError for tensors that do not fit together."""
    expect("qweight", qweight, torch.int32, [f"K * {bits} / 32", "N"])
    words, n = qweight.shape
    k = words * 32 // bits
    if g_idx is not None:
        expect("g_idx", g_idx, INTEGERS, ["K"])
        k = g_idx.shape[0]
        expect("qweight", qweight, torch.int32, [words_for(k, bits), n])
    expect("scales", scales, FLOATS, ["groups", n])
    groups = scales.shape[0]
    expect("qzeros", qzeros, torch.int32, [groups, words_for(n, bits)])
    return k, n, groups


def _grouping(
    k: int, groups: int, g_idx: torch.Tensor | None, group_size: int | None, device: torch.device
) -> Grouping:
    return even_groups(k, groups, group_size, device) if g_idx is None else group_rows(g_idx, groups)


def _zero_points(qzeros: torch.Tensor, n: int, bits: int, version: int, symmetric: bool) -> torch.Tensor:
    """z, uint8 [groups, N]."""
    stored = unpack_words(qzeros, bits, dim=1)[:, :n]
    if version == 2:
        return stored
    middle = 1 << (bits - 1)
    if symmetric and bool((stored == middle).all()):
        warnings.warn(
            f"qzeros: expected {middle - 1}, as a symmetric checkpoint of version 1 has, got {middle}: "
            "read as version 2",
            stacklevel=2,
        )
        return stored
    # int32 wraps; values that padded N up to whole words are above the others and give nothing back to them
    return unpack_words(qzeros + _ONES[bits], bits, dim=1)[:, :n]
