"""grouped_gemm by one launch: numbers on a grid and at random, every routing, CUDA graphs, the same bits again."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from tests.code_cases import own
from tests.expert_cases import ends, random_stack
from tests.gemm_cases import DTYPES

import weightonly as wo
from weightonly.device import device_arch
from weightonly.experts import Product, fused_experts
from weightonly.gate import Gate
from weightonly.grouped import ExpertsPlan, GroupedArgs, grouped
from weightonly.heuristics.configs import GROUPED_CONFIGS, KernelConfig, TypeConfig, kernel_types
from weightonly.heuristics.families.grouped_decode_sm90 import MAX_SORTED_CHOICES
from weightonly.heuristics.families.grouped_sm90 import MAX_EXPERTS
from weightonly.heuristics.grouped import LayerChoice, why_not_grouped
from weightonly.heuristics.problem import Problem
from weightonly.kernels import is_compiled, runs_on
from weightonly.layout.shapes import TILED
from weightonly.ops.around_experts import combine, sort_by_expert
from weightonly.plan import cache
from weightonly.plan import experts as layer_plans
from weightonly.plan import grouped as grouped_plans

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_device", "floats")]

KERNELS = [(c, t) for c in GROUPED_CONFIGS for t in kernel_types(c)]
LAYOUTS = list(dict.fromkeys(c.layout for c in GROUPED_CONFIGS))
INT4 = TypeConfig("f16", "int4", "group")
COUNTS = {
    "some each": [3, 1, 9, 2, 33],
    "empty experts": [0, 130, 0, 0, 5],
    "all in the first": [300, 0, 0, 0, 0],
    "all in the last": [0, 0, 0, 0, 17],
    "one row": [0, 0, 1, 0, 0],
    "one expert": [65],
    "full tiles": [256, 0, 128, 64, 8],
    "many tiles": [2500, 0, 1, 700],
}


@dataclass
class Weights:
    """Stacked experts on the GPU, and the same weights in fp64."""

    qweight: wo.PackedWeight
    scales: torch.Tensor
    zeros: torch.Tensor | None
    w64: torch.Tensor  # [E, K, N]


def weights(
    experts: int,
    k: int,
    n: int,
    types: TypeConfig,
    g: torch.Generator,
    group_size: int = 128,
    exact: bool = True,
    layout: str = TILED,
) -> Weights:
    """exact: scales are powers of two, and zeros integers, so that every product and sum is exact in fp32."""
    dtype = DTYPES[types.dtype]
    q = random_stack(experts, k, n, types.format, g)
    groups = 1 if types.scale_mode == "channel" else k // group_size
    shape = (experts, groups, n)
    if exact:
        scales = torch.exp2(torch.randint(-2, 2, shape, generator=g).double()).to(dtype)
        zeros = torch.randint(-4, 4, shape, generator=g).to(dtype)
    else:
        scales = (torch.rand(shape, generator=g) * 0.02 + 0.001).to(dtype)
        zeros = (torch.rand(shape, generator=g) * 8 - 4).to(dtype)
    code = None
    values = q.cuda().double()
    if types.format == "code4":
        code = torch.arange(-8.0, 8.0) if exact else own("code4")
        values = torch.as_tensor(code, dtype=dtype, device="cuda").double()[q.cuda().int()]
    given = zeros.cuda() if types.scale_mode == "group_zeros" else None
    offset = 0 if given is None else given.double()[:, :, None]
    w64 = (values.view(experts, groups, k // groups, n) - offset) * scales.cuda().double()[:, :, None]
    packed = wo.preprocess(q, layout=layout, format=types.format, code=code)
    qweight = wo.PackedWeight(packed.data.cuda(), **packed.fields)
    return Weights(qweight, scales.cuda(), given, w64.view(experts, k, n))


def expected(x: torch.Tensor, w64: torch.Tensor, counts: list[int], bias: torch.Tensor | None = None) -> torch.Tensor:
    """fp64 [T, N], zeros in rows after the last expert's."""
    y = torch.zeros(x.shape[0], w64.shape[2], dtype=torch.float64, device=x.device)
    begin = 0
    for e, count in enumerate(counts):
        rows = slice(begin, begin + count)
        y[rows] = x[rows].double() @ w64[e]
        if bias is not None:
            y[rows] += bias[e].double()
        begin += count
    return y


