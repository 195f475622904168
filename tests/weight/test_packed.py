"""PackedWeight: moving, copying, and the checks of its fields."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.packed_cases import random_q

import weightonly as wo


def test_to_the_same_device_is_the_same_object(generator: torch.Generator) -> None:
    weight = wo.preprocess(random_q(64, 64, 4, generator))
    assert weight.to("cpu") is weight
    assert weight.device == torch.device("cpu")


def test_to_another_device_keeps_the_metadata_and_drops_what_gemm_keeps(generator: torch.Generator) -> None:
    weight = wo.preprocess(random_q(65, 66, 4, generator), layout="row_major")
    wo.gemm(torch.zeros(1, 65), weight, torch.ones(1, 66))
    assert weight._kind is not None
    moved = weight.to("meta")
    assert (moved.k, moved.n, moved.format, moved.layout) == (65, 66, "int4", "row_major")
    assert moved.device.type == "meta"
    assert moved._kind is None


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_drop_what_gemm_keeps(
    clone: Callable[[wo.PackedWeight], wo.PackedWeight], generator: torch.Generator
) -> None:
    weight = wo.preprocess(random_q(65, 66, 8, generator), bits=8, layout="row_major")
    wo.gemm(torch.zeros(1, 65), weight, torch.ones(1, 66), out=torch.empty(1, 66))
    assert weight._checked_out is not None
    other = clone(weight)
    assert (other.k, other.n, other.format, other.layout) == (65, 66, "int8", "row_major")
    assert torch.equal(other.data, weight.data)
    assert other._kind is other._checked_out is None


def test_repr() -> None:
    weight = wo.preprocess(torch.ones(65, 64, dtype=torch.int8), layout="row_major")
    assert repr(weight) == "PackedWeight(int4 [65, 64], layout='row_major', 4096 bytes on cpu)"


BYTES = torch.zeros(2048, dtype=torch.uint8)
GOOD_FIELDS: dict[str, Any] = {"data": BYTES, "k": 64, "n": 64, "format": "int4", "layout": "interleaved"}
BAD_FIELDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"data": BYTES.view(torch.int8)}, TypeError, "data: expected dtype torch.uint8, got torch.int8"),
    "not a tensor": ({"data": b"\0" * 2048}, TypeError, "data: expected a tensor, got bytes"),
    "rank": (
        {"data": BYTES.view(64, 32)},
        ValueError,
        r"data: expected one contiguous dimension, got \[64, 32\]",
    ),
    "strides": ({"data": BYTES.repeat(2)[::2]}, ValueError, "data: expected one contiguous dimension"),
    "bytes": ({"data": BYTES[1:]}, ValueError, "data: expected 2048 bytes for int4.*got 2047"),
    "k": (
        {"k": 65},
        ValueError,
        r"data: expected 4096 bytes for int4 \[65, 64\] padded to \[128, 64\], got 2048",
    ),
    "padding of tiled int8": (
        {"n": 32, "format": "int8", "layout": "tiled"},
        ValueError,
        r"data: expected 4096 bytes for int8 \[64, 32\] padded to \[64, 64\], got 2048",
    ),
    "zero n": ({"n": 0}, ValueError, "n: expected at least 1, got 0"),
    "float k": ({"k": 64.0}, TypeError, "k: expected an int, got float"),
    "format": (
        {"format": "int3"},
        ValueError,
        "format: expected one of int4, int8, nf4, fp4, mxfp4, nvfp4, code4, fp8, got 'int3'",
    ),
    "layout": (
        {"layout": "tiles"},
        ValueError,
        "layout: expected one of row_major, interleaved, tiled, cpu, got 'tiles'",
    ),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_fields_are_checked(case: str) -> None:
    fields, error, message = BAD_FIELDS[case]
    wo.PackedWeight(**GOOD_FIELDS)
    with pytest.raises(error, match=message):
        wo.PackedWeight(**GOOD_FIELDS | fields)


def test_the_bytes_cannot_be_replaced(generator: torch.Generator) -> None:
    """Plans that exist would let kernels read beyond the end of fewer bytes."""
    weight = wo.preprocess(random_q(64, 64, 4, generator))
    x, scales = torch.randn(2, 64), torch.ones(1, 64)
    before, y = weight.data, wo.gemm(x, weight, scales)
    for data in (torch.zeros(1, dtype=torch.uint8), weight.data.clone(), None):
        with pytest.raises(AttributeError, match=r"^data: expected to stay as it is; PackedWeight\(data, "):
            weight.data = data  # type: ignore[assignment]
    assert weight.data is before
    assert torch.equal(wo.gemm(x, weight, scales), y)
