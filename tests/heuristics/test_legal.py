"""Which configurations are legal: one definition for the search, for tuned tables and for callers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightonly.heuristics import Problem, candidates, legal
from weightonly.heuristics.arch import ARCHS
from weightonly.heuristics.configs import CONFIGS
from weightonly.heuristics.families import base
from weightonly.heuristics.legal import why_not
from weightonly.heuristics.machine import machine
from weightonly.heuristics.problem import layouts_of


@pytest.mark.parametrize("format", ["int4", "int8", "nf4"])
@pytest.mark.parametrize("arch", ARCHS)
def test_candidates_are_all_that_is_legal(arch: int, format: str) -> None:
    for layout in layouts_of(arch):
        if format == "nf4" and layout == "row_major":
            continue  # codes have no such layout
        for m, n, k, group_size in ((1, 4096, 4096, 128), (9, 1000, 320, 64), (2048, 6144, 14336, 32)):
            problem = Problem(m, n, k, format, group_size, arch, 100, layout)
            every = [config for c in CONFIGS for config in c.splits if legal(config, problem)]
            assert candidates(problem) == every != []


def test_kernels_of_an_older_gpu_run_if_they_are_asked_for() -> None:
    """Turing's on Ampere: it has kernels of its own, so nothing chooses them, and no table of tunings may name them."""
    turing = next(c for c in CONFIGS if c.family == "gemm_sm75")
    for arch, is_legal in ((75, True), (80, False), (120, False)):
        problem = Problem(64, 4096, 4096, "int4", 128, arch, 100)
        assert why_not(turing, problem, "f16") is None
        assert legal(turing, problem) == is_legal


def test_kernels_of_a_newer_gpu_are_not_legal() -> None:
    ampere = next(c for c in CONFIGS if c.family == "gemm_sm80")
    problem = Problem(64, 4096, 4096, "int4", 128, 75, 68)
    assert not legal(ampere, problem)
    assert "needs compute capability 8.0, but the GPU has 7.5" in str(why_not(ampere, problem))


def test_a_kernel_may_take_all_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = next(c for c in CONFIGS if c.family == "gemm_sm80" and "int4" in c.formats)
    problem = Problem(64, 4096, 4096, "int4", 128, 80, 108)
    needed = ampere.rules.smem_bytes(ampere, problem)
    for limit in (needed, needed - 1):
        monkeypatch.setattr(base, "machine", lambda arch, limit=limit: replace(machine(arch), smem_bytes=limit))
        reason = why_not(ampere, problem)
        assert reason is None if limit == needed else f"needs {needed} bytes" in str(reason)
