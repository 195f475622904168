"""What loading a checkpoint leaves of the memory that it took."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.hf_models import write_model

from weightonly.hf import checkpoint, load_model


def test_freed_memory_goes_back_while_layers_are_packed(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc keeps what the threads of transformers free: a model of 1.1 GB took 2.7 GB."""
    folder, calls = write_model(tmp_path, "gptq-4bit-v1-act_order", generator), []
    monkeypatch.setattr(checkpoint, "_TRIM_BYTES", 1)
    monkeypatch.setattr(checkpoint, "_give_memory_back", lambda: calls.append(1))
    model = load_model(folder, dtype=torch.float16)
    assert len(calls) == sum(hasattr(module, "qweight") for module in model.modules())
