"""grouped_gemm of x in E4M3 on the CPU: each expert is a gemm, wrong arguments, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.expert_cases import ends, random_stack
from tests.tensor_kinds import GONE

import weightonly as wo
from weightonly.gate import Gate

FP8 = torch.float8_e4m3fn
COUNTS = [3, 0, 70, 1]


def good(g: torch.Generator, format: str = "int4", layout: str = "tiled_fp8", **changed: Any) -> dict[str, Any]:
    """Exact numbers: [74, 192] @ 4 experts [192, 40]."""
    group_size = 32 if format == "mxfp4" else 64
    q = random_stack(4, 192, 40, "code4" if format == "mxfp4" else format, g)
    scales = torch.exp2(torch.randint(-2, 2, (4, 192 // group_size, 40), generator=g).float()).bfloat16()
    return {
        "x": torch.randint(-4, 5, (74, 192), generator=g).float().to(FP8),
        "qweight": wo.preprocess(q, format=format, layout=layout),
        "scales": scales,
        "offs": ends(COUNTS),
        "x_scales": torch.exp2(torch.randint(-3, 3, (74,), generator=g).float()),
        "bias": torch.randint(-8, 9, (4, 40), generator=g).bfloat16(),
    } | changed


def expected(a: dict[str, Any]) -> torch.Tensor:
    y, begin = torch.zeros(74, 40, dtype=torch.float64), 0
    for e, count in enumerate(COUNTS):
        rows = slice(begin, begin + count)
        w = wo.dequantize(a["qweight"][e], a["scales"][e]).double()
        y[rows] = (a["x"][rows].double() @ w) * a["x_scales"][rows].double()[:, None] + a["bias"][e].double()
        begin += count
    return y


@pytest.mark.parametrize("layout", ["tiled_fp8", "tiled", "cpu"])
@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_exact(format: str, layout: str, generator: torch.Generator) -> None:
    a = good(generator, format, layout)
    y = wo.grouped_gemm(**a)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected(a).bfloat16())
    out = torch.full_like(y, float("nan"))
    operand = wo.QuantizedWeight(a["qweight"], a["scales"])
    named = {name: a[name] for name in ("offs", "x_scales", "bias")}
    assert wo.grouped_gemm(a["x"], operand, **named, out=out) is out and torch.equal(out, y)
    silu = wo.grouped_gemm(**a, activation="silu")
    assert torch.allclose(silu.double(), torch.nn.functional.silu(expected(a)), rtol=2**-7)
    none = wo.grouped_gemm(**a | {"x": a["x"][:0], "x_scales": a["x_scales"][:0], "offs": ends([0, 0, 0, 0])})
    assert none.shape == (0, 40) and none.dtype == torch.bfloat16


def test_torch_compile_traces_it(generator: torch.Generator) -> None:
    a = good(generator)
    x, x_scales = a.pop("x").bfloat16(), a.pop("x_scales")

    def product(x: torch.Tensor) -> torch.Tensor:
        x8, scales = wo.quantize_activations(x)
        return wo.grouped_gemm(x8, x_scales=scales * x_scales, **a)

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), product(x))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no x_scales": ({"x_scales": None}, TypeError, "got torch.float8_e4m3fn; x_scales= takes its scales"),
    "x in 16 bits": ({"x": torch.ones(74, 192).half()}, TypeError, "x: expected dtype torch.float8_e4m3fn beside"),
    "of another shape": ({"x_scales": torch.ones(73)}, ValueError, r"x_scales: expected shape \[74\], a scale for"),
    "of 16 bits": ({"x_scales": torch.ones(74).half()}, TypeError, r"x_scales: expected dtype torch\.float32"),
    "no tensor": ({"x_scales": 1.0}, TypeError, "x_scales: expected a tensor, got float"),
    "a gradient": ({"x_scales": torch.ones(74, requires_grad=True)}, ValueError, "x_scales: expected a tensor that"),
    "zeros": ({"zeros": torch.zeros(4, 3, 40).bfloat16()}, ValueError, "zeros: expected None in layout 'tiled_fp8'"),
    "offs": ({"offs": ends([1, 2])}, ValueError, r"offs: expected shape \[E\] = \[4\], got \[2\]"),
    "out": ({"out": torch.empty(74, 40)}, TypeError, r"out: expected dtype torch\.bfloat16 as scales have"),
    "config": ({"config": 1}, TypeError, "config: expected a KernelConfig"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused(case: str, generator: torch.Generator) -> None:
    changed, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        wo.grouped_gemm(**good(generator, **changed))


def stack(k: int, n: int, format: str, g: torch.Generator) -> wo.QuantizedWeight:
    """4 experts, groups of 32."""
    q = random_stack(4, k, n, "code4" if format == "mxfp4" else format, g)
    scales = torch.exp2(torch.randint(-6, -3, (4, k // 32, n), generator=g).float()).bfloat16()
    return wo.QuantizedWeight(wo.preprocess(q, format=format, layout="tiled_fp8"), scales)


@pytest.mark.parametrize(("activation", "columns"), [("silu", 64), ("swigluoai", 64), ("relu2", 32)])
@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_layer(format: str, activation: str, columns: int, generator: torch.Generator) -> None:
    """Beside each token's experts, one after another; some choices are of none."""
    w13, w2 = stack(160, columns, format, generator), stack(32, 160, format, generator)
    bias = torch.randn(4, columns, generator=generator).bfloat16()
    gate = Gate.of(activation, has_gate=columns == 64)
    x8, x_scales = wo.quantize_activations(torch.randn(9, 160, generator=generator).bfloat16())
    ids = torch.randint(-1, 4, (9, 3), generator=generator)
    weights = torch.rand(9, 3, generator=generator)
    y = wo.fused_experts(x8, (w13, bias), w2, ids, weights, activation, x_scales=x_scales)
    assert y.shape == (9, 160) and y.dtype == torch.bfloat16
    for m, row in enumerate(y):
        total = torch.zeros(160)
        for e, weight in zip(ids[m].tolist(), weights[m], strict=True):
            if e >= 0:
                z = wo.gemm(x8[m : m + 1], w13.expert(e), bias=bias[e], x_scales=x_scales[m : m + 1])
                between, scales = wo.quantize_activations(gate(z))
                total += wo.gemm(between, w2.expert(e), x_scales=scales)[0].float() * weight
        torch.testing.assert_close(row.float(), total, rtol=2**-7, atol=2e-3)


