"""Tables of a report: ratios to others, their means, and what is said of them."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from tests.bench.report_cases import BATCH, TIMES, made_up

from weightonly.bench.report.tables import MEAN, OVER_ROOFLINE, QUICKEST, number_text, parts, speedup_text, with_mean


def test_ratios_and_their_means() -> None:
    (part,) = parts(made_up())
    assert part.name == "int4, group 128, fp16" and part.others == ["cuBLAS fp16", "marlin"]
    for provider, ratios in (("cuBLAS fp16", (3.0, 1.8, 0.8)), (QUICKEST, (1.1, 0.9, 0.8))):
        table = with_mean(part.speedups(provider))
        assert list(table.index) == ["4096 x 6144", "4096 x 4096", "4096 x 28672", "14336 x 4096", "256 x 128", MEAN]
        assert list(table.columns) == list(BATCH)
        for _, row in table.iterrows():
            assert tuple(row) == pytest.approx(ratios)
    summary = part.summary()
    assert list(summary.index) == [f"speedup over {name}" for name in (QUICKEST, "cuBLAS fp16", "marlin")] + [
        OVER_ROOFLINE
    ]
    assert tuple(summary.loc[OVER_ROOFLINE]) == pytest.approx(TIMES["ours"])


def test_the_mean_is_geometric_and_of_all_shapes() -> None:
    rows = made_up()
    first = (rows["provider"] == "cuBLAS fp16") & (rows["k"] == 256)
    rows.loc[first, "us"] *= 32
    (part,) = parts(rows)
    assert part.summary().loc["speedup over cuBLAS fp16", 1] == pytest.approx(3.0 * 2)  # 32 ** (1 / 5)
    (lacking,) = parts(rows[~(first & (rows["m"] == 16))])
    assert math.isnan(lacking.summary().loc["speedup over cuBLAS fp16", 16])
    ratios = lacking.mean_ratios()
    assert list(ratios.loc[ratios["provider"] == "cuBLAS fp16", "m"]) == [1, 256]
    # A missing time does not beat one that is there.
    assert lacking.speedups(QUICKEST).loc[(256, 128), 16] == pytest.approx(0.9)


def test_formats_are_apart() -> None:
    names = [part.name for part in parts(pd.concat([made_up(), made_up(format="int8"), made_up(format="nf4")]))]
    assert names == ["int4, group 128, fp16", "int8, per channel, fp16", "nf4, group 64, fp16"]


def test_rows_without_ours_are_refused() -> None:
    rows = made_up()
    with pytest.raises(ValueError, match='expected some of the provider "ours", got none'):
        parts(rows[rows["provider"] != "ours"])


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        (
            (3.0, 1.8, 0.8),
            "3.00 times faster than cuBLAS fp16 at M = 1, not slower up to M = 16, slower from M = 256 on",
        ),
        ((3.0, 1.8, 1.2), "not slower at any M (at worst 1.20 times faster, at M = 256"),
        ((0.02, 0.9, 0.7), "50.0 times slower than cuBLAS fp16 at M = 1, slower at every M"),
        ((0.5, 0.9, 0.7), "slower at every M (at worst 2.00 times slower, at M = 1"),
        ((3.0, 0.7, 1.2), "slower at M = 16 (at worst 1.43 times slower, at M = 16"),
    ],
)
def test_in_words(ratios: tuple[float, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIMES, "cuBLAS fp16", ratios)
    (part,) = parts(made_up())
    assert words in part.in_words()
    assert "geometric means over 5 shapes" in part.in_words()
    slower = 5 * sum(min(a, b) < 1 for a, b in zip(ratios, TIMES["marlin"], strict=True))
    assert part.in_words().endswith(f"Slower than the quickest other in {slower} of 15 cells of shape and M")


def test_lost_cells_are_marked_by_what_is_printed() -> None:
    assert [speedup_text(ratio) for ratio in (1.5, 0.996, 0.99, 0.0058, math.nan)] == [
        "1.50",
        "1.00",
        "0.99 ▼",
        "0.0058 ▼",
        "",
    ]
    assert [number_text(value) for value in (1.234, 123.4, 1234.5, math.nan, 7)] == ["1.23", "123.4", "1234", "", "7"]
