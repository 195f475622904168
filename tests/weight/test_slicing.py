"""Rows and columns of a quantized layer as a layer of its own, whatever the layout and wherever the bounds are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.expert_cases import kinds, pack, random_stack

import weightonly as wo
from weightonly.grouped import Product
from weightonly.layout import Range
from weightonly.slicing import cut_columns, cut_rows, cut_weight, rows_of_a_group

K, N, GROUP = 256, 200, 64


def layer(format: str, layout: str, generator: torch.Generator, group_size: int = GROUP) -> Product:
    q = random_stack(1, K, N, format, generator)[0]
    shape = (K // group_size, N)
    zeros = torch.randint(-4, 4, shape, generator=generator).float() if format.startswith("int") else None
    scales = torch.exp2(torch.randint(-2, 2, shape, generator=generator).float())
    return Product(wo.QuantizedWeight(pack(q, format, layout), scales, zeros), torch.randn(N, generator=generator))


COLUMNS: dict[str, list[Range]] = {
    "panels": [(64, 192)],
    "up to the end": [(128, N)],
    "inside of words": [(5, 46)],
    "up to the inside of a panel": [(64, 101)],
    "from the inside of a panel": [(5, 128)],
    "two ranges": [(0, 64), (128, 192)],
    "a range that ends inside of a panel, and another": [(0, 37), (64, 128)],
    "two ranges inside of words": [(3, 20), (101, 199)],
}


@kinds
@pytest.mark.parametrize("case", COLUMNS)
def test_columns(case: str, format: str, layout: str, generator: torch.Generator) -> None:
    whole, ranges = layer(format, layout, generator), COLUMNS[case]
    part = cut_columns(whole, ranges)
    index = torch.cat([torch.arange(begin, end) for begin, end in ranges])
    assert torch.equal(part.operand.dequantize(), whole.operand.dequantize()[:, index])
    assert part.bias is not None and whole.bias is not None and torch.equal(part.bias, whole.bias[index])
    alone = pack(wo.unpack(whole.operand.packed)[:, index], format, layout)
    assert part.operand.packed.fields == alone.fields
    assert torch.equal(part.operand.packed.data, alone.data)


# bounds -> rows that share a scale in the part
ROWS: dict[Range, int] = {
    (0, K): 64,
    (64, 192): 64,
    (192, K): 64,
    (32, 160): 32,  # both bounds are inside of groups
    (64, 160): 32,  # the second bound is
    (128, 144): 16,  # all rows of the part are of one group
    (70, 83): 13,
    (70, 128): 58,  # up to the end of their group
    (32, 128): 32,  # the first bound is inside of a group
    (48, 80): 16,  # a multiple of 16 alone
    (64, 128): 64,
}


@kinds
@pytest.mark.parametrize("bounds", ROWS, ids=str)
def test_rows(bounds: Range, format: str, layout: str, generator: torch.Generator) -> None:
    """No value changes, and groups that the cut splits become smaller ones."""
    whole = layer(format, layout, generator).operand
    begin, end = bounds
    part = cut_rows(whole, begin, end)
    assert part.scales.shape == ((end - begin) // ROWS[bounds], N)
    assert torch.equal(part.dequantize(), whole.dequantize()[begin:end])
    alone = pack(wo.unpack(whole.packed)[begin:end], format, layout)
    assert torch.equal(part.packed.data, alone.data)  # with zeros where K is padded


@pytest.mark.parametrize(
    ("group_size", "begin", "end"), [(64, 8, 72), (64, 0, 72), (64, 40, 80), (128, 16, 136)], ids=str
)
def test_bounds_that_leave_no_groups(group_size: int, begin: int, end: int) -> None:
    message = (
        f"begin, end: expected multiples of 16, or rows of one group of {group_size}, got {begin}, {end} of K = 256"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        rows_of_a_group(K, group_size, begin, end)


def test_groups_that_no_kernel_computes_become_smaller() -> None:
    assert rows_of_a_group(384, 192, 96, 384) == 32, "96 are no size"
    assert rows_of_a_group(384, 192, 48, 384) == 16, "48 neither"


def test_groups_of_16_stay(generator: torch.Generator) -> None:
    """A CPU computes them, so a part has them, too."""
    whole = layer("int4", "cpu", generator, 16).operand
    part = cut_rows(whole, 48, 112)
    assert part.scales.shape == (4, N)
    assert torch.equal(part.dequantize(), whole.dequantize()[48:112])


def test_a_part_knows_what_it_is_to_be_multiplied_with(generator: torch.Generator) -> None:
    """Its groups may be others than those of the whole, and x is permuted before it is cut."""
    q = random_stack(1, K, N, "int4", generator)[0]
    whole = wo.preprocess(q, 4, layout="tiled", group_size=GROUP, zeros=True, perm=True)
    rows = cut_weight(whole, rows=(64, 128))
    assert (rows.group_size, rows.has_zeros, rows.has_perm) == (None, True, False)
    columns = cut_weight(whole, columns=[(64, 128)])
    assert (columns.group_size, columns.has_zeros, columns.has_perm) == (GROUP, True, True)
    assert cut_weight(wo.preprocess(q, 4, layout="tiled"), rows=(64, 128)).has_perm is None


@pytest.mark.parametrize("layout", ["tiled", "interleaved", "cpu"])
@pytest.mark.parametrize("bounds", [(64, 128), (5, 46)], ids=str)
def test_stacked_experts_are_cut_each(bounds: Range, layout: str, generator: torch.Generator) -> None:
    q = random_stack(3, K, N, "int4", generator)
    whole, (begin, end) = pack(q, "int4", layout), bounds
    for part, expected in (
        (cut_weight(whole, rows=bounds), q[:, begin:end]),
        (cut_weight(whole, columns=[bounds]), q[..., begin:end]),
    ):
        assert part.experts == 3
        assert torch.equal(wo.unpack(part), expected)


@pytest.mark.parametrize("bounds", [(64, 128), (5, 46)], ids=str)
@pytest.mark.parametrize("experts", [None, 3], ids=["one weight", "experts"])
def test_a_weight_on_meta_has_the_shape_of_its_part(experts: int | None, bounds: Range) -> None:
    q = torch.zeros(*((experts,) if experts else ()), K, N, dtype=torch.int8)
    for layout in ("tiled", "interleaved"):
        whole = wo.preprocess(q, 4, layout=layout)
        for cut in ({"rows": bounds}, {"columns": [bounds]}):
            part, real = cut_weight(whole.to("meta"), **cut), cut_weight(whole, **cut)
            assert part.data.is_meta
            assert (part.fields, part.data.shape) == (real.fields, real.data.shape)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rows beyond K": ({"rows": (0, K + 64)}, r"rows: expected 0 <= begin < end <= 256, got 0, 320"),
    "no rows": ({"rows": (64, 64)}, r"rows: expected 0 <= begin < end <= 256, got 64, 64"),
    "rows before 0": ({"rows": (-64, 64)}, r"rows: expected 0 <= begin < end <= 256, got -64, 64"),
    "columns beyond N": (
        {"columns": [(0, 64), (64, N + 1)]},
        r"columns: expected 0 <= begin < end <= 200, got 64, 201",
    ),
    "no columns": ({"columns": [(0, 64), (70, 70)]}, r"columns: expected 0 <= begin < end <= 200, got 70, 70"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bounds_that_are_refused(case: str) -> None:
    weight = wo.preprocess(torch.zeros(K, N, dtype=torch.int8), 4, layout="tiled")
    cut, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{message}$"):
        cut_weight(weight, **cut)