def test_layers_that_are_refused(generator: torch.Generator) -> None:
    w13, w2 = stack(160, 64, "int4", generator), stack(32, 160, "int4", generator)
    x8, x_scales = wo.quantize_activations(torch.randn(3, 160, generator=generator).bfloat16())
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(TypeError, match=r"x: expected dtype .* got torch\.float8_e4m3fn"):
        wo.fused_experts(x8, w13, w2, ids, weights)
    with pytest.raises(TypeError, match=r"w13: x: expected dtype torch\.float8_e4m3fn beside x_scales, got"):
        wo.fused_experts(x8.bfloat16(), w13, w2, ids, weights, x_scales=x_scales)
    with pytest.raises(ValueError, match=r"w13: x_scales: expected shape \[3\], a scale for each row, got \[2\]"):
        wo.fused_experts(x8, w13, w2, ids, weights, x_scales=x_scales[:2])
    with pytest.raises(ValueError, match="w2: expected 4 experts with N = 160"):
        wo.fused_experts(x8, w13, stack(32, 128, "int4", generator), ids, weights, x_scales=x_scales)


@pytest.mark.parametrize("columns", [160, 159])
def test_layer_of_an_x_in_the_middle_of_others(columns: int, generator: torch.Generator) -> None:
    w13, w2 = (
        wo.QuantizedWeight(
            wo.preprocess(random_stack(4, k, n, "int4", generator), layout="tiled_fp8"), torch.ones(4, 1, n).bfloat16()
        )
        for k, n in ((columns, 64), (32, columns))
    )
    rows, x_scales = wo.quantize_activations(torch.randn(5, 200, generator=generator).bfloat16())
    ids, weights = torch.randint(0, 4, (5, 2), generator=generator), torch.rand(5, 2, generator=generator)
    x8 = rows[:, 3 : 3 + columns]
    assert not x8.is_contiguous() and x8.storage_offset() % 2
    y = wo.fused_experts(x8, w13, w2, ids, weights, x_scales=x_scales)
    assert torch.equal(y, wo.fused_experts(x8.contiguous(), w13, w2, ids, weights, x_scales=x_scales))


@pytest.mark.parametrize("kind", GONE)
@pytest.mark.parametrize("name", ["x", "scales", "offs", "x_scales", "bias"])
def test_memory_that_is_gone_is_refused(name: str, kind: str, generator: torch.Generator) -> None:
    a = good(generator)
    wo.grouped_gemm(**a)
    with pytest.raises(ValueError, match=f"^{name}: expected memory"):
        wo.grouped_gemm(**a | {name: GONE[kind](a[name])})


@pytest.mark.parametrize("kind", GONE)
@pytest.mark.parametrize("name", ["x", "x_scales"])
def test_layers_of_memory_that_is_gone_are_refused(name: str, kind: str, generator: torch.Generator) -> None:
    w13, w2 = stack(160, 64, "int4", generator), stack(32, 160, "int4", generator)
    x8, x_scales = wo.quantize_activations(torch.randn(3, 160, generator=generator).bfloat16())
    a: dict[str, Any] = {"x": x8, "w13": w13, "w2": w2, "x_scales": x_scales, "topk_weights": torch.ones(3, 1)}
    a["topk_ids"] = torch.zeros(3, 1, dtype=torch.int64)
    wo.fused_experts(**a)
    with pytest.raises(ValueError, match=f"{name}: expected memory"):
        wo.fused_experts(**a | {name: GONE[kind](a[name])})
