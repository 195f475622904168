"""`dequantize` and `gemm` of weights of codes."""

from __future__ import annotations

import re

import pytest
import torch
from tests.code_cases import FORMATS, codebook_of, dtypes, formats, packed, random_codes

import weightonly as wo
from weightonly.nn import Linear


def exact(codes: torch.Tensor, format: str, scales: torch.Tensor) -> torch.Tensor:
    """The weight in fp64, [K, N]."""
    group = codes.shape[0] // scales.shape[0]
    return codebook_of(format).double()[codes.long()] * scales.double().repeat_interleave(group, 0)


@formats
@dtypes
@pytest.mark.parametrize(("k", "n", "group_size"), [(128, 64, 32), (100, 77, 100), (65, 1, 13), (1, 130, 1)], ids=str)
def test_dequantize(
    format: str, dtype: torch.dtype, k: int, n: int, group_size: int, generator: torch.Generator
) -> None:
    codes = random_codes(k, n, generator)
    scales = (torch.rand(k // group_size, n, generator=generator) + 0.5).to(dtype)
    w = wo.dequantize(packed(codes, format), scales)
    assert w.dtype == dtype and w.shape == (k, n)
    in_fp32 = codebook_of(format)[codes.long()] * scales.float().repeat_interleave(group_size, 0)
    assert torch.equal(w, in_fp32.to(dtype))


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 256])
def test_dequantize_is_that_of_bitsandbytes(format: str, blocksize: int, generator: torch.Generator) -> None:
    """Bit for bit in fp32. bitsandbytes has [N, K], blocks along K, and the first code in the high nibble."""
    functional = pytest.importorskip("bitsandbytes.functional")
    n, k = 72, 512
    data, state = functional.quantize_4bit(
        torch.randn(n, k, generator=generator), blocksize=blocksize, quant_type=format
    )
    codes = torch.stack((data.flatten() >> 4, data.flatten() & 15), -1).view(n, k).t()
    scales = state.absmax.view(n, k // blocksize).t()
    assert torch.equal(wo.dequantize(packed(codes, format), scales), functional.dequantize_4bit(data, state).t())


@formats
@dtypes
@pytest.mark.parametrize("group_size", [16, 32, 64, 192])
def test_gemm_against_fp64(format: str, dtype: torch.dtype, group_size: int, generator: torch.Generator) -> None:
    codes = random_codes(192, 77, generator)
    scales = (torch.rand(192 // group_size, 77, generator=generator) + 0.5).to(dtype)
    x = (torch.randn(2, 3, 192, generator=generator) / 16).to(dtype)
    bias = torch.randn(77, generator=generator).to(dtype)
    w = exact(codes, format, scales)
    y = wo.gemm(x, packed(codes, format), scales, bias=bias, activation="relu")
    expected = torch.relu(x.double() @ w + bias.double())
    magnitude = x.double().abs() @ w.abs() + bias.double().abs()
    # w, fp32 sums in proportion to the sum of magnitudes, and the result rounded once
    tolerance = 1.2 * magnitude * 192 * 2**-24 + expected.abs() * torch.finfo(dtype).eps * 0.51
    assert y.dtype == dtype and y.shape == (2, 3, 77)
    assert ((y.double() - expected).abs() <= tolerance).all()


def test_gemm_is_exact_on_a_grid(generator: torch.Generator) -> None:
    """A codebook of small integers and scales of powers of two: every sum is exact in fp32."""
    codes = random_codes(256, 130, generator)
    weight = wo.preprocess(codes, format="code4", code=torch.arange(-8.0, 8.0))
    scales = torch.exp2(torch.randint(-2, 3, (4, 130), generator=generator).float()).half()
    x = torch.randint(-3, 4, (9, 256), generator=generator).half()
    same = wo.preprocess(codes.to(torch.int8) - 8, layout="tiled")
    assert torch.equal(wo.gemm(x, weight, scales), wo.gemm(x, same, scales))


def test_compiled_and_recorded_functions(generator: torch.Generator) -> None:
    codes = random_codes(128, 72, generator)
    scales = torch.rand(2, 72, generator=generator)
    x = torch.randn(3, 128, generator=generator)
    for format in FORMATS:
        weight = packed(codes, format)
        expected = wo.gemm(x, weight, scales)
        function = torch.compile(
            lambda x, weight=weight: wo.gemm(x, weight, scales) + 1, fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(function(x), expected + 1)
        assert torch.equal(wo.gemm(x.clone().requires_grad_(), weight, scales), expected)


@formats
def test_zeros_of_a_codebook_are_refused(format: str, generator: torch.Generator) -> None:
    weight = packed(random_codes(128, 72, generator), format)
    scales = torch.ones(2, 72)
    message = f"zeros: expected None for a weight of format {format}, got Tensor"
    with pytest.raises(ValueError, match=message):
        wo.gemm(torch.ones(1, 128), weight, scales, zeros=scales)
    with pytest.raises(ValueError, match=message):
        wo.dequantize(weight, scales, scales)
    with pytest.raises(ValueError, match=message):
        Linear.from_quantized(weight, scales, scales)


@pytest.mark.parametrize("group_size", [8, 48, 96])
def test_group_sizes_are_those_of_integers(group_size: int, generator: torch.Generator) -> None:
    weight = packed(random_codes(192, 72, generator), "nf4")
    with pytest.raises(ValueError, match=f"scales: .*group_size must be .*got {group_size}"):
        wo.gemm(torch.ones(1, 192), weight, torch.ones(192 // group_size, 72))


@pytest.mark.gpu
def test_a_gpu_without_kernels_for_codebooks_says_so(cuda_device: torch.device, generator: torch.Generator) -> None:
    major, minor = torch.cuda.get_device_capability(cuda_device)
    if (major, minor) == (9, 0):
        pytest.skip("Hopper has them")
    weight = packed(random_codes(128, 64, generator), "nf4").to(cuda_device)
    x, scales = torch.ones(1, 128, device=cuda_device).half(), torch.ones(2, 64, device=cuda_device).half()
    with pytest.raises(ValueError, match=re.escape("qweight: packed in layout 'tiled', but a GPU of compute")):
        wo.gemm(x, weight, scales)
