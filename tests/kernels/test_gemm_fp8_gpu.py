"""Every compiled kernel that takes x in E4M3: exact-grid inputs, bit for bit, and fp64 on random inputs."""

from __future__ import annotations

import pytest
import torch
from tests.gemm_cases import ACTIVATIONS, DTYPES, Case, Operands, make, require, run, splits

import weightonly as wo
from weightonly.device import sm_count
from weightonly.heuristics.configs import FP8_CONFIGS, KernelConfig
from weightonly.heuristics.families import FAMILIES
from weightonly.heuristics.legal import why_not
from weightonly.heuristics.problem import FP8_LAYOUT, Problem

pytestmark = pytest.mark.gpu

GROUPS = (-1, 32, 64, 128, 192, 256)
KERNELS = [
    pytest.param(config, dtype, group_size, id=f"{config.kernel}-{dtype}-g{group_size}")
    for config in FP8_CONFIGS
    for dtype in DTYPES
    for group_size in ((32,) if config.formats == ("mxfp4",) else GROUPS)
    if group_size in (-1, 128, 256) or config.least_group == 32
]
SEEDS = range(3)


def framed(x: torch.Tensor) -> torch.Tensor:
    """The same numbers amid NaN: rows before and after, and columns on both sides."""
    m, k = x.shape
    frame = torch.full((m + 2, k + 48), 0x7F, dtype=torch.uint8, device="cuda").view(x.dtype)
    frame[1 : m + 1, 16 : k + 16] = x.cuda()
    return frame[1 : m + 1, 16 : k + 16]


