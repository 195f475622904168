"""quantize: the error bound of the range, extremes of the dtypes, what any search keeps, and bad input."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weightonly as wo
from weightonly.quantize import quantize_for

DTYPES = [torch.float16, torch.bfloat16, torch.float32]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
bits_4_and_8 = pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
symmetries = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero_points"])


def reconstruct(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """scales * (q - zeros) in fp64, [K, N]."""
    group = q.shape[0] // scales.shape[0]
    z = 0.0 if zeros is None else zeros.double().repeat_interleave(group, 0)
    return scales.double().repeat_interleave(group, 0) * (q.double() - z)


def assert_same(got: tuple[torch.Tensor | None, ...], want: tuple[torch.Tensor | None, ...]) -> None:
    """Equal (q, scales, zeros), wherever they are."""
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a.cpu(), b.cpu())


def assert_within_half_a_scale(
    w: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> None:
    half = 0.5 * scales.double().repeat_interleave(q.shape[0] // scales.shape[0], 0)
    error = (reconstruct(q, scales, zeros) - w.double()).abs()
    # w / scale is rounded to fp32 before it is rounded to an integer of up to 8 bits
    assert (error <= half * (1 + 2**-14)).all(), f"worst error in scales: {(error / half).max().item() / 2}"


@dtypes
@bits_4_and_8
@symmetries
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128, 256, 768, 3], ids=lambda g: f"g{g}")
def test_every_element_is_within_half_a_scale(
    dtype: torch.dtype, bits: int, symmetric: bool, group_size: int, generator: torch.Generator
) -> None:
    w = (torch.randn(768, 40, generator=generator) * torch.rand(1, 40, generator=generator)).to(dtype)
    w[:, :4] += 2.0  # columns of one sign: the range is extended to 0
    w[:, 4:8] -= 2.0
    q, scales, zeros = wo.quantize(w, bits=bits, group_size=group_size, symmetric=symmetric, search=False)

    groups = 1 if group_size == -1 else 768 // group_size
    assert q.dtype == torch.int8
    assert q.shape == w.shape
    assert q.is_contiguous()
    assert scales.dtype == dtype
    assert scales.shape == (groups, 40)
    limit = 1 << (bits - 1)
    assert -limit <= int(q.min())
    assert int(q.max()) < limit
    assert (zeros is None) == symmetric
    if zeros is not None:
        assert zeros.dtype == dtype
        assert zeros.shape == scales.shape
        assert torch.equal(zeros, zeros.round())
        assert -limit <= zeros.min().item()
        assert zeros.max().item() < limit
    assert_within_half_a_scale(w, q, scales, zeros)


@bits_4_and_8
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_group_of_one_sign_has_its_levels_from_0_on(bits: int, sign: int) -> None:
    w = sign * torch.linspace(1e-5, 1e-4, 64)[:, None]
    q, scales, zeros = wo.quantize(w, bits, -1, symmetric=False, search=False)
    assert zeros is not None
    torch.testing.assert_close(scales, torch.full((1, 1), 1e-4 / (2**bits - 1)), rtol=1e-5, atol=0)
    largest = (1 << (bits - 1)) - 1
    assert int(zeros) == (largest if sign < 0 else -largest - 1)
    assert_within_half_a_scale(w, q, scales, zeros)


@bits_4_and_8
def test_symmetric_scale_is_absmax(bits: int, generator: torch.Generator) -> None:
    w = torch.randn(256, 24, generator=generator)
    _, scales, _ = wo.quantize(w, bits=bits, group_size=64, search=False)
    absmax = w.view(4, 64, 24).abs().amax(1)
    torch.testing.assert_close(scales, absmax / (2 ** (bits - 1) - 1), rtol=1e-6, atol=0)


@dtypes
@bits_4_and_8
@symmetries
def test_values_on_the_grid_are_exact(
    dtype: torch.dtype, bits: int, symmetric: bool, generator: torch.Generator
) -> None:
    largest = 2 ** (bits - 1) - 1
    levels = torch.randint(-largest, largest + 1, (128, 16), generator=generator).float()
    levels[0] = largest
    levels[1] = -largest if symmetric else -largest - 1
    w = (levels * 0.25).to(dtype)
    q, scales, zeros = wo.quantize(w, bits=bits, group_size=-1, symmetric=symmetric)
    assert (scales == 0.25).all()
    assert torch.equal(reconstruct(q, scales, zeros), w.double())


def test_zero_points_use_the_whole_range(generator: torch.Generator) -> None:
    w = torch.rand(128, 16, generator=generator) + 0.5  # of one sign: symmetric levels would waste half of them
    q, scales, zeros = wo.quantize(w, bits=4, group_size=-1, symmetric=False, search=False)
    assert (q.amax(0) == 7).all()
    assert zeros is not None
    assert (zeros == -8).all()
    assert (scales < w.amax(0) / 14).all()


@bits_4_and_8
def test_zero_is_exact_with_zero_points(bits: int, generator: torch.Generator) -> None:
    w = torch.randn(128, 16, generator=generator).half()
    w[::3] = 0
    q, scales, zeros = wo.quantize(w, bits=bits, group_size=32, symmetric=False)
    assert (reconstruct(q, scales, zeros)[::3] == 0).all()


@dtypes
@bits_4_and_8
@symmetries
def test_group_of_zeros(dtype: torch.dtype, bits: int, symmetric: bool, generator: torch.Generator) -> None:
    w = torch.randn(128, 8, generator=generator).to(dtype)
    w[32:64] = 0
    w[:, 5] = -0.0
    q, scales, zeros = wo.quantize(w, bits=bits, group_size=32, symmetric=symmetric)
    got = wo.dequantize(wo.preprocess(q, bits=bits), scales, zeros)
    assert (got[32:64] == 0).all()
    assert (got[:, 5] == 0).all()
    assert torch.isfinite(scales).all()
    assert (scales != 0).all()


@dtypes
@bits_4_and_8
@symmetries
@pytest.mark.parametrize("steps", [1, 2, 5, 9, 10, 20, 100, 1000], ids=lambda s: f"{s}_steps")
def test_tiny_weights(dtype: torch.dtype, bits: int, symmetric: bool, steps: int, generator: torch.Generator) -> None:
    """Weights of a few times the smallest subnormal: the exact scale rounds to 0 or to a number far from it."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    w = (torch.randint(-steps, steps + 1, (64, 16), generator=generator).double() * smallest).to(dtype)
    w[0] = steps * smallest
    q, scales, zeros = wo.quantize(w, bits=bits, group_size=-1, symmetric=symmetric, search=False)
    assert (scales > 0).all()
    assert torch.isfinite(scales).all()
    assert_within_half_a_scale(w, q, scales, zeros)


