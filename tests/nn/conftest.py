"""Layers of PyTorch have the parameters of the run's seed."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded_parameters(seed: int) -> None:
    torch.manual_seed(seed)
