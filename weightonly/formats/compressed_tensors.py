"""compressed-tensors' "pack-quantized" checkpoints (llm-compressor), 4 and 8 bit.

weight_packed      int32 [N, ceil(K * bits / 32)]: q + 2^(bits-1), packed along K, lowest bits first
weight_scale       float [N, groups]; [N, 1]: per channel; [1]: one for all
weight_shape       int [2]: N, K
weight_zero_point  int32 [ceil(N * bits / 32), groups]: zero point + 2^(bits-1), packed along N; asymmetric only
weight_g_idx       int32 [K]: the group of each row, in the order of x; all -1: never set

w = scale * (q - zero_point). https://github.com/vllm-project/compressed-tensors has the packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .ct_schemes import BITS, schemes_of, targeting
from .expect import FLOATS, INTEGERS, TensorError, expect
from .groups import Grouping, even_groups, group_rows
from .layers import Axis, LayerFormat, LayerShape, Tensors, check_bias
from .patterns import Steps
from .plain import IntWeight
from .words import signed_zeros, to_signed, unpack_words, words_for


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

    Tensors: see the top of this module; on one device, CPU or CUDA. weight_scale: float16, bfloat16 or float32.
    bits: 4 or 8. Raises TensorError (a ValueError) for tensors that do not fit, ValueError for other bits.
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
    """The format that a quantization config describes. Where it is empty, the shapes of the tensors tell the bits.

    A layer has to be as some group of the config says that can mean it (see ct_schemes.py). Raises ValueError for a
    format other than pack-quantized, and for groups of other bits than 4 and 8.
    """
    schemes = list(schemes_of(options))
    steps = Steps()

    def bits_of(layer: str, tensors: Tensors) -> int:
        """Bits of one layer, from its shapes."""
        bits_of_groups = sorted({scheme.bits for scheme in targeting(layer, schemes, steps)}) or BITS
        k = _sizes(tensors["weight_shape"])[1]
        packed = tensors["weight_packed"]
        fitting = [b for b in bits_of_groups if packed.dim() == 2 and packed.shape[1] == words_for(k, b)]
        if len(fitting) != 1:
            wanted = " or ".join(f"{words_for(k, b)} ({b} bit)" for b in bits_of_groups)
            raise TensorError("weight_packed", f"expected int32 [N, {wanted}] for K = {k}, got {list(packed.shape)}")
        return fitting[0]

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        bits = bits_of(layer, tensors)
        g_idx, zero_point = tensors.get("weight_g_idx"), tensors.get("weight_zero_point")
        k, n, groups = _shape(
            tensors["weight_packed"], tensors["weight_scale"], tensors["weight_shape"], zero_point, g_idx, bits
        )
        check_bias(tensors, n)
        possible = [scheme for scheme in targeting(layer, schemes, steps) if scheme.bits == bits]
        problems = [scheme.problem(tensors, k, groups) for scheme in possible]
        if problems and None not in problems:
            assert problems[0] is not None
            raise problems[0]
        grouping = _grouping(k, groups, g_idx, torch.device("cpu"))
        return LayerShape(f"int{bits}", k, n, grouping.rows, zero_point is None, grouping.perm is not None)

    def has_zeros(layer: str, zero_point: torch.Tensor, n: int) -> bool:
        bits = next(bits for bits in BITS if words_for(n, bits) == zero_point.shape[0])
        return bool(to_signed(unpack_words(zero_point, bits, dim=0)[:n], bits).any())

    def read(layer: str, tensors: Tensors) -> IntWeight:
        bits = bits_of(layer, tensors)
        weight = read_compressed_tensors(
            tensors["weight_packed"],
            tensors["weight_scale"],
            tensors["weight_shape"],
            tensors.get("weight_zero_point"),
            tensors.get("weight_g_idx"),
            bits=bits,
        )
        symmetric = {scheme.symmetric for scheme in targeting(layer, schemes, steps) if scheme.bits == bits}
        if weight.zeros is not None and symmetric == {True}:
            raise TensorError("weight_zero_point", "expected zeros, as the config says symmetric, got others")
        return weight

    return LayerFormat(
        name="compressed-tensors",
        anchors=("weight_packed",),
        required=("weight_scale", "weight_shape"),
        optional=("weight_zero_point", "weight_g_idx", "bias"),
        owned=("weight_shape", "weight_g_idx"),
        small=("weight_shape", "weight_g_idx"),
        describe=describe,
        read=read,
        zeros="weight_zero_point",
        has_zeros=has_zeros,
        axes=lambda bits: {
            "weight_packed": (Axis("n"), Axis("k", 32 // bits)),
            "weight_scale": (Axis("n"), Axis("g")),
            "weight_zero_point": (Axis("n", 32 // bits), Axis("g")),
            "weight_g_idx": (Axis("k"),),
            "bias": (Axis("n"),),
        },
    )


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
