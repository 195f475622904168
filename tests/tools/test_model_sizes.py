"""How many GB models take: two models of few layers stand for all layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import weightonly as wo
from tools import measured
from tools.measured import source
from tools.model_sizes import Known, model_bytes

_QWEN = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
_DEEPSEEK = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "first_k_dense_replace": 2}
_DEEPSEEK |= {"num_attention_heads": 2, "n_routed_experts": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "n_group": 1}


@pytest.mark.parametrize(
    ("family", "sizes", "first"), [("Qwen3", _QWEN, 1), ("DeepseekV3", _DEEPSEEK, 2)], ids=["alike", "two others first"]
)
@pytest.mark.parametrize("format", ["int4", "nf4"])
def test_layers_that_are_alike_take_the_same(family: str, sizes: dict[str, int], first: int, format: str) -> None:
    known = Known(family, sizes | {"num_hidden_layers": 5, "vocab_size": 64}, first)
    summary: Any = wo.nn.quantize_model(known.on_meta(), format=format).weightonly_summary
    assert model_bytes(known, format=format) == (summary.bytes_before, summary.bytes_after)
    assert summary.bytes_after < summary.bytes_before


def test_source_has_gpu_date_command_and_file() -> None:
    assert source("h200_serve.csv") == (
        "H200, 2026-11-25: `python -m weightonly.bench serve --model llama3-8b --quant gptq --batch 1,32,128 "
        "--prefill 2048` (`bench/measurements/h200_serve.csv`)."
    )
    assert source("h200x2_decode.csv").startswith("2 x H200, 2026-11-25: `python -m weightonly.bench parallel ")


def test_source_wants_a_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.csv").write_text("# H200; python -m weightonly.bench serve\nm\n1\n")
    monkeypatch.setattr(measured, "MEASUREMENTS", tmp_path)
    with pytest.raises(ValueError, match=r"rows\.csv: expected a date in its head"):
        source("rows.csv")
