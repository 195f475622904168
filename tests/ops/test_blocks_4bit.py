"""`quantize_4bit` and `dequantize_4bit` on the CPU: bit for bit those of bitsandbytes on the CPU."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weightonly as wo
from weightonly.codebooks import CODEBOOKS, codebook

functional = pytest.importorskip("bitsandbytes.functional")

BLOCKS = sys.modules["weightonly.ops.blocks_4bit"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BLOCKSIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
QUANT_TYPES = ["nf4", "fp4"]


@pytest.fixture(autouse=True)
def no_compiler() -> Iterator[None]:
    """bitsandbytes compiles its generic path with torch.compile, which needs a compiler and seconds for each shape."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # since PyTorch 2.6
    with set_stance("force_eager") if set_stance else contextlib.nullcontext():
        yield


def midpoints(book: tuple[float, ...]) -> torch.Tensor:
    """The midpoints between neighbours of a codebook, fp32 [15]."""
    numbers = torch.tensor(sorted(book))
    return (numbers[:-1] + numbers[1:]) / 2


def check_against_the_package(w: torch.Tensor, blocksize: int, quant_type: str) -> None:
    packed, absmax = wo.quantize_4bit(w, blocksize, quant_type)
    data, state = functional.quantize_4bit(w, blocksize=blocksize, quant_type=quant_type)
    assert packed.dtype == torch.uint8 and absmax.dtype == torch.float32
    assert torch.equal(packed, data)
    assert torch.equal(absmax.view(torch.int32), state.absmax.view(torch.int32))
    codes = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], 1).view(-1)[: w.numel()].int()
    products = codebook(quant_type)[codes] * absmax.repeat_interleave(blocksize)[: w.numel()]  # fp32
    for dtype in DTYPES:
        # Flat, because bitsandbytes' AVX-512 code starts a new block with each row.
        flat = functional.QuantState(
            absmax=state.absmax,
            shape=torch.Size([w.numel()]),
            code=state.code,
            blocksize=blocksize,
            quant_type=quant_type,
            dtype=dtype,
        )
        restored = wo.dequantize_4bit(packed, absmax, blocksize, quant_type, w.shape, dtype)
        assert restored.shape == w.shape and restored.dtype == dtype
        # On a CPU bitsandbytes may flush products that are subnormal in fp32 to zero: compare with the product then.
        is_subnormal = products.abs() < torch.finfo(torch.float32).tiny
        expected = torch.where(is_subnormal, products.to(dtype), functional.dequantize_4bit(data, flat).view(-1))
        assert torch.equal(restored.view(-1), expected)


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    """Flat weights: Gaussian ones, of all magnitudes, midpoints between numbers of a codebook; zeros among them."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(DTYPES))
    blocks = draw(st.integers(0, 3))
    count = max(1, blocks * draw(st.sampled_from(BLOCKSIZES)) + draw(st.integers(-40, 140)))
    if draw(st.booleans()):
        exponent = draw(st.integers(-149, 120)) if dtype != torch.float16 else draw(st.integers(-24, 12))
        w = torch.randn(count, generator=g) * 2.0**exponent
    else:
        ties = midpoints(CODEBOOKS[draw(st.sampled_from(QUANT_TYPES))])
        near = torch.cat([ties, ties.nextafter(torch.tensor(2.0)), ties.nextafter(torch.tensor(-2.0)), torch.ones(3)])
        # A power of two: dividing by it, and multiplying by its reciprocal, is exact.
        w = near[torch.randint(len(near), (count,), generator=g)] * 2.0 ** draw(st.integers(-8, 8))
    zeroed = torch.rand(count, generator=g) < draw(st.sampled_from([0.0, 0.3, 0.99, 1.0]))
    w[zeroed] = draw(st.sampled_from([0.0, -0.0]))
    return w.to(dtype)


@settings(max_examples=200, deadline=None)
@given(w=weights(), blocksize=st.sampled_from(BLOCKSIZES), quant_type=st.sampled_from(QUANT_TYPES))
def test_bytes_are_those_of_the_package(w: torch.Tensor, blocksize: int, quant_type: str) -> None:
    check_against_the_package(w, blocksize, quant_type)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_ties_go_to_the_lower_number(quant_type: str) -> None:
    ties = midpoints(CODEBOOKS[quant_type])
    assert ties.unique().numel() == 15
    numbers = torch.tensor(CODEBOOKS[quant_type])
    lower, higher = (numbers.sort().values[places] for places in (slice(0, 15), slice(1, 16)))
    for x, expected in ((ties, lower), (ties.nextafter(torch.tensor(2.0)), higher)):
        w = torch.cat([x, torch.ones(17)])  # absmax 1
        check_against_the_package(w, 32, quant_type)
        restored = wo.dequantize_4bit(*wo.quantize_4bit(w, 32, quant_type), 32, quant_type, (32,), torch.float32)
        assert torch.equal(restored[:15], expected)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_numbers_whose_quotient_is_rounded_to_the_other_side_of_a_tie(
    quant_type: str, generator: torch.Generator
) -> None:
    """x * (1 / absmax) and x / absmax are neighbours there, with the midpoint at one of them."""
    ties, absmax = midpoints(CODEBOOKS[quant_type]), torch.rand(1000, 1, generator=generator) + 1
    w = torch.cat([ties * absmax, (ties * absmax).nextafter(torch.tensor(2.0)), absmax, -absmax], 1)  # (1000, 32)
    assert (torch.bucketize(w / absmax, ties) != torch.bucketize(w * (1 / absmax), ties)).sum() > 100
    check_against_the_package(w.view(-1), 32, quant_type)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_zeros_give_zeros_back(dtype: torch.dtype, quant_type: str) -> None:
    w = torch.zeros(5, 77, dtype=dtype)
    w[2, 11] = 1
    check_against_the_package(w, 64, quant_type)
    packed, absmax = wo.quantize_4bit(w, 64, quant_type)
    assert torch.equal(wo.dequantize_4bit(packed, absmax, 64, quant_type, w.shape, dtype), w)


def test_several_chunks(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BLOCKS, "_CHUNK_ELEMS", 4096)
    for count in (4096, 8192, 3 * 4096 + 33, 2 * 4096 + 4095):
        for blocksize in (32, 4096):
            check_against_the_package(torch.randn(count, generator=generator), blocksize, "nf4")


def test_any_shape_and_strides(generator: torch.Generator) -> None:
    w = torch.randn(6, 5, 40, generator=generator).half()
    for view in (w, w.transpose(0, 2), w[::2, :, 3:], w[0, 0, 0]):
        packed, absmax = wo.quantize_4bit(view)
        flat = wo.quantize_4bit(view.contiguous().view(-1))
        assert torch.equal(packed, flat[0]) and torch.equal(absmax, flat[1])
        restored = wo.dequantize_4bit(packed, absmax, 64, "nf4", view.shape, torch.float16)
        assert restored.shape == view.shape and restored.is_contiguous()
    # bytes in another shape, and every other byte and absmax of larger tensors
    packed, absmax = wo.quantize_4bit(w)
    apart = torch.stack([packed.view(-1), packed.view(-1)], dim=1)[:, 0]
    restored = wo.dequantize_4bit(packed, absmax, 64, "nf4", w.shape, torch.float16)
    for bytes_ in (packed.view(-1), packed.view(4, -1), apart):
        assert torch.equal(wo.dequantize_4bit(bytes_, absmax, 64, "nf4", w.shape, torch.float16), restored)
    apart = torch.stack([absmax, absmax], dim=1)[:, 0]
    assert torch.equal(wo.dequantize_4bit(packed, apart, 64, "nf4", w.shape, torch.float16), restored)


@pytest.mark.parametrize("shape", [(0,), (3, 0)], ids=str)
def test_no_elements(shape: tuple[int, ...]) -> None:
    packed, absmax = wo.quantize_4bit(torch.empty(shape))
    assert packed.shape == (0, 1) and absmax.shape == (0,)
    assert wo.dequantize_4bit(packed, absmax, 64, "nf4", shape, torch.float16).shape == shape


def test_a_second_time_changes_nothing(generator: torch.Generator) -> None:
    w = torch.randn(1000, generator=generator)
    for quant_type in QUANT_TYPES:
        restored = wo.dequantize_4bit(*wo.quantize_4bit(w, 64, quant_type), 64, quant_type, w.shape, torch.float32)
        packed, absmax = wo.quantize_4bit(restored, 64, quant_type)
        assert torch.equal(wo.dequantize_4bit(packed, absmax, 64, quant_type, w.shape, torch.float32), restored)


# --- other codebooks ---------------------------------------------------------------------------------------

RANDOM_CODEBOOKS = st.lists(st.floats(-1, 1, width=32), min_size=16, max_size=16)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**31), book=RANDOM_CODEBOOKS, dtype=st.sampled_from(DTYPES))
def test_nearest_number_of_any_codebook(seed: int, book: list[float], dtype: torch.dtype) -> None:
    w = torch.randn(300, generator=torch.Generator().manual_seed(seed)).to(dtype)
    packed, absmax = wo.quantize_4bit(w, 32, code=book)
    numbers = np.array(book, dtype=np.float32)
    restored = wo.dequantize_4bit(packed, absmax, 32, "nf4", w.shape, torch.float32, code=torch.tensor(book))
    scale = absmax.repeat_interleave(32)[:300]
    codes = torch.stack([packed[:, 0] >> 4, packed[:, 0] & 15], dim=1).view(-1)
    assert torch.equal(restored, torch.from_numpy(numbers)[codes.int()] * scale)
    x = (w.double() / scale.double()).numpy()
    distance = np.abs(x - numbers[codes.numpy()])
    assert (distance <= np.abs(x[:, None] - numbers).min(axis=1) + 1e-6).all()


def test_the_codebooks_of_the_library_as_code(generator: torch.Generator) -> None:
    w = torch.randn(333, generator=generator)
    for quant_type in QUANT_TYPES:
        expected = wo.quantize_4bit(w, 64, quant_type)
        for code in (CODEBOOKS[quant_type], list(CODEBOOKS[quant_type]), torch.tensor(CODEBOOKS[quant_type])):
            packed, absmax = wo.quantize_4bit(w, 64, code=code)
            assert torch.equal(packed, expected[0]) and torch.equal(absmax, expected[1])


def test_codes_follow_the_order_of_the_codebook(generator: torch.Generator) -> None:
    """A reversed codebook gives the codes 15 - c, except for ties."""
    w = torch.randn(64, generator=generator)
    book = CODEBOOKS["nf4"]
    forwards, _ = wo.quantize_4bit(w, 64, code=book)
    backwards, _ = wo.quantize_4bit(w, 64, code=book[::-1])
    assert torch.equal(backwards, 255 - forwards)


# --- errors ------------------------------------------------------------------------------------------------

W = torch.ones(100)
PACKED, ABSMAX = torch.zeros(50, 1, dtype=torch.uint8), torch.ones(2)

BAD_QUANTIZE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "array": ({"w": W.numpy()}, TypeError, "w: expected a tensor, got ndarray"),
    "kind": ({"w": W.double()}, TypeError, "w: expected dtype torch.float16 or torch.bfloat16 or torch.float32, got"),
    "sparse": ({"w": W.to_sparse()}, TypeError, "w: expected a dense tensor, got one with layout torch.sparse_coo"),
    "device": ({"w": W.to("meta")}, ValueError, "w: expected a CPU or CUDA tensor, got one on meta"),
    "nan": ({"w": torch.tensor([1.0, float("nan")])}, ValueError, "w: expected finite values, got NaN or Inf"),
    "inf": ({"w": torch.tensor([1.0, -float("inf")])}, ValueError, "w: expected finite values, got NaN or Inf"),
    "blocksize 48": ({"blocksize": 48}, ValueError,
                     "blocksize: expected one of 32, 64, 128, 256, 512, 1024, 2048, 4096, got 48"),
    "blocksize 16": ({"blocksize": 16}, ValueError, "blocksize: expected one of 32, 64"),
    "blocksize 8192": ({"blocksize": 8192}, ValueError, "blocksize: expected one of 32, 64"),
    "blocksize float": ({"blocksize": 64.0}, TypeError, "blocksize: expected an int, got float"),
    "quant_type": ({"quant_type": "int4"}, ValueError, "quant_type: expected one of 'nf4', 'fp4', got 'int4'"),
    "short code": ({"code": torch.zeros(15)}, ValueError, "code: expected 16 numbers, got shape [15]"),
    "code of ints": ({"code": torch.zeros(16, dtype=torch.int32)}, TypeError, "code: expected floats, got torch.int32"),
    "code with nan": ({"code": [float("nan")] * 16}, ValueError, "code: expected finite values"),
}  # fmt: skip

BAD_DEQUANTIZE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kind of bytes": ({"packed": PACKED.char()}, TypeError, "packed: expected dtype torch.uint8, got torch.int8"),
    "bytes": ({"packed": PACKED[1:]}, ValueError, "packed: expected 50 bytes for shape [4, 25], got 49"),
    "more bytes": ({"packed": torch.zeros(51, 1, dtype=torch.uint8)}, ValueError,
                   "packed: expected 50 bytes for shape [4, 25], got 51"),
    "kind of absmax": ({"absmax": ABSMAX.half()}, TypeError, "absmax: expected dtype torch.float32, got torch.float16"),
    "absmax": ({"absmax": torch.ones(3)}, ValueError,
               "absmax: expected shape [2] for 100 elements in blocks of 64, got [3]"),
    "rank of absmax": ({"absmax": ABSMAX[:, None]}, ValueError, "absmax: expected shape [2] for 100 elements"),
    "device": ({"absmax": ABSMAX.to("meta")}, ValueError, "absmax: expected on cpu as packed is, got meta"),
    "other device": ({"packed": PACKED.to("meta")}, ValueError,
                     "packed: expected a CPU or CUDA tensor, got one on meta"),
    "blocksize": ({"blocksize": 100}, ValueError, "blocksize: expected one of 32, 64"),
    "quant_type": ({"quant_type": None}, ValueError, "quant_type: expected one of 'nf4', 'fp4', got None"),
    "dtype": ({"dtype": torch.float64}, TypeError,
              "dtype: expected one of torch.float16, torch.bfloat16, torch.float32, got torch.float64"),
    "shape": ({"shape": 100}, TypeError, "shape: expected a sequence of ints, got 100"),
    "shape of floats": ({"shape": (4.0, 25)}, TypeError, "shape: expected a sequence of ints, got (4.0, 25)"),
    "negative shape": ({"shape": (-4, -25)}, ValueError, "shape: expected sizes from 0 on, got [-4, -25]"),
    "code": ({"code": "nf4"}, TypeError, "code: expected 16 numbers, got str"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_QUANTIZE)
def test_quantize_refuses(case: str) -> None:
    change, error, message = BAD_QUANTIZE[case]
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        wo.quantize_4bit(**{"w": W, **change})


@pytest.mark.parametrize("case", BAD_DEQUANTIZE)
def test_dequantize_refuses(case: str) -> None:
    change, error, message = BAD_DEQUANTIZE[case]
    good: dict[str, Any] = {
        "packed": PACKED,
        "absmax": ABSMAX,
        "blocksize": 64,
        "quant_type": "nf4",
        "shape": (4, 25),
        "dtype": torch.float16,
    }
    assert wo.dequantize_4bit(**good).shape == (4, 25)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        wo.dequantize_4bit(**good | change)
