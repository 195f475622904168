"""quantize_activations, and gemm of what it returns, on the CPU: formulas in fp64, exact cases, wrong arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.packed_cases import random_q

import weightonly as wo
from weightonly.codebooks import codebook

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda y: y,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
FP8 = torch.float8_e4m3fn


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """fp64 -> the nearest number of E4M3, the one with an even mantissa of two; no more than 448."""
    every = torch.arange(0x7F, dtype=torch.uint8).view(FP8).double()  # 0 .. 448, ascending
    above = torch.searchsorted(every, values.abs().clamp(max=448.0)).clamp(min=1, max=0x7E)
    low, high = every[above - 1], every[above]
    middle, magnitude = (low + high) / 2, values.abs()
    is_high = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    return torch.where(is_high, high, low).copysign(values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_quantized_activations(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = (torch.randn(50, 300, generator=generator) * torch.logspace(-4, 3, 50)[:, None]).to(dtype)
    x8, x_scales = wo.quantize_activations(x)
    assert x8.dtype == FP8 and x8.is_contiguous() and x_scales.dtype == torch.float32
    assert torch.equal(x_scales, (x.double().abs().amax(1) / 448).float())
    divided = (x.float() / x_scales[:, None]).double()  # rounded to fp32 once
    assert torch.equal(x8.double(), nearest_e4m3(divided))
    assert torch.equal(x8.float().abs().amax(1), torch.full((50,), 448.0))


def test_numbers_of_e4m3_come_back(generator: torch.Generator) -> None:
    """Those of a row with 448 have the scale 1; a power of two changes the scale alone."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[~numbers.isnan()]
    rows = numbers[None] * torch.exp2(torch.arange(-4.0, 5.0))[:, None]
    x8, x_scales = wo.quantize_activations(rows)
    assert torch.equal(x8.float(), numbers.expand(9, -1))
    assert torch.equal(x_scales, torch.exp2(torch.arange(-4.0, 5.0)))


def test_rows_of_zeros_nan_and_infinity() -> None:
    x = torch.ones(5, 3)
    x[0], x[1, 1], x[2, 2], x[3] = 0, float("nan"), float("inf"), 1e-45
    x8, x_scales = wo.quantize_activations(x)
    assert x8[0].float().tolist() == [0, 0, 0] and x_scales[0] == 1
    assert x8[1].float().isnan().all() and x_scales[1].isnan()
    assert x8[2].float().nan_to_num(7).tolist() == [0, 0, 7] and x_scales[2] == float("inf")
    assert x8[3].float().tolist() == [0, 0, 0] and x_scales[3] == 1  # 1e-45 / 448 is 0
    assert x8[4].float().tolist() == [448] * 3


