"""quantize with its search: how accurate it is, that no group is worse than without, and the same bits anywhere."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weightonly as wo
from weightonly import dense
from weightonly.least_squares import fold

dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
kinds = pytest.mark.parametrize("bits", [4, 8])
symmetries = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def squares(w: torch.Tensor, quantized: Quantized) -> torch.Tensor:
    """The sum of squares of what quantizing changes, fp64 [K / g, N]."""
    q, scales, zeros = quantized
    group = q.shape[0] // scales.shape[0]
    levels = q.double().unflatten(0, (-1, group))
    levels = levels if zeros is None else levels - zeros.double().unsqueeze(1)
    return (levels * scales.double().unsqueeze(1) - w.double().unflatten(0, (-1, group))).square().sum(1)


@pytest.mark.parametrize(
    ("symmetric", "group", "percent"), [(True, 128, 9.7), (False, 128, 9.1), (False, 64, 8.2), (False, 32, 7.1)]
)
def test_error_of_gaussian_weights(symmetric: bool, group: int, percent: float) -> None:
    w = torch.randn(2048, 512, generator=torch.Generator().manual_seed(0))
    error = squares(w, wo.quantize(w, 4, group, symmetric)).sum().sqrt() / w.double().norm()
    assert float(error) <= percent / 100


@dtypes
@kinds
@symmetries
@pytest.mark.parametrize("group", [1, 16, 128, -1])
@pytest.mark.parametrize("exponent", [-130, -20, -8, 0, 15], ids=lambda e: f"2^{e}")
def test_no_group_is_worse_than_by_the_largest_value(
    dtype: torch.dtype, bits: int, symmetric: bool, group: int, exponent: int, generator: torch.Generator
) -> None:
    w = torch.randn(256, 40, generator=generator)
    w[:, :8] *= torch.rand(256, 8, generator=generator) ** 8 * 10  # outliers
    w[:, 8:12] += 3
    w[:, 12:16] -= 3
    w[::3, 16:20] = 0
    w[:, 20:24] = w[:, 20:24].round()
    w[:, 24] = 0
    w[:, 25] = -0.0
    limit = torch.finfo(dtype).max
    w = (w.double() * 2.0**exponent).clamp(-limit, limit).to(dtype)
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


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_a_sum_is_the_same_beside_other_columns(rows: int, seed: int) -> None:
    w = torch.randn(rows, 3, 7, generator=torch.Generator().manual_seed(seed))
    found = fold(w.clone())
    torch.testing.assert_close(found, w.double().sum(0), rtol=0, atol=1e-4)
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


GOLDEN = {
    (4, True): "79448b9aa5a5c21c6ea1a1a26aa2f96504f743a549ed640a685e728017600a8a",
    (4, False): "9ade9973d0f86560b4345924217be5b42cd25f2e042be49d237c593b14ad9719",
    (8, True): "1853a1aa98989c97b959f980892cc499c589418946e6c9e306947589ad5b1ebb",
    (8, False): "e9f8fce44d8a992717aa794908f65ddac84dd06ca46cb2036a8744a450f3674e",
}


@kinds
@symmetries
def test_without_search_the_bytes_are_those_of_before(bits: int, symmetric: bool) -> None:
    w = torch.randn(256, 48, generator=torch.Generator().manual_seed(3)).half()
    parts = wo.quantize(w, bits, 64, symmetric, search=False)
    found = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts if part is not None)).hexdigest()
    assert found == GOLDEN[bits, symmetric]


def test_search_is_a_bool() -> None:
    with pytest.raises(TypeError, match="search: expected"):
        wo.quantize(torch.ones(128, 2), search="no")  # type: ignore[arg-type]


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
