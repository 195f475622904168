"""Rows and columns of a quantized layer as a layer of its own, whatever the layout and wherever the bounds are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .grouped import Product
from .heuristics.problem import check_group_size
from .layout import Range, can_cut, column_step, cut_bytes, padded_shape
from .packed import PackedWeight
from .packing import preprocess, unpack, unpack_columns
from .require import require_memory
from .weight import LooseWeight, QuantizedWeight


def cut_columns(product: Product, ranges: Sequence[Range]) -> Product:
    """The layer that computes these columns of y, side by side; of stacked experts, of each."""
    w = product.operand
    packed = cut_weight(w.packed, columns=ranges)
    scales, zeros, bias = (
        None if t is None else torch.cat([t[..., begin:end] for begin, end in ranges], -1)
        for t in (w.scales, w.zeros, product.bias)
    )
    assert scales is not None
    return Product(LooseWeight(packed, scales, zeros, w.perm), bias)


def cut_rows(w: QuantizedWeight, begin: int, end: int) -> QuantizedWeight:
    """w[begin:end], in the order of the weight's rows, for x[..., begin:end] or x[..., perm[begin:end]]; without perm.

    Groups that the cut splits become smaller ones, without a change of value. Raises ValueError for bounds that leave
    no groups that `gemm` takes.
    """
    size = rows_of_a_group(w.k, w.group_rows, begin, end)
    index = torch.arange(begin, end, size, device=w.device) // w.group_rows
    zeros = None if w.zeros is None else w.zeros.index_select(-2, index)
    return LooseWeight(cut_weight(w.packed, rows=(begin, end)), w.scales.index_select(-2, index), zeros)


def rows_of_a_group(k: int, group_size: int, begin: int, end: int) -> int:
    """How many rows share a scale in rows begin..end of a weight [K, N] alone.

    group_size: of the weight. Inside of one of its groups all of the rows share one. Raises ValueError for bounds
    between which no groups fit that `gemm` takes.
    """
    rows = end - begin
    if begin // group_size == (end - 1) // group_size:
        return rows
    size = math.gcd(group_size, begin, end)
    for candidate in (size, math.gcd(size, 32)):
        try:
            check_group_size(candidate, rows)
        except ValueError:
            continue
        return candidate
    raise ValueError(
        f"begin, end: expected multiples of 16, or rows of one group of {group_size}, got {begin}, {end} of K = {k}"
    )


def cut_weight(
    weight: PackedWeight, *, rows: Range | None = None, columns: Sequence[Range] | None = None
) -> PackedWeight:
    """w[rows], its `columns` side by side, in the same layout; of stacked weights, of each.

    Bytes are cut where they lie if the bounds and the layout allow it; else these columns are unpacked and packed.
    Returns a weight on the same memory or on a copy. Where rows are cut it knows no group size, and has no perm.

    Raises ValueError for an empty range or one beyond the weight.
    """
    require_memory("weight", weight.data)
    is_of_rows = rows is not None
    rows = (0, weight.k) if rows is None else rows
    columns = [(0, weight.n)] if columns is None else columns
    for name, size, ranges in (("rows", weight.k, [rows]), ("columns", weight.n, columns)):
        for begin, end in ranges:
            if not 0 <= begin < end <= size:
                raise ValueError(f"{name}: expected 0 <= begin < end <= {size}, got {begin}, {end}")
    fields = weight.fields | {"k": rows[1] - rows[0], "n": sum(end - begin for begin, end in columns)}
    if is_of_rows:
        fields.pop("group_size", None)
        if "has_perm" in fields:
            fields["has_perm"] = False
    w = weight
    if can_cut(w.k, w.n, w.bits, w.layout, rows, columns):
        data = cut_bytes(w.data, w.k_padded, w.n_padded, w.bits, w.layout, rows, columns)
    elif w.data.is_meta:
        k, n = padded_shape(fields["k"], fields["n"], w.bits, w.layout)
        data = torch.empty((w.experts or 1) * k * n * w.bits // 8, dtype=torch.uint8, device="meta")
    else:
        q = torch.cat([_unpacked(w, begin, end)[..., rows[0] : rows[1], :] for begin, end in columns], -1)
        code = w.code if w.format == "code4" else None
        data = preprocess(q, w.bits, layout=w.layout, format=w.format, code=code).data
    return PackedWeight(data, **fields)


def _unpacked(weight: PackedWeight, begin: int, end: int) -> torch.Tensor:
    """Columns of what `unpack` returns, [K, end - begin], or [E, K, end - begin]."""
    if weight.experts is not None:
        return unpack(weight)[..., begin:end]
    step = column_step(weight.bits, weight.layout)
    first = begin // step * step
    return unpack_columns(weight, first, end)[:, begin - first :]
