"""What a tensor becomes before a kernel reads it: itself where it can, else a copy."""

from __future__ import annotations

import pytest
import torch

from weightonly.plain import aligned, aligned_rows


@pytest.mark.parametrize("alignment_bytes", [4, 16])
def test_aligned(alignment_bytes: int) -> None:
    whole = torch.arange(64, dtype=torch.float32)
    assert aligned(whole, alignment_bytes) is whole
    shifted = whole[1:]  # 4 bytes on
    assert (aligned(shifted, alignment_bytes) is shifted) == (alignment_bytes == 4)
    for view in (shifted, whole[::2], whole.view(8, 8).t()):
        result = aligned(view, alignment_bytes)
        assert torch.equal(result, view)
        assert result.is_contiguous() and result.data_ptr() % alignment_bytes == 0


def test_rows_of_scales() -> None:
    scales = torch.randn(3, 64).half()
    assert aligned_rows(scales, 64) is scales
    floats = torch.randn(200).half()  # 2 and 8 bytes on
    for view in (scales[:, :50], scales.t().contiguous().t(), floats[1:193].view(3, 64), floats[4:196].view(3, 64)):
        rows = aligned_rows(view, 64)
        assert rows.shape == (3, 64) and rows.is_contiguous() and rows.data_ptr() % 16 == 0
        assert torch.equal(rows[:, : view.shape[1]], view)
        assert not rows[:, view.shape[1] :].any()
