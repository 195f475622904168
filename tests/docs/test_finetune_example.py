"""examples/finetune.py, as a user runs it."""

from __future__ import annotations

import importlib.util

import pytest
from tests import ROOT

EXAMPLE = ROOT / "examples" / "finetune.py"


@pytest.mark.filterwarnings("ignore:adapters are merged")
def test_the_model_learns_to_count(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("finetune", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    texts = example.main()
    counted = list(range(7, 15))
    assert texts["before"] != counted
    assert texts["trained"] == texts["loaded"] == texts["merged"] == counted
    assert "7 layers quantized" in capsys.readouterr().out
