"""Folders of a small model, dense and packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, torch.Tensor]:
    from tests.hf_models import dense_and_packed  # skips where transformers is missing

    return dense_and_packed(tmp_path)
