"""preprocess, its inverse, and the choice of the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.packed_cases import LAYOUTS, bits_4_and_8, random_q

import weightonly as wo
from weightonly.packing import layout_for_arch


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def column_multiple(bits: int, layout: str) -> int:
    return 32 if bits == 8 and layout in ("row_major", "interleaved") else 64


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 300),
    n=st.integers(1, 300),
    bits=st.sampled_from([4, 8]),
    layout=st.sampled_from(LAYOUTS),
)
def test_unpack_is_the_inverse_of_preprocess(seed: int, k: int, n: int, bits: int, layout: str) -> None:
    q = random_q(k, n, bits, torch.Generator().manual_seed(seed))
    weight = wo.preprocess(q, bits=bits, layout=layout)
    k_padded, n_padded = padded(k, 64), padded(n, column_multiple(bits, layout))
    assert (weight.k, weight.n, weight.format, weight.layout) == (k, n, f"int{bits}", layout)
    assert (weight.k_padded, weight.n_padded, weight.bits) == (k_padded, n_padded, bits)
    assert weight.data.dtype == torch.uint8
    assert weight.data.shape == (k_padded * n_padded * bits // 8,)
    unpacked = wo.unpack(weight)
    assert unpacked.is_contiguous()
    assert torch.equal(unpacked, q)


@bits_4_and_8
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_zero(bits: int, layout: str, generator: torch.Generator) -> None:
    q = random_q(70, 65, bits, generator)
    full = torch.zeros(128, padded(65, column_multiple(bits, layout)), dtype=torch.int8)
    full[:70, :65] = q
    got = wo.preprocess(q, bits=bits, layout=layout)
    assert torch.equal(got.data, wo.preprocess(full, bits=bits, layout=layout).data)


def test_arch_and_layout_together() -> None:
    q = torch.ones(64, 64, dtype=torch.int8)
    assert wo.preprocess(q, arch="sm70", layout="row_major").layout == "row_major"
    assert wo.preprocess(q, arch="sm90a", layout="tiled").layout == "tiled"
    assert wo.preprocess(q, arch="cpu", layout="cpu").layout == wo.preprocess(q, arch="cpu").layout == "cpu"
    with pytest.raises(ValueError, match="layout: expected 'interleaved' for arch 'sm80', got 'row_major'"):
        wo.preprocess(q, arch="sm80", layout="row_major")
    with pytest.raises(ValueError, match="layout: expected 'tiled' for arch 90, got 'interleaved'"):
        wo.preprocess(q, arch=90, layout="interleaved")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        (None, "cpu"),
        ((7, 0), "row_major"),
        ((8, 9), "interleaved"),
        ((9, 0), "tiled"),
        ((10, 0), "interleaved"),
        ((6, 1), "cpu"),
    ],
    ids=["no_gpu", "sm70", "sm89", "sm90", "sm100", "sm61"],
)
def test_layout_for_a_cpu_tensor_follows_the_visible_gpu(
    capability: tuple[int, int] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert wo.preprocess(torch.ones(64, 64, dtype=torch.int8)).layout == expected


@pytest.mark.gpu
@bits_4_and_8
def test_preprocess_on_the_gpu(bits: int, cuda_device: torch.device, generator: torch.Generator) -> None:
    q = random_q(100, 90, bits, generator)
    weight = wo.preprocess(q.to(cuda_device), bits=bits)
    major, minor = torch.cuda.get_device_capability(cuda_device)
    assert weight.layout == layout_for_arch(10 * major + minor)
    assert weight.device == cuda_device
    assert torch.equal(weight.data.cpu(), wo.preprocess(q, bits=bits, layout=weight.layout).data)
    assert torch.equal(wo.unpack(weight).cpu(), q)
    assert weight.to("cpu").device.type == "cpu"
    assert weight.to(cuda_device) is weight


BAD_PREPROCESS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "rank": (torch.ones(64, dtype=torch.int8), {}, ValueError, r"q: expected 2 dimensions, got shape \[64\]"),
    "dtype": (torch.ones(64, 64), {}, TypeError, "q: expected dtype torch.int8, got torch.float32"),
    "not a tensor": ([[1]], {}, TypeError, "q: expected a tensor, got list"),
    "empty": (torch.ones(0, 64, dtype=torch.int8), {}, ValueError, r"K, N >= 1, got \[0, 64\]"),
    "range": (torch.full((64, 64), 8, dtype=torch.int8), {}, ValueError, r"-8\.\.7 for bits=4, got 8\.\.8"),
    "bits": (torch.ones(64, 64, dtype=torch.int8), {"bits": 2}, ValueError, "bits: expected 4 or 8, got 2"),
    "arch": (torch.ones(64, 64, dtype=torch.int8), {"arch": "sm50"}, ValueError, "arch: .*got 'sm50'"),
    "layout": (torch.ones(64, 64, dtype=torch.int8), {"layout": ""}, ValueError, "layout: .*got ''"),
    "format": (
        torch.ones(64, 64, dtype=torch.int8),
        {"bits": 4, "format": "int8"},
        ValueError,
        "bits: expected 8 for int8, got 4",
    ),
}


@pytest.mark.parametrize("case", BAD_PREPROCESS)
def test_preprocess_rejects(case: str) -> None:
    q, arguments, error, message = BAD_PREPROCESS[case]
    with pytest.raises(error, match=message):
        wo.preprocess(q, **arguments)


def test_repack_of_the_layout_that_a_weight_has_is_the_weight(generator: torch.Generator) -> None:
    weight = wo.preprocess(random_q(64, 64, 4, generator), arch="sm80")
    assert wo.repack(weight, "sm86") is weight


def test_repack_keeps_what_a_weight_is_for(generator: torch.Generator) -> None:
    weight = wo.preprocess(random_q(64, 64, 4, generator), arch="sm80", group_size=32, zeros=True, perm=False)
    assert wo.repack(weight, "sm90").fields == weight.fields | {"layout": "tiled"}


def test_unpack_rejects_a_plain_tensor() -> None:
    with pytest.raises(TypeError, match="qweight: expected a PackedWeight, got Tensor"):
        wo.unpack(torch.zeros(2048, dtype=torch.uint8))  # type: ignore[arg-type]
