"""The CPU path: dequantize and gemm against fp64, exact where the inputs allow it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly import reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LAYOUTS = ["row_major", "interleaved", "tiled", "cpu"]
ACTIVATIONS = [None, "identity", "relu", "gelu", "silu"]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
bits_4_and_8 = pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
layouts = pytest.mark.parametrize("layout", LAYOUTS)
zero_points = pytest.mark.parametrize("with_zeros", [False, True], ids=["symmetric", "zero_points"])


class Case:
    """A random weight in its parts: q, scales, zeros and the packed form."""

    def __init__(
        self,
        k: int,
        n: int,
        bits: int,
        group_size: int,
        dtype: torch.dtype,
        layout: str,
        with_zeros: bool,
        generator: torch.Generator,
    ) -> None:
        limit = 1 << (bits - 1)
        self.q = torch.randint(-limit, limit, (k, n), dtype=torch.int8, generator=generator)
        self.scales = (torch.rand(k // group_size, n, generator=generator) + 0.5).to(dtype)
        # halves: zero points need not be integers
        halves = torch.randint(-2 * limit, 2 * limit, self.scales.shape, generator=generator)
        self.zeros = (halves / 2).to(dtype) if with_zeros else None
        self.packed = wo.preprocess(self.q, bits=bits, layout=layout)

    def exact(self) -> torch.Tensor:
        """The dequantized weight in fp64, [K, N]."""
        group = self.q.shape[0] // self.scales.shape[0]
        z = 0.0 if self.zeros is None else self.zeros.double().repeat_interleave(group, 0)
        return self.scales.double().repeat_interleave(group, 0) * (self.q.double() - z)


def activate(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    """The activations from their definitions."""
    if activation == "relu":
        return torch.where(y > 0, y, torch.zeros_like(y))
    if activation == "gelu":
        return y * 0.5 * (1 + torch.erf(y / 2**0.5))
    if activation == "silu":
        return y / (1 + torch.exp(-y))
    return y


@dtypes
@bits_4_and_8
@layouts
@zero_points
@pytest.mark.parametrize(("k", "n", "group_size"), [(128, 64, 32), (100, 77, 100), (65, 1, 13), (1, 130, 1)], ids=str)
def test_dequantize(
    dtype: torch.dtype,
    bits: int,
    layout: str,
    with_zeros: bool,
    k: int,
    n: int,
    group_size: int,
    generator: torch.Generator,
) -> None:
    case = Case(k, n, bits, group_size, dtype, layout, with_zeros, generator)
    w = wo.dequantize(case.packed, case.scales, case.zeros)
    assert w.dtype == dtype
    assert w.shape == (k, n)
    # scale * (q - z) has at most 11 + 9 significant bits for fp16 and bf16: exact in fp32, so one rounding
    assert torch.equal(w, case.exact().to(dtype)) or dtype == torch.float32
    torch.testing.assert_close(w.double(), case.exact(), rtol=torch.finfo(dtype).eps, atol=0)


@dtypes
@bits_4_and_8
@layouts
@zero_points
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gemm_against_fp64(
    dtype: torch.dtype,
    bits: int,
    layout: str,
    with_zeros: bool,
    activation: str | None,
    generator: torch.Generator,
) -> None:
    case = Case(192, 77, bits, 32, dtype, layout, with_zeros, generator)
    x = torch.randn(5, 192, generator=generator).to(dtype) / 16
    bias = torch.randn(77, generator=generator).to(dtype)
    y = reference.gemm(x, case.packed, case.scales, case.zeros, bias, activation)
    assert y.dtype == dtype
    assert y.shape == (5, 77)

    exact = x.double() @ case.exact()
    magnitude = x.double().abs() @ case.exact().abs() + bias.double().abs()
    expected = activate(exact + bias.double(), activation)
    # the error of an fp32 sum is bounded by the sum of magnitudes; then one rounding; the slope of gelu is at most 1.13
    tolerance = 1.2 * magnitude * 192 * 2**-24 + expected.abs() * torch.finfo(dtype).eps * 0.51
    tolerance += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((y.double() - expected).abs() <= tolerance).all()


@bits_4_and_8
@layouts
@zero_points
def test_gemm_is_exact_on_a_grid(bits: int, layout: str, with_zeros: bool, generator: torch.Generator) -> None:
    """Small integers: products and sums are exact in fp32, so that each order of summation gives the same bits."""
    case = Case(256, 130, bits, 64, torch.float16, layout, with_zeros, generator)
    case.scales = torch.ones_like(case.scales)
    x = torch.randint(-1, 2, (9, 256), generator=generator).half()
    assert torch.equal(reference.gemm(x, case.packed, case.scales, case.zeros), (x.double() @ case.exact()).half())


@bits_4_and_8
@layouts
@pytest.mark.parametrize("block_elems", [1, 128 * 24, 1 << 22], ids=lambda b: f"block{b}")
def test_blocks_of_columns_do_not_change_the_result(
    bits: int, layout: str, block_elems: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(128, 83, bits, 64, torch.float16, layout, True, generator)
    monkeypatch.setattr(sys.modules["weightonly.reference"], "_BLOCK_ELEMS", block_elems)
    x = torch.eye(128, dtype=torch.float16)
    assert torch.equal(wo.dequantize(case.packed, case.scales, case.zeros), case.exact().half())
    assert torch.equal(reference.gemm(x, case.packed, case.scales, case.zeros), case.exact().half())
    bias = torch.arange(83).half()  # each column its own
    expected = (case.exact() + bias.double()).half()
    assert torch.equal(reference.gemm(x, case.packed, case.scales, case.zeros, bias), expected)


@pytest.mark.parametrize("lead", [(), (3,), (0,), (2, 3), (2, 0, 3)], ids=str)
def test_leading_dimensions(lead: tuple[int, ...], generator: torch.Generator) -> None:
    case = Case(64, 40, 4, 64, torch.float16, "interleaved", False, generator)
    x = torch.randn(*lead, 64, generator=generator).half()
    y = reference.gemm(x, case.packed, case.scales)
    assert y.shape == (*lead, 40)
    torch.testing.assert_close(y, (x.double() @ case.exact()).half(), rtol=1e-3, atol=1e-3)


@dtypes
def test_out_is_filled_and_returned(dtype: torch.dtype, generator: torch.Generator) -> None:
    case = Case(96, 96, 4, 32, dtype, "interleaved", False, generator)
    x = torch.randn(2, 3, 96, generator=generator).to(dtype)
    expected = reference.gemm(x, case.packed, case.scales)
    out = torch.full((2, 3, 96), float("nan"), dtype=dtype)
    assert reference.gemm(x, case.packed, case.scales, out=out) is out
    assert torch.equal(out, expected)
    strided = torch.full((2, 96, 3), float("nan"), dtype=dtype).transpose(1, 2)
    assert torch.equal(reference.gemm(x, case.packed, case.scales, out=strided), expected)


@dtypes
def test_strided_x(dtype: torch.dtype, generator: torch.Generator) -> None:
    case = Case(96, 40, 4, 32, dtype, "interleaved", False, generator)
    case.scales = torch.ones_like(case.scales)
    x = torch.randint(-1, 2, (3, 96, 2), generator=generator).to(dtype).permute(2, 0, 1)
    assert torch.equal(reference.gemm(x, case.packed, case.scales), (x.double() @ case.exact()).to(dtype))


GROUPS = torch.ones(2, 48)
BAD_DEQUANTIZE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "plain tensor": (
        {"qweight": torch.ones(64, 48)},
        TypeError,
        r"qweight: expected the PackedWeight that weightonly\.preprocess",
    ),
    "integer scales": (
        {"scales": GROUPS.int()},
        TypeError,
        "scales: expected dtype .*, got torch.int32",
    ),
    "no scales": ({"scales": None}, TypeError, "scales: expected a tensor, got NoneType"),
    "columns": ({"scales": GROUPS[:, :47]}, ValueError, r"scales: .*N = 48\], got \[2, 47\]"),
    "rows": ({"scales": torch.ones(3, 48)}, ValueError, r"got shape \[3, 48\]"),
    "no rows": ({"scales": torch.ones(0, 48)}, ValueError, r"got shape \[0, 48\]"),
    "rank": ({"scales": torch.ones(48)}, ValueError, r"got \[48\]"),
    "device": (
        {"scales": GROUPS.to("meta")},
        ValueError,
        "scales: expected on cpu as qweight is, got meta",
    ),
    "zeros shape": (
        {"zeros": torch.ones(1, 48)},
        ValueError,
        r"zeros: expected shape \[2, 48\] as scales, got \[1, 48\]",
    ),
    "zeros dtype": (
        {"zeros": GROUPS.half()},
        TypeError,
        "zeros: expected dtype torch.float32 as scales have, got torch.float16",
    ),
}


@pytest.mark.parametrize("case", BAD_DEQUANTIZE)
def test_dequantize_rejects(case: str) -> None:
    changes, error, message = BAD_DEQUANTIZE[case]
    arguments = {
        "qweight": wo.preprocess(torch.ones(64, 48, dtype=torch.int8)),
        "scales": GROUPS,
        "zeros": None,
    }
    with pytest.raises(error, match=message):
        wo.dequantize(**arguments | changes)  # type: ignore[arg-type]


@pytest.mark.gpu
@bits_4_and_8
@layouts
def test_dequantize_on_the_gpu(bits: int, layout: str, cuda_device: torch.device, generator: torch.Generator) -> None:
    case = Case(100, 77, bits, 50, torch.bfloat16, layout, True, generator)
    assert case.zeros is not None
    w = wo.dequantize(case.packed.to(cuda_device), case.scales.to(cuda_device), case.zeros.to(cuda_device))
    assert w.device == cuda_device
    assert torch.equal(w.cpu(), case.exact().to(torch.bfloat16))
