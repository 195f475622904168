"""The compiled module, which a stand-in replaces."""

from __future__ import annotations

import pytest
from tests.ops.stand_in import Module, installed


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Stands in for the compiled module: see stand_in.py."""
    return installed(monkeypatch)
