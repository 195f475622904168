"""The choice of a kernel for the codes of a codebook."""

from __future__ import annotations

from typing import Any

import pytest
from code_cases import formats

from weightonly.heuristics import Problem, candidates, select


@formats
def test_to_the_heuristics_they_are_one_format(format: str) -> None:
    problem = Problem(1, 4096, 4096, format, 64, 90, 132)
    assert (problem.format, problem.bits, problem.layout) == ("code4", 4, "tiled")
    assert problem == Problem(1, 4096, 4096, "code4", 64, 90, 132, "tiled")
    assert all("code4" in config.formats for config in candidates(problem))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": 80}, "layout must be one that sm80 reads, interleaved, got 'tiled'"),
        ({"layout": "interleaved"}, "layout must be 'tiled' for nf4, got 'interleaved'"),
        ({"zeros": True}, "zeros must be False for nf4, got True"),
        ({"format": "nf8"}, "format must be one of .*got 'nf8'"),
    ],
    ids=["arch", "layout", "zeros", "format"],
)
def test_select_rejects(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "m": 1,
        "n": 4096,
        "k": 4096,
        "format": "nf4",
        "group_size": 64,
        "arch": 90,
        "sm_count": 132,
    }
    with pytest.raises(ValueError, match=message):
        select(**good | arguments)