@pytest.mark.parametrize("shape", [(7,), (2, 3, 7), (0, 7), (2, 0, 7)], ids=str)
def test_shapes_of_quantized_activations(shape: tuple[int, ...]) -> None:
    x8, x_scales = wo.quantize_activations(torch.ones(shape))
    assert x8.shape == shape and x_scales.shape == shape[:-1]


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1.0], TypeError, "x: expected a tensor, got list"),
        (torch.ones(3, dtype=torch.int32), TypeError, r"x: expected dtype torch\.float16 or .* got torch\.int32"),
        (torch.ones(3, 4).to(FP8), TypeError, r"x: expected dtype .* got torch\.float8_e4m3fn"),
        (torch.ones(()), ValueError, r"x: expected shape \[\.\.\., K\] with K >= 1, got \[\]"),
        (torch.ones(3, 0), ValueError, r"x: expected shape \[\.\.\., K\] with K >= 1, got \[3, 0\]"),
        (torch.ones(3, 4, device="meta"), ValueError, "x: expected a CPU or CUDA tensor, got one on meta"),
    ],
    ids=str,
)
def test_what_quantize_activations_refuses(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wo.quantize_activations(x)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["tiled_fp8", "tiled", "cpu"])
@pytest.mark.parametrize(("k", "n", "group_size"), [(192, 40, 64), (100, 65, -1), (96, 130, 32)], ids=str)
def test_product(k: int, n: int, group_size: int, layout: str, activation: str, generator: torch.Generator) -> None:
    q = random_q(k, n, 4, generator)
    groups = 1 if group_size == -1 else k // group_size
    scales = (torch.rand(groups, n, generator=generator) * 0.1).bfloat16()
    bias = torch.randn(n, generator=generator).bfloat16()
    x8, x_scales = wo.quantize_activations(torch.randn(2, 3, k, generator=generator))
    w = (q.double().view(groups, -1, n) * scales.double()[:, None]).view(k, n)
    expected = ACTIVATIONS[activation](x_scales.double()[..., None] * (x8.double() @ w) + bias.double())
    packed = wo.preprocess(q, layout=layout)
    y = wo.gemm(x8, packed, scales, x_scales=x_scales, bias=bias, activation=activation)
    assert y.dtype == torch.bfloat16 and y.shape == (2, 3, n)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-4)
    out = torch.full_like(y, float("nan"))
    operand = wo.QuantizedWeight(packed, scales)
    assert wo.gemm(x8, operand, x_scales=x_scales, bias=bias, activation=activation, out=out) is out
    assert torch.equal(out, y)


@pytest.mark.parametrize("layout", ["tiled_fp8", "tiled", "interleaved", "cpu"])
def test_codes(layout: str, generator: torch.Generator) -> None:
    codes = random_q(96, 130, 4, generator) + 8
    scales = torch.exp2(torch.randint(-3, 3, (3, 130), generator=generator).float()).bfloat16()
    packed = wo.preprocess(codes, format="mxfp4", layout=layout)
    assert torch.equal(wo.unpack(packed), codes)
    assert torch.equal(wo.unpack(wo.repack(packed, layout="tiled_fp8")), codes)
    x8 = torch.randint(-4, 5, (7, 96), generator=generator).float().to(FP8)
    w = codebook("mxfp4").double()[codes.long()] * scales.double().repeat_interleave(32, 0)
    y = wo.gemm(x8, packed, scales, x_scales=torch.full((7,), 0.5))
    assert torch.equal(y, (x8.double() @ w * 0.5).bfloat16())


@pytest.mark.parametrize("format", ["nf4", "fp4", "nvfp4"])
def test_codes_that_are_not_exact_in_e4m3(format: str) -> None:
    with pytest.raises(ValueError, match=r"layout: expected .* for codes of a codebook, got 'tiled_fp8'"):
        wo.preprocess(torch.zeros(64, 64, dtype=torch.int8), format=format, layout="tiled_fp8")


def good(**changed: Any) -> dict[str, Any]:
    """Exact numbers: [3, 192] @ int4 [192, 40], groups of 64."""
    g = torch.Generator().manual_seed(0)
    return {
        "x": torch.randint(-4, 5, (3, 192), generator=g).float().to(FP8),
        "qweight": wo.preprocess(random_q(192, 40, 4, g), layout="tiled_fp8"),
        "scales": torch.exp2(torch.randint(-2, 2, (3, 40), generator=g).float()).half(),
        "x_scales": torch.tensor([0.5, 2.0, 4.0]),
        "bias": torch.randint(-8, 9, (40,), generator=g).half(),
    } | changed


def exact(a: dict[str, Any]) -> torch.Tensor:
    w = wo.dequantize(a["qweight"], a["scales"]).double()
    return ((a["x"].double() @ w) * a["x_scales"].double()[:, None] + a["bias"].double()).half()


