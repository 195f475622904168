"""What loading leaves of the memory that it took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf_models import write_model
from transformers import AutoModelForCausalLM

from weightonly.hf import WeightOnlyConfig, load_model, memory


def from_others(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=WeightOnlyConfig())


@pytest.mark.parametrize("load", [load_model, from_others], ids=["load_model", "from_pretrained"])
def test_freed_memory_goes_back_while_layers_are_packed(
    load: Any, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc keeps what the threads of transformers free: a model of 1.1 GB took 2.7 GB."""
    folder, trims = write_model(tmp_path, "gptq-4bit-v1-act_order", generator), []
    monkeypatch.setattr(memory, "_TRIM_BYTES", 1)
    monkeypatch.setattr(memory, "_trim", lambda: trims.append(1))
    model = load(folder)
    assert len(trims) == sum(hasattr(module, "qweight") for module in model.modules())
