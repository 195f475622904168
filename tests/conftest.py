"""Fixtures of tests in several folders: a seed, new in every run unless it is given, and the GPU if there is one."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WEIGHTONLY_TUNED"] = ""  # what is tuned on this machine has no say in the tests

_SEED_VARIABLE = "WEIGHTONLY_TEST_SEED"
_SEED = int(os.environ.get(_SEED_VARIABLE) or random.SystemRandom().randrange(1 << 31))
os.environ[_SEED_VARIABLE] = str(_SEED)  # for the processes of pytest-xdist


def pytest_report_header() -> str:
    return f"{_SEED_VARIABLE}={_SEED} (set it to repeat this run)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The last lines are what is kept of a run that failed."""
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(f"{_SEED_VARIABLE}={_SEED} repeats this run")


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


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """Each test may compile a function as often as PyTorch allows."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def cuda_device() -> torch.device:
    """The GPU; skips the test where there is none or the kernels are not compiled."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    from weightonly import cuda_built

    if not cuda_built():
        pytest.skip("the CUDA kernels are not built")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Nothing that was chosen before counts in the test, and nothing that it chose after it."""
    from weightonly.heuristics.grouped import invariant_grouped_class
    from weightonly.heuristics.select import invariant_kernels, kernels_of, select

    caches: tuple[Any, ...] = (select, kernels_of, invariant_kernels, invariant_grouped_class)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def groups_of_16(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    """Every kernel for groups of 16 counts as verified."""
    _set_verified(monkeypatch, "groups_of_16_verified", True)


@pytest.fixture
def no_groups_of_16(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    """No kernel for groups of 16 counts as verified."""
    _set_verified(monkeypatch, "groups_of_16_verified", False)


@pytest.fixture
def floats(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    """Every kernel for floats of 8 bits counts as verified."""
    _set_verified(monkeypatch, "floats_verified", True)


@pytest.fixture
def no_floats(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    """No kernel for floats of 8 bits counts as verified."""
    _set_verified(monkeypatch, "floats_verified", False)


def _set_verified(monkeypatch: pytest.MonkeyPatch, name: str, verified: bool) -> None:
    from weightonly.heuristics.families import FAMILIES

    for family in FAMILIES.values():
        monkeypatch.setattr(family, name, verified)


@pytest.fixture
def launch_overlap() -> Iterator[None]:
    """Launches overlap again after the test."""
    yield
    from weightonly import set_launch_overlap

    set_launch_overlap(True)
