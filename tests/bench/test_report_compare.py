"""Comparisons of two files of measurements: changes beyond the noise."""

from __future__ import annotations

import re

import pandas as pd
import pytest
from tests.bench.report_cases import made_up

from weightonly.bench.report.compare import compare, describe
from weightonly.bench.report.results import cells


def test_a_change_beyond_the_noise_counts() -> None:
    old, quick = cells(made_up()), made_up()
    quick.loc[(quick["k"] == 256) & (quick["m"] == 1), ["us", "us_p10", "us_p90"]] *= 0.9
    slow = quick["m"] == 16
    quick.loc[slow, ["us", "us_p10", "us_p90"]] *= 1.05
    found = compare(cells(quick), old)
    assert len(found.regressions) == 5 and set(found.regressions["m"]) == {16}
    assert list(found.regressions["change"]) == pytest.approx([0.05] * 5)
    assert list(found.improvements["k"]) == [256] and found.improvements["change"].iloc[0] == pytest.approx(-0.1)
    lines = describe(found).splitlines()
    assert lines[0].startswith("15 times of ours compared: 5 regressions, 1 improvements")
    assert any(
        re.fullmatch(r"for comparison, cuBLAS fp16: [+-]\d\.\d% in the geometric mean, 10\.0% at most", x)
        for x in lines
    )
    assert "improvement: 256x128 M = 1 (int4, group 128, fp16): 12.00 us -> 10.80 us (-10.0%)" in lines


@pytest.mark.parametrize(
    ("factor", "spread", "regressions"),
    [(1.10, 0.01, 15), (1.10, 0.06, 0), (1.02, 0.001, 0), (1.0, 0.01, 0)],
    ids=["beyond", "within the range", "below the tolerance", "the same"],
)
def test_noise_is_no_regression(factor: float, spread: float, regressions: int) -> None:
    found = compare(cells(made_up(factor, spread)), cells(made_up(spread=spread)))
    assert len(found.regressions) == regressions and len(found.improvements) == 0
    backwards = compare(cells(made_up(spread=spread)), cells(made_up(factor, spread)))
    assert len(backwards.regressions) == 0 and len(backwards.improvements) == regressions


def test_runs_that_differ_widen_the_range() -> None:
    """Each run is steady, but they are 12% apart: 10% more is then within the noise."""
    apart = cells(pd.concat([made_up(), made_up(1.12)]))
    assert len(compare(cells(made_up(1.1)), apart).regressions) == 0
    assert len(compare(cells(made_up(1.3)), apart).regressions) == 15


def test_what_the_new_file_lacks_is_counted() -> None:
    new = made_up()
    found = compare(cells(new[new["m"] != 1]), cells(made_up()))
    assert found.missing == 5 * 3
    assert "15 measurements of the old file are not in the new one" in describe(found)
    with pytest.raises(ValueError, match="expected measurements of the same shapes"):
        compare(cells(new), cells(made_up(format="int8")))
