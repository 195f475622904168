"""The roofline of a GPU, and the bytes of a weight that it counts."""

from __future__ import annotations

import pytest

from weightonly.bench import roofline


# From the measured comparison of this project: k, n, m, bits, group size, roofline in us on an H200.
@pytest.mark.parametrize(
    ("k", "n", "m", "bits", "group_size", "expected_us"),
    [
        pytest.param(4096, 4096, 1, 4, 128, 3.44, id="int4-decode"),
        pytest.param(8192, 8192, 4096, 4, 128, 706.32, id="int4-prefill"),
        pytest.param(28672, 8192, 16, 8, -1, 54.31, id="int8-per-channel"),
    ],
)
def test_roofline_of_an_h200(k: int, n: int, m: int, bits: int, group_size: int, expected_us: float) -> None:
    limits = roofline.CEILINGS["NVIDIA H200"]
    us = roofline.roofline_us(m, k, n, bits=bits, group_size=group_size, symmetric=True, limits=limits)
    assert us == pytest.approx(expected_us, abs=0.005)


def test_zero_points_count_as_bytes() -> None:
    assert roofline.weight_bytes(256, 64, 4, 128, symmetric=True) == 256 * 64 // 2 + 2 * 64 * 2
    assert roofline.weight_bytes(256, 64, 4, 128, symmetric=False) == 256 * 64 // 2 + 2 * 2 * 64 * 2


def test_the_roofline_in_words_has_its_numbers() -> None:
    text = roofline.describe(roofline.CEILINGS["NVIDIA H200"])
    assert text.startswith("the longer of bytes / 4.47 TB/s and operations / 780 TFLOP/s, plus 1.5 us for a launch")
