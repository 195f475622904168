"""Every compiled grouped kernel that takes x in E4M3: exact-grid inputs, bit for bit, and fp64 on random inputs."""

from __future__ import annotations

import pytest
import torch
from tests.gemm_cases import DTYPES
from tests.kernels.test_gemm_fp8_gpu import framed
from tests.kernels.test_grouped_gpu import COUNTS, expected, need

import weightonly as wo
from weightonly.codebooks import codebook
from weightonly.gate import Gate
from weightonly.heuristics.configs import GROUPED_FP8_CONFIGS, KernelConfig, TypeConfig, kernel_types
from weightonly.heuristics.grouped import LayerChoice
from weightonly.heuristics.problem import FP8_LAYOUT
from weightonly.plan import cache
from weightonly.plan import experts as layer_plans
from weightonly.plan import grouped as grouped_plans

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_device")]

GROUPS = {"channel": (-1,), "group": (32, 64, 128, 192)}
KERNELS = [
    pytest.param(config, types, group_size, id=f"{config.kernel}-{types.name}-g{group_size}")
    for config in GROUPED_FP8_CONFIGS
    for types in kernel_types(config)
    for group_size in ((32,) if types.format == "mxfp4" else GROUPS[types.scale_mode])
]


def weights(
    experts: int, k: int, n: int, types: TypeConfig, group_size: int, g: torch.Generator, exact: bool
) -> tuple[wo.QuantizedWeight, torch.Tensor]:
    """Stacked experts on the GPU, and the same weights in fp64 [E, K, N]."""
    q = torch.randint(-8, 8, (experts, k, n), generator=g, dtype=torch.int8)
    is_code, groups = types.format == "mxfp4", 1 if group_size == -1 else k // group_size
    values = codebook("mxfp4").double()[(q + 8).long()] if is_code else q.double()
    shape = (experts, groups, n)
    if exact or is_code:
        scales = torch.exp2(torch.randint(*((-1, 2) if exact else (-9, -5)), shape, generator=g).float())
    else:
        scales = torch.rand(shape, generator=g) * 0.02 + 0.001
    scales = scales.to(DTYPES[types.dtype])
    w64 = (values.view(experts, groups, k // groups, n) * scales.double()[:, :, None]).view(experts, k, n)
    packed = wo.preprocess(q + 8 if is_code else q, format=types.format, layout=FP8_LAYOUT)
    qweight = wo.PackedWeight(packed.data.cuda(), **packed.fields)
    return wo.QuantizedWeight(qweight, scales.cuda()), w64.cuda()


def grid(rows: int, k: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x8 = torch.randint(-4, 5, (rows, k), generator=g).float().to(torch.float8_e4m3fn)
    return framed(x8), torch.exp2(torch.randint(-3, 3, (rows,), generator=g).float()).cuda()


def ends(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int().cuda()


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize(("config", "types", "group_size"), KERNELS)
def test_every_kernel_is_bit_exact_on_the_grid(
    generator: torch.Generator, config: KernelConfig, types: TypeConfig, group_size: int, number: int
) -> None:
    """Every routing; three rows are of no expert."""
    need(config, types)
    generator.manual_seed(generator.initial_seed() + number)
    k, n = {-1: (720, 456), 32: (672, 136), 64: (704, 600), 128: (640, 250), 192: (576, 200)}[group_size]
    for counts in COUNTS.values():
        w, w64 = weights(len(counts), k, n, types, group_size, generator, exact=True)
        rows = sum(counts) + 3
        x8, x_scales = grid(rows, k, generator)
        bias = torch.randint(-8, 9, (len(counts), n), generator=generator).to(w.dtype).cuda()
        sums = expected(x8, w64, counts) * x_scales.double()[:, None]
        begin = 0
        for e, count in enumerate(counts):
            sums[begin : begin + count] += bias[e].double()
            begin += count
        frame = torch.full((rows + 2, n + 8), float("nan"), dtype=w.dtype, device="cuda")
        out = frame[1:-1, :n]
        y = wo.grouped_gemm(x8, w, offs=ends(counts), bias=bias, x_scales=x_scales, config=config, out=out)
        assert torch.equal(y, sums.to(y.dtype)), counts
        assert frame[0].isnan().all() and frame[-1].isnan().all() and frame[:, n:].isnan().all()
        again = wo.grouped_gemm(x8, w, offs=ends(counts), bias=bias, x_scales=x_scales, config=config)
        assert torch.equal(again, y)


@pytest.mark.parametrize(("config", "types", "group_size"), KERNELS)
def test_every_kernel_is_accurate(
    generator: torch.Generator, config: KernelConfig, types: TypeConfig, group_size: int
) -> None:
    need(config, types)
    k, n, counts = (1536 if group_size == 192 else 4096), 520, [3, 70, 0, 300]
    w, w64 = weights(len(counts), k, n, types, group_size, generator, exact=False)
    x = torch.randn(sum(counts), k, generator=generator).to(w.dtype).cuda()
    x8, x_scales = wo.quantize_activations(x)
    sums = expected(x8, w64, counts) * x_scales.double()[:, None]
    for activation, function in {None: lambda y: y, "silu": torch.nn.functional.silu}.items():
        want = function(sums.to(w.dtype).double())
        y = wo.grouped_gemm(x8, w, offs=ends(counts), x_scales=x_scales, activation=activation, config=config)
        rounding = (want.to(y.dtype).double() - want).norm() + (sums.to(y.dtype).double() - sums).norm()
        assert (y.double() - want).norm() <= rounding + 5e-4 * want.norm(), activation


@pytest.mark.parametrize(("config", "types", "group_size"), KERNELS)
def test_a_row_does_not_depend_on_others(
    generator: torch.Generator, config: KernelConfig, types: TypeConfig, group_size: int
) -> None:
    need(config, types)
    k = 576 if group_size == 192 else 1024
    w, _ = weights(3, k, 264, types, group_size, generator, exact=False)
    x8, x_scales = wo.quantize_activations(torch.randn(400, k, generator=generator).to(w.dtype).cuda())
    y = wo.grouped_gemm(x8, w, offs=ends([100, 0, 300]), x_scales=x_scales, config=config)
    few = [*range(37), *range(100, 105)]
    got = wo.grouped_gemm(
        x8.view(torch.uint8)[few].view(x8.dtype), w, offs=ends([37, 0, 5]), x_scales=x_scales[few], config=config
    )
    assert torch.equal(got, y[few])
    x8.view(torch.uint8)[50], x_scales[200] = 0x7F, float("nan")
    bad = wo.grouped_gemm(x8, w, offs=ends([100, 0, 300]), x_scales=x_scales, config=config)
    rest = torch.ones(400, dtype=torch.bool, device="cuda")
    rest[[50, 200]] = False
    assert bad[~rest].isnan().all() and torch.equal(bad[rest], y[rest])


LAYERS = [
    pytest.param(config, types, group_size, id=f"{config.kernel}-{types.name}-g{group_size}")
    for config in GROUPED_FP8_CONFIGS
    for types in kernel_types(config)
    for group_size in ((32,) if types.format == "mxfp4" else (GROUPS[types.scale_mode][0],))
]


@pytest.mark.parametrize("inner", [192, 256])  # odd and even numbers of tiles: of the second two CTAs share x
@pytest.mark.parametrize("gate", [Gate("silu"), Gate.of("swigluoai"), Gate("relu2", has_gate=False)], ids=str)
@pytest.mark.parametrize(("config", "types", "group_size"), LAYERS)
def test_layers_of_every_kernel(
    generator: torch.Generator,
    config: KernelConfig,
    types: TypeConfig,
    group_size: int,
    gate: Gate,
    inner: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six launches beside one product after another; some choices are of none, and a graph holds the layer."""
    need(config, types)
    monkeypatch.setattr(grouped_plans, "select_grouped", lambda *problem: config)
    experts, hidden = 6, 256
    first, second = (
        weights(experts, k, n, types, group_size, generator, exact=False)[0]
        for k, n in ((hidden, 2 * inner if gate.has_gate else inner), (inner, hidden))
    )
    for tokens, top_k in ((1, 2), (19, 5), (300, 2)):
        x8, x_scales = wo.quantize_activations(torch.randn(tokens, hidden, generator=generator).to(first.dtype).cuda())
        ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator).cuda()
        of_ids = torch.rand(tokens, top_k, generator=generator).cuda()
        bias = torch.randn(experts, first.n, generator=generator).to(first.dtype).cuda()

        def layer() -> torch.Tensor:
            return wo.fused_experts(x8, (first, bias), second, ids, of_ids, gate, x_scales=x_scales)  # noqa: B023

        cache.clear()
        monkeypatch.setattr(layer_plans, "select_layer", lambda *problems: None)
        apart = layer()
        cache.clear()
        monkeypatch.setattr(layer_plans, "select_layer", lambda *problems: LayerChoice(config, config, False))
        y = layer()
        (plan,) = cache.layers.values()
        assert isinstance(plan, layer_plans.LayerPlan)
        assert (y - apart).float().norm() <= 5e-2 * apart.float().norm()  # numbers between may round elsewhere
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            in_graph = layer()
        for _ in range(2):
            ids.random_(-1, experts + 1, generator=torch.Generator("cuda").manual_seed(tokens))
            graph.replay()
            assert torch.equal(in_graph, layer())
    cache.clear()


def test_in_a_cuda_graph_ends_change(generator: torch.Generator) -> None:
    for config in wo.grouped_fp8_kernels():
        types = kernel_types(config)[-1]
        w, _ = weights(4, 512, 264, types, 32 if types.format == "mxfp4" else 128, generator, exact=True)
        x8, x_scales = grid(90, 512, generator)
        offs = ends([10, 20, 0, 60])

        def product(offs: torch.Tensor = offs, config: KernelConfig = config) -> torch.Tensor:
            return wo.grouped_gemm(x8, w, offs=offs, x_scales=x_scales, config=config)  # noqa: B023

        product()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = product()
        for counts in ([90, 0, 0, 0], [1, 2, 3, 4], [0, 45, 45, 0]):
            offs.copy_(ends(counts))
            graph.replay()
            assert torch.equal(y, product(offs.clone()))
