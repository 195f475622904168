"""A tuned table, where a test wants a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tuned_cases import written_table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written_table(tmp_path)
