"""`select` chooses as it did when its constants were measured: the problems of the report, and 6000 random ones.

The file is made by make_choices.py. A choice that differs needs a measurement that says so.
"""

from __future__ import annotations

import csv
import lzma
from pathlib import Path

import pytest

from weightonly.heuristics import Problem, select
from weightonly.heuristics.arch import ARCHS

FILE = Path(__file__).parent / "data" / "choices.csv.xz"


@pytest.fixture(scope="module")
def choices() -> list[tuple[Problem, str]]:
    with lzma.open(FILE, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        (
            Problem(
                int(r["m"]),
                int(r["n"]),
                int(r["k"]),
                r["format"],
                int(r["group_size"]),
                int(r["arch"]),
                int(r["sm_count"]),
                r["layout"],
                r["zeros"] == "1",
            ),
            r["config"],
        )
        for r in rows
    ]


def test_choices_are_what_they_were(choices: list[tuple[Problem, str]]) -> None:
    assert len(choices) == 336 + 6000
    different = [(p, expected, found) for p, expected in choices if (found := select(p).name) != expected]
    assert not different


def test_a_problem_and_its_fields_choose_alike(choices: list[tuple[Problem, str]]) -> None:
    for p, expected in choices[::100]:
        config = select(p.m, p.n, p.k, p.format, p.group_size, p.arch, p.sm_count, p.layout, p.zeros)
        assert config == select(p)
        assert config.name == expected


def test_the_problems_are_of_all_kinds(choices: list[tuple[Problem, str]]) -> None:
    problems = [p for p, _ in choices]
    assert {p.format for p in problems} == {"int4", "int8", "code4"}
    assert {p.arch for p in problems} <= set(ARCHS) and len({p.arch for p in problems}) == 9
    assert {p.layout for p in problems} == {"row_major", "interleaved", "tiled"}
    assert {p.zeros for p in problems} == {False, True}
    assert min(p.m for p in problems) == 1 and max(p.m for p in problems) > 90000
    assert sum("+" in name for _, name in choices) > 100, "and of two launches"
