"""GPTQ checkpoints of AutoGPTQ and GPTQModel, 4 and 8 bit (GPTQ: Frantar et al., https://arxiv.org/abs/2210.17323).

qweight  int32 [ceil(K * bits / 32), N]: u; value j of word r, lowest bits first, is row 32 / bits * r + j
qzeros   int32 [groups, ceil(N * bits / 32)]: z; value j of word c is column 32 / bits * c + j
scales   float [groups, N]
g_idx    int32 [K]: the group of each row; without it, k // group_size

w = scales * (u - z). Version 2 ("gptq_v2") stores z in qzeros, version 1 ("gptq") z - 1. Version 1 subtracted whole
words, 0x11111111 for 4 bits and 0x01010101 for 8, so a z of 0 borrowed from the value above it. Adding the same word
undoes both.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .expect import FLOATS, INTEGERS, TensorError, expect, option
from .groups import Grouping, even_groups, group_rows, is_in_order
from .layer_settings import LayerSettings, dynamic_settings
from .layers import Axis, LayerFormat, LayerShape, Tensors, check_bias
from .plain import IntWeight
from .words import signed_zeros, unpack_words, words_for

VERSIONS = {"gptq": 1, "gptq_v2": 2}
"""`checkpoint_format` of the config -> version of the zero points."""

V1_ONES = {4: 0x11111111, 8: 0x01010101}


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

    Groups of several sizes, such as a short last one, are cut into smaller groups of one size. All tensors are on one
    device, CPU or CUDA.

    Args:
        qweight: int32 [ceil(K * bits / 32), N]: u; value j of word r, lowest bits first, is row 32 / bits * r + j.
        scales: float16, bfloat16 or float32 [groups, N].
        qzeros: int32 [groups, ceil(N * bits / 32)]: z, or z - 1 in version 1; value j of word c is column 32 / bits * c
            + j.
        g_idx: int32 [K]: the group of each row; None: k // group_size.
        bits: 4 or 8.
        version: of the zero points, 1 or 2.
        group_size: rows of a group where there is no g_idx; -1: all of K; None: K / groups, a power of two.
        symmetric: the quantizer's `sym`: every z is 2^(bits-1), the middle. Some checkpoints say version 1 but store z
            as version 2 does (vLLM pull request 38966). Where every stored value is the middle, this one is read as
            version 2, with a warning.

    Raises:
        TensorError: a ValueError, tensors that do not fit.
        ValueError: other bits or versions.

    Examples:
        >>> words = torch.randint(2**31 - 1, (64, 768), dtype=torch.int32)
        >>> wo.formats.read_gptq(words, torch.rand(4, 768).half(), words[:4, :96], group_size=128).q.shape
        torch.Size([512, 768])
    """
    if bits not in V1_ONES:
        raise ValueError(f"bits: expected 4 or 8 for GPTQ, got {bits}")
    if version not in VERSIONS.values():
        raise ValueError(f"version: expected 1 or 2, got {version}")
    k, n, groups = _shape(qweight, scales, qzeros, g_idx, bits)
    grouping = _grouping(k, groups, g_idx, group_size, scales.device)
    zeros = signed_zeros(_zero_points(qzeros, n, bits, version, symmetric), bits)
    return grouping.weight(unpack_words(qweight, bits, dim=0)[:k], bits, scales, zeros)


def gptq_format(options: Mapping[str, Any], settings: LayerSettings | None = None) -> LayerFormat:
    """The format that a quantization config describes. settings: of single layers; None: those of its `dynamic`.

    Raises ValueError for a config without bits, for other bits than 4 and 8, and for a layout other than GPTQ's.
    """
    stored = option(options, "checkpoint_format", str, option(options, "format", str, "gptq")).lower()
    if stored not in VERSIONS:
        raise ValueError(f"checkpoint_format: expected one of {', '.join(VERSIONS)}, got {stored!r}")
    if option(options, "is_marlin_format", bool, False):
        raise ValueError("is_marlin_format: expected false, got true; Marlin's order is not read")
    version = VERSIONS[stored]
    default_bits = option(options, "bits", int)
    for key, kind in (("group_size", int), ("sym", bool), ("desc_act", bool)):
        option(options, key, kind)
    own = dynamic_settings(option(options, "dynamic", dict, {})) if settings is None else settings

    def bits_of(layer: str) -> int:
        bits: int = own.option(layer, "bits", int, default_bits)
        if bits not in V1_ONES:
            raise TensorError("qweight", f"bits: expected 4 or 8 for GPTQ, got {bits} in the config")
        return bits

    def rows_of(layer: str) -> int | None:
        rows: int | None = own.option(layer, "group_size", int, options.get("group_size"))
        return rows

    def is_symmetric(layer: str) -> bool | None:
        symmetric: bool | None = own.option(layer, "sym", bool, options.get("sym"))
        return symmetric

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        bits, g_idx, size = bits_of(layer), tensors.get("g_idx"), rows_of(layer)
        act_order = own.option(layer, "desc_act", bool, options.get("desc_act"))
        k, n, groups = _shape(tensors["qweight"], tensors["scales"], tensors["qzeros"], g_idx, bits)
        check_bias(tensors, n)
        if g_idx is None and act_order and size != -1:
            raise TensorError("g_idx", "expected one, as the config says desc_act; there is none")
        grouping = _grouping(k, groups, g_idx, size, torch.device("cpu"))
        rows = k // groups if size is None else k if size == -1 else size
        if g_idx is not None and act_order is False and not is_in_order(g_idx, rows):
            raise TensorError("g_idx", "expected the groups in order, as the config says desc_act is false, got others")
        return LayerShape(f"int{bits}", k, n, grouping.rows, is_symmetric(layer), act_order=grouping.perm is not None)

    def read(layer: str, tensors: Tensors, zeros: torch.Tensor | None) -> IntWeight:
        qweight, scales, g_idx, bits = tensors["qweight"], tensors["scales"], tensors.get("g_idx"), bits_of(layer)
        zeros = None if zeros is None else zeros.to(scales)
        k = len(qweight) * 32 // bits if g_idx is None else len(g_idx)
        grouping = _grouping(k, len(scales), g_idx, rows_of(layer), scales.device)
        return grouping.weight(unpack_words(qweight, bits, dim=0)[:k], bits, scales, zeros)

    def zero_points(shape: LayerShape, layer: str, qzeros: torch.Tensor) -> torch.Tensor | None:
        bits = bits_of(layer)
        return signed_zeros(_zero_points(qzeros, shape.n, bits, version, bool(is_symmetric(layer))), bits)

    if own.is_empty and default_bits not in V1_ONES:
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
        zeros="qzeros",
        zero_points=zero_points,
        axes=lambda bits: {
            "qweight": (Axis("k", 32 // bits), Axis("n")),
            "qzeros": (Axis("g"), Axis("n")),
            "scales": (Axis("g"), Axis("n")),
            "g_idx": (Axis("k"),),
            "bias": (Axis("n"),),
        },
    )


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
    if g_idx is None:
        return even_groups(k, groups, group_size, device)
    if group_size is not None:
        even_groups(k, groups, group_size, device)  # as many groups as the config says, whichever rows they have
    return group_rows(g_idx, groups)


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
    # int32 wraps. Values beyond N, which fill the last word, are its highest bits: no carry goes to a real value.
    return unpack_words(qzeros + V1_ONES[bits], bits, dim=1)[:, :n]
