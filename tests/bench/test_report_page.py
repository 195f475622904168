"""The page of a report, and what it has in Markdown and as a table of times."""

from __future__ import annotations

import math
import re

import pandas as pd
import pytest
from tests.bench.report_cases import FACTS, Page, made_up

from weightonly.bench.plot import styles
from weightonly.bench.report import Report
from weightonly.bench.report.results import Results


@pytest.fixture(scope="module")
def report() -> Report:
    rows = pd.concat([made_up(runs=2), made_up(format="int8", runs=2)], ignore_index=True)
    return Report(Results(rows, dict(FACTS)), ("llama3-8b", "llama3-70b"))


def test_the_page_needs_nothing_else(report: Report) -> None:
    page = Page(report.html())
    assert len(page.ids) == len(set(page.ids)) > 0
    assert set(page.fetched) <= {f"#{name}" for name in page.ids}
    assert "@import" not in report.html() and not re.search(r"url\((?!#)", report.html())


def test_the_page_has_a_section_per_model_and_one_for_other_shapes(report: Report) -> None:
    page, formats = Page(report.html()), ["int4, group 128, fp16", "int8, per channel, fp16"]
    assert page.headings == [
        "weightonly benchmark: NVIDIA <H200>",
        "llama3-8b",
        *formats,
        "other shapes",
        *formats,
        "How it was measured",
    ]


def test_the_page_marks_every_lost_cell_and_no_other(report: Report) -> None:
    page = Page(report.html())
    assert {float(text.removesuffix(" ▼")) for text in page.lost} == {0.8, 0.9}
    assert all(text.endswith(" ▼") for text in page.lost)
    # Per format: ours loses 2 of 3 columns to the quickest other, 1 to each of cuBLAS and marlin: in the means of all
    # shapes, in those of the model's four, and in 5 shapes. Among all numbers: to cuBLAS and marlin, in 5 shapes.
    assert len(page.lost) == 2 * ((2 + 1 + 1) + (5 + 1) * (2 + 1 + 1) + 5 * (1 + 1))


def test_the_page_says_what_and_how(report: Report) -> None:
    text = report.html()
    assert text.count("<svg") == 1 + 2 * 2 * 2  # the summary; sections x formats x (time, ratio)
    for words in ("580.65", "python -m weightonly.bench report: x", "So.", "2 of each time", "median 1964 MHz"):
        assert words in text
    assert "NVIDIA &lt;H200&gt;" in text and "<H200>" not in text


def test_the_roofline_is_explained_before_it_is_used(report: Report) -> None:
    for text in (report.html(), report.markdown()):
        first = text.index("oofline")
        assert text[first - len("The r") :].startswith("The roofline of a call is about the least time")
        assert text.index("the longer of bytes") < text.index("roofline", first + 10)
    without = Report(Results(made_up().assign(roofline_us=math.nan)))
    assert "roofline" not in without.markdown()


def test_the_dense_product_looks_the_same_on_every_device() -> None:
    assert styles(["cuBLAS fp16"])["cuBLAS fp16"] == styles(["torch bf16"])["torch bf16"]


def test_markdown_has_the_tables_of_the_page(report: Report) -> None:
    text = report.markdown()
    for words in ("# weightonly benchmark", "## llama3-8b", "## other shapes", "| 4096 x 6144", "0.80 ▼", "So."):
        assert words in text
    assert "## llama3-70b" not in text


def test_times_hold_every_number(report: Report) -> None:
    table = report.times()
    assert len(table) == 2 * 5 * 3
    row = table[(table["K"] == 256) & (table["M"] == 16) & (table["format"] == "int8")].iloc[0]
    assert row["ours us"] == pytest.approx(60.0 * 1.01) and row["roofline us"] == pytest.approx(40.0)
    assert row["x cuBLAS fp16"] == pytest.approx(1.8) and row["x roofline"] == pytest.approx(1.515)
    assert row["range %"] == pytest.approx(100 * (1.02 * 1.01 - 0.99) / 1.01)


def test_without_a_roofline_and_without_others() -> None:
    rows = made_up().assign(roofline_us=math.nan)
    page = Page(Report(Results(rows)).html())
    assert "weightonly benchmark: machine not recorded" in page.headings
    alone = Report(Results(rows[rows["provider"] == "ours"]))
    assert "no other provider was measured" in alone.html() and not Page(alone.html()).lost
    assert "speedup over" not in alone.markdown()


def test_every_provider_has_a_look_of_its_own() -> None:
    looks = styles(["ours", "cuBLAS fp16", "one", "two", "three"])
    assert len({look.color for look in looks.values()}) == len({look.marker for look in looks.values()}) == len(looks)
    assert looks["one"] == styles(["one"])["one"]
    assert looks["ours"].linewidth > looks["cuBLAS fp16"].linewidth
