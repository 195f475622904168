"""Scales of which float16 holds few bits: an error where all of a layer are so small, but not where some groups are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.formats.fp4_cases import nvfp4_layer, options
from tests.formats_layers import folder_of

import weightonly as wo
from weightonly.formats import QuantizedLayer
from weightonly.quantize_codes import check_scales_as

TOO_SMALL = "scales: expected numbers within its range for .* in torch.float16, got .*; bfloat16 has the range"


@pytest.mark.parametrize("format", ["nvfp4", "int4", "int8", "nf4", "fp4"])
def test_scales_of_a_layer(format: str, generator: torch.Generator) -> None:
    small = torch.rand(64, 32, generator=generator) * 1e-6 + 1e-7
    with pytest.raises(ValueError, match=TOO_SMALL):
        check_scales_as(small, torch.float16, format)
    check_scales_as(small, torch.bfloat16, format)
    check_scales_as(torch.cat((small, torch.rand(64, 32, generator=generator) + 1e-3)), torch.float16, format)
    with pytest.raises(ValueError, match=TOO_SMALL):
        check_scales_as(torch.tensor([1.0, 1e6]), torch.float16, format)


def test_a_checkpoint_of_small_weights(tmp_path: Path, generator: torch.Generator) -> None:
    """Weights of about 1e-6, as in vLLM's issue 33972: rounded to float16 their scales were 9% off."""

    def layer(g: torch.Generator) -> dict[str, torch.Tensor]:
        scale = torch.full((24, 4), 56.0).to(torch.float8_e4m3fn)
        return nvfp4_layer(g) | {"weight_global_scale": torch.tensor([1e8]), "weight_scale": scale}

    records = wo.load_checkpoint(folder_of(tmp_path, layer, options("nvfp4"), generator), arch="cpu", progress=False)
    layers = [record for record in records if isinstance(record, QuantizedLayer)]
    for record in layers:
        with pytest.raises(ValueError, match=f"{record.name}: {TOO_SMALL}"):
            record.to_linear(torch.float16)
        record.to_linear(torch.bfloat16)
    assert len(layers) == 2
