"""The native kernels of CPUs, where they are built."""

from __future__ import annotations

import pytest

from weightonly.cpu import library
from weightonly.cpu.library import Backend


@pytest.fixture(params=("generic", "avx2", "avx512", "amx"))
def backend(request: pytest.FixtureRequest) -> Backend:
    """The native kernels of CPUs at one level; skips those that this CPU lacks, and all where they were not built."""
    found, problem = library._load(library._PATH)
    if found is None:
        pytest.skip(problem)
    if library.LEVELS.index(request.param) > found.wo_cpu_level():
        pytest.skip(f"this CPU lacks {request.param}")
    return library.choose(request.param, library._PATH)


@pytest.fixture
def best() -> Backend:
    """The native kernels of CPUs as `gemm` uses them."""
    found = library.choose("auto", library._PATH)
    if found.library is None:
        pytest.skip(found.reason)
    return found
