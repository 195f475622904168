"""Fixtures of all tests: a seed, new in every run unless it is given, and the GPU if there is one."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from stand_in import Module

    from weightonly.cpu.library import Backend

os.environ["WEIGHTONLY_TUNED"] = ""  # what is tuned on this machine has no say in the tests

_SEED_VARIABLE = "WEIGHTONLY_TEST_SEED"
_SEED = int(os.environ.get(_SEED_VARIABLE) or random.SystemRandom().randrange(1 << 31))
os.environ[_SEED_VARIABLE] = str(_SEED)  # for the processes of pytest-xdist


def pytest_report_header() -> str:
    return f"{_SEED_VARIABLE}={_SEED} (set it to repeat this run)"


@pytest.fixture
def seed() -> int:
    """The seed of this run; printed, so that a failing test shows it."""
    print(f"{_SEED_VARIABLE}={_SEED}")
    return _SEED


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """A CPU generator, in the same state at the start of every test."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def no_plans() -> None:
    """Each test starts without plans: those of another one were made by what that one replaced."""
    from weightonly.plan import cache

    cache.clear()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Stands in for the compiled module: see stand_in.py."""
    from stand_in import installed

    return installed(monkeypatch)


@pytest.fixture
def cuda_device() -> torch.device:
    """The GPU; skips the test where there is none or the kernels are not compiled."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    from weightonly import cuda_built

    if not cuda_built():
        pytest.skip("the CUDA kernels are not built")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=("generic", "avx2", "avx512", "amx"))
def backend(request: pytest.FixtureRequest) -> Backend:
    """The native kernels of CPUs at one level; skips those that this CPU lacks, and all where they were not built."""
    from weightonly.cpu import library

    found, problem = library._load(library._PATH)
    if found is None:
        pytest.skip(problem)
    if library.LEVELS.index(request.param) > found.wo_cpu_level():
        pytest.skip(f"this CPU lacks {request.param}")
    return library.choose(request.param, library._PATH)


@pytest.fixture
def best() -> Backend:
    """The native kernels of CPUs as `gemm` uses them."""
    from weightonly.cpu import library

    found = library.choose("auto", library._PATH)
    if found.library is None:
        pytest.skip(found.reason)
    return found


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Nothing that was chosen before counts in the test, and nothing that it chose after it."""
    from weightonly.heuristics.select import kernels_of, select

    caches: tuple[Any, ...] = (select, kernels_of)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def groups_of_16(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    """Every kernel for groups of 16 counts as verified."""
    _set_groups_of_16(monkeypatch, True)


@pytest.fixture
def no_groups_of_16(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    """No kernel for groups of 16 counts as verified."""
    _set_groups_of_16(monkeypatch, False)


def _set_groups_of_16(monkeypatch: pytest.MonkeyPatch, verified: bool) -> None:
    from weightonly.heuristics.families import FAMILIES

    for family in FAMILIES.values():
        monkeypatch.setattr(family, "groups_of_16_verified", verified)


@pytest.fixture
def compiled_groups_of_16(groups_of_16: None) -> None:
    """The same for tests on a GPU; skips where the build is without these kernels (WEIGHTONLY_UNVERIFIED=on)."""
    from weightonly.kernels import dequantizes_groups_of_16

    if not dequantizes_groups_of_16():
        pytest.skip("the kernels for groups of 16 are not built")


@pytest.fixture
def fp32_sums() -> Iterator[None]:
    """cuBLAS may add the parts of a split K in 16 bits, unless it is told not to: then sums are exact on the grid."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(matmul, name, value)


@pytest.fixture
def launch_overlap() -> Iterator[None]:
    """Launches overlap again after the test."""
    yield
    from weightonly import set_launch_overlap

    set_launch_overlap(True)
