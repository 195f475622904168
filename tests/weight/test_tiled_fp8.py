"""Layout "tiled_fp8" in all that a packed weight does: packing, files, slices, numbers; and what it refuses."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.packed_cases import random_q

import weightonly as wo

LAYOUT = "tiled_fp8"


@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (100, 77), (300, 130)], ids=str)
def test_packing_and_back(shape: tuple[int, int], tmp_path: Path, generator: torch.Generator) -> None:
    q = random_q(*shape, 4, generator)
    weight = wo.preprocess(q, layout=LAYOUT)
    assert torch.equal(wo.unpack(weight), q)
    weight.save(tmp_path / "w.safetensors")
    copies = wo.PackedWeight.load(tmp_path / "w.safetensors"), pickle.loads(pickle.dumps(weight))
    for copy in copies:
        assert copy.layout == LAYOUT and torch.equal(copy.data, weight.data)


@pytest.mark.parametrize("other", ["row_major", "interleaved", "tiled", "cpu"])
def test_repack(other: str, generator: torch.Generator) -> None:
    q = random_q(100, 77, 4, generator)
    there = wo.repack(wo.preprocess(q, layout=other, group_size=50, zeros=False), layout=LAYOUT)
    assert (there.layout, there.group_size, there.has_zeros) == (LAYOUT, 50, False)
    assert torch.equal(there.data, wo.preprocess(q, layout=LAYOUT).data)
    back = wo.repack(there, layout=other)
    assert torch.equal(back.data, wo.preprocess(q, layout=other).data)
    assert wo.repack(there, layout=LAYOUT) is there
    assert wo.repack(there, arch=90).layout == "tiled"


def test_slices_and_experts(generator: torch.Generator) -> None:
    q = random_q(192, 200, 4, generator)
    weight = wo.preprocess(q, layout=LAYOUT)
    assert torch.equal(weight.slice_n(64, 200).data, wo.preprocess(q[:, 64:], layout=LAYOUT).data)
    assert torch.equal(weight.slice_k(64, 192).data, wo.preprocess(q[64:], layout=LAYOUT).data)
    stack = wo.preprocess(torch.stack((q, q.flip(0))), layout=LAYOUT)
    assert torch.equal(stack[1].data, wo.preprocess(q.flip(0), layout=LAYOUT).data)


def test_dequantize(generator: torch.Generator) -> None:
    q = random_q(192, 65, 4, generator)
    scales = torch.rand(3, 65, generator=generator).half()
    expected = (q.float().view(3, 64, 65) * scales.float()[:, None]).view(192, 65).half()
    packed = wo.preprocess(q, layout=LAYOUT)
    assert torch.equal(wo.dequantize(packed, scales), expected)
    assert torch.equal(wo.QuantizedWeight(packed, scales).dequantize(), expected)


Q = torch.ones(64, 64, dtype=torch.int8)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "int8": (lambda: wo.preprocess(Q, bits=8, layout=LAYOUT), "layout: expected one of .* for 8 bits, got 'tiled_fp8'"),
    "codes": (
        lambda: wo.preprocess(Q, format="nf4", layout=LAYOUT),
        "layout: expected .* for codes of a codebook, got 'tiled_fp8'",
    ),
    "zeros": (
        lambda: wo.preprocess(Q, layout=LAYOUT, zeros=True),
        "zeros: expected False or None in layout 'tiled_fp8', got True",
    ),
    "fields": (
        lambda: wo.PackedWeight(torch.zeros(2048, dtype=torch.uint8), 64, 64, "int4", LAYOUT, has_zeros=True),
        "has_zeros: expected False or None in layout 'tiled_fp8', got True",
    ),
    "repack zeros": (
        lambda: wo.repack(wo.preprocess(Q, layout="tiled", zeros=True), layout=LAYOUT),
        "qweight: expected one without zeros for layout 'tiled_fp8'",
    ),
    "repack int8": (
        lambda: wo.repack(wo.preprocess(Q, bits=8, layout="tiled"), layout=LAYOUT),
        "layout: expected one of .* for 8 bits, got 'tiled_fp8'",
    ),
    "an operand": (
        lambda: wo.QuantizedWeight(wo.preprocess(Q, layout=LAYOUT), torch.ones(1, 64), torch.ones(1, 64)),
        "zeros: expected None in layout 'tiled_fp8', got Tensor",
    ),
    "arch": (lambda: wo.preprocess(Q, arch=80, layout=LAYOUT), "layout: expected 'interleaved' for arch 80"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
