"""The pages are run as on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture
def without_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some blocks write files
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