def test_exact_numbers_and_calls_that_share_a_plan() -> None:
    a = good()
    for factor in (1.0, 2.0, 0.5):
        a["x_scales"] = a["x_scales"] * factor
        assert torch.equal(wo.gemm(**a), exact(a))
    order = torch.randperm(192)
    shuffled = torch.empty(3, 192, dtype=torch.uint8)
    shuffled[:, order] = a["x"].view(torch.uint8)
    assert torch.equal(wo.gemm(**a | {"x": shuffled.view(FP8), "perm": order}), exact(a))
    none = wo.gemm(**a | {"x": a["x"][:0], "x_scales": a["x_scales"][:0]})
    assert none.shape == (0, 40) and none.dtype == torch.float16


def test_x_in_16_bits_reads_the_layout_on_a_cpu() -> None:
    a = good()
    x = a["x"].half()
    expected = (x.double() @ wo.dequantize(a["qweight"], a["scales"]).double()).half()
    assert torch.equal(wo.gemm(x, a["qweight"], a["scales"]), expected)


def test_torch_compile_traces_it() -> None:
    a = good()
    x = a.pop("x").half()
    del a["x_scales"]

    def product(x: torch.Tensor) -> torch.Tensor:
        x8, x_scales = wo.quantize_activations(x)
        return wo.gemm(x8, x_scales=x_scales, **a)

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), product(x))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no x_scales": ({"x_scales": None}, TypeError, "got torch.float8_e4m3fn; x_scales= takes its scales"),
    "x in 16 bits": (
        {"x": torch.ones(3, 192).half()},
        TypeError,
        "x: expected dtype torch.float8_e4m3fn beside x_scales, got torch.float16",
    ),
    "x in E5M2": (
        {"x": torch.ones(3, 192).to(torch.float8_e5m2)},
        TypeError,
        "x: expected dtype torch.float8_e4m3fn beside x_scales, got torch.float8_e5m2",
    ),
    "no tensor": ({"x_scales": 1.0}, TypeError, "x_scales: expected a tensor, got float"),
    "x_scales in 16 bits": (
        {"x_scales": torch.ones(3).half()},
        TypeError,
        "x_scales: expected dtype torch.float32, got torch.float16",
    ),
    "too many": (
        {"x_scales": torch.ones(4)},
        ValueError,
        "x_scales: expected shape [3], a scale for each row, got [4]",
    ),
    "a column": ({"x_scales": torch.ones(3, 1)}, ValueError, "x_scales: expected shape [3], a scale for each row"),
    "meta": ({"x_scales": torch.ones(3, device="meta")}, ValueError, "x_scales: expected on cpu as x is, got meta"),
    "K": ({"x": torch.ones(3, 128).to(FP8)}, ValueError, "x: expected [..., K] with K = 192"),
    "zeros": (
        {"zeros": torch.zeros(3, 40).half()},
        ValueError,
        "zeros: expected None in layout 'tiled_fp8', got Tensor",
    ),
    "bias": (
        {"bias": torch.ones(40)},
        TypeError,
        "bias: expected dtype torch.float16 as scales have, got torch.float32",
    ),
    "out": (
        {"out": torch.empty(3, 40)},
        TypeError,
        "out: expected dtype torch.float16 as scales have, got torch.float32",
    ),
    "gradient": (
        {"bias": torch.ones(40).half().requires_grad_()},
        ValueError,
        "bias: expected a tensor that requires no gradient beside x_scales",
    ),
    "activation": ({"activation": "tanh"}, ValueError, "activation: expected"),
    "config": (
        {"config": wo.heuristics.configs.FP8_CONFIGS[0]},
        ValueError,
        "config: expected None for CPU tensors",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str) -> None:
    changed, error, message = WRONG[case]
    wo.gemm(**good())  # its plan is known
    with pytest.raises(error, match=re.escape(message)):
        wo.gemm(**good(**changed))


def test_freed_x_scales_are_refused() -> None:
    a = good()
    wo.gemm(**a)
    a["x_scales"].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"x_scales: expected memory for shape \[3\]"):
        wo.gemm(**a)
