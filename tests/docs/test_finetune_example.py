"""examples/finetune.py and finetune_mixture.py, as a user runs them."""

from __future__ import annotations

import importlib.util

import pytest
from tests import ROOT


@pytest.mark.filterwarnings("ignore:adapters are merged")
@pytest.mark.parametrize(
    ("name", "ways", "quantized"),
    [
        ("finetune", ["trained", "loaded", "merged"], "7 layers quantized"),
        ("finetune_mixture", ["trained", "packed", "dense", "merged"], "5 layers quantized"),
    ],
)
def test_the_model_learns_to_count(
    name: str, ways: list[str], quantized: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    texts = example.main()
    counted = list(range(7, 15))
    assert texts["before"] != counted
    assert set(texts) == {"before", *ways} and all(texts[way] == counted for way in ways)
    assert quantized in capsys.readouterr().out