@dtypes
@bits_4_and_8
@symmetries
@pytest.mark.parametrize("signs", ["both", "positive", "negative"])
def test_largest_weights(dtype: torch.dtype, bits: int, symmetric: bool, signs: str) -> None:
    largest = torch.finfo(dtype).max
    w = torch.linspace(-1, 1, 64, dtype=torch.float64)[:, None].expand(64, 8)
    w = {"both": w, "positive": w.abs(), "negative": -w.abs()}[signs] * largest
    w = w.to(dtype)
    q, scales, zeros = wo.quantize(w, bits=bits, group_size=-1, symmetric=symmetric, search=False)
    got = wo.dequantize(wo.preprocess(q, bits=bits), scales, zeros)
    assert torch.isfinite(scales).all()
    assert torch.isfinite(got).all()
    error = (reconstruct(q, scales, zeros) - w.double()).abs() / scales.double()
    assert error.max().item() <= 0.52


def test_strided_weight_and_parameter(generator: torch.Generator) -> None:
    weight = torch.nn.Parameter(torch.randn(24, 128, generator=generator))
    got = wo.quantize(weight.t(), group_size=32)
    assert_same(got, wo.quantize(weight.detach().t().contiguous(), group_size=32))
    assert not got[1].requires_grad


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16], ids=lambda d: str(d).removeprefix("torch."))
@bits_4_and_8
@symmetries
def test_the_default_dtype_changes_nothing(
    default: torch.dtype, bits: int, symmetric: bool, generator: torch.Generator
) -> None:
    """Loaders of models set it to the model's."""
    w = torch.randn(256, 24, generator=generator).half()
    want = wo.quantize(w, bits=bits, group_size=64, symmetric=symmetric)
    torch.set_default_dtype(default)
    try:
        got = wo.quantize(w, bits=bits, group_size=64, symmetric=symmetric)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(got, want)