def need(config: KernelConfig, types: TypeConfig) -> None:
    if not is_compiled(config, types) or not runs_on(config, device_arch(0)):
        pytest.skip(f"{config.kernel}_{types.name} is not in this build, or does not run here")


def computes(config: KernelConfig, group_size: int) -> bool:
    problem = Problem(8, 128, 64 * group_size, config.formats[0], group_size, 90, 132, config.layout)
    return why_not_grouped(config, problem, 1) is None


def int4_configs(layout: str) -> list[KernelConfig]:
    """But those of groups of 16."""
    found = [c for c, types in KERNELS if types == INT4 and c.layout == layout and is_compiled(c, types)]
    return [c for c in found if not c.groups_of_16]


def some_kernel(layout: str = TILED) -> tuple[KernelConfig, TypeConfig]:
    """One for narrow tiles."""
    return next(c for c, types in KERNELS if types == INT4 and c.layout == layout), INT4


@dataclass
class Exact:
    """A grouped product whose result is exact: x [rows + 3, K], the last three rows of no expert."""

    counts: list[int]
    group_size: int
    weights: Weights
    x: torch.Tensor
    bias: torch.Tensor
    y: torch.Tensor


SHAPES = ((384, 328, 128), (1344, 128, 64), (256, 192, 32), (576, 70, 192), (208, 600, 16))  # K, N, group_size
CASES = [(counts, SHAPES[i % len(SHAPES)]) for i, counts in enumerate(COUNTS.values())]
CASES += [([5, 0, 40], (128, 64, 128)), ([2, 90], (2048, 256, 256)), ([70, 0, 9, 256, 257, 1], (640, 576, 32))]
CASES += [([16, 65, 0, 3], (320, 264, 16)), ([300, 0, 5, 129], (768, 500, 128))]


@functools.cache
def exact_case(number: int, types: TypeConfig, layout: str) -> Exact:
    counts, (k, n, group_size) = CASES[number]
    g = torch.Generator().manual_seed(number)
    w = weights(len(counts), k, n, types, g, group_size, layout=layout)
    dtype = DTYPES[types.dtype]
    x = torch.randint(-1, 2, (sum(counts) + 3, k + 8), generator=g).to(dtype).cuda()[:, :k]
    bias = torch.randint(-8, 9, (len(counts), n), generator=g).to(dtype).cuda()
    return Exact(counts, group_size, w, x, bias, expected(x, w.w64, counts, bias).to(dtype))


@pytest.mark.parametrize(("config", "types"), KERNELS, ids=[f"{c.kernel}_{t.name}" for c, t in KERNELS])
def test_exact(config: KernelConfig, types: TypeConfig) -> None:
    """Every kernel: each routing, groups of 32 to all of K, K and N that fill no tile, a bias, `out` full of NaN."""
    need(config, types)
    for case in (exact_case(number, types, config.layout) for number in range(len(CASES))):
        if types.scale_mode != "channel" and not computes(config, case.group_size):
            continue
        w, n = case.weights, case.bias.shape[1]
        whole = torch.full((len(case.x), n + 10), torch.nan, dtype=case.x.dtype, device="cuda")
        offs = ends(case.counts).cuda()
        args = GroupedArgs(
            case.x,
            wo.QuantizedWeight(w.qweight, w.scales, w.zeros),
            offs,
            case.bias,
            out=whole[:, :n],
            config=config,
            has_rest=True,
        )
        y = grouped(args)
        assert torch.equal(y, case.y), f"{case.counts} of {w.qweight}, groups of {case.group_size}"
        assert whole[:, n:].isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("experts", [1, 2, 33, 256, 512, 1024])
def test_any_number_of_experts(experts: int, layout: str) -> None:
    need(*some_kernel(layout))
    if experts > some_kernel(layout)[0].rules.max_experts:
        pytest.skip("kernels of this layout count fewer")
    g = torch.Generator().manual_seed(experts)
    w = weights(experts, 128, 64, INT4, g, layout=layout)
    for rows in (1, 7, 600):
        counts = torch.randint(0, experts, (rows,), generator=g).bincount(minlength=experts).tolist()
        x = torch.randint(-1, 2, (rows, 128), generator=g).half().cuda()
        wanted = expected(x, w.w64, counts).half()
        for config in int4_configs(layout):
            y = wo.grouped_gemm(x, w.qweight, w.scales, ends(counts).cuda(), config=config)
            assert torch.equal(y, wanted), f"{config}, {rows} rows"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("types", list(dict.fromkeys(t for _, t in KERNELS)), ids=lambda t: t.name)
