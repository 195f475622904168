"""`Linear` with weights of codes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.code_cases import FORMATS, formats, packed, random_codes

import weightonly as wo
from weightonly.nn import Linear


@formats
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_dict_round_trip(format: str, assign: bool, tmp_path: Path, generator: torch.Generator) -> None:
    weight = packed(random_codes(128, 72, generator), format)
    scales = torch.rand(2, 72, generator=generator).half()
    layer = Linear.from_quantized(weight, scales, bias=torch.randn(72, generator=generator).half())
    assert layer.packed.data is weight.data
    assert set(layer.state_dict()) == {"qweight", "scales", "bias", *(["codebook"] if format == "code4" else [])}
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = Linear(128, 72, group_size=64, format=format)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"), assign=assign)
    assert other.packed.code == weight.code
    assert other.packed.data.data_ptr() == other.qweight.data_ptr()
    x = torch.randn(3, 128, generator=generator).half()
    assert torch.equal(other(x), wo.gemm(x, weight, scales, bias=layer.bias))
    moved = copy.deepcopy(other).to(torch.bfloat16)
    assert moved.packed.code == weight.code and moved.scales.dtype == torch.bfloat16
    assert f"format={format}" in repr(other)


def test_an_empty_layer_gives_zeros() -> None:
    for format in FORMATS:
        assert torch.equal(Linear(128, 40, format=format)(torch.ones(2, 128).half()), torch.zeros(2, 40).half())


def test_state_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state dict: expected a weight with .*'fp4'.*got .*'nf4'"):
        Linear(128, 40, format="fp4").load_state_dict(Linear(128, 40, format="nf4").state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "nf4", "symmetric": False}, "symmetric: expected True for nf4, got False"),
        ({"format": "nf4", "bits": 8}, "bits: expected 4 for nf4, got 8"),
        ({"format": "fp4", "arch": "sm70"}, "arch: expected sm75 .*for fp4, .*got 'sm70'"),
        ({"format": "af4"}, "format: expected one of int4, .*got 'af4'"),
    ],
    ids=["zero points", "bits", "arch", "format"],
)
def test_linear_rejects(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Linear(128, 40, **arguments)


def test_compiled_layer(generator: torch.Generator) -> None:
    weight = packed(random_codes(128, 72, generator), "code4")
    layer = Linear.from_quantized(weight, torch.rand(2, 72, generator=generator))
    x = torch.randn(3, 128, generator=generator)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))
