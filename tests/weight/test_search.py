"""quantize with its search: how accurate it is, that no group is worse than without, and the same bits anywhere."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import weightonly as wo
from weightonly import dense, quantize_codes
from weightonly.codebooks import CODEBOOKS
from weightonly.least_squares import Nearest, fold
from weightonly.quantize import quantize_for

dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
kinds = pytest.mark.parametrize("bits", [4, 8])
symmetries = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
exponents = pytest.mark.parametrize("exponent", [-130, -20, -8, 0, 15], ids=lambda e: f"2^{e}")
codes = pytest.mark.parametrize(
    ("format", "group"), [("nf4", 64), ("nf4", 256), ("fp4", 32), ("mxfp4", 32), ("nvfp4", 16)]
)

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def squares(w: torch.Tensor, quantized: Quantized, book: Sequence[float] | None = None) -> torch.Tensor:
    """The sum of squares of what quantizing changes, fp64 [K / g, N]. book: what codes stand for."""
    q, scales, zeros = quantized
    group = q.shape[0] // scales.shape[0]
    levels = q.double() if book is None else torch.tensor(book, dtype=torch.float32).double()[q.long()]
    levels = levels.unflatten(0, (-1, group))
    levels = levels if zeros is None else levels - zeros.double().unsqueeze(1)
    return (levels * scales.double().unsqueeze(1) - w.double().unflatten(0, (-1, group))).square().sum(1)


@pytest.mark.parametrize(
    ("symmetric", "group", "percent"), [(True, 128, 9.7), (False, 128, 9.1), (False, 64, 8.2), (False, 32, 7.1)]
)
def test_error_of_gaussian_weights(symmetric: bool, group: int, percent: float) -> None:
    w = torch.randn(2048, 512, generator=torch.Generator().manual_seed(0))
    error = squares(w, wo.quantize(w, 4, group, symmetric)).sum().sqrt() / w.double().norm()
    assert float(error) <= percent / 100


@pytest.mark.parametrize(
    ("format", "group", "percent"), [("nf4", 64, 8.4), ("fp4", 64, 11.4), ("mxfp4", 32, 11.3), ("nvfp4", 16, 8.3)]
)
def test_error_of_codes_of_gaussian_weights(format: str, group: int, percent: float) -> None:
    w = torch.randn(2048, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    error = squares(w, wo.quantize(w, format=format, group_size=group), CODEBOOKS[format])
    assert float(error.sum().sqrt() / w.double().norm()) <= percent / 100


def many_kinds(dtype: torch.dtype, exponent: int, generator: torch.Generator) -> torch.Tensor:
    """[256, 40] of the size of 2^exponent."""
    w = torch.randn(256, 40, generator=generator)
    w[:, :8] *= torch.rand(256, 8, generator=generator) ** 8 * 10  # outliers
    w[:, 8:12] += 3
    w[:, 12:16] -= 3
    w[::3, 16:20] = 0
    w[:, 20:24] = w[:, 20:24].round()
    w[:, 24] = 0
    w[:, 25] = -0.0
    limit = torch.finfo(dtype).max
    return (w.double() * 2.0**exponent).clamp(-limit, limit).to(dtype)


@dtypes
@codes
@exponents
def test_no_group_of_codes_is_worse(
    dtype: torch.dtype, format: str, group: int, exponent: int, generator: torch.Generator
) -> None:
    w = many_kinds(dtype, exponent, generator)
    found, by_range = (wo.quantize(w, format=format, group_size=group, search=search) for search in (True, False))
    assert found[1].isfinite().all()
    assert (squares(w, found, CODEBOOKS[format]) <= squares(w, by_range, CODEBOOKS[format]) * (1 + 1e-9)).all()
    assert (wo.dequantize(wo.preprocess(found[0], format=format), found[1])[w == 0] == 0).all() or format == "fp4"


@codes
def test_codes_are_the_nearest_of_their_scales(format: str, group: int, generator: torch.Generator) -> None:
    w = many_kinds(torch.bfloat16, 0, generator)
    q, scales, _ = wo.quantize(w, format=format, group_size=group)
    numbers = scales.double().repeat_interleave(group, 0).unsqueeze(-1) * torch.tensor(CODEBOOKS[format]).double()
    distance = (numbers - w.double().unsqueeze(-1)).abs()  # [K, N, 16]
    torch.testing.assert_close(distance.gather(-1, q.long().unsqueeze(-1)), distance.amin(-1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@codes
@pytest.mark.parametrize("peak", [None, 5.26, 5.35, 5.5])  # the last three are rounded to 5.25
def test_what_codes_represent_is_given_back(
    dtype: torch.dtype, format: str, group: int, peak: float | None, generator: torch.Generator
) -> None:
    def rounded(w: torch.Tensor) -> torch.Tensor:
        q, scales, _ = wo.quantize(w, format=format, group_size=group)
        return wo.dequantize(wo.preprocess(q, format=format), scales)

    w = torch.randn(512, 64, generator=generator) / 32
    if peak is not None:
        w[7, 9] = peak / 32
    once = rounded(w.to(dtype))
    assert torch.equal(rounded(once), once)


@pytest.mark.parametrize("book", [[i / 8 - 1 for i in range(16)], [0.5] * 3 + [1e-6 * i for i in range(13)]])
def test_codebooks_of_the_caller(book: list[float], generator: torch.Generator) -> None:
    w = many_kinds(torch.float32, 0, generator)
    pair = [quantize_for(w, w.dtype, "code4", 64, True, search, code=book) for search in (True, False)]
    found, by_range = (squares(w, quantized, book) for quantized in pair)
    assert (found <= by_range * (1 + 1e-6)).all() and found.sum() < 0.9 * by_range.sum()


@settings(max_examples=60, deadline=None)
@example(numbers=[0.0, 2.0**-126], spread=1.0, seed=0)
@given(
    numbers=st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=16, unique=True),
    spread=st.sampled_from([1.0, 1e-3, 1e-30]),
    seed=st.integers(0, 2**31),
)
def test_nearest_is_bucketize(numbers: list[float], spread: float, seed: int) -> None:
    ordered = (torch.tensor(numbers) * spread).sort().values
    bounds = (ordered[:-1] + ordered[1:]) / 2
    if not bounds.abs().max() > 0:
        return
    x = torch.randn(400, generator=torch.Generator().manual_seed(seed)) * spread
    x = torch.cat([x, bounds, torch.nextafter(bounds, torch.tensor(9.0)), ordered, torch.tensor([9e30, -9e30, 0.0])])
    nearest = Nearest(ordered, bounds, x.device)
    expected = torch.bucketize(x, bounds)
    assert torch.equal(nearest.index(x).long(), expected)
    assert torch.equal(nearest(x, torch.empty_like(x)), ordered[expected])


@dtypes
@kinds
@symmetries
@pytest.mark.parametrize("group", [1, 16, 128, -1])
@exponents
def test_no_group_is_worse_than_by_the_largest_value(
    dtype: torch.dtype, bits: int, symmetric: bool, group: int, exponent: int, generator: torch.Generator
) -> None:
    w = many_kinds(dtype, exponent, generator)
    found, by_range = wo.quantize(w, bits, group, symmetric), wo.quantize(w, bits, group, symmetric, search=False)
    assert found[1].isfinite().all()
    assert (found[1] != 0).all()
    assert (squares(w, found) <= squares(w, by_range) * (1 + 1e-9)).all()
    exact = (w == 0) & (wo.dequantize(wo.preprocess(by_range[0], bits), *by_range[1:]) == 0)
    assert (wo.dequantize(wo.preprocess(found[0], bits), *found[1:])[exact] == 0).all()


@symmetries
def test_search_is_worth_it_in_each_dtype(symmetric: bool, generator: torch.Generator) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        w = torch.randn(512, 64, generator=generator).to(dtype)
        error = squares(w, wo.quantize(w, 4, 128, symmetric)).sum()
        assert error < 0.85 * squares(w, wo.quantize(w, 4, 128, symmetric, search=False)).sum()


@kinds
@symmetries
@pytest.mark.parametrize("group", [1, 24, 37, 128, -1])
def test_blocks_do_not_change_a_bit(
    bits: int, symmetric: bool, group: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.randn(24 * 37 if group in (24, 37) else 512, 37, generator=generator)
    whole = wo.quantize(w, bits, group, symmetric)
    for elems in (1, 5000):
        monkeypatch.setitem(dense._BLOCK_ELEMS, "cpu", elems)
        for a, b in zip(whole, wo.quantize(w, bits, group, symmetric), strict=True):
            assert a is b or (a is not None and b is not None and torch.equal(a, b))


@codes
def test_blocks_do_not_change_a_bit_of_codes(
    format: str, group: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.randn(512, 37, generator=generator)
    q, scales, _ = wo.quantize(w, format=format, group_size=group)
    for elems in (1, 5000):
        monkeypatch.setitem(dense._BLOCK_ELEMS, "cpu", elems)
        again = wo.quantize(w, format=format, group_size=group)
        assert torch.equal(again[0], q) and torch.equal(again[1], scales)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_a_sum_is_the_same_beside_other_columns(rows: int, seed: int) -> None:
    w = torch.randn(rows, 3, 7, generator=torch.Generator().manual_seed(seed))
    found = fold(w.clone())
    torch.testing.assert_close(found, w.sum(0), rtol=0, atol=1e-4)
    for column in range(7):
        assert torch.equal(fold(w[:, :1, column : column + 1].clone()), found[:1, column : column + 1])


def test_threads_do_not_change_a_bit(generator: torch.Generator) -> None:
    threads = torch.get_num_threads()
    try:
        for k, n, group in ((512, 700, 128), (4096, 1, -1), (65536, 1, -1), (256, 3, 32)):
            w = torch.randn(k, n, generator=generator)
            for symmetric in (True, False):
                kept = []
                for count in (1, 2, 3):
                    torch.set_num_threads(count)
                    kept.append(wo.quantize(w, 4, group, symmetric))
                for other in kept[1:]:
                    for a, b in zip(kept[0], other, strict=True):
                        assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(
    ("format", "group", "symmetric"),
    [
        *((format, 128, symmetric) for format in ("int4", "int8") for symmetric in (True, False)),
        ("int4", -1, False),
        ("nf4", 64, True),
        ("fp4", 32, True),
        ("mxfp4", 32, True),
        ("nvfp4", 16, True),
    ],
)
def test_a_gpu_gives_the_bits_of_a_cpu(
    dtype: torch.dtype, format: str, group: int, symmetric: bool, generator: torch.Generator
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    w = torch.cat([many_kinds(dtype, exponent, generator) for exponent in (-8, 0, 3)], 1)
    for search in (True, "whole", False):
        want = wo.quantize(w, None, group, symmetric, search, format=format)
        got = wo.quantize(w.cuda(), None, group, symmetric, search, format=format)
        for a, b in zip(want, got, strict=True):
            assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b.cpu()))


GOLDEN = {
    (4, True): "79448b9aa5a5c21c6ea1a1a26aa2f96504f743a549ed640a685e728017600a8a",
    (4, False): "9ade9973d0f86560b4345924217be5b42cd25f2e042be49d237c593b14ad9719",
    (8, True): "1853a1aa98989c97b959f980892cc499c589418946e6c9e306947589ad5b1ebb",
    (8, False): "e9f8fce44d8a992717aa794908f65ddac84dd06ca46cb2036a8744a450f3674e",
}

GOLDEN_CODES = {
    "mxfp4": "61de7a9359d2893f8941bd740d759795914f48c92b83cf8762b21647da056b33",
    "nvfp4": "ffc6e9ee1f2c5297fa6c7c420897d0a64002236792a3fc7d15a531563c9fad02",
}


@kinds
@symmetries
def test_without_search_the_bytes_are_those_of_before(bits: int, symmetric: bool) -> None:
    w = torch.randn(256, 48, generator=torch.Generator().manual_seed(3)).half()
    parts = wo.quantize(w, bits, 64, symmetric, search=False)
    found = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts if part is not None)).hexdigest()
    assert found == GOLDEN[bits, symmetric]


@codes
def test_the_default_dtype_and_device_change_nothing_of_codes(
    format: str, group: int, generator: torch.Generator
) -> None:
    """Loaders of models set them."""
    w = torch.randn(256, 24, generator=generator).half()
    want = wo.quantize(w, format=format, group_size=group)
    quantize_codes._to_codes.cache_clear()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            got = wo.quantize(w, format=format, group_size=group)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@codes
def test_without_search_the_bytes_of_codes_are_those_of_before(format: str, group: int) -> None:
    w = torch.randn(256, 48, generator=torch.Generator().manual_seed(3)).half()
    q, scales, _ = wo.quantize(w, format=format, group_size=group, search=False)
    if format in ("nf4", "fp4"):
        packed, absmax = wo.quantize_4bit(w.t(), group, format)
        by_bytes = torch.stack([packed >> 4, packed & 15], -1).view(48, 256).t()
        assert torch.equal(q, by_bytes.char()) and torch.equal(scales.float(), absmax.view(48, -1).t())
    else:
        found = hashlib.sha256(q.numpy().tobytes() + scales.numpy().tobytes()).hexdigest()
        assert found == GOLDEN_CODES[format]


def test_zero_points_of_8_bits_are_not_searched(generator: torch.Generator) -> None:
    w = torch.randn(256, 24, generator=generator)
    for a, b in zip(wo.quantize(w, 8, 32, False), wo.quantize(w, 8, 32, False, search=False), strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@dtypes
def test_whole_zero_points(dtype: torch.dtype, generator: torch.Generator) -> None:
    w = torch.randn(512, 64, generator=generator).to(dtype)
    _, _, zeros = wo.quantize(w, 4, 64, False, search="whole")
    assert zeros is not None and torch.equal(zeros, zeros.round()) and zeros.abs().max() <= 8
    whole, best, by_range = (
        squares(w, wo.quantize(w, 4, 64, False, search=search)) for search in ("whole", True, False)
    )
    assert (whole <= by_range).all() and best.sum() < 0.95 * whole.sum() and whole.sum() < 0.97 * by_range.sum()


@pytest.mark.parametrize(("search", "error"), [("no", ValueError), (1.5, TypeError), (None, TypeError)])
def test_search_is_one_of_three(search: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match='search: expected True, False or "whole", got'):
        wo.quantize(torch.ones(128, 2), search=search)
    with pytest.raises(error, match='search: expected True, False or "whole", got'):
        wo.nn.quantize_model(torch.nn.Linear(128, 64), search=search)


def test_layers_search_by_default() -> None:
    linear = torch.nn.Linear(128, 64)
    cases: list[dict[str, Any]] = [{}, {"search": True}, {"search": False}]
    for options in cases:
        q, scales, _ = wo.quantize(linear.weight.t(), **options)
        expected = q * scales.repeat_interleave(128, 0)
        model = torch.nn.Sequential(copy.deepcopy(linear))
        wo.nn.quantize_model(model, **options)
        layer = model.get_submodule("0")
        assert isinstance(layer, wo.nn.Linear)
        assert torch.equal(layer.dequantize(), expected)
