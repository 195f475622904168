"""AutoAWQ's "gemm" checkpoints, 4 bit (AWQ: Lin et al., https://arxiv.org/abs/2306.00978).

qweight  int32 [K, N / 8]: u; bits 4i .. 4i + 3 of word c are column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
qzeros   int32 [groups, N / 8]: z, in the same order
scales   float [groups, N]; row k belongs to group k // group_size, and K is a multiple of that

w = scales * (u - z). AutoAWQ packs in this order (awq/modules/linear/gemm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .expect import FLOATS, TensorError, expect, option
from .groups import rows_by_count
from .layer_settings import NO_SETTINGS, LayerSettings
from .layers import Axis, LayerFormat, LayerShape, Tensors, check_bias
from .plain import IntWeight
from .words import pack_words, signed_zeros, to_signed, words_as_bytes

_COLUMNS_PER_WORD = 8


def read_awq(
    qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor, *, group_size: int | None = None
) -> IntWeight:
    """One AWQ layer in the library's conventions: q = u - 8, zeros = z - 8. All tensors are on one device, CPU or CUDA.

    Args:
        qweight: int32 [K, N / 8].
        scales: float16, bfloat16 or float32 [groups, N].
        qzeros: int32 [groups, N / 8]; the number of groups divides K.
        group_size: rows of a group; -1: all of K; None: K / groups, a power of two.

    Raises:
        TensorError: a ValueError, for anything else.

    Examples:
        >>> words = torch.randint(2**31 - 1, (512, 96), dtype=torch.int32)
        >>> wo.formats.read_awq(words, torch.rand(4, 768).half(), words[:4]).q.shape
        torch.Size([512, 768])
    """
    k, _, groups = awq_shape(qweight, scales, qzeros)
    _rows(k, groups, group_size)
    return _weight(qweight, scales, signed_zeros(unpack_awq(qzeros), 4))


def _rows(k: int, groups: int, group_size: int | None) -> int:
    """Rows of a group. Raises TensorError where they are not those that the config says: no group of AWQ is short."""
    rows = rows_by_count(k, groups) if group_size is None else k // groups
    if group_size not in (None, rows) and not (group_size == -1 and groups == 1):
        raise TensorError("scales", f"expected groups of {group_size} rows as the config says, got {rows}")
    return rows


def _weight(qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> IntWeight:
    return IntWeight(to_signed(unpack_awq(qweight), 4), 4, scales, None if zeros is None else zeros.to(scales), None)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, N / 8] in AutoAWQ's order -> uint8 [rows, N], values 0..15, columns in order."""
    rows, columns = words.shape
    data = words_as_bytes(words)  # byte j of a word has its nibbles 2j and 2j + 1
    nibbles = torch.stack((data & 15, data >> 4), dim=-1)  # (rows, word, byte, 2)
    # nibble 4h + l is column 2l + h
    return nibbles.view(rows, columns, 2, 4).transpose(2, 3).reshape(rows, columns * _COLUMNS_PER_WORD)


def pack_awq(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_awq`: uint8 [rows, N] -> int32 [rows, N / 8]; N is a multiple of 8."""
    nibbles = values.view(len(values), -1, 4, 2).transpose(2, 3).reshape(values.shape)
    return pack_words(nibbles, 4, dim=1)


def awq_format(options: Mapping[str, Any], settings: LayerSettings = NO_SETTINGS) -> LayerFormat:
    """The format that a quantization config describes. options: AutoAWQ's own file or Hugging Face's config.

    settings: of single layers. Raises ValueError for other bits than 4, and for a version other than "gemm".
    """
    default_bits = option(options, "bits", int, option(options, "w_bit", int, 4))
    if settings.is_empty and default_bits != 4:
        raise ValueError(f"bits: expected 4 for AWQ, got {default_bits}")
    # Hugging Face's newer configs name it "format".
    version = option(options, "version", str, option(options, "format", str, "gemm"))
    if version.lower() != "gemm":
        raise ValueError(f"version: expected 'gemm', got {version!r}; other orders of AutoAWQ are not read")
    default_rows = option(options, "group_size", int, option(options, "q_group_size", int))

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        bits = settings.option(layer, "bits", int, default_bits)
        if bits != 4:
            raise TensorError("qweight", f"bits: expected 4 for AWQ, got {bits} in the config")
        group_size = settings.option(layer, "group_size", int, default_rows)
        k, n, groups = awq_shape(tensors["qweight"], tensors["scales"], tensors["qzeros"])
        check_bias(tensors, n)
        return LayerShape("int4", k, n, _rows(k, groups, group_size), symmetric=False, act_order=False)

    return LayerFormat(
        name="awq",
        anchors=("qweight",),
        required=("scales", "qzeros"),
        optional=("bias",),
        owned=("qzeros",),  # not scales: AutoAWQ stores scales of activations, too
        small=(),
        describe=describe,
        read=lambda layer, tensors, zeros: _weight(tensors["qweight"], tensors["scales"], zeros),
        zeros="qzeros",
        zero_points=lambda shape, layer, qzeros: signed_zeros(unpack_awq(qzeros), 4),
        axes=lambda bits: {
            "qweight": (Axis("k"), Axis("n", _COLUMNS_PER_WORD)),
            "qzeros": (Axis("g"), Axis("n")),
            "scales": (Axis("g"), Axis("n")),
            "bias": (Axis("n"),),
        },
    )


def awq_shape(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> tuple[int, int, int]:
    """(K, N, groups). Raises TensorError for tensors that do not fit together."""
    expect("qweight", qweight, torch.int32, ["K", "N / 8"])
    k, n = qweight.shape[0], qweight.shape[1] * _COLUMNS_PER_WORD
    expect("scales", scales, FLOATS, ["groups", n])
    groups = scales.shape[0]
    if k % groups:
        raise TensorError("scales", f"expected a number of groups that divides K = {k}, got {groups}")
    expect("qzeros", qzeros, torch.int32, [groups, n // _COLUMNS_PER_WORD])
    return k, n, groups
