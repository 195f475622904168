"""mxfp4 and nvfp4: E2M1 codes, their scales, `quantize`, `gemm` and `Linear`; and groups of 16."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.code_cases import DTYPES, dtypes

import weightonly as wo
from weightonly.codebooks import CODEBOOKS, E2M1
from weightonly.heuristics import Problem, select
from weightonly.nn import Linear, quantize_model
from weightonly.nn.grouped import GroupedLinear
from weightonly.quantize_codes import check_scales_as, power_of_two

GROUPS = {"mxfp4": 32, "nvfp4": 16}
MAGNITUDES = torch.tensor(E2M1, dtype=torch.float64)

both = pytest.mark.parametrize("format", GROUPS)


def random_weight(k: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Columns of sizes from 2^-8 to 1, one group of zeros, one of subnormal numbers."""
    w = torch.randn(k, n, generator=generator) * torch.exp2(-8 * torch.rand(1, n, generator=generator))
    w[:32, 0] = 0
    w[:32, 1] *= 2.0**-20
    return w.to(dtype)


def spread(scales: torch.Tensor, k: int) -> torch.Tensor:
    """fp64 [K, N]"""
    return scales.double().repeat_interleave(k // len(scales), 0)


def nearest_codes(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The code of each weight by comparison with all numbers, ties to the even one; int64 [K, N]."""
    distance = (w.double().abs().unsqueeze(-1) - MAGNITUDES * spread(scales, len(w)).unsqueeze(-1)).abs()  # [K, N, 8]
    odd = torch.arange(8) % 2
    is_least = distance == distance.amin(-1, keepdim=True)
    magnitude = torch.where(is_least, odd, 2).argmin(-1)
    return magnitude + 8 * w.signbit()


def squares(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The squared error of each group, [K / 32, N]."""
    codes = nearest_codes(w, scales) % 8
    error = w.double().abs() - MAGNITUDES[codes] * spread(scales, len(w))
    return (error**2).unflatten(0, (len(scales), -1)).sum(1)


@both
@dtypes
def test_codes_are_the_nearest(format: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    w = random_weight(192, 24, dtype, generator)
    q, scales, zeros = wo.quantize(w, format=format)
    assert zeros is None and q.dtype == torch.int8 and scales.dtype == dtype
    assert scales.shape == (192 // GROUPS[format], 24)
    assert torch.equal(q.long(), nearest_codes(w, scales))


@both
def test_ties_go_to_the_even_code(format: str) -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    w = torch.zeros(32, 2)
    w[: len(middles), 0], w[: len(middles), 1] = middles, -middles
    w[[8, 24]] = 6.0  # the largest of each group: scales are 1
    q, scales, _ = wo.quantize(w, format=format, search=False)
    assert (scales == 1).all()
    assert q[:7, 0].tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert q[:7, 1].tolist() == [8, 10, 10, 12, 12, 14, 14]


@dtypes
def test_scales_of_mxfp4_are_the_better_powers_of_two(dtype: torch.dtype, generator: torch.Generator) -> None:
    w = random_weight(128, 40, dtype, generator)
    _, scales, _ = wo.quantize(w, format="mxfp4")
    peak = w.double().abs().unflatten(0, (-1, 32)).amax(1)
    ocp = torch.exp2(torch.floor(torch.log2(peak)) - 2).clamp(min=2.0**-23 if dtype == torch.float16 else 2.0**-127)
    least = torch.minimum(squares(w, ocp), squares(w, 2 * ocp))
    is_zero = peak == 0
    assert (scales[is_zero] == 1).all()
    assert (torch.frexp(scales.double()).mantissa == 0.5).all()
    torch.testing.assert_close(squares(w, scales)[~is_zero], least[~is_zero], rtol=1e-6, atol=0)


@dtypes
@pytest.mark.parametrize("search", [True, False], ids=["search", "largest"])
def test_scales_of_nvfp4_are_numbers_of_e4m3(dtype: torch.dtype, search: bool, generator: torch.Generator) -> None:
    """Times one power of two, exactly; the largest is in the upper half of what E4M3 has, or 4 / 6 of that."""
    w = random_weight(128, 40, dtype, generator)
    _, scales, _ = wo.quantize(w, format="nvfp4", search=search)
    factor = 2.0 ** (torch.ceil(torch.log2(w.double().abs().max() / ((4 if search else 6) * 448)))).item()
    of_e4m3 = (scales.double() / factor).float()
    assert torch.equal(of_e4m3.to(torch.float8_e4m3fn).float(), of_e4m3)
    peak = w.double().abs().unflatten(0, (-1, 16)).amax(1)
    normal = peak / 6 / factor >= 2.0**-6  # below, E4M3 has fewer bits
    of_peak = (scales.double() / peak * 6)[normal]
    if search:
        assert of_e4m3.max() <= 448 and (of_peak > 0.7).all() and 1.4 < of_peak.max() < 2  # peaks of code 6 to 4
    else:
        assert 224 <= of_e4m3.max() <= 448 and ((of_peak - 1).abs() <= 2.0**-4 * 1.001).all()


@dtypes
def test_what_mxfp4_represents_is_given_back(dtype: torch.dtype, generator: torch.Generator) -> None:
    codes = torch.randint(0, 16, (160, 24), generator=generator)
    scales = power_of_two(torch.randint(-12, 12, (5, 24), generator=generator).int()).to(dtype)
    w = wo.dequantize(wo.preprocess(codes.to(torch.int8), format="mxfp4"), scales)
    assert torch.equal(w.double(), torch.tensor(CODEBOOKS["mxfp4"]).double()[codes] * spread(scales, 160))
    q, again, _ = wo.quantize(w, format="mxfp4")
    assert torch.equal(wo.dequantize(wo.preprocess(q, format="mxfp4"), again), w)


@both
@dtypes
@pytest.mark.parametrize("size", ["largest", "smallest", "mixed", "zeros"])
def test_extremes_of_the_dtype(format: str, dtype: torch.dtype, size: str, generator: torch.Generator) -> None:
    info = torch.finfo(dtype)
    sign = torch.randint(0, 2, (64, 16), generator=generator) * 2.0 - 1
    smallest = info.smallest_normal * info.eps
    w = {
        "largest": sign * info.max,
        "smallest": sign * smallest,
        "mixed": torch.where(sign > 0, torch.full_like(sign, info.max), torch.full_like(sign, smallest)),
        "zeros": sign * 0,
    }[size].to(dtype)
    q, scales, _ = wo.quantize(w, format=format)
    packed = wo.preprocess(q, format=format)
    found = wo.dequantize(packed, scales)
    assert found.isfinite().all() and scales.isfinite().all() and (scales > 0).all()
    if size == "zeros":
        assert (found == 0).all()
    if size == "largest":  # two levels next to each other are a factor of 1.5 apart, and the upper one may be infinite
        assert ((found.double() / w.double() - 1).abs() <= 0.25).all()
    exact = torch.tensor(CODEBOOKS[format]).double()[q.long()] * spread(scales, 64)
    if format == "mxfp4":
        assert torch.equal(found.double(), exact)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_gemm_is_exact_on_a_grid(format: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Halves times powers of two times small integers: every sum is exact in fp32, and each y in 11 bits or fewer."""
    k, n, m = 96, 70, 5
    codes = torch.randint(0, 16, (k, n), generator=generator)
    codes[torch.rand(k, n, generator=generator) < 0.9] = 0
    scales = power_of_two(torch.randint(-1, 1, (k // GROUPS[format], n), generator=generator).int()).to(dtype)
    x = torch.randint(-1, 2, (m, k), generator=generator).to(dtype)
    bias = torch.randint(-3, 4, (n,), generator=generator).to(dtype)
    w = torch.tensor(CODEBOOKS[format]).double()[codes] * spread(scales, k)
    out = torch.full((m, n), float("nan"), dtype=dtype)
    y = wo.gemm(x, wo.preprocess(codes.to(torch.int8), format=format), scales, bias=bias, out=out)
    assert y is out
    assert torch.equal(y, (x.double() @ w + bias.double()).to(dtype))


@dtypes
@pytest.mark.parametrize("kind", ["int4", "int4 with zeros", "int4 in act-order", "int8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("layout", ["row_major", "interleaved", "tiled"])
def test_gemm_against_fp64(kind: str, dtype: torch.dtype, layout: str, generator: torch.Generator) -> None:
    """Integers in groups of 16, and both formats."""
    format = kind.split()[0]
    if format in GROUPS and layout == "row_major":
        pytest.skip("codes have no such layout")
    k, n = 208 if format != "mxfp4" else 224, 77
    w = torch.randn(k, n, generator=generator).to(dtype)
    group = GROUPS.get(format, 16)
    q, scales, zeros = wo.quantize(w, format=format, group_size=group, symmetric="zeros" not in kind)
    packed = wo.preprocess(q, 8 if format == "int8" else 4, layout=layout, format=format, group_size=group)
    perm = torch.randperm(k, generator=generator) if "order" in kind else None
    x = (torch.randn(2, 3, k, generator=generator) / 16).to(dtype)
    values = torch.tensor(CODEBOOKS[format]).double()[q.long()] if format in GROUPS else q.double()
    w64 = (values - (0 if zeros is None else spread(zeros, k))) * spread(scales, k)
    out = torch.full((2, 3, n), float("nan"), dtype=dtype)
    wo.gemm(x, packed, scales, zeros=zeros, perm=perm, activation="relu", out=out)
    x64 = x.double() if perm is None else x.double()[..., perm]
    expected = torch.relu(x64 @ w64)
    # w, fp32 sums in proportion to the sum of magnitudes, and the result rounded once
    tolerance = 1.2 * (x64.abs() @ w64.abs()) * k * 2**-24 + expected * torch.finfo(dtype).eps * 0.51
    assert ((out.double() - expected).abs() <= tolerance).all()
    assert torch.equal(wo.unpack(packed), q)
    torch.testing.assert_close(
        wo.dequantize(packed, scales, zeros).double(), w64, rtol=torch.finfo(dtype).eps, atol=1e-6
    )


# --- layers -----------------------------------------------------------------------------------------------------


@both
def test_layer_round_trip(format: str, tmp_path: Path, generator: torch.Generator) -> None:
    dense = torch.nn.Linear(96, 40)
    dense.weight.data = torch.randn(40, 96, generator=generator) / 8
    layer = Linear.from_linear(dense, format=format, dtype=torch.bfloat16)
    assert layer.group_size == GROUPS[format] and set(layer.state_dict()) == {"qweight", "scales", "bias"}
    q, scales, _ = wo.quantize(dense.weight.detach().t(), format=format)
    assert torch.equal(layer.packed.data, wo.preprocess(q, format=format).data)
    assert torch.equal(layer.scales.float(), scales.float())  # powers of two, and numbers of 4 bits: exact
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = Linear(96, 40, format=format, dtype=torch.bfloat16)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    x = torch.randn(3, 96, generator=generator).bfloat16()
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer).half().float().scales, layer.scales.float())
    wo.save(tmp_path / "packed.safetensors", {"w": layer.packed, "scales": layer.scales})
    loaded = wo.load(tmp_path / "packed.safetensors")["w"]
    assert isinstance(loaded, wo.PackedWeight) and loaded.fields == layer.packed.fields
    assert torch.equal(Linear.from_quantized(loaded, layer.scales, bias=layer.bias)(x), layer(x))
    layer.requantize(layer.dequantize(torch.float32))
    if format == "mxfp4":
        assert torch.equal(layer.dequantize(), other.dequantize())
    assert layer.repack("sm90").layout == "tiled"


@both
def test_quantize_model(format: str, generator: torch.Generator) -> None:
    head = torch.nn.Linear(40, 8)
    model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.ReLU(), torch.nn.Linear(64, 40), head)
    x = torch.randn(4, 96, generator=generator)
    quantized = quantize_model(copy.deepcopy(model), format=format)
    assert isinstance(quantized, torch.nn.Sequential)
    first, _, second, last = quantized
    assert isinstance(first, Linear) and isinstance(second, Linear)
    assert first.format == second.format == format
    assert type(last) is torch.nn.Linear  # K = 40 is no multiple of 16
    assert first.bias is not None and second.bias is not None
    expected = head(torch.relu(x @ first.dequantize() + first.bias) @ second.dequantize() + second.bias)
    torch.testing.assert_close(quantized(x), expected, rtol=1e-4, atol=1e-4)
    with torch.device("meta"):
        empty = torch.nn.Sequential(
            *(torch.nn.Linear(*s) if s else torch.nn.ReLU() for s in ((96, 64), (), (64, 40), (40, 8)))
        )
    again = quantize_model(empty, format=format)
    again.load_state_dict(quantized.state_dict(), assign=True)
    assert torch.equal(again(x), quantized(x))


@both
def test_grouped(format: str, generator: torch.Generator) -> None:
    w = torch.randn(3, 64, 40, generator=generator)
    parts = [wo.quantize(one, format=format) for one in w]
    q, scales = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    packed = wo.preprocess(q, format=format)
    x, offs = torch.randn(7, 64, generator=generator), torch.tensor([2, 2, 7], dtype=torch.int32)
    y = wo.grouped_gemm(x, packed, scales, offs)
    dense = wo.dequantize(packed, scales)
    torch.testing.assert_close(y, torch.cat([x[:2] @ dense[0], x[2:] @ dense[2]]), rtol=1e-4, atol=1e-4)
    layer = GroupedLinear.from_quantized(packed, scales)
    assert torch.equal(layer(x, offs), y)
    assert GroupedLinear(3, 64, 40, format=format).group_size == GROUPS[format]
    assert packed.slice_n(0, 40).group_size == packed.slice_k(0, 64).group_size == GROUPS[format]


def test_gradients_in_groups_of_16(generator: torch.Generator) -> None:
    q, scales, zeros = wo.quantize(torch.randn(64, 24, generator=generator), 4, 16, False)
    packed = wo.preprocess(q, 4, group_size=16, zeros=True)
    x = torch.randn(3, 64, generator=generator, requires_grad=True)
    wo.gemm(x, packed, scales, zeros=zeros).sum().backward()
    expected = wo.dequantize(packed, scales, zeros).sum(1).expand(3, 64)
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)


# --- which GPUs compute it --------------------------------------------------------------------------------------


def test_hopper_computes_mxfp4_by_the_kernels_of_codes() -> None:
    config = select(16, 4096, 4096, "mxfp4", 32, 90, 132)
    assert "code4" in config.formats and config.layout == "tiled"
    assert config == select(16, 4096, 4096, "code4", 32, 90, 132)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nvfp4", 32), "group_size must be 16 for nvfp4, got 32"),
        (("int4", 48), "group_size must be .*; got 48"),
        (("mxfp4", 64), "group_size must be 32 for mxfp4, got 64"),
        (("mxfp4", -1), "group_size must be 32 for mxfp4, got -1"),
    ],
    ids=lambda a: " ".join(map(str, a)) if isinstance(a, tuple) else "",
)
def test_what_no_kernel_computes(arguments: tuple[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(1, 64, 128, *arguments, 90, 132)


def test_layers_for_a_gpu_that_does_not_compute_them(no_groups_of_16: None) -> None:
    linear = torch.nn.Linear(64, 64)
    with pytest.raises(ValueError, match="on a GPU; got 16"):
        Linear.from_linear(linear, format="nvfp4", arch="sm90")
    with pytest.raises(ValueError, match="on a GPU; got 16"):
        Linear.from_linear(linear, format="int4", group_size=16, arch="sm80")
    with pytest.raises(ValueError, match=r"arch: expected sm75 .*for mxfp4.* got 'sm70'"):
        quantize_model(linear, format="mxfp4", arch="sm70")


@pytest.mark.gpu
def test_groups_of_16_on_a_gpu_are_refused(cuda_device: torch.device, no_groups_of_16: None) -> None:
    packed = wo.preprocess(torch.zeros(64, 64, dtype=torch.int8), 4).to(cuda_device)
    x, scales = torch.ones(1, 64).half().to(cuda_device), torch.ones(4, 64).half().to(cuda_device)
    with pytest.raises(ValueError, match=r"scales: .*on a GPU; got 16.*quantize it again with groups of 32"):
        wo.gemm(x, packed, scales)


# --- bad input --------------------------------------------------------------------------------------------------

W = torch.ones(64, 8)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "groups of mxfp4": (W, {"format": "mxfp4", "group_size": 64}, "group_size must be 32 for mxfp4, got 64"),
    "groups of nvfp4": (W, {"format": "nvfp4", "group_size": 32}, "group_size must be 16 for nvfp4, got 32"),
    "a K of mxfp4": (W[:48], {"format": "mxfp4"}, "group_size: expected -1 or a divisor of K=48, got 32"),
    "zero points": (W, {"format": "mxfp4", "symmetric": False}, "symmetric: expected True for mxfp4"),
    "bits": (W, {"format": "nvfp4", "bits": 8}, "bits: expected 4 for nvfp4, got 8"),
    "another format": (W, {"format": "mxfp6"}, "format: expected one of int4, .*mxfp4, nvfp4, .*got 'mxfp6'"),
    "code4": (W, {"format": "code4", "group_size": 64}, "format: expected one of .* to quantize to, got 'code4'"),
    "NaN": (W * float("nan"), {"format": "mxfp4"}, "w: expected finite values"),
    "empty": (W[:0], {"format": "nvfp4"}, "w: expected shape .*got .0, 8."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_quantize_refuses(case: str) -> None:
    w, arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        wo.quantize(w, **arguments)


@both
def test_other_groups_are_refused(format: str) -> None:
    codes = torch.zeros(64, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match=f"group_size: expected {GROUPS[format]} for {format}, got 64"):
        wo.preprocess(codes, format=format, group_size=64)
    with pytest.raises(ValueError, match=f"k: expected a multiple of {GROUPS[format]}, .* got 40"):
        wo.preprocess(codes[:40], format=format)
    packed = wo.preprocess(codes, format=format)
    assert packed.group_size == GROUPS[format]
    with pytest.raises(ValueError, match=f"scales: expected {64 // GROUPS[format]} rows"):
        wo.gemm(torch.ones(1, 64), packed, torch.ones(1, 64))
    with pytest.raises(ValueError, match=r"group_size: expected"):
        Linear(64, 64, format=format, group_size=64)
    with pytest.raises(ValueError, match="code: expected None"):
        wo.preprocess(codes, format=format, code=CODEBOOKS[format])


def test_scales_that_do_not_fit_another_dtype() -> None:
    """E8M0 reaches from 2^-127 to 2^127, float16 from 2^-24 to 2^15."""
    layer = Linear(64, 8, format="mxfp4", dtype=torch.bfloat16)
    layer.scales.data.fill_(1.0)[0, 0] = 2.0**-40
    with pytest.raises(
        ValueError, match=r"layer .*scales: expected powers of two in 2\^-23 .. 2\^13 .*got 9.09495e-13"
    ):
        layer.half()
    assert layer.scales.dtype == torch.bfloat16
    assert torch.equal(layer.float().scales[0, :2], torch.tensor([2.0**-40, 1.0]))
    fits = torch.tensor([2.0**-23, 2.0**13])
    check_scales_as(fits, torch.float16, "mxfp4")
    for bad in (2.0**-24, 2.0**14, 0.3, 0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scales: expected powers of two"):
            check_scales_as(torch.tensor([1.0, bad]), torch.float16, "mxfp4")
    check_scales_as(torch.tensor([0.0071, 1e-6]), torch.float16, "nvfp4")
    for bad in (1e-9, 1e9):
        with pytest.raises(ValueError, match="scales: expected numbers within its range for nvfp4"):
            check_scales_as(torch.tensor([bad]), torch.float16, "nvfp4")


def test_powers_of_two() -> None:
    exponents = torch.arange(-149, 128, dtype=torch.int32)
    assert torch.equal(power_of_two(exponents).double(), torch.exp2(exponents.double()))
