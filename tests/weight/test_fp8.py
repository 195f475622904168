"""Weights of 8-bit floats: packed and unpacked, multiplied, quantized, kept in files and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly.args import GemmArgs
from weightonly.heuristics import Problem, candidates, select
from weightonly.layout import CODE_LAYOUTS
from weightonly.plan.unfused import UnfusedPlan
from weightonly.weight import QuantizedWeight

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def numbers(k: int, n: int, g: torch.Generator) -> torch.Tensor:
    """Any bits but those of NaN."""
    bits = torch.randint(0, 256, (k, n), dtype=torch.uint8, generator=g)
    bits[(bits & 0x7F) == 0x7F] = 0x80
    return bits.view(E4M3)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("layout", CODE_LAYOUTS)
@pytest.mark.parametrize("size", [(64, 64), (200, 33), (65, 1)], ids=str)
def test_unpacked_is_what_was_packed(layout: str, size: tuple[int, int], generator: torch.Generator) -> None:
    q = numbers(*size, generator)
    packed = wo.preprocess(q, format="fp8", layout=layout)
    assert (packed.bits, packed.format, packed.code) == (8, "fp8", None)
    assert same_bits(wo.unpack(packed), q)
    assert same_bits(wo.unpack(wo.repack(packed, "cpu")), q)
    other = numbers(*size, generator)
    stack = wo.preprocess(torch.stack([q, other]), format="fp8", layout=layout)
    assert same_bits(wo.unpack(stack), torch.stack([q, other]))
    assert same_bits(stack[1].data, wo.preprocess(other, format="fp8", layout=layout).data)


@pytest.mark.parametrize("layout", ["tiled", "cpu"])
def test_slices_are_what_packing_them_gives(layout: str, generator: torch.Generator) -> None:
    q = numbers(256, 192, generator)
    packed = wo.preprocess(q, format="fp8", layout=layout)
    assert torch.equal(packed.slice_n(64, 192).data, wo.preprocess(q[:, 64:], format="fp8", layout=layout).data)
    assert torch.equal(packed.slice_k(128, 256).data, wo.preprocess(q[128:], format="fp8", layout=layout).data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 128, -1])
def test_product_against_fp64(device: str, dtype: torch.dtype, group: int, generator: torch.Generator) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("16 bits on a GPU")
    k, n = 384, 70
    q = numbers(k, n, generator)
    groups = 1 if group == -1 else k // group
    scales = (torch.rand(groups, n, generator=generator) * 0.01 + 0.001).to(dtype)
    w64 = (q.double().unflatten(0, (groups, -1)) * scales.double()[:, None]).flatten(0, 1)
    bias = torch.randn(n, generator=generator).to(dtype)
    for layout in ("tiled", "interleaved") + ("cpu",) * (device == "cpu"):
        packed = wo.preprocess(q.to(device), format="fp8", layout=layout)
        dense = wo.dequantize(packed, scales.to(device))
        assert torch.equal(dense.cpu(), w64.float().to(dtype))
        for m in (1, 3, 40):
            x = torch.randn(m, k, generator=generator).to(dtype)
            y = wo.gemm(x.to(device), packed, scales.to(device), bias=bias.to(device), activation="silu").cpu()
            z = x.double() @ w64 + bias.double()
            expected = z * z.sigmoid()
            rounded = torch.nn.functional.silu(x.float() @ w64.to(dtype).float() + bias.float()).to(dtype)
            own, error = (rounded.double() - expected).norm(), (y.double() - expected).norm()
            assert error <= 2 * own + 1e-6 * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plan_of_gpus_multiplies_by_dequantized_slices(dtype: torch.dtype, generator: torch.Generator) -> None:
    packed = wo.preprocess(numbers(128, 96, generator), format="fp8", layout="tiled")
    scales = torch.rand(2, 96, generator=generator).to(dtype)
    x, bias = torch.randn(5, 128, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    args = GemmArgs(x, QuantizedWeight(packed, scales), bias, "relu")
    y = UnfusedPlan(args, None).run(args)
    assert torch.equal(y, torch.addmm(bias, x, wo.dequantize(packed, scales)).relu())


def test_no_kernel_of_a_gpu_is_asked_before_one_has_run(no_floats: None) -> None:
    problem = Problem(4, 128, 128, "fp8", 128, 90, 132)
    assert candidates(problem) == []
    with pytest.raises(ValueError, match="format: no kernel that a GPU has run multiplies by fp8 in groups of 128"):
        select(problem)
    shown = str(wo.explain(k=256, n=256, format="fp8", m=4, arch="sm90"))
    assert "fp8 is dequantized, slice after slice, and cuBLAS multiplies" in shown


def test_experts_and_gradients(generator: torch.Generator) -> None:
    q = torch.stack([numbers(64, 48, generator) for _ in range(3)])
    scales = torch.rand(3, 1, 48, generator=generator)
    w = QuantizedWeight(wo.preprocess(q, format="fp8"), scales)
    x = torch.randn(7, 64, generator=generator, requires_grad=True)
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)
    y = wo.grouped_gemm(x, w, offs=offs)
    dense = w.dequantize()
    expected = torch.cat([x[:2] @ dense[0], x[2:] @ dense[2]])
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    y.sum().backward()
    torch.testing.assert_close(
        x.grad, torch.cat([dense[0].sum(1).expand(2, -1), dense[2].sum(1).expand(5, -1)]), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_quantized_is_the_nearest_number(dtype: torch.dtype, size: float, generator: torch.Generator) -> None:
    w = (torch.randn(256, 40, generator=generator) * size).clamp(-65000, 65000).to(dtype)
    w[:128, 0] = 0
    q, scales, zeros = wo.quantize(w, format="fp8", group_size=64)
    assert zeros is None and q.dtype == E4M3 and scales.dtype == dtype and scales.shape == (4, 40)
    scaled = w.double().view(4, 64, 40) / scales.double()[:, None]
    table = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    table = table[table.isfinite()].unique()
    nearest = (scaled[..., None] - table).abs().amin(-1)
    torch.testing.assert_close((scaled - q.double().view(4, 64, 40)).abs(), nearest, rtol=1e-5, atol=1e-5)
    assert not q[:128, 0].float().any() and (scales[:2, 0] == 1).all()
    assert wo.dequantize(wo.preprocess(q, format="fp8"), scales).isfinite().all()


@pytest.mark.parametrize("peak", [65504.0, 60000.0])
def test_largest_numbers_of_fp16_stay_finite(peak: float) -> None:
    w = torch.full((64, 8), peak, dtype=torch.float16)
    q, scales, _ = wo.quantize(w, format="fp8", group_size=64)
    back = wo.dequantize(wo.preprocess(q, format="fp8"), scales)
    assert back.isfinite().all() and ((back - w).abs() <= 2**-9 * w).all()


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "nan": (torch.full((4, 4), float("nan")).to(E4M3), {}, ValueError, "q: expected numbers for fp8, got NaN"),
    "int8": (
        torch.zeros(4, 4, dtype=torch.int8),
        {},
        TypeError,
        "q: expected dtype torch.float8_e4m3fn, got torch.int8",
    ),
    "e5m2": (torch.zeros(4, 4).to(torch.float8_e5m2), {}, TypeError, "q: .*e4m3fn, got torch.float8_e5m2"),
    "fnuz": (torch.zeros(4, 4).to(torch.float8_e4m3fnuz), {}, TypeError, "q: .*e4m3fn, got torch.float8_e4m3fnuz"),
    "bits": (torch.zeros(4, 4).to(E4M3), {"bits": 4}, ValueError, "bits: expected 8 for fp8, got 4"),
    "zeros": (torch.zeros(4, 4).to(E4M3), {"zeros": True}, ValueError, "zeros: expected False or None for fp8"),
    "layout": (torch.zeros(4, 4).to(E4M3), {"layout": "row_major"}, ValueError, "layout: expected .*got 'row_major'"),
    "arch": (torch.zeros(4, 4).to(E4M3), {"arch": 70}, ValueError, "arch: expected .* for fp8"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input(what: str) -> None:
    q, arguments, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        wo.preprocess(q, format="fp8", **arguments)


def test_zero_points_are_refused(generator: torch.Generator) -> None:
    packed, scales = wo.preprocess(numbers(64, 64, generator), format="fp8"), torch.ones(1, 64)
    with pytest.raises(ValueError, match="zeros: expected None for a weight of format fp8"):
        wo.gemm(torch.ones(1, 64), packed, scales, zeros=scales)
    with pytest.raises(ValueError, match="symmetric: expected True for fp8"):
        wo.quantize(torch.ones(64, 64), format="fp8", symmetric=False)
    with pytest.raises(ValueError, match="has_zeros: expected False or None for fp8"):
        wo.PackedWeight(packed.data, 64, 64, "fp8", packed.layout, has_zeros=True)


def test_files_and_layers(tmp_path: Path, generator: torch.Generator) -> None:
    packed = wo.preprocess(numbers(128, 64, generator), format="fp8", group_size=32)
    packed.save(tmp_path / "w.safetensors")
    loaded = wo.PackedWeight.load(tmp_path / "w.safetensors")
    assert loaded.fields == packed.fields and torch.equal(loaded.data, packed.data)
    dense = torch.nn.Linear(256, 96)
    layer = wo.nn.Linear.from_linear(dense, format="fp8")
    x = torch.randn(5, 256, generator=generator)
    assert (layer(x) - dense(x)).norm() < 0.03 * dense(x).norm()
    other = wo.nn.Linear(256, 96, format="fp8", dtype=torch.float32)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    before = layer.dequantize()
    assert torch.equal(layer.repack("sm90").dequantize(), before)
    w = torch.randn(96, 256, generator=generator)
    layer.update_(w, torch.zeros(96))
    q, scales, _ = wo.quantize(w.t().contiguous(), format="fp8")
    assert torch.equal(layer.dequantize(), wo.dequantize(wo.preprocess(q, format="fp8"), scales))
    model = wo.nn.quantize_model(torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 64)), format="fp8")
    assert [child.format for child in model.children()] == ["fp8", "fp8"]
