"""`gemm` by slices of the dequantized weight and cuBLAS, on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.gemm_cases import DTYPES, Case, Operands, check_exact, check_random, make, own_layout, require, run, this_gpu
from tests.kernels.dequantize_cases import random_weight

import weightonly as wo
from weightonly import reference
from weightonly.device import sm_count
from weightonly.heuristics import select, slices
from weightonly.heuristics.configs import CONFIGS, KernelConfig
from weightonly.heuristics.problem import layouts_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fp32_sums")]


def unfused_configs(groups_of_16: bool = False, format: str = "int4") -> list[KernelConfig]:
    """Those of this GPU that have a format, for groups of 16 or for all others."""
    of_groups = (c for c in CONFIGS if c.unfused and format in c.formats and c.groups_of_16 == groups_of_16)
    return [c for c in of_groups if c.layout in layouts_of(this_gpu())]


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 columns of K = 1024 at a time."""
    monkeypatch.setattr(slices, "WORKSPACE_BYTES", 2 * 1024 * 64)


@pytest.mark.parametrize("m", [1, 7, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_slices(
    cuda_device: torch.device, small_slices: None, generator: torch.Generator, dtype: str, m: int
) -> None:
    for config in unfused_configs():
        for case in (
            Case(1024, 1000, "int4", dtype, 128, zeros=True),
            Case(1000, 257, "int8", dtype, -1),
            Case(960, 65, "int4", dtype, 32),
        ):
            require(config, case)
            check_exact(m, case, config, generator)
            check_random(m, case, config, generator, "gelu")


@pytest.mark.parametrize("m", [1, 7, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_slices_of_floats(
    cuda_device: torch.device, small_slices: None, generator: torch.Generator, dtype: str, m: int
) -> None:
    for config in unfused_configs(format="fp8"):
        for case in (Case(1024, 1000, "fp8", dtype, 128), Case(1000, 257, "fp8", dtype, -1)):
            require(config, case)
            check_exact(m, case, config, generator)
            check_random(m, case, config, generator, "gelu")


@pytest.mark.parametrize("m", [1, 7, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_slices_in_groups_of_16(
    cuda_device: torch.device, small_slices: None, generator: torch.Generator, dtype: str, m: int
) -> None:
    for config in unfused_configs(groups_of_16=True):
        for case in (
            Case(1024, 1000, "int4", dtype, 16, zeros=True),
            Case(976, 257, "int8", dtype, 16),
            Case(80, 65, "int4", dtype, 16),
            Case(1008, 328, "code4", dtype, 16),
        ):
            require(config, case)
            check_exact(m, case, config, generator)
            check_random(m, case, config, generator, "gelu")


def test_the_workspace_is_bounded(cuda_device: torch.device, generator: torch.Generator) -> None:
    """[8192, 16384] would be 256 MiB."""
    config = next(c for c in unfused_configs() if c.layout == own_layout())
    data = torch.randint(0, 256, (8192 * 16384 // 2,), dtype=torch.uint8, device="cuda")
    qweight = wo.PackedWeight(data, 8192, 16384, "int4", config.layout)
    scales = torch.ones(1, 16384, dtype=torch.float16, device="cuda")
    x = torch.randn(64, 8192, device="cuda").half()
    out = torch.empty(64, 16384, dtype=torch.float16, device="cuda")
    wo.gemm(x, qweight, scales, out=out, config=config)  # cuBLAS keeps a workspace of its own
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    wo.gemm(x, qweight, scales, out=out, config=config)
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20


def test_gemm_chooses_it_for_many_rows(cuda_device: torch.device, generator: torch.Generator) -> None:
    layout = layouts_of(this_gpu())[-1]  # on Hopper that of Ampere: its own kernels are quicker
    o = make(Case(512, 1000), generator, layout, exact=True)
    sms = sm_count(torch.cuda.current_device())
    m = next((m for m in (256, 1024, 8192, 65536) if choice(m, o, sms).unfused), None)
    if m is None:
        pytest.skip("the fused kernels are quicker by the cost model")
    x = torch.randint(-3, 4, (m, 512), generator=generator).half().cuda()
    y = wo.gemm(x, o.qweight, o.scales)
    assert torch.equal(y, (x.double() @ o.w64).half())
    assert torch.equal(wo.gemm(x, o.qweight, o.scales, config=choice(m, o, sms)), y)


def choice(m: int, o: Operands, sms: int) -> KernelConfig:
    return select(m, o.qweight.n, o.qweight.k, o.qweight.format, 128, this_gpu(), sms, o.qweight.layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["nf4", "fp4", "code4", "nvfp4"])
def test_codebooks(
    cuda_device: torch.device, small_slices: None, generator: torch.Generator, format: str, dtype: str
) -> None:
    group_size = 16 if format == "nvfp4" else 64
    configs = unfused_configs(groups_of_16=group_size == 16)
    config = next((c for c in configs if c.layout == "tiled"), None)
    if config is None:
        pytest.skip("no kernel of this GPU reads tiled weights")
    require(config, Case(960, 328, "code4", dtype, group_size))
    weight = random_weight(960, 328, format, "tiled", DTYPES[dtype], group_size, False, generator)
    w = reference.dequantize(weight.qweight, weight.scales).to(cuda_device)
    qweight, scales, _ = weight.on(cuda_device)
    for m in (1, 40, 300):
        x = torch.randn(m, 960, generator=generator).to(DTYPES[dtype]).cuda()
        expected, peer = x.double() @ w.double(), x @ w
        y = run(x, Operands(qweight, scales, None, w.double()), config=config)
        assert (y.double() - expected).norm() <= 2 * (peer.double() - expected).norm() + 1e-6 * expected.norm()


def test_parameters_for_bias_and_scales(cuda_device: torch.device, generator: torch.Generator) -> None:
    """Parameters that want gradients, in a call that records none: cuBLAS' out= would refuse them in grad mode."""
    for config in unfused_configs():
        o = make(Case(256, 72), generator, config.layout, exact=True)
        x = torch.randint(-3, 4, (6, 256), generator=generator).half().cuda()
        bias = torch.nn.Parameter(torch.randint(-8, 9, (72,), generator=generator).half().cuda())
        with torch.no_grad():
            y = wo.gemm(x, o.qweight, torch.nn.Parameter(o.scales), bias=bias, config=config)
        assert torch.equal(y, (x.double() @ o.w64 + bias.detach().double()).half())
        assert not y.requires_grad


def test_views_of_x_and_out(cuda_device: torch.device, small_slices: None, generator: torch.Generator) -> None:
    for config in unfused_configs():
        o = make(Case(256, 1000), generator, config.layout, exact=True)
        wide = torch.randint(-3, 4, (6, 300), generator=generator).half().cuda()
        for x in (
            wide[:, :256],
            wide[:, 3:259],
            wide[::2, :256],
            wide[2, :256],
            wide[:1, :256].expand(4, 256),
            torch.randint(-3, 4, (256, 5), generator=generator).half().cuda().t(),
            torch.randint(-3, 4, (3, 2, 256), generator=generator).half().cuda().transpose(0, 1),
        ):
            expected = (x.double() @ o.w64).half()
            assert torch.equal(wo.gemm(x, o.qweight, o.scales, config=config), expected)
            out = torch.full_like(expected, float("nan"))
            assert wo.gemm(x, o.qweight, o.scales, config=config, out=out) is out
            assert torch.equal(out, expected)


def test_slices_in_a_graph(cuda_device: torch.device, small_slices: None, generator: torch.Generator) -> None:
    for config in unfused_configs():
        o = make(Case(1024, 328, "int4", "f16", 128), generator, config.layout, exact=True)
        x = torch.randint(-3, 4, (200, 1024), generator=generator).half().cuda()
        expected = torch.relu(x.double() @ o.w64).half()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = wo.gemm(x, o.qweight, o.scales, activation="relu", config=config)
        stream.synchronize()
        assert torch.equal(y, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wo.gemm(x, o.qweight, o.scales, activation="relu", out=y, config=config)
        x.neg_()
        for _ in range(2):
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, torch.relu(x.double() @ o.w64).half())


def test_two_runs_are_identical(cuda_device: torch.device, generator: torch.Generator) -> None:
    for config in unfused_configs():
        o = make(Case(4096, 1000), generator, config.layout, exact=False)
        x = torch.randn(500, 4096, generator=generator).half().cuda()
        y = run(x, o, config=config, activation="silu")
        assert torch.equal(run(x, o, config=config, activation="silu"), y)
