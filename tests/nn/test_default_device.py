"""`torch.device("meta")` as the default, as frameworks set it to build models, changes nothing of what is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.formats_layers import KNOWN, folder_of

import weightonly as wo
from weightonly.codebooks import codebook_on, codebook_values
from weightonly.formats import convert


@pytest.mark.parametrize("method", KNOWN)
def test_checkpoints(method: str, tmp_path: Path, generator: torch.Generator) -> None:
    layer, options = KNOWN[method]
    folder = folder_of(tmp_path, layer, options, generator)
    expected = [record for record in wo.load_checkpoint(folder) if isinstance(record, wo.formats.QuantizedLayer)]
    with torch.device("meta"):
        records = [record for record in wo.load_checkpoint(folder) if isinstance(record, wo.formats.QuantizedLayer)]
        convert(folder, tmp_path / "packed")
        again = [r for r in wo.load_checkpoint(tmp_path / "packed") if isinstance(r, wo.formats.QuantizedLayer)]
        dense = [[record.dequantize() for record in some] for some in (expected, records, again)]
    for first, *others in zip(*dense, strict=True):
        assert first.device.type == "cpu" and all(torch.equal(first, other) for other in others)


def test_blocks_of_4_bits() -> None:
    w = torch.randn(5, 77)
    for more in ({}, {"code": [i / 15 for i in range(16)]}):
        arguments: dict[str, Any] = more
        packed, absmax = wo.quantize_4bit(w, 32, "fp4", **arguments)
        expected = wo.dequantize_4bit(packed, absmax, 32, "fp4", (5, 77), torch.float16, **arguments)
        with torch.device("meta"):
            assert torch.equal(wo.quantize_4bit(w, 32, "fp4", **arguments)[0], packed)
            result = wo.dequantize_4bit(packed, absmax, 32, "fp4", (5, 77), torch.float16, **arguments)
        assert torch.equal(result, expected)


def test_code_tables() -> None:
    with torch.device("meta"):
        values = codebook_values([i / 31 for i in range(16)])
        table = codebook_on(values, torch.device("cpu"), torch.float32)
    assert table.device.type == "cpu" and table.tolist() == list(values)


def test_quantize_pack_and_multiply() -> None:
    w, x = torch.randn(128, 64), torch.randn(3, 128)

    def product() -> torch.Tensor:
        q, scales, zeros = wo.quantize(w, 4, 64, symmetric=False)
        perm = torch.arange(128, device="cpu").flip(0)
        return wo.gemm(x, wo.preprocess(q, 4), scales, zeros=zeros, perm=perm, activation="gelu")

    expected = product()
    with torch.device("meta"):
        assert torch.equal(product(), expected)
