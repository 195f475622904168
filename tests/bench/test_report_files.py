"""Files of measurements: written, read, joined and put together to cells."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from tests.bench.report_cases import FACTS, made_up

from weightonly.bench.report.results import Results, cells, join, read


def test_a_file_keeps_rows_and_facts(file: Path) -> None:
    found = read(file)
    assert found.facts == FACTS
    pd.testing.assert_frame_equal(found.rows, made_up(), atol=6e-4, check_dtype=False)
    assert len(pd.read_csv(file, comment="#")) == len(found.rows)


def test_a_plain_sweep_is_read_too(tmp_path: Path) -> None:
    made_up().drop(columns=["zeros", "config", "sm_mhz"]).to_csv(tmp_path / "sweep.csv", index=False)
    found = read(tmp_path / "sweep.csv")
    assert not found.facts and not found.rows["zeros"].any() and set(found.rows["config"]) == {""}


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "expected a CSV file"), ("# GPU: x\na,b\n1,2\n", "got none of k, n, m"), ("k,n\n", "got none of m")],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"other\.csv: .*{message}"):
        read(tmp_path / "other.csv")


def test_files_of_one_gpu_are_joined() -> None:
    first, second = Results(made_up(), {"GPU": "a", "date": "1"}), Results(made_up(), {"GPU": "a", "date": "2"})
    both = join([first, second])
    assert both.facts == {"GPU": "a", "date": "1; 2"} and len(both.rows) == 2 * len(first.rows)
    with pytest.raises(ValueError, match="expected measurements of one GPU, got a, b"):
        join([first, Results(made_up(), {"GPU": "b"})])


def test_a_cell_is_the_median_of_its_runs_with_their_range() -> None:
    table = cells(pd.concat([made_up(f) for f in (1.0, 1.3, 1.1)]))
    row = table[(table["k"] == 4096) & (table["n"] == 6144) & (table["m"] == 1) & (table["provider"] == "ours")].iloc[0]
    assert row["us"] == pytest.approx(2.4 * 1.1) and row["runs"] == 3
    assert (row["low"], row["high"]) == (pytest.approx(2.4 * 0.99), pytest.approx(2.4 * 1.3 * 1.01))
    assert row["x_roofline"] == pytest.approx(1.32)
