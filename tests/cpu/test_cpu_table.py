"""What runs where: the table of `python -m weightonly info` and of the guide."""

from __future__ import annotations

import platform

import pytest
from tests import ROOT

from weightonly.cpu import library, table
from weightonly.heuristics.problem import FORMATS

GUIDE = ROOT / "docs/guides/cpu.md"


class Stub:
    """A library with a rule of its own: tiles for rows above the type's number, in groups that 32 divides."""

    def wo_cpu_level(self) -> int:
        return library.LEVELS.index("avx512")

    def wo_cpu_kernel(self, params: library.Params) -> int:
        if params.level == 3 and params.group_size % 32 == 0 and params.m > params.type:
            return 2
        return int(params.m > 7)


@pytest.fixture
def native() -> library.Backend:
    """The library, which was compiled for every level."""
    found = library.choose("auto", library._PATH)
    if found.library is None:
        pytest.skip(found.reason)
    if platform.machine() != "x86_64":
        pytest.skip("compiled for plain C++ alone")
    return found


def test_rows_that_differ_stand_apart() -> None:
    found = {(row.level, row.weights): row.kernels for row in table.rows(Stub())}
    same = dict.fromkeys(("fp16", "bf16", "fp32"), "few 1-7, many 8+")
    assert found == {
        ("amx", "groups of 16 (nvfp4)"): same,
        ("amx", "groups of 32 and more"): {"fp16": "tiles 1+", "bf16": "few 1, tiles 2+", "fp32": "few 1-2, tiles 3+"},
        ("avx512", "every format"): same,
        ("avx2", "every format"): same,
        ("generic", "every format"): same,
    }


def test_levels_that_this_cpu_lacks_are_left_out() -> None:
    lines = table.describe(library.Backend(Stub(), library.LEVELS.index("avx2"), "a test")).splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [["avx512", "every"], ["*", "avx2"], ["generic", "every"]]
    assert all("few 1-7, many 8+" in line for line in lines)


def test_without_the_library_pytorch_computes_everything() -> None:
    text = table.describe(library.Backend(None, -1, "a test"))
    assert text.splitlines() == ["  every format, dtype and M: the equation in PyTorch (weightonly/reference.py)"]


def test_the_guide_has_the_table(native: library.Backend) -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    for row in table.rows(native.library):
        cells = (f"`{row.level}`", row.weights, *(row.kernels[dtype] for dtype in library.TYPES))
        assert f"| {' | '.join(cells)} |" in guide


def test_every_format_is_in_the_table(native: library.Backend) -> None:
    """A format with groups of its own is named where these make a difference."""
    assert "nvfp4" in FORMATS and any("nvfp4" in row.weights for row in table.rows(native.library, ["amx"]))
    assert {row.weights for row in table.rows(native.library, ["avx2"])} == {"every format"}
