"""Ranks talk to each other over the loopback."""

from __future__ import annotations

import pytest
from tests.parallel.parallel_ranks import has_loopback


@pytest.fixture(scope="session", autouse=True)
def loopback() -> None:
    if not has_loopback():
        pytest.skip("no network, not even 127.0.0.1")
