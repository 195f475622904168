"""Rows of a weight sorted by group: the order, groups of several sizes, and numbers that do not fit."""

from __future__ import annotations

import pytest
import torch

from weightonly.formats.expect import TensorError
from weightonly.formats.groups import even_groups, group_rows

CPU = torch.device("cpu")


def test_rows_of_a_group_keep_their_order() -> None:
    """So every rank of a tensor parallel layer, and every device, has one permutation of a checkpoint."""
    found = group_rows(torch.tensor([2, 0, 1, 0, 2, 1, 1, 0, 2]), 3)
    assert found.perm is not None and found.perm.tolist() == [1, 3, 7, 2, 5, 6, 0, 4, 8]
    assert found.perm.dtype == torch.int32
    assert (found.rows, found.source) == (3, None)
    rows = torch.arange(9.0).view(9, 1)
    assert found.sort(rows).flatten().tolist() == found.perm.tolist()


def test_rows_that_are_in_order_stay() -> None:
    found = group_rows(torch.arange(8) // 4, 2)
    assert (found.perm, found.source, found.rows) == (None, None, 4)
    one_late = group_rows(torch.tensor([0, 0, 1, 0, 1, 1]), 2)
    assert one_late.perm is not None and one_late.perm.tolist() == [0, 1, 3, 2, 4, 5]


def test_groups_of_several_sizes_are_cut_into_equal_ones() -> None:
    """4, 6 and 0 rows: the greatest that divides all is 2. Scales are repeated."""
    found = group_rows(torch.tensor([0] * 4 + [1] * 6), 3)
    assert found.rows == 2 and found.source is not None and found.source.tolist() == [0, 0, 1, 1, 1]
    assert found.spread(torch.tensor([[1.0], [2.0], [3.0]])).flatten().tolist() == [1, 1, 2, 2, 2]


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [-1, 0, 1, 2]], ids=["as many as there are", "negative"])
def test_groups_that_the_scales_lack(numbers: list[int]) -> None:
    message = rf"g_idx: expected groups within 0..2 as scales has, got {min(numbers)}..{max(numbers)}"
    with pytest.raises(TensorError, match=message):
        group_rows(torch.tensor(numbers), 3)


def test_neighbouring_rows() -> None:
    assert (even_groups(128, 4, None, CPU).rows, even_groups(128, 4, 32, CPU).rows) == (32, 32)
    assert even_groups(96, 1, -1, CPU).rows == 96
    short = even_groups(80, 3, 32, CPU)  # 32, 32 and 16 rows
    assert short.rows == 16 and short.source is not None and short.source.tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("k", "groups", "group_size", "message"),
    [
        (128, 3, None, "expected a number of groups that gives K = 128 a power of two .*, got 3"),
        (128, 3, 32, "expected 4 groups of 32 rows for K = 128, got 3"),
        (128, 5, 32, "expected 4 groups of 32 rows for K = 128, got 5"),
        (128, 2, -1, "expected 1 groups of 128 rows for K = 128, got 2"),
        (128, 4, 0, "group_size: expected -1 or at least 1, got 0 in the config"),
        (128, 4, -2, "group_size: expected -1 or at least 1, got -2 in the config"),
    ],
)
def test_numbers_that_do_not_fit(k: int, groups: int, group_size: int | None, message: str) -> None:
    with pytest.raises(TensorError, match=f"scales: {message}"):
        even_groups(k, groups, group_size, CPU)
