"""The committed measurements (bench/measurements): the constants of the cost model choose well on all files."""

from __future__ import annotations

import pandas as pd
import pytest
from tests import ROOT

from tools.regret import regret
from tools.regret_experts import regret as experts_regret

FOLDER = ROOT / "bench" / "measurements"


@pytest.mark.parametrize(
    ("name", "cells", "mean", "worst"),
    [
        ("h200_fit", 437, 0.003, 0.06),
        # Shapes that nothing was fitted to: int4 12, int8 and NF4 6 of them, 14 M each.
        ("h200_held_out", 336, 0.008, 0.10),
        # Small and other shapes, and M between the powers of two: fitted to, but for M = 6 of the held-out shapes.
        ("h200_more", 274, 0.008, 0.12),
        # NF4 in layout "interleaved", five shapes: the kernels before Hopper were fitted to it.
        ("h200_codes", 55, 0.008, 0.09),
        # x in E4M3, ten shapes, all fitted to.
        ("h200_fp8", 140, 0.004, 0.06),
    ],
)
def test_regret_of_the_choices(name: str, cells: int, mean: float, worst: float) -> None:
    frame = pd.read_csv(FOLDER / f"{name}.csv.xz")
    found = regret(frame)
    assert len(found.cells) == cells
    assert found.mean <= mean
    assert found.worst <= worst


@pytest.mark.parametrize(
    ("format", "mean", "worst"),
    [("int4", 0.025, 0.28), ("int8", 0.027, 0.28), ("nf4", 0.025, 0.32), ("mxfp4", 0.015, 0.18)],
)
def test_regret_of_the_choices_for_experts(format: str, mean: float, worst: float) -> None:
    """Routing by chance, with favourites and in turns; the choice knows none of it."""
    frame = pd.read_csv(FOLDER / "h200_grouped.csv.xz")
    found = experts_regret(frame[frame.format == format])
    assert len(found.cells) == 4 * 2 * 4 * 3
    assert found.mean <= mean
    assert found.worst <= worst


def test_regret_of_the_choices_for_experts_with_other_tokens() -> None:
    """3, 24 and 200 tokens, which nothing was fitted to."""
    found = experts_regret(pd.read_csv(FOLDER / "h200_grouped_held_out.csv.xz"))
    assert len(found.cells) == 4 * 4 * 2 * 3 * 3
    assert found.mean <= 0.03
    assert found.worst <= 0.57


@pytest.mark.parametrize(("format", "cells", "mean"), [("int4", 108, 0.012), ("mxfp4", 108, 0.01)])
def test_regret_of_the_choices_for_experts_of_x_in_e4m3(format: str, cells: int, mean: float) -> None:
    """The worst have just as many rows an expert as a tile has: of half of the experts there are two tiles."""
    frame = pd.read_csv(FOLDER / "h200_grouped_fp8.csv.xz")
    found = experts_regret(frame[frame.format == format])
    assert len(found.cells) == cells and found.mean <= mean and found.worst <= 0.35


def test_regret_of_the_choices_for_mxfp4_and_x_in_e4m3() -> None:
    found = regret(pd.read_csv(FOLDER / "h200_fp8_mx.csv.xz"))
    assert len(found.cells) == 30 and found.mean <= 0.002 and found.worst <= 0.01


def test_held_out_shapes_are_not_those_of_the_fit() -> None:
    frames = [pd.read_csv(FOLDER / f"{name}.csv.xz") for name in ("h200_fit", "h200_held_out")]
    fitted, held_out = (set(zip(f.k, f.n, f.format, strict=True)) for f in frames)
    assert not fitted & held_out
    assert len({(k, n) for k, n, _ in held_out}) >= 12


@pytest.mark.parametrize(("format", "cells"), [("int4", 168), ("code4", 84), ("int8", 84)])
def test_regret_of_each_format(format: str, cells: int) -> None:
    frame = pd.read_csv(FOLDER / "h200_held_out.csv.xz")
    found = regret(frame[frame.format == format])
    assert len(found.cells) == cells
    assert found.mean <= 0.03
    assert found.worst <= 0.10
