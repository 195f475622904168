"""compressed-tensors' "pack-quantized" checkpoints (llm-compressor), 4 and 8 bit.

weight_packed      int32 [N, ceil(K * bits / 32)], lowest bits first along K, value q + 2^(bits-1)
weight_scale       float [N, groups], [N, 1] per channel, [1] for one of all
weight_shape       int [2]: N, K
weight_zero_point  int32 [ceil(N * bits / 32), groups], packed along N, with the same offset; asymmetric only
weight_g_idx       int32 [K], the group of each row of K, in the order of x; all -1: never set

w = scale * (q - zero_point). https://github.com/vllm-project/compressed-tensors has the packing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .expect import FLOATS, INTEGERS, TensorError, expect, option
from .groups import Grouping, even_groups, group_rows
from .layers import LayerFormat, LayerShape, Tensors, check_bias
from .plain import IntWeight
from .words import signed_zeros, to_signed, unpack_words, words_for

PACK_QUANTIZED = "pack-quantized"
BITS = (4, 8)


def read_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_shape: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
    *,
    bits: int = 4,
) -> IntWeight:
    """One pack-quantized layer in the library's conventions: scales and zeros transposed, rows sorted by group.

    The tensors as above, on one device, CPU or CUDA; weight_scale float16, bfloat16 or float32; bits: 4 or 8.
    Raises TensorError (a ValueError) for tensors that do not fit, ValueError for other bits.
    """
    if bits not in BITS:
        raise ValueError(f"bits: expected 4 or 8, got {bits}")
    k, n, groups = _shape(weight_packed, weight_scale, weight_shape, weight_zero_point, weight_g_idx, bits)
    grouping = _grouping(k, groups, weight_g_idx, weight_scale.device)
    q = to_signed(unpack_words(weight_packed, bits, dim=1)[:, :k].t().contiguous(), bits)
    scales = weight_scale.expand(n, groups).t().contiguous()
    zeros = None
    if weight_zero_point is not None:
        unsigned = unpack_words(weight_zero_point, bits, dim=0)[:n].t().contiguous()  # (groups, N)
        zeros = signed_zeros(unsigned, bits, scales.dtype)
    return IntWeight(
        grouping.sort(q),
        bits,
        grouping.spread(scales),
        None if zeros is None else grouping.spread(zeros),
        grouping.perm,
    )


def compressed_tensors_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format as `options`, a quantization config, has it; an empty one leaves the bits to the tensors.

    Raises ValueError for another format than pack-quantized, or for groups of other bits.
    """
    bits_of_groups = sorted(set(_bits(options)))

    def bits_of(tensors: Tensors) -> int:
        """From the shapes: which layer belongs to which of the config's groups takes its targets to say."""
        k = _sizes(tensors["weight_shape"])[1]
        packed = tensors["weight_packed"]
        fitting = [b for b in bits_of_groups or BITS if packed.dim() == 2 and packed.shape[1] == words_for(k, b)]
        if len(fitting) != 1:
            wanted = " or ".join(f"{words_for(k, b)} ({b} bit)" for b in bits_of_groups or BITS)
            raise TensorError("weight_packed", f"expected int32 [N, {wanted}] for K = {k}, got {list(packed.shape)}")
        return fitting[0]

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        bits, g_idx, zero_point = bits_of(tensors), tensors.get("weight_g_idx"), tensors.get("weight_zero_point")
        k, n, groups = _shape(
            tensors["weight_packed"], tensors["weight_scale"], tensors["weight_shape"], zero_point, g_idx, bits
        )
        check_bias(tensors, n)
        grouping = _grouping(k, groups, g_idx, torch.device("cpu"))
        return LayerShape(f"int{bits}", k, n, grouping.rows, zero_point is None, grouping.perm is not None)

    def read(layer: str, tensors: Tensors) -> IntWeight:
        return read_compressed_tensors(
            tensors["weight_packed"],
            tensors["weight_scale"],
            tensors["weight_shape"],
            tensors.get("weight_zero_point"),
            tensors.get("weight_g_idx"),
            bits=bits_of(tensors),
        )

    return LayerFormat(
        name="compressed-tensors",
        anchors=("weight_packed",),
        required=("weight_scale", "weight_shape"),
        optional=("weight_zero_point", "weight_g_idx", "bias"),
        owned=("weight_shape", "weight_g_idx"),
        small=("weight_shape", "weight_g_idx"),
        describe=describe,
        read=read,
    )


def _bits(options: Mapping[str, Any]) -> Iterable[int]:
    """num_bits of each group of the config."""
    if options.get("transform_config"):  # rotations, some of which are applied to x at run time
        raise ValueError(f"transform_config: expected none, got {options['transform_config']}")
    whole = option(options, "format", str, PACK_QUANTIZED)
    for name, group in option(options, "config_groups", dict, {}).items():
        if not isinstance(group, dict):
            raise ValueError(f"config_groups.{name}: expected an object, got {group!r}")
        form = option(group, "format", str, whole)
        if form != PACK_QUANTIZED:
            raise ValueError(f"config_groups.{name}.format: expected {PACK_QUANTIZED!r}, got {form!r}")
        weights = option(group, "weights", dict, {})
        kind, bits = option(weights, "type", str, "int"), option(weights, "num_bits", int)
        if kind != "int" or bits not in BITS:
            raise ValueError(f"config_groups.{name}.weights: expected int of 4 or 8 bits, got {kind} of {bits}")
        yield bits
    if whole not in (PACK_QUANTIZED, "mixed-precision"):  # the latter: each group has a format of its own
        raise ValueError(f"format: expected {PACK_QUANTIZED!r}, got {whole!r}")


def _sizes(weight_shape: torch.Tensor) -> tuple[int, int]:
    """(N, K)"""
    expect("weight_shape", weight_shape, INTEGERS, [2])
    n, k = weight_shape.tolist()
    if min(n, k) < 1:
        raise TensorError("weight_shape", f"expected N, K >= 1, got {n}, {k}")
    return n, k


def _shape(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_shape: torch.Tensor,
    weight_zero_point: torch.Tensor | None,
    weight_g_idx: torch.Tensor | None,
    bits: int,
) -> tuple[int, int, int]:
    """(K, N, groups). Raises TensorError for tensors that do not fit together."""
    n, k = _sizes(weight_shape)
    expect("weight_packed", weight_packed, torch.int32, [n, words_for(k, bits)])
    expect("weight_scale", weight_scale, FLOATS, [1] if weight_scale.dim() == 1 else [n, "groups"])
    groups = weight_scale.shape[-1]
    if weight_zero_point is not None:
        expect("weight_zero_point", weight_zero_point, torch.int32, [words_for(n, bits), groups])
    if weight_g_idx is not None:
        expect("weight_g_idx", weight_g_idx, INTEGERS, [k])
    return k, n, groups


def _grouping(k: int, groups: int, g_idx: torch.Tensor | None, device: torch.device) -> Grouping:
    if g_idx is None or bool((g_idx == -1).all()):
        if k % groups:
            raise TensorError("weight_scale", f"expected a number of groups that divides K = {k}, got {groups}")
        return even_groups(k, groups, None, device)
    return group_rows(g_idx, groups, "weight_g_idx")
