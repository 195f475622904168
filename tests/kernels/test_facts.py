"""Facts that C++ and Python both state, read from the headers. Shared memory: test_smem_of_kernels.py."""

from __future__ import annotations

import re

import pytest
from tests import ROOT

from weightonly.heuristics.families import clusters, gemv
from weightonly.heuristics.machine import HOPPER_SMEM_BYTES
from weightonly.heuristics.problem import K_ALIGNMENT
from weightonly.kernels import MAX_K
from weightonly.layout import shapes


def constant(header: str, name: str) -> int:
    """The value of a `constexpr int` that is a number or a product or shift of numbers."""
    text = (ROOT / header).read_text(encoding="utf-8")
    value = re.search(rf"constexpr int {name} = ([\d *<]+);", text)
    assert value, f"{header}: no constant {name}"
    return int(eval(value[1]))


@pytest.mark.parametrize(
    ("header", "name", "expected"),
    [
        ("cutlass_ext/arch/limits.h", "kMaxSmemBytesSm90", HOPPER_SMEM_BYTES),
        ("cutlass_ext/layout/tiled.h", "kPanelColumns", clusters.PANEL_COLUMNS),
        ("cutlass_ext/layout/tiled.h", "kPanelBlockK", K_ALIGNMENT),
        ("cutlass_ext/mainloop/gemv_stage.h", "kPassK", gemv.PASS_K),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_constants_of_the_headers(header: str, name: str, expected: int) -> None:
    assert constant(header, name) == expected


@pytest.mark.parametrize("source", ["kernels/api/checks.h", "kernels/convert/dequantize.cu"])
def test_the_longest_k(source: str) -> None:
    text = (ROOT / source).read_text(encoding="utf-8")
    limit = re.search(r'if \(p\.k_padded > \(1 << (\d+)\)\) return fail\("k_padded", "at most 2\^(\d+)"', text)
    assert limit and limit[1] == limit[2]
    assert 1 << int(limit[1]) == MAX_K


def test_the_layout_and_the_heuristics_pad_alike() -> None:
    assert (shapes.TILE, shapes.K_ALIGN) == (clusters.PANEL_COLUMNS, K_ALIGNMENT)