def test_error_beside_dense_products(types: TypeConfig, layout: str) -> None:
    """At most twice the error that the dense product in 16 bits has against fp64."""
    g = torch.Generator().manual_seed(5)
    counts, dtype = [9, 0, 160, 1], DTYPES[types.dtype]
    w = weights(4, 512, 192, types, g, exact=False, layout=layout)
    x = torch.randn(170, 512, generator=g).to(dtype).cuda()
    exact = expected(x, w.w64, counts)
    dense = w.w64.to(dtype)
    peer = torch.cat([part @ dense[e] for e, part in enumerate(x.split(counts))])
    found = [c for c, t in KERNELS if t == types and c.layout == layout and is_compiled(c, t) and computes(c, 128)]
    if not found:
        pytest.skip("not in this build")
    for config in found:
        need(config, types)
        y = wo.grouped_gemm(x, w.qweight, w.scales, ends(counts).cuda(), zeros=w.zeros, config=config)
        for part in (slice(0, 9), slice(9, 169), slice(169, 170)):
            error, its = (y - exact)[part], (peer - exact)[part]
            assert error.norm() <= 2 * its.norm(), config
        again = wo.grouped_gemm(x, w.qweight, w.scales, ends(counts).cuda(), zeros=w.zeros, config=config)
        assert torch.equal(y, again), "the same bits again"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activation_and_perm(layout: str) -> None:
    config, types = some_kernel(layout)
    need(config, types)
    g = torch.Generator().manual_seed(6)
    counts = [2, 0, 5]
    w = weights(3, 256, 96, types, g, layout=layout)
    perm = torch.stack([torch.randperm(256, generator=g) for _ in range(3)]).cuda()
    x = torch.randint(-1, 2, (7, 256), generator=g).half().cuda()
    y = wo.grouped_gemm(x, w.qweight, w.scales, ends(counts).cuda(), activation="relu", perm=perm, config=config)
    gathered = torch.cat([x[:2][:, perm[0]], x[2:][:, perm[2]]])
    assert torch.equal(y, expected(gathered, w.w64, counts).relu().half())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_serves_every_routing(layout: str) -> None:
    """Rows of each expert change between replays; the host reads none of them."""
    need(*some_kernel(layout))
    g = torch.Generator().manual_seed(7)
    w = weights(5, 256, 128, INT4, g, layout=layout)
    rows = 150
    x = torch.randint(-1, 2, (rows, 256), generator=g).half().cuda()
    offs = ends([30] * 5).cuda()
    out = torch.empty(rows, 128, dtype=torch.float16, device="cuda")
    for config in int4_configs(layout):

        def call() -> None:
            wo.grouped_gemm(x, w.qweight, w.scales, offs, out=out, config=config)  # noqa: B023

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for counts in ([30] * 5, [150, 0, 0, 0, 0], [0, 0, 0, 0, 150], [1, 100, 0, 48, 1]):
            offs.copy_(ends(counts))
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected(x, w.w64, counts).half()), f"{config}, {counts}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offs_out_of_range_stay_in_memory(layout: str) -> None:
    """Ends that no caller should give write nothing beside `out`."""
    config, types = some_kernel(layout)
    need(config, types)
    w = weights(4, 128, 64, types, torch.Generator().manual_seed(8), layout=layout)
    x = torch.ones(40, 128, dtype=torch.float16, device="cuda")
    whole = torch.full((60, 64), torch.nan, dtype=torch.float16, device="cuda")
    for bad in ([-5, 70, 2, 1000], [2**31 - 1, -(2**31), 7, 0], [50, 60, 70, 80]):
        offs = torch.tensor(bad, dtype=torch.int32, device="cuda")
        wo.grouped_gemm(x, w.qweight, w.scales, offs, out=whole[10:50], config=config)
        assert whole[:10].isnan().all() and whole[50:].isnan().all()


