"""Zeros of `quantize(symmetric=False)` that are forgotten afterwards: what knows that there were some."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import ROOT

import weightonly as wo

W = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
X = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))

USES: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "gemm": lambda q, scales: wo.gemm(X, wo.preprocess(q, 4), scales),
    "with a group size": lambda q, scales: wo.gemm(X, wo.preprocess(q, bits=4, group_size=64), scales),
    "QuantizedWeight": lambda q, scales: wo.QuantizedWeight(wo.preprocess(q), scales),
    "dequantize": lambda q, scales: wo.dequantize(wo.preprocess(q, layout="tiled"), scales),
    "layer": lambda q, scales: wo.nn.Linear.from_quantized(wo.preprocess(q), scales),
    "repacked": lambda q, scales: wo.gemm(X, wo.repack(wo.preprocess(q, arch="sm80"), "cpu"), scales),
    "deep copy of q": lambda q, scales: wo.gemm(X, wo.preprocess(copy.deepcopy(q)), scales),
    "torch.save of q": lambda q, scales: wo.gemm(X, wo.preprocess(saved(q)), scales),
}


def saved(q: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_forgotten_zeros_are_an_error(use: Callable[[Any, torch.Tensor], object]) -> None:
    q, scales, _ = wo.quantize(W, bits=4, group_size=64, symmetric=False)
    with pytest.raises(ValueError, match=r"^zeros: expected shape \[2, 64\], .* got None; zeros= takes those of quant"):
        use(q, scales)
    use(*wo.quantize(W, bits=4, group_size=64)[:2])


def test_a_packed_weight_keeps_what_q_knew(tmp_path: Path) -> None:
    q, scales, zeros = wo.quantize(W, bits=8, group_size=64, symmetric=False)
    wo.preprocess(q, bits=8).save(tmp_path / "w.safetensors")
    packed = wo.PackedWeight.load(tmp_path / "w.safetensors")
    assert wo.gemm(X, packed, scales, zeros=zeros).isfinite().all()
    with pytest.raises(ValueError, match=r"^zeros: "):
        wo.gemm(X, packed, scales)


def test_what_the_caller_says_counts_more() -> None:
    q, scales, _ = wo.quantize(W, symmetric=False)
    assert wo.gemm(X, wo.preprocess(q, zeros=False), scales).isfinite().all()
    assert wo.preprocess(q.clone()).has_zeros is None  # a copy: nobody said so


def test_the_lines_of_the_readme_need_their_zeros() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "zeros=zeros" in block)
    wrong = code.replace("zeros=zeros, ", "").replace("4096", "128").replace("6144", "64")
    assert wrong.count("zeros") == 1
    with pytest.raises(ValueError, match=r"^zeros: "):
        exec(wrong, {"torch": torch, "wo": wo, "device": "cpu"})
