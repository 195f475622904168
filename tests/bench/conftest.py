"""A file of measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench.report_cases import written_results


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written_results(tmp_path)