def test_what_config_refuses() -> None:
    config, types = some_kernel()
    need(config, types)
    w = weights(2, 128, 64, types, torch.Generator().manual_seed(9))
    x, offs = torch.ones(3, 128, dtype=torch.float16, device="cuda"), ends([1, 2]).cuda()
    with pytest.raises(ValueError, match=r"config: .* computes single products"):
        wo.grouped_gemm(x, w.qweight, w.scales, offs, config=wo.kernels()[0])
    with pytest.raises(TypeError, match="config: expected a KernelConfig"):
        wo.grouped_gemm(x, w.qweight, w.scales, offs, config="quick")  # type: ignore[arg-type]
    many = weights(MAX_EXPERTS + 1, 64, 64, types, torch.Generator().manual_seed(9), group_size=64)
    with pytest.raises(ValueError, match="at most 1024 experts, but qweight has 1025"):
        wo.grouped_gemm(x[:, :64], many.qweight, many.scales, ends([3] + [0] * MAX_EXPERTS).cuda(), config=config)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_fused_experts_in_a_graph(tokens: int, layout: str) -> None:
    """Two grouped launches give what a `gemm` for each expert gives, to rounding, and a graph holds them."""
    if not some_kernel(layout)[0].is_verified:
        pytest.skip("no grouped kernel is selected")
    need(*some_kernel(layout))
    g = torch.Generator().manual_seed(tokens)
    hidden, inner, experts, top_k = 256, 128, 16, 4
    w13 = weights(experts, hidden, 2 * inner, INT4, g, exact=False, layout=layout)
    w2 = weights(experts, inner, hidden, INT4, g, exact=False, layout=layout)
    x = torch.randn(tokens, hidden, generator=g).half().cuda()
    ids = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)]).cuda()
    probabilities = torch.rand(tokens, top_k, generator=g).cuda()

    def call() -> torch.Tensor:
        return fused_experts(x, (w13.qweight, w13.scales), (w2.qweight, w2.scales), ids, probabilities)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for _ in range(2):
        ids.copy_(torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)]))
        graph.replay()
        wanted = torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda")
        for t in range(tokens):
            for j in range(top_k):
                e = int(ids[t, j])
                gate, up = (x[t].double() @ w13.w64[e]).half().chunk(2)
                between = (torch.nn.functional.silu(gate.float()).half() * up).double()
                wanted[t] += probabilities[t, j].double() * (between @ w2.w64[e])
        assert (y.double() - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_expert_by_gemm_agrees(layout: str) -> None:
    """The launch for all experts and a `gemm` for each differ by rounding alone."""
    config, types = some_kernel(layout)
    need(config, types)
    g = torch.Generator().manual_seed(11)
    w = weights(6, 512, 320, types, g, exact=False, layout=layout)
    x = torch.randn(50, 512, generator=g).half().cuda()
    offs = ends([10, 0, 20, 1, 1, 18]).cuda()
    y = wo.grouped_gemm(x, w.qweight, w.scales, offs, config=config)
    args = GroupedArgs(x, wo.QuantizedWeight(w.qweight, w.scales), offs)
    one_by_one = ExpertsPlan(args).run(args)
    assert (y - one_by_one).float().norm() <= 2e-3 * y.float().norm()


LAYER_KERNELS = [(c, t) for c, t in KERNELS if c.rules.in_layers]
GATES = [Gate("silu"), Gate(None), Gate("gelu"), Gate("relu"), Gate("gelu_tanh"), Gate("relu2"), Gate("situ")]
GATES += [Gate("silu", limit=0.5), Gate.of("swigluoai"), Gate("situ", alpha=2.0, limit=3.0)]
GATES += [Gate("relu2", has_gate=False)]


@pytest.mark.parametrize(("config", "types"), LAYER_KERNELS, ids=[f"{c.kernel}_{t.name}" for c, t in LAYER_KERNELS])
def test_a_layer_is_its_products(config: KernelConfig, types: TypeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel, in layers of three launches and of five: bit for bit what separate launches give, but for the
    functions of gates, which PyTorch rounds in other places. Choices of no expert, int32 and int64, biases."""
    need(config, types)
    group_size = 16 if config.groups_of_16 else 64

    def select(first: Problem, second: Problem, experts: int, is_gated: bool) -> LayerChoice:
        return LayerChoice(config, config, sorts=config.rules.sorts and first.m <= MAX_SORTED_CHOICES)

    monkeypatch.setattr(layer_plans, "select_layer", select)
    monkeypatch.setattr(grouped_plans, "select_grouped", lambda problem, experts: config)
    cache.clear()
    dtype, hidden, inner = DTYPES[types.dtype], 320, 192
    for i, (tokens, top_k, experts) in enumerate([(1, 8, 64), (2, 1, 5), (16, 8, 16), (21, 6, 256), (300, 4, 3)]):
        g = torch.Generator().manual_seed(tokens)
        gate = GATES[(i + len(config.kernel)) % len(GATES)]
        columns = 2 * inner if gate.has_gate else inner
        w13 = weights(experts, hidden, columns, types, g, group_size, exact=False)
        w2 = weights(experts, inner, hidden, types, g, group_size, exact=False)
        x = (torch.randn(tokens, hidden + 8, generator=g) / 64).to(dtype).cuda()[:, :hidden]  # far from fp16's limit
        ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=g, dtype=torch.int32).cuda()
        if tokens > 2:
            ids[1] = -1  # a row that pads a batch
        probabilities = torch.rand(tokens, top_k, generator=g).cuda()
        first, second = (
            Product(
                wo.QuantizedWeight(w.qweight, w.scales, w.zeros),
                (torch.randn(experts, n, generator=g) / 8).to(dtype).cuda(),
            )
            for w, n in ((w13, columns), (w2, hidden))
        )
        found = [layer_plans.layer(x, kind, probabilities, first, gate, second) for kind in (ids, ids.long(), ids)]
        assert found[0] is not None and all(y is not None and torch.equal(y, found[0]) for y in found)
        rows, offs, places = sort_by_expert(x, ids, experts)
        rows[int(offs[-1]) :] = torch.nan
        wanted = combine(second(gate(first(rows, offs)), offs), probabilities, ids, offs, places, dtype)
        what = f"{tokens} tokens, {gate}"
        if gate.activation in (None, "relu") and gate.has_gate:
            assert torch.equal(found[0], wanted), what
        difference = (found[0].double() - wanted.double()).norm()
        assert difference <= 4 * torch.finfo(dtype).eps * wanted.double().norm(), what
        if tokens > 2:
            assert not found[0][1].any(), "a row without experts gives zeros"
    cache.clear()


def test_layers_share_memory_with_others() -> None:
    """Scratch of one layer is that of the next: graphs of several layers, replayed in turn with other routings."""
    g = torch.Generator().manual_seed(3)
    hidden, inner, experts = 256, 128, 12
    types = TypeConfig("bf16", "int4", "group")
    layers = [
        [weights(experts, k, n, types, g, 128, exact=False) for k, n in ((hidden, 2 * inner), (inner, hidden))]
        for _ in range(3)
    ]

    def forward(x: torch.Tensor, ids: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        for w13, w2 in layers:
            y = fused_experts(x, (w13.qweight, w13.scales), (w2.qweight, w2.scales), ids, probabilities)
            x = x + y / y.float().std().to(y.dtype)
        return x

    graphs = []
    for tokens in (1, 4, 16, 130):
        x = torch.randn(tokens, hidden, generator=g).bfloat16().cuda()
        ids = torch.randint(0, experts, (tokens, 8), generator=g).cuda()
        probabilities = torch.rand(tokens, 8, generator=g).cuda()
        forward(x, ids, probabilities)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = forward(x, ids, probabilities)
        graphs.append((graph, x, ids, probabilities, y))
    for _ in range(3):
        for graph, x, ids, probabilities, y in graphs:
            ids.copy_(torch.randint(-1, experts, ids.shape, generator=g))
            ids[:, 0] = 0
            x.copy_(torch.randn(x.shape, generator=g))
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, forward(x, ids, probabilities))


@pytest.mark.parametrize("config", [c for c, t in KERNELS if t == INT4 and c.rules.in_layers], ids=str)
def test_rows_are_what_they_are_alone(config: KernelConfig) -> None:
    """A row's result depends on no other row: kernels sum in the order of K, wherever a tile comes."""
    need(config, INT4)
    group_size = 16 if config.groups_of_16 else 64
    g = torch.Generator().manual_seed(12)
    w = weights(9, 704, 448, INT4, g, group_size, exact=False)
    x = torch.randn(140, 704, generator=g).half().cuda()
    counts = [3, 0, 8, 1, 0, 120, 1, 1, 6]
    y = wo.grouped_gemm(x, w.qweight, w.scales, ends(counts).cuda(), config=config)
    begin = 0
    for expert, count in enumerate(counts):
        for row in range(begin, begin + count):
            alone = [int(e == expert) for e in range(9)]
            one = wo.grouped_gemm(x[row : row + 1], w.qweight, w.scales, ends(alone).cuda(), config=config)
            assert torch.equal(one[0], y[row]), f"row {row} of expert {expert}"
        begin += count
