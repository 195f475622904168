"""`preprocess`, `unpack` and slices of weights of codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.code_cases import DTYPES, FORMATS, OWN, codebook_of, formats, packed, random_codes

import weightonly as wo


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 300),
    n=st.integers(1, 300),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.int8, torch.uint8]),
    layout=st.sampled_from(["interleaved", "tiled", "cpu"]),
)
def test_unpack_is_the_inverse_of_preprocess(
    seed: int, k: int, n: int, format: str, dtype: torch.dtype, layout: str
) -> None:
    codes = random_codes(k, n, torch.Generator().manual_seed(seed))
    weight = packed(codes.to(dtype), format, layout)
    assert (weight.k, weight.n, weight.format, weight.layout, weight.bits) == (k, n, format, layout, 4)
    assert weight.code == tuple(codebook_of(format).tolist())
    assert weight.data.shape == (-(-k // 64) * -(-n // 64) * 2048,)
    unpacked = wo.unpack(weight)
    assert unpacked.dtype == torch.int8 and unpacked.is_contiguous()
    assert torch.equal(unpacked, codes.to(torch.int8))


@formats
def test_padding_is_code_0(format: str, generator: torch.Generator) -> None:
    """Code 0 is a finite number of every codebook, so that 0 times it is 0: padding adds nothing to a sum."""
    codes = random_codes(70, 65, generator)
    full = torch.zeros(128, 128, dtype=torch.uint8)
    full[:70, :65] = codes
    assert torch.equal(packed(codes, format).data, packed(full, format).data)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 300),
    n=st.integers(1, 300),
    format=st.sampled_from(FORMATS),
    layout=st.sampled_from(["tiled", "cpu"]),
    data=st.data(),
)
def test_a_slice_is_the_weight_packed_alone(
    seed: int, k: int, n: int, format: str, layout: str, data: st.DataObject
) -> None:
    codes = random_codes(k, n, torch.Generator().manual_seed(seed))
    weight = packed(codes, format, layout)
    for size, cut, part in (
        (n, weight.slice_n, lambda b, e: codes[:, b:e]),
        (k, weight.slice_k, lambda b, e: codes[b:e]),
    ):
        begin = data.draw(st.integers(0, (size - 1) // 64)) * 64
        end = data.draw(st.sampled_from([size, *range(begin + 64, size, 64)]))
        got, expected = cut(begin, end), packed(part(begin, end), format, layout)
        assert got.fields == expected.fields and got.code == expected.code
        assert torch.equal(got.data, expected.data)


@pytest.mark.parametrize(
    ("arch", "layout"),
    [("sm90", "tiled"), ("sm_90a", "tiled"), (90, "tiled"), ("sm75", "interleaved"), ((8, 6), "interleaved")],
    ids=str,
)
def test_packed_for_a_gpu(arch: Any, layout: str, generator: torch.Generator) -> None:
    codes = random_codes(64, 64, generator)
    weight = wo.preprocess(codes, arch=arch, format="nf4")
    assert weight.layout == layout
    assert torch.equal(weight.data, packed(codes, "nf4", layout).data)


@pytest.mark.parametrize(
    ("capability", "layout"),
    [((7, 0), "tiled"), ((7, 5), "interleaved"), ((8, 0), "interleaved"), ((9, 0), "tiled"), ((10, 0), "interleaved")],
    ids=str,
)
def test_the_layout_is_that_of_the_visible_gpu(
    capability: tuple[int, int], layout: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Volta's has no codes: it can dequantize those of "tiled"."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert packed(random_codes(64, 64, generator), "fp4").layout == layout


def test_a_word_of_interleaved_codes(generator: torch.Generator) -> None:
    """Byte i of the word of lane t, n 0: the codes of rows 8i + 2t and 8i + 2t + 1, the even one in the low nibble."""
    codes = random_codes(64, 64, generator)
    line = packed(codes, "nf4", "interleaved").data.view(16, 4, 2, 4, 4)  # line, column, chunk of 32 k, t, byte
    for n, chunk, t, i in ((0, 0, 0, 0), (5, 1, 3, 2), (62, 0, 2, 3)):
        k = 32 * chunk + 8 * i + 2 * t
        assert int(line[n // 4, n % 4, chunk, t, i]) == int(codes[k, n]) + 16 * int(codes[k + 1, n])


def test_repacked_for_every_gpu(generator: torch.Generator) -> None:
    """There and back, byte for byte; the CPU multiplies by each."""
    codes = random_codes(130, 77, generator)
    scales, x = torch.rand(13, 77, generator=generator), torch.randn(3, 130, generator=generator)
    weight = packed(codes, "nf4", "cpu")
    for arch in ("sm75", "sm80", "sm89", "sm90", "sm120", "cpu"):
        other = wo.repack(weight, arch)
        assert torch.equal(other.data, wo.preprocess(codes, format="nf4", arch=arch).data)
        assert torch.equal(wo.repack(other, "cpu").data, weight.data)
        assert torch.equal(wo.dequantize(other, scales), wo.dequantize(weight, scales))
        assert torch.equal(wo.gemm(x, other, scales[:1]), wo.gemm(x, weight, scales[:1]))


def test_packed_for_cpus_where_no_gpu_is_visible(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    codes = random_codes(64, 64, generator)
    weight = packed(codes, "nf4")
    assert weight.layout == "cpu"
    for arch in ("sm90", "cpu"):
        other = wo.repack(weight, arch)
        assert torch.equal(other.data, wo.preprocess(codes, format="nf4", arch=arch).data)
        assert torch.equal(wo.repack(other, "cpu").data, weight.data)


CODES = torch.zeros(64, 64, dtype=torch.uint8)
BAD_PREPROCESS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "arch of another layout": (
        CODES,
        {"format": "nf4", "arch": "cpu", "layout": "tiled"},
        ValueError,
        "layout: expected 'cpu' for arch 'cpu', got 'tiled'",
    ),
    "zeros": (CODES, {"format": "nf4", "zeros": True}, ValueError, "^zeros: expected False or None for nf4"),
    "arch": (CODES, {"format": "nf4", "arch": "sm70"}, ValueError, "arch: expected sm75 or .*for nf4, .*got 'sm70'"),
    "unknown arch": (CODES, {"format": "nf4", "arch": "sm50"}, ValueError, "arch: expected one of .*got 'sm50'"),
    "layout": (CODES, {"format": "fp4", "layout": "row_major"}, ValueError, "layout: expected 'interleaved' .*got 'r"),
    "unknown layout": (CODES, {"format": "fp4", "layout": "t"}, ValueError, "layout: expected one of .*got 't'"),
    "bits": (CODES, {"format": "nf4", "bits": 8}, ValueError, "bits: expected 4 for nf4, got 8"),
    "bits of int8": (
        CODES.to(torch.int8),
        {"format": "int8", "bits": 4},
        ValueError,
        "bits: expected 8 for int8, got 4",
    ),
    "format": (CODES.to(torch.int8), {"format": "nf5"}, ValueError, "format: expected one of int4, .*got 'nf5'"),
    "large": (CODES + 16, {"format": "nf4"}, ValueError, r"q: expected codes in 0\.\.15, got 16\.\.16"),
    "larger": (CODES + 200, {"format": "nf4"}, ValueError, r"q: expected codes in 0\.\.15, got -56"),
    "negative": (CODES.to(torch.int8) - 1, {"format": "nf4"}, ValueError, r"q: expected codes in 0\.\.15, got -1"),
    "dtype": (CODES.int(), {"format": "nf4"}, TypeError, "q: expected dtype torch.int8, got torch.int32"),
    "not a tensor": ([[1]], {"format": "nf4"}, TypeError, "q: expected a tensor, got list"),
    "uint8 of integers": (CODES, {}, TypeError, "q: expected dtype torch.int8, got torch.uint8"),
    "empty": (CODES[:0], {"format": "nf4"}, ValueError, r"q: expected shape .*got \[0, 64\]"),
    "no codebook": (CODES, {"format": "code4"}, ValueError, "code: expected the codebook of a code4 weight, got None"),
    "codebook of nf4": (CODES, {"format": "nf4", "code": OWN}, ValueError, "code: expected None for nf4, got"),
    "codebook of int4": (CODES.to(torch.int8), {"code": OWN}, ValueError, "code: expected None for int4, got"),
}


@pytest.mark.parametrize("case", BAD_PREPROCESS)
def test_preprocess_rejects(case: str) -> None:
    q, arguments, error, message = BAD_PREPROCESS[case]
    with pytest.raises(error, match=message):
        wo.preprocess(q, **arguments)


@pytest.mark.gpu
@formats
def test_packed_and_dequantized_on_the_gpu(format: str, cuda_device: torch.device, generator: torch.Generator) -> None:
    codes = random_codes(200, 130, generator)
    weight = packed(codes, format, "tiled")
    there = packed(codes.to(cuda_device), format)
    assert there.device == cuda_device and there.fields == weight.fields
    assert torch.equal(there.data.cpu(), weight.data)
    assert torch.equal(weight.to(cuda_device).data, there.data)
    assert torch.equal(wo.unpack(there).cpu(), codes.to(torch.int8))
    scales = torch.rand(4, 130, generator=generator)
    for dtype in DTYPES:
        expected = wo.dequantize(weight, scales.to(dtype))
        assert torch.equal(wo.dequantize(there, scales.to(cuda_device, dtype)).cpu(), expected)