@symmetries
@pytest.mark.parametrize("block_elems", [1, 64, 1000], ids=lambda b: f"block{b}")
def test_blocks_do_not_change_the_result(
    symmetric: bool, block_elems: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.randn(96, 23, generator=generator)
    expected = wo.quantize(w, group_size=32, symmetric=symmetric)
    monkeypatch.setitem(sys.modules["weightonly.dense"]._BLOCK_ELEMS, "cpu", block_elems)
    assert_same(wo.quantize(w, group_size=32, symmetric=symmetric), expected)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    exponent=st.integers(-60, 30),
    groups=st.integers(1, 5),
    group=st.integers(1, 40),
    n=st.integers(1, 9),
)
def test_error_bound_for_any_magnitude(
    seed: int, dtype: torch.dtype, bits: int, symmetric: bool, exponent: int, groups: int, group: int, n: int
) -> None:
    w = torch.randn(groups * group, n, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    w = w.clamp(-60000, 60000).to(dtype)
    assert_within_half_a_scale(w, *wo.quantize(w, bits=bits, group_size=group, symmetric=symmetric, search=False))


BAD_CALLS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "nan": (torch.tensor([[1.0], [float("nan")]]), {}, ValueError, "w: expected finite values"),
    "inf": (torch.tensor([[1.0], [float("-inf")]]), {}, ValueError, "w: expected finite values"),
    "bits": (torch.ones(128, 2), {"bits": 3}, ValueError, "bits: expected 4 or 8, got 3"),
    "rank": (torch.ones(128), {}, ValueError, r"w: expected shape \[K, N\].*got \[128\]"),
    "empty": (torch.ones(0, 4), {}, ValueError, r"got \[0, 4\]"),
    "integers": (torch.ones(128, 2, dtype=torch.int8), {}, TypeError, "w: expected dtype .*got torch.int8"),
    "float64": (torch.ones(128, 2, dtype=torch.float64), {}, TypeError, "got torch.float64"),
    "list": ([[1.0]], {}, TypeError, "w: expected a tensor, got list"),
    "group does not divide": (torch.ones(192, 2), {}, ValueError, "group_size: .*divisor of K=192, got 128"),
    "group too large": (torch.ones(64, 2), {}, ValueError, "K=64, got 128"),
    "group 0": (torch.ones(128, 2), {"group_size": 0}, ValueError, "got 0"),
    "group -2": (torch.ones(128, 2), {"group_size": -2}, ValueError, "got -2"),
    "group kind": (
        torch.ones(128, 2),
        {"group_size": 64.0},
        TypeError,
        "group_size: expected an int, got float",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input(case: str) -> None:
    w, arguments, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        wo.quantize(w, **({"group_size": -1} if case in ("nan", "inf") else {}) | arguments)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("search", [True, False, "whole"])
@pytest.mark.parametrize("format", ["int4", "int4 zeros", "int8", "int8 zeros", "nf4", "fp4", "mxfp4", "nvfp4"])
def test_gpu_agrees_with_cpu(
    dtype: torch.dtype, search: Any, format: str, cuda_device: torch.device, generator: torch.Generator
) -> None:
    w = torch.randn(256, 96, generator=generator) * torch.exp2(-20 * torch.rand(1, 96, generator=generator))
    w[:64, 0], w[:64, 1] = 0, -0.0
    w = w.to(dtype)
    options: dict[str, Any] = {"format": format.split()[0], "symmetric": "zeros" not in format, "search": search}
    got = wo.quantize(w.to(cuda_device), **options)
    assert all(tensor is None or tensor.device == cuda_device for tensor in got)
    assert_same(got, wo.quantize(w, **options))


def test_slack_keeps_the_nearest_scale() -> None:
    """A symmetric scale is absmax / 7 to the nearest, be it smaller: the outermost level covers half a scale more."""
    w = (1 + torch.arange(2000, dtype=torch.float32) / 2000).half()[None]
    scales = wo.quantize(w, 4, -1, search=False)[1]
    expected = (w.double() / 7).to(torch.float16)
    assert torch.equal(scales, expected)
    assert bool((expected.double() * 7 < w.double()).any())


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_half_a_scale_holds_up_to_the_largest_number(
    dtype: torch.dtype, bits: int, symmetric: bool, generator: torch.Generator
) -> None:
    largest = torch.finfo(dtype).max
    parts = torch.rand(2, 40_000, generator=generator, dtype=torch.float64)
    w = ((1 - parts**4) * largest).clamp(max=largest).to(dtype)
    w[1] *= -1
    w[:, 0] = torch.tensor([65472.0, -57600.0], dtype=dtype)
    q, scales, zeros = wo.quantize(w, bits, -1, symmetric, search=False)
    levels = scales.double() * (q.double() - (0 if zeros is None else zeros.double()))
    assert float(levels.abs().max()) <= largest
    error = float(((levels - w.double()).abs() / scales.double()).max())
    assert error <= (0.7 if dtype == torch.bfloat16 and bits == 8 and not symmetric else 0.5001)


@pytest.mark.parametrize("sign", [1, -1], ids=["above", "below"])
def test_weights_beyond_the_dtype_of_their_scales(sign: int) -> None:
    w = torch.ones(128, 2)
    w[5, 1] = sign * 7e4
    with pytest.raises(ValueError, match=r"w: expected values within \+-65504, the range of torch.float16, got"):
        quantize_for(w, torch.float16, "int4", 128, True)
