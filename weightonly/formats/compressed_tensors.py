"""compressed-tensors' "pack-quantized" checkpoints (llm-compressor), 4 and 8 bit; for floats see ct_fp4.py and fp8.py.

weight_packed      int32 [N, ceil(K * bits / 32)]: q + 2^(bits-1), packed along K, lowest bits first
weight_scale       float [N, groups]; [N, 1]: per channel; [1]: one for all
weight_shape       int [2]: N, K
weight_zero_point  int32 [ceil(N * bits / 32), groups]: zero point + 2^(bits-1), packed along N; asymmetric only
weight_g_idx       int32 [K]: the group of each row, in the order of x; all -1: never set

w = scale * (q - zero_point). https://github.com/vllm-project/compressed-tensors has the packing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..heuristics.problem import FORMAT_GROUPS, FORMATS
from .ct_fp4 import fp4_shape, read_compressed_fp4
from .ct_schemes import BITS, FLOAT_QUANTIZED, PACK_QUANTIZED, Scheme, Schemes
from .expect import FLOATS, INTEGERS, TensorError, expect
from .fp8 import Block, fp8_layers
from .groups import Grouping, even_groups, group_rows
from .layers import Axis, LayerFormat, LayerShape, MissingTensorError, Tensors, check_bias
from .plain import CodeWeight, IntWeight
from .words import signed_zeros, unpack_words, words_for

METHOD = "compressed-tensors"


def read_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_shape: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int | None = None,
) -> IntWeight:
    """One pack-quantized layer in the library's conventions: scales and zeros transposed, rows sorted by group.

    All tensors are on one device, CPU or CUDA.

    Args:
        weight_packed: int32 [N, ceil(K * bits / 32)]: q + 2^(bits-1), packed along K, lowest bits first.
        weight_scale: float16, bfloat16 or float32 [N, groups]; [N, 1]: per channel; [1]: one for all.
        weight_shape: int [2]: N, K.
        weight_zero_point: int32 [ceil(N * bits / 32), groups]: zero point + 2^(bits-1), packed along N; None:
            symmetric.
        weight_g_idx: int32 [K]: the group of each row, in the order of x; None, or all -1: in order.
        bits: 4 or 8.
        group_size: rows of a group where no weight_g_idx says it, the last one maybe short; -1: all of K; None: K /
            groups, a power of two.

    Raises:
        TensorError: a ValueError, tensors that do not fit.
        ValueError: other bits.

    Examples:
        >>> words = torch.randint(2**31 - 1, (768, 64), dtype=torch.int32)
        >>> wo.formats.read_compressed_tensors(words, torch.rand(768, 4).half(), torch.tensor([768, 512])).q.shape
        torch.Size([512, 768])
    """
    if bits not in BITS:
        raise ValueError(f"bits: expected 4 or 8, got {bits}")
    k, n, groups = _shape(weight_packed, weight_scale, weight_shape, weight_zero_point, weight_g_idx, bits)
    grouping = _grouping(k, groups, weight_g_idx, group_size, weight_scale.device)
    zeros = None if weight_zero_point is None else _zero_points(weight_zero_point, n, bits)
    return _weight(weight_packed, weight_scale, zeros, bits, (n, k), grouping)


def _zero_points(weight_zero_point: torch.Tensor, n: int, bits: int) -> torch.Tensor | None:
    return signed_zeros(unpack_words(weight_zero_point, bits, dim=0)[:n].t().contiguous(), bits)


def _weight(
    packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None, bits: int, size: Sequence[int], by: Grouping
) -> IntWeight:
    n, k = size
    u = unpack_words(packed, bits, dim=1)[:, :k].t().contiguous()
    return by.weight(u, bits, scale.expand(n, -1).t().contiguous(), zeros)


def compressed_tensors_formats(options: Mapping[str, Any]) -> tuple[LayerFormat, ...]:
    """The formats that a quantization config describes. Where it is empty, the shapes of the tensors tell the bits.

    A layer has to be as some group of the config says that can mean it (see ct_schemes.py). Raises ValueError for a
    format other than pack-quantized and those of floats, and for groups of other bits than 4 and 8.
    """
    schemes = Schemes(options)
    packed = _packed_format(schemes)
    return (packed, _float_format(schemes)) if FLOAT_QUANTIZED in schemes.formats else (packed,)


def _float_format(schemes: Schemes) -> LayerFormat:
    """Layers of 8-bit floats."""

    def block_of(layer: str) -> Block | None:
        targets = schemes.targeting(layer)
        blocks = {scheme.block for scheme in targets if scheme.format == FLOAT_QUANTIZED}
        if len(blocks) != 1:
            got = "none" if not blocks else str(sorted(map(str, blocks)))
            raise TensorError("weight", f"expected one strategy of 8-bit floats for it in the config, got {got}")
        return blocks.pop()

    unused = ("input_scale", "input_zero_point", "output_scale", "weight_zero_point")
    return fp8_layers(METHOD, block_of, ("weight_scale",), unused)


def _packed_format(schemes: Schemes) -> LayerFormat:
    group_sizes: dict[str, int | None] = {}
    """Layer, once it is described -> its group size, as the config says."""

    def of_format(layer: str, format: str) -> list[Scheme]:
        """The groups that can mean a layer whose tensors are in this format.

        Raises TensorError where all that can mean it say another.
        """
        targets = schemes.targeting(layer)
        fitting = [scheme for scheme in targets if scheme.format == format]
        if targets and not fitting:
            expected = " or ".join(sorted({scheme.format for scheme in targets}))
            raise TensorError("weight_packed", f"expected {expected} as the config says, got tensors of {format}")
        return fitting

    def bits_of(layer: str, tensors: Tensors) -> int:
        """Bits of one layer, from its shapes."""
        bits_of_groups = sorted({scheme.bits for scheme in of_format(layer, PACK_QUANTIZED)}) or BITS
        if "weight_shape" not in tensors:
            raise MissingTensorError(f"{layer}.weight_shape", f"{layer}.weight_packed")
        for name in ("weight_global_scale", "input_global_scale"):
            if name in tensors:
                raise TensorError(name, f"expected none for {PACK_QUANTIZED}, got one")
        k = _sizes(tensors["weight_shape"])[1]
        packed = tensors["weight_packed"]
        fitting = [b for b in bits_of_groups if packed.dim() == 2 and packed.shape[1] == words_for(k, b)]
        if len(fitting) != 1:
            wanted = " or ".join(f"{words_for(k, b)} ({b} bit)" for b in bits_of_groups)
            raise TensorError("weight_packed", f"expected int32 [N, {wanted}] for K = {k}, got {list(packed.shape)}")
        return fitting[0]

    def describe_floats(layer: str, tensors: Tensors) -> LayerShape:
        scale = tensors["weight_scale"]
        format, k, n = fp4_shape(tensors["weight_packed"], scale, tensors.get("weight_global_scale"))
        for scheme in of_format(layer, f"{format}-{PACK_QUANTIZED}"):
            if scheme.scale_dtype not in (None, str(scale.dtype)):
                expected = f"{scheme.scale_dtype} as the config says"
                raise TensorError("weight_scale", f"expected {expected}, got {scale.dtype}")
        for name in ("weight_shape", "weight_zero_point", "weight_g_idx"):
            if name in tensors:
                raise TensorError(name, f"expected none for {format}-{PACK_QUANTIZED}, got one")
        if "input_global_scale" in tensors:
            expect("input_global_scale", tensors["input_global_scale"], torch.float32, [1])
        check_bias(tensors, n)
        return LayerShape(format, k, n, FORMAT_GROUPS[format], symmetric=True, act_order=False)

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        if is_floats(tensors):
            return describe_floats(layer, tensors)
        bits = bits_of(layer, tensors)
        g_idx, zero_point = tensors.get("weight_g_idx"), tensors.get("weight_zero_point")
        k, n, groups = _shape(
            tensors["weight_packed"], tensors["weight_scale"], tensors["weight_shape"], zero_point, g_idx, bits
        )
        check_bias(tensors, n)
        possible = [scheme for scheme in of_format(layer, PACK_QUANTIZED) if scheme.bits == bits]
        problems = [scheme.problem(tensors, k, groups) for scheme in possible]
        if problems and None not in problems:
            assert problems[0] is not None
            raise problems[0]
        fitting = [scheme for scheme, problem in zip(possible, problems, strict=True) if problem is None]
        sizes = {k if scheme.rows == -1 else min(scheme.rows, k) for scheme in fitting if scheme.rows is not None}
        if len(sizes) > 1:
            raise TensorError("weight_scale", f"expected one group_size for it in the config, got {sorted(sizes)}")
        group_sizes[layer] = -1 if sizes == {k} else next(iter(sizes), None)
        grouping = _grouping(k, groups, g_idx, group_sizes[layer], torch.device("cpu"))
        asked = {scheme.activations for scheme in fitting}
        return LayerShape(
            f"int{bits}",
            k,
            n,
            grouping.rows,
            zero_point is None,
            grouping.perm is not None,
            activations=asked.pop() if len(asked) == 1 else None,
        )

    def read(layer: str, tensors: Tensors, zeros: torch.Tensor | None) -> IntWeight | CodeWeight:
        if is_floats(tensors):
            return read_compressed_fp4(
                tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_global_scale")
            )
        bits, scale = bits_of(layer, tensors), tensors["weight_scale"]
        symmetric = {scheme.symmetric for scheme in of_format(layer, PACK_QUANTIZED) if scheme.bits == bits}
        if zeros is not None and symmetric == {True}:
            raise TensorError("weight_zero_point", "expected zeros, as the config says symmetric, got others")
        size = _sizes(tensors["weight_shape"])
        g_idx = tensors.get("weight_g_idx")
        grouping = _grouping(size[1], scale.shape[-1], g_idx, group_sizes[layer], scale.device)
        return _weight(tensors["weight_packed"], scale, zeros, bits, size, grouping)

    return LayerFormat(
        name=METHOD,
        anchors=("weight_packed",),
        required=("weight_scale",),
        optional=(
            "weight_shape",
            "weight_zero_point",
            "weight_g_idx",
            "weight_global_scale",
            "input_global_scale",
            "bias",
        ),
        owned=("weight_shape", "weight_g_idx", "weight_global_scale"),
        small=("weight_shape", "weight_g_idx"),
        describe=describe,
        read=read,
        zeros="weight_zero_point",
        zero_points=lambda shape, layer, zero_point: _zero_points(zero_point, shape.n, FORMATS[shape.format]),
        axes=lambda bits: {
            "weight_packed": (Axis("n"), Axis("k", 32 // bits)),
            "weight_scale": (Axis("n"), Axis("g")),
            "weight_zero_point": (Axis("g"), Axis("n")),
            "weight_g_idx": (Axis("k"),),
            "bias": (Axis("n"),),
        },
    )


def is_floats(tensors: Tensors) -> bool:
    """Whether a layer is one of ct_fp4.py: bytes instead of words."""
    return tensors["weight_packed"].dtype == torch.uint8


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


def _grouping(
    k: int, groups: int, g_idx: torch.Tensor | None, group_size: int | None, device: torch.device
) -> Grouping:
    if g_idx is None or bool((g_idx == -1).all()):
        return even_groups(k, groups, group_size, device, "weight_scale")
    return group_rows(g_idx, groups, "weight_g_idx")