def grid(m: int, k: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Small integers in E4M3, and powers of two."""
    x8 = torch.randint(-4, 5, (m, k), generator=g).float().to(torch.float8_e4m3fn)
    return framed(x8), torch.exp2(torch.randint(-3, 3, (m,), generator=g).float()).cuda()


def check_exact(m: int, case: Case, config: KernelConfig | None, g: torch.Generator) -> Operands:
    o = make(case, g, FP8_LAYOUT, exact=True)
    x8, x_scales = grid(m, case.k, g)
    bias = torch.randint(-8, 9, (case.n,), generator=g).to(DTYPES[case.dtype]).cuda()
    expected = (x8.double() @ o.w64) * x_scales.double()[:, None] + bias.double()
    y = run(x8, o, x_scales=x_scales, bias=bias, config=config)
    assert torch.equal(y, expected.to(y.dtype))
    assert torch.equal(run(x8, o, x_scales=x_scales, bias=bias, config=config), y)
    return o


def case_of(config: KernelConfig, k: int, n: int, dtype: str, group_size: int) -> Case:
    """Of a weight that it reads: mxfp4 has groups of 32."""
    (format,) = config.formats
    return Case(k, n, format, dtype, 32) if format == "mxfp4" else Case(k, n, format, dtype, group_size)


def k_of(group_size: int) -> int:
    """Ragged: no multiple of 128, and per channel none of 64."""
    return {-1: 720, 32: 672, 64: 704, 128: 640, 192: 576, 256: 1280}[group_size]


@pytest.mark.parametrize("number", SEEDS)
@pytest.mark.parametrize(("config", "dtype", "group_size"), KERNELS)
def test_every_kernel_is_bit_exact_on_the_grid(
    cuda_device: torch.device,
    generator: torch.Generator,
    config: KernelConfig,
    dtype: str,
    group_size: int,
    number: int,
) -> None:
    generator.manual_seed(generator.initial_seed() + number)
    ragged = case_of(config, k_of(group_size), 328, dtype, group_size)
    require(config, ragged)
    ms = (1, config.block_m - 3, config.block_m + 5, 2 * config.block_m)
    for split in splits(config, 1, ragged, (1, 2, 4)):
        for m in ms:
            check_exact(m, ragged, split, generator)
    deep = case_of(config, 4096, 136, dtype, group_size if 4096 % group_size == 0 else 64)
    for split in splits(config, 1, deep, (1, 3, 4, 8)):
        check_exact(config.block_m + 3, deep, split, generator)
    even = case_of(config, ragged.k, 4 * config.block_n, dtype, group_size)  # two CTAs share x where they loop
    check_exact(3 * config.block_m - 1, even, config, generator)


@pytest.mark.parametrize(("config", "dtype", "group_size"), KERNELS)
def test_every_kernel_is_accurate(
    cuda_device: torch.device, generator: torch.Generator, config: KernelConfig, dtype: str, group_size: int
) -> None:
    """Beside the rounding of y, sums of 128 k keep some 14 bits in the tensor cores."""
    k = {192: 1536}.get(group_size, 4096)
    case = case_of(config, k, 520, dtype, group_size)
    require(config, case)
    m = 2 * config.block_m - 1
    o = make(case, generator, FP8_LAYOUT, exact=False)
    x = torch.randn(m, k, generator=generator).to(DTYPES[dtype]).cuda()
    x8, x_scales = wo.quantize_activations(x)
    sums = (x8.double() @ o.w64) * x_scales.double()[:, None]
    for split in splits(config, m, case, (1, 2, 4)):
        for activation, function in ACTIVATIONS.items():
            expected = function(sums)
            y = run(x8, o, x_scales=x_scales, activation=activation, config=split)
            rounding = (expected.to(y.dtype).double() - expected).norm()
            assert (y.double() - expected).norm() <= rounding + 5e-4 * expected.norm(), (split, activation)


@pytest.mark.parametrize("scales", ["far apart", "of other numbers"])
@pytest.mark.parametrize("config", [c for c in FP8_CONFIGS if c.formats == ("mxfp4",)], ids=lambda c: c.kernel)
def test_scales_that_do_not_fold_at_once(
    cuda_device: torch.device, generator: torch.Generator, config: KernelConfig, scales: str
) -> None:
    """Some columns need several turns over 128 k, and others one: warps of a warpgroup stay together."""
    for k, n, m in ((736, 328, config.block_m + 5), (4096, 136, 3), (2048, 3 * config.block_n, 2 * config.block_m)):
        case = case_of(config, k, n, "bf16", 32)
        require(config, case)
        o = make(case, generator, FP8_LAYOUT, exact=True)
        few = torch.rand(o.scales.shape, generator=generator).cuda() < 0.05
        # Scales of one turn share the tensor cores' 14 bits: 2^14 apart from 2^-1 to 2 no turn has both.
        others = 2.0**14 if scales == "far apart" else 1.5
        factors = torch.where(few, others, 1.0)
        w64 = o.w64 * factors.double().repeat_interleave(32, 0)
        given = (o.scales.float() * factors).to(o.scales.dtype)
        x8 = framed(torch.randint(-1, 2, (m, k), generator=generator).float().to(torch.float8_e4m3fn))
        x_scales = torch.ones(m, device="cuda")
        expected = x8.double() @ w64
        for split in splits(config, m, case, (1, 2, 4)):
            y = wo.gemm(x8, o.qweight, given, x_scales=x_scales, config=split)
            assert torch.equal(y, expected.to(y.dtype)), split


@pytest.mark.parametrize("tiles", ["odd", "even"])
@pytest.mark.parametrize("k", [64, 448, 1216])
def test_ctas_that_go_through_many_tiles(
    cuda_device: torch.device, generator: torch.Generator, k: int, tiles: str
) -> None:
    """Two tiles and more for each CTA, the last ones ragged: stages, turns and rows of y come round."""
    for config in wo.fp8_kernels():
        if config.rules.loops(config):
            columns = -(-(2 * sm_count(torch.cuda.current_device()) + 7) // 3) // 2 * 2 + (tiles == "odd")
            group_size = 64 if config.least_group == 32 else -1
            case = case_of(config, k, columns * config.block_n - 24, "bf16", group_size)
            check_exact(3 * config.block_m - 3, case, config, generator)


@pytest.mark.parametrize("n", [72, 1000])
def test_swizzled_token_tiles(cuda_device: torch.device, generator: torch.Generator, n: int) -> None:
    for config in wo.fp8_kernels():
        case = case_of(config, 256, n, "f16", 128)
        for split in splits(config, 1, case, (1, 2)):
            check_exact(11 * config.block_m - 3, case, split, generator)


@pytest.mark.parametrize("m", [1, 7, 64, 100, 300])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (8, 33), (16, 64), (72, 31), (200, 130), (4104, 66), (8192, 1)], ids=str)
def test_any_shape(cuda_device: torch.device, generator: torch.Generator, m: int, k: int, n: int) -> None:
    """K is padded in a copy of x where it is no multiple of 16."""
    for config in wo.fp8_kernels():
        for dtype in DTYPES:
            rows = -(-k // 32) * 32 if config.formats == ("mxfp4",) else k
            check_exact(m, case_of(config, rows, n, dtype, -1), config, generator)


def small(config: KernelConfig, g: torch.Generator) -> tuple[Operands, torch.Tensor, torch.Tensor, torch.Tensor]:
    o = make(case_of(config, 512, 192, "bf16", 128), g, FP8_LAYOUT, exact=True)
    x8, x_scales = grid(70, 512, g)
    return o, x8, x_scales, ((x8.double() @ o.w64) * x_scales.double()[:, None]).bfloat16()


def test_leading_dimensions_strides_and_act_order(cuda_device: torch.device, generator: torch.Generator) -> None:
    for config in wo.fp8_kernels():
        o, x8, x_scales, expected = small(config, generator)
        x3 = x8.contiguous().view(2, 35, 512)
        y = wo.gemm(x3, o.qweight, o.scales, x_scales=x_scales.view(2, 35), config=config)
        assert y.shape == (2, 35, 192) and torch.equal(y.view(70, 192), expected)
        spread = x_scales.repeat_interleave(3)[::3]
        assert torch.equal(wo.gemm(x8, o.qweight, o.scales, x_scales=spread, config=config), expected)
        turned = x8.view(torch.uint8).t().contiguous().t().view(x8.dtype)
        assert torch.equal(wo.gemm(turned, o.qweight, o.scales, x_scales=x_scales, config=config), expected)
        order = torch.randperm(512, generator=generator).cuda()
        shuffled = torch.empty(70, 512, dtype=torch.uint8, device="cuda")
        shuffled[:, order] = x8.view(torch.uint8)
        y = wo.gemm(shuffled.view(x8.dtype), o.qweight, o.scales, x_scales=x_scales, perm=order, config=config)
        assert torch.equal(y, expected)
        none = wo.gemm(x8[:0], o.qweight, o.scales, x_scales=x_scales[:0], config=config)
        assert none.shape == (0, 192) and none.dtype == torch.bfloat16


def test_nan_stays_in_its_row(cuda_device: torch.device, generator: torch.Generator) -> None:
    for config in wo.fp8_kernels():
        o, x8, x_scales, expected = small(config, generator)
        x8.view(torch.uint8)[3, 5] = 0x7F
        x_scales[60] = float("nan")
        y = wo.gemm(x8, o.qweight, o.scales, x_scales=x_scales, config=config)
        bad = torch.tensor([3, 60], device="cuda")
        assert y[bad].isnan().all()
        rest = torch.ones(70, dtype=torch.bool, device="cuda")
        rest[bad] = False
        assert torch.equal(y[rest], expected[rest])


def test_in_a_cuda_graph(cuda_device: torch.device, generator: torch.Generator) -> None:
    """Quantizing and the product, with numbers of x that change from replay to replay."""
    for config in wo.fp8_kernels():
        o = make(case_of(config, 512, 192, "bf16", 128), generator, FP8_LAYOUT, exact=False)
        x = torch.randn(40, 512, generator=generator).bfloat16().cuda()

        def product(x: torch.Tensor, o: Operands = o, config: KernelConfig = config) -> torch.Tensor:
            x8, x_scales = wo.quantize_activations(x)
            return wo.gemm(x8, o.qweight, o.scales, x_scales=x_scales, config=config)

        product(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = product(x)
        for _ in range(2):
            x.copy_(torch.randn(40, 512, generator=generator))
            graph.replay()
            assert torch.equal(y, product(x))


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    monkeypatch.setattr(FAMILIES["gemm_sm90_fp8"], "verified", True)


@pytest.mark.parametrize("group_size", [-1, 32, 128])
def test_what_is_chosen_computes_every_m(
    cuda_device: torch.device, verified: None, generator: torch.Generator, group_size: int
) -> None:
    if not any("int4" in c.formats for c in wo.fp8_kernels()):
        pytest.skip("no kernel takes x in 8 bits")
    o = make(Case(1024, 328, "int4", "bf16", group_size), generator, FP8_LAYOUT, exact=True)
    x8, x_scales = grid(1100, 1024, generator)
    expected = ((x8.double() @ o.w64) * x_scales.double()[:, None]).bfloat16()
    for m in (*range(1, 40), 63, 64, 65, 127, 128, 129, 256, 257, 500, 512, 513, 1000, 1100):
        assert torch.equal(run(x8[:m], o, x_scales=x_scales[:m]), expected[:m]), m


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("k", [1, 7, 8, 16, 100, 2048, 4097, 8192, 28672, 40008])
def test_quantized_activations_are_those_of_the_cpu(
    cuda_device: torch.device, generator: torch.Generator, k: int, dtype: str
) -> None:
    x = torch.randn(37, k, generator=generator) * torch.logspace(-6, 4, 37)[:, None]
    x[8] *= 2.0**-126 if dtype != "float16" else 2.0**-8  # a scale that is no normal number
    x[9] = torch.randint(-448, 449, (k,), generator=generator) * 2.0**-6  # ties, if 7 is among them
    x[9, 0] = 7
    x[3], x[4] = 0, -0.0
    x[5, k // 2], x[6, k // 3], x[7, 0] = float("nan"), float("inf"), -float("inf")
    x = x.to(getattr(torch, dtype))
    for given in (x, x.repeat(1, 2)[:, :k], x.repeat(1, 3)[:, 1 : k + 1], x.view(37, 1, k), x.repeat(2, 1)[::2]):
        x8, x_scales = wo.quantize_activations(given)
        got8, got_scales = wo.quantize_activations(given.cuda())
        assert got8.shape == given.shape and got_scales.shape == given.shape[:-1]
        assert torch.equal(got_scales.cpu().nan_to_num(-1.0), x_scales.nan_to_num(-1.0))
        is_nan = x8.float().isnan()
        assert torch.equal(got8.cpu().float().isnan(), is_nan)
        assert torch.equal(got8.cpu().view(torch.uint8)[~is_nan], x8.view(torch.uint8)[~is_nan])


def test_what_is_refused_on_a_gpu(cuda_device: torch.device, generator: torch.Generator) -> None:
    for config in [c for c in wo.fp8_kernels() if "int4" in c.formats][:1]:
        o, x8, x_scales, _ = small(config, generator)
        tiled = wo.repack(o.qweight, layout="tiled")
        with pytest.raises(ValueError, match="qweight: packed in layout 'tiled', but x is float8_e4m3fn"):
            wo.gemm(x8, tiled, o.scales, x_scales=x_scales)
        with pytest.raises(ValueError, match="qweight: packed in layout 'tiled_fp8' for x in float8_e4m3fn, but x is"):
            wo.gemm(x8.bfloat16(), o.qweight, o.scales)
        with pytest.raises(TypeError, match=r"scales: expected dtype torch\.float16 or torch\.bfloat16, got torch"):
            wo.gemm(x8, o.qweight, o.scales.float(), x_scales=x_scales)
        with pytest.raises(ValueError, match="x_scales: expected on cuda:0 as x is, got cpu"):
            wo.gemm(x8, o.qweight, o.scales, x_scales=x_scales.cpu())
        of_32 = o.scales.repeat_interleave(4, 0)
        big = next(c for c in FP8_CONFIGS if c.least_group == 128)
        assert why_not(big, Problem(70, 192, 512, "int4", 32, 90, 132, FP8_LAYOUT)) is not None
        with pytest.raises(ValueError, match=r"config: .* computes groups of 128 and its multiples, but those of"):
            wo.gemm(x8, o.qweight, of_32, x_scales=x_scales, config=big)
        assert torch.equal(wo.dequantize(o.qweight, o.scales).double(), o.w64)  # by PyTorch's operators
