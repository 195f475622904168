"""The choice of a kernel for the codes of a codebook."""

from __future__ import annotations

from typing import Any

import pytest
from tests.code_cases import formats

from weightonly.heuristics import Problem, candidates, legal, select


@formats
def test_to_the_heuristics_they_are_one_format(format: str) -> None:
    for arch, layout in ((90, "tiled"), (90, "interleaved"), (80, "interleaved"), (75, "interleaved")):
        problem = Problem(1, 4096, 4096, format, 64, arch, 132, layout)
        assert (problem.format, problem.bits, problem.layout) == ("code4", 4, layout)
        assert problem == Problem(1, 4096, 4096, "code4", 64, arch, 132, layout)
        assert all("code4" in config.formats for config in candidates(problem))
    assert Problem(1, 4096, 4096, format, 64, 89, 128).layout == "interleaved"


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("m", [1, 8, 9, 64, 512, 8192])
def test_interleaved_codes_have_a_kernel_for_any_m(m: int, arch: int) -> None:
    config = select(m, 4096, 4096, "nf4", 64, arch, 100, "interleaved")
    assert config.layout == "interleaved" and "code4" in config.formats
    if arch >= 80 and m <= 8:
        assert config.family == "decode_sm80"
    assert legal(config, Problem(m, 4096, 4096, "nf4", 64, arch, 100, "interleaved"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": 80, "layout": "tiled"}, "layout must be one that sm80 reads, interleaved, got 'tiled'"),
        ({"layout": "row_major"}, "layout must be 'interleaved' or 'tiled' for nf4, got 'row_major'"),
        ({"arch": 70}, "layout must be 'interleaved' or 'tiled' for nf4, got 'row_major'"),
        ({"zeros": True}, "zeros must be False for nf4, got True"),
        ({"format": "nf8"}, "format must be one of .*got 'nf8'"),
    ],
    ids=["arch", "layout", "volta", "zeros", "format"],
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
