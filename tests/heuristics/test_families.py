"""A family is known to its own file: who else asks for one by its name, and what is not verified."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from tests import ROOT

from weightonly.heuristics import Problem, candidates, select
from weightonly.heuristics.configs import CONFIGS
from weightonly.heuristics.families import FAMILIES
from weightonly.heuristics.select import kernels_of

ROOMS = ("weightonly", "heuristics", "bench", "kernels", "examples")
ITS_OWN = ("heuristics/families", "heuristics/h200.py")  # h200.py: constants by the names of kernels
MOST_LINES = 8


def lines_that_name_a_family(text: str) -> list[int]:
    """Lines with a string that is the name of a family, or of one of its kernels."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or "\n" in node.value:
            continue
        if any(node.value == name or node.value.startswith(f"{name}_") for name in FAMILIES):
            found.add(node.lineno)
    return sorted(found)


def test_names_are_found() -> None:
    text = 'if c.family == "gemv":\n    """gemv is not\n    this."""\nx = ["gemm_sm90_8x64", "gemm"]\n'
    assert lines_that_name_a_family(text) == [1, 4]


def test_few_ask_for_a_family_by_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(ITS_OWN)
        for line in lines_that_name_a_family(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MOST_LINES, found


def test_heuristics_needs_the_standard_library_alone() -> None:
    program = "import sys; import heuristics.occupancy; print(sorted({m.split('.')[0] for m in sys.modules}))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"numpy", "pandas", "scipy", "torch", "weightonly"} & set(ast.literal_eval(result.stdout))


@pytest.mark.parametrize("what", ["family", "configuration"])
def test_what_no_gpu_has_run_is_neither_built_nor_selected(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(ROOT / "kernels"))
    import generate

    chosen = select(16, 6144, 4096, "int4", 128, 90, 132)
    p = Problem(16, 6144, 4096, "int4", 128, 90, 132)
    if what == "family":
        monkeypatch.setattr(type(chosen.rules), "verified", False)
        configs = CONFIGS
    else:
        configs = tuple(dataclasses.replace(c, verified=c.kernel != chosen.kernel) for c in CONFIGS)
    for module in ("heuristics.legal", "heuristics.select"):
        monkeypatch.setattr(sys.modules[f"weightonly.{module}"], "CONFIGS", configs)
    # The build's list is one of its own: generate.py imports heuristics/ without the package.
    of_build = next(c for c in generate.CONFIGS if c.kernel == chosen.kernel)
    if what == "family":
        monkeypatch.setattr(type(of_build.rules), "verified", False)
    else:
        marked = (dataclasses.replace(c, verified=c is not of_build) for c in generate.CONFIGS)
        monkeypatch.setattr(generate, "CONFIGS", tuple(marked))
    caches: tuple[Any, ...] = (select, kernels_of)
    for cache in caches:
        cache.cache_clear()
    try:
        assert chosen.kernel not in {c.kernel for c in candidates(p)}
        other = select(16, 6144, 4096, "int4", 128, 90, 132)
        assert other.kernel != chosen.kernel
        assert other.is_verified
        built = {k.config.kernel for k in generate.all_kernels()}
        assert chosen.kernel not in built
        assert built < {k.config.kernel for k in generate.all_kernels(unverified=True)}
    finally:
        for cache in caches:
            cache.cache_clear()
