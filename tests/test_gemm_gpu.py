"""Every compiled kernel against two oracles: exact-grid inputs, bit for bit, and fp64 on random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

import weightonly as wo
from weightonly.heuristics import Problem
from weightonly.heuristics.configs import CONFIGS, FAMILIES, KernelConfig
from weightonly.heuristics.cost import cluster_slots, machine
from weightonly.heuristics.legal import parts_of_k, smem_bytes, splits_evenly
from weightonly.heuristics.problem import layouts_of
from weightonly.kernels import device_arch, kernel_numbers, runs_on, sm_count

pytestmark = pytest.mark.gpu

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
ACTIVATIONS = {
    None: lambda y: y,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


@dataclass(frozen=True)
class Case:
    """One weight: shape, types and how it is quantized."""

    k: int
    n: int
    format: str = "int4"
    dtype: str = "f16"
    group_size: int = 128
    zeros: bool = False

    @property
    def mode(self) -> str:
        return "group_zeros" if self.zeros else "channel" if self.group_size == -1 else "group"

    @property
    def groups(self) -> int:
        return 1 if self.group_size == -1 else self.k // self.group_size


@dataclass
class Operands:
    """A packed weight with its scales and zeros, and the same weight in fp64."""

    qweight: wo.PackedWeight
    scales: torch.Tensor
    zeros: torch.Tensor | None
    w64: torch.Tensor  # [K, N]


def make(case: Case, g: torch.Generator, layout: str, *, exact: bool) -> Operands:
    """exact: scales are powers of two and zeros integers, so that every product and sum is exact in fp32."""
    limit = 8 if case.format == "int4" else 128
    q = torch.randint(-limit, limit, (case.k, case.n), generator=g, dtype=torch.int8)
    shape = (case.groups, case.n)
    dtype = DTYPES[case.dtype]
    if exact:
        scales = torch.exp2(torch.randint(-2, 2, shape, generator=g).double()).to(dtype)
        zeros = torch.randint(-limit // 2, limit // 2, shape, generator=g).to(dtype)
    else:
        scales = (torch.rand(shape, generator=g) * 0.02 + 0.001).to(dtype)
        zeros = (torch.rand(shape, generator=g) * limit - limit / 2).to(dtype)
    offset = zeros.double() if case.zeros else torch.zeros(shape, dtype=torch.float64)
    rows = case.k // case.groups
    w64 = (q.double().view(case.groups, rows, case.n) - offset[:, None]) * scales.double()[:, None]
    return Operands(
        wo.preprocess(q, bits=4 if case.format == "int4" else 8, layout=layout).to("cuda"),
        scales.cuda(),
        zeros.cuda() if case.zeros else None,
        w64.view(case.k, case.n).cuda(),
    )


def this_gpu() -> int:
    return device_arch(torch.cuda.current_device())


def own_layout() -> str:
    """The layout that `preprocess` makes for this GPU."""
    return layouts_of(this_gpu())[0]


def splits(config: KernelConfig, m: int, case: Case, wanted: tuple[int, ...]) -> list[KernelConfig]:
    """The configuration with those split_k of `wanted` that it can have for this problem."""
    problem = Problem(
        m, case.n, case.k, case.format, case.group_size, this_gpu(), 132, layout=config.layout, zeros=case.zeros
    )
    found = []
    for s in (config.with_split_k(s) for s in wanted if s <= config.max_split_k):
        if not splits_evenly(parts_of_k(s, problem), s.split_k):
            continue
        if s.shares_cluster and not splits_evenly(s.shared_sums, s.split_k):
            continue
        if smem_bytes(s, problem) <= machine(this_gpu()).smem_bytes:
            found.append(s)
    return found


@pytest.fixture
def overlap() -> Iterator[None]:
    """Launches overlap again after the test."""
    yield
    wo.set_launch_overlap(True)


def run(x: torch.Tensor, o: Operands, **arguments: object) -> torch.Tensor:
    """gemm into a NaN-filled tensor inside a guard band, which must come back untouched."""
    m, n = x.shape[0], o.qweight.n
    frame = torch.full((m + 2, n + 16), float("nan"), dtype=x.dtype, device=x.device)
    out = frame[1 : m + 1, 8 : n + 8]
    result = wo.gemm(x, o.qweight, o.scales, zeros=o.zeros, out=out, **arguments)  # type: ignore[arg-type]
    assert result is out
    guard = torch.ones_like(frame, dtype=torch.bool)
    guard[1 : m + 1, 8 : n + 8] = False
    assert frame[guard].isnan().all(), "wrote outside of out"
    assert not out.isnan().any(), "left elements unwritten"
    return out


def check_exact(m: int, case: Case, config: KernelConfig | None, g: torch.Generator) -> None:
    o = make(case, g, own_layout() if config is None else config.layout, exact=True)
    x = torch.randint(-3, 4, (m, case.k), generator=g).to(DTYPES[case.dtype]).cuda()
    bias = torch.randint(-8, 9, (case.n,), generator=g).to(x.dtype).cuda()
    expected = x.double() @ o.w64 + bias.double()
    y = run(x, o, bias=bias, config=config)
    assert torch.equal(y, expected.to(x.dtype))
    assert torch.equal(run(x, o, bias=bias, config=config), y)


def check_random(
    m: int,
    case: Case,
    config: KernelConfig | None,
    g: torch.Generator,
    activation: str | None,
) -> None:
    """The error against fp64 is at most twice that of cuBLAS on the dequantized weight in the same dtype."""
    o = make(case, g, own_layout() if config is None else config.layout, exact=False)
    x = torch.randn(m, case.k, generator=g).to(DTYPES[case.dtype]).cuda()
    act = ACTIVATIONS[activation]
    expected = act(x.double() @ o.w64)
    peer = act((x @ wo.dequantize(o.qweight, o.scales, o.zeros)).float()).to(x.dtype)
    y = run(x, o, activation=activation, config=config)
    scale = expected.abs().max()
    error = (y.double() - expected).norm() / expected.norm()
    peer_error = (peer.double() - expected).norm() / expected.norm()
    assert error <= 2 * peer_error + 1e-6
    worst = (y.double() - expected).abs().max()
    peer_worst = (peer.double() - expected).abs().max()
    eps = torch.finfo(x.dtype).eps
    assert worst <= 2 * peer_worst + eps * scale


def require(config: KernelConfig, case: Case) -> None:
    """Skips where this build or this GPU lacks the kernel; fails nowhere else."""
    if f"{config.kernel}_{case.dtype}_{case.format}_{case.mode}" not in kernel_numbers():
        pytest.skip(f"{config.kernel} is not compiled for {case.dtype} {case.format} {case.mode}")
    if not runs_on(config, this_gpu()):
        pytest.skip(f"{config.kernel} does not run on this GPU with this build")


MODES = {"channel": (-1, False), "group128": (128, False), "group32zeros": (32, True), "channelzeros": (-1, True)}
PAIRS = [
    pytest.param(config, format, dtype, id=f"{config.kernel}-{dtype}-{format}")
    for config in CONFIGS
    for format in config.formats
    for dtype in FAMILIES[config.family].dtypes
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("config", "format", "dtype"), PAIRS)
def test_every_kernel_is_bit_exact_on_the_grid(
    cuda_device: torch.device, generator: torch.Generator, config: KernelConfig, format: str, dtype: str, mode: str
) -> None:
    group_size, zeros = MODES[mode]
    ragged = Case(k=640, n=328, format=format, dtype=dtype, group_size=group_size, zeros=zeros)
    require(config, ragged)
    m = min(config.max_m, config.block_m + 5)
    for split in splits(config, m, ragged, (1, 2, 3, 4, 8) if config.shares_cluster else (1, 3)):
        check_exact(m, ragged, split, generator)
    if config.shares_cluster:
        check_exact(config.block_m - 3, ragged, config, generator)  # rows of the tile that are not there


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("config", "format", "dtype"), PAIRS)
def test_every_kernel_is_as_accurate_as_cublas(
    cuda_device: torch.device, generator: torch.Generator, config: KernelConfig, format: str, dtype: str, mode: str
) -> None:
    group_size, zeros = MODES[mode]
    case = Case(k=1024, n=520, format=format, dtype=dtype, group_size=group_size, zeros=zeros)
    require(config, case)
    m = min(config.max_m, 2 * config.block_m - 1)
    for split in splits(config, m, case, (1, 4) if config.shares_cluster else (1,)):
        check_random(m, case, split, generator, "silu")


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_clusters_that_go_through_many_units(
    cuda_device: torch.device, generator: torch.Generator, format: str
) -> None:
    """Five units and a ragged one per cluster: buffers and barriers come round twice."""
    for config in wo.kernels():
        if config.family != "decode_sm90" or format not in config.formats:
            continue
        for split_k, k in ((1, 256), (3, 1216), (8, 1600)):
            slots = cluster_slots(sm_count(torch.cuda.current_device()), split_k)
            case = Case(k, 5 * slots * config.block_n + 40, format, "f16", 64)
            for split in splits(config, config.max_m, case, (split_k,)):
                check_exact(config.max_m, case, split, generator)


@pytest.mark.parametrize("layout", ["own", "interleaved"])
@pytest.mark.parametrize(("k", "n"), [(512, 328), (4096, 1000), (14336, 72)], ids=str)
def test_every_small_batch(cuda_device: torch.device, generator: torch.Generator, k: int, n: int, layout: str) -> None:
    """Every M from 1 to 72: the heuristic goes from one kernel to the next without a gap."""
    read = layouts_of(this_gpu())
    if layout not in ("own", *read[1:]):
        pytest.skip("this GPU has one layout")
    for format in ("int4", "int8"):
        o = make(Case(k, n, format), generator, read[0] if layout == "own" else layout, exact=True)
        x = torch.randint(-1, 2, (72, k), generator=generator).half().cuda()
        expected = (x.double() @ o.w64).half()
        for m in range(1, 73):
            assert torch.equal(run(x[:m], o), expected[:m]), (format, m)


SHAPES = [(1, 1), (8, 1), (63, 65), (64, 64), (72, 31), (128, 4096), (200, 130), (257, 33), (4104, 66), (4096, 1)]


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 9, 17, 64, 100, 129, 300])
@pytest.mark.parametrize(("k", "n"), SHAPES, ids=[f"{k}x{n}" for k, n in SHAPES])
def test_any_shape(cuda_device: torch.device, generator: torch.Generator, m: int, k: int, n: int) -> None:
    for format in ("int4", "int8"):
        for dtype in ("f16", "bf16"):
            check_exact(m, Case(k, n, format, dtype, group_size=-1), None, generator)


@pytest.mark.parametrize("group_size", [32, 64, 128, 192, 320, 960])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
def test_group_sizes(cuda_device: torch.device, generator: torch.Generator, group_size: int, zeros: bool) -> None:
    k = 1920
    for config in wo.kernels():
        if config.layout != "row_major":
            for format in config.formats if config.shares_cluster else config.formats[:1]:
                case = Case(k, 100, format, "f16", group_size, zeros)
                require(config, case)
                check_exact(min(config.max_m, 20), case, config, generator)


@pytest.mark.parametrize("split_k", range(1, 9))
def test_split_k(cuda_device: torch.device, generator: torch.Generator, split_k: int) -> None:
    for config in wo.kernels():
        case = Case(7 * 1024, 72, config.formats[0], "f16", 64)
        require(config, case)
        m = min(config.max_m, 18)
        for split in splits(config, m, case, (split_k,)):
            check_exact(m, case, split, generator)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(cuda_device: torch.device, generator: torch.Generator, activation: str | None) -> None:
    for m in (1, 4, 40, 200):
        for config in wo.kernels():
            if m <= config.max_m:
                case = Case(512, 96, config.formats[0])
                for split in splits(config, m, case, (1, 2)):
                    check_random(m, case, split, generator, activation)


def test_huge_and_tiny_bf16(cuda_device: torch.device, generator: torch.Generator) -> None:
    """bf16 spans fp32's exponents; kernels that work on bit patterns must not overflow or flush."""
    for layout in layouts_of(this_gpu()):
        o = make(Case(512, 64, "int4", "bf16", 128), generator, layout, exact=True)
        for exponent in (-110, -60, 0, 60, 110):
            x = (torch.randn(1, 512, generator=generator).double() * 2.0**exponent).bfloat16().cuda()
            expected = x.double() @ o.w64
            for config in wo.kernels():
                can_bf16 = "bf16" in FAMILIES[config.family].dtypes
                if config.layout == layout and "int4" in config.formats and can_bf16:
                    y = wo.gemm(x, o.qweight, o.scales, config=config)
                    assert ((y.double() - expected).norm() / expected.norm()) < 0.01, (config, exponent)


def test_nan_and_inf_in_x_reach_y(cuda_device: torch.device, generator: torch.Generator) -> None:
    for dtype in ("f16", "bf16"):
        o = make(Case(512, 64, "int4", dtype), generator, own_layout(), exact=False)
        for m in (1, 16):
            for bad in (float("nan"), float("inf")):
                x = torch.randn(m, 512, generator=generator).to(DTYPES[dtype]).cuda()
                x[0, 77] = bad
                y = wo.gemm(x, o.qweight, o.scales)
                assert not y[0].isfinite().any()
                assert y[1:].isfinite().all()


def test_strided_misaligned_and_batched_x(cuda_device: torch.device, generator: torch.Generator) -> None:
    o = make(Case(256, 72), generator, own_layout(), exact=True)
    wide = torch.randint(-3, 4, (6, 300), generator=generator).half().cuda()
    views = {
        "strided rows": wide[:, :256],
        "rows 8 elements in": wide[:, 8:264],
        "misaligned rows": wide[:, 3:259],
        "transposed": torch.randint(-3, 4, (256, 5), generator=generator).half().cuda().t(),
        "every other row": torch.randint(-3, 4, (8, 256), generator=generator).half().cuda()[::2],
        "expanded": wide[:1, :256].expand(4, 256),
        "one dimension": wide[2, :256],
        "three dimensions": torch.randint(-3, 4, (2, 3, 256), generator=generator).half().cuda(),
        "permuted": torch.randint(-3, 4, (3, 2, 256), generator=generator).half().cuda().transpose(0, 1),
    }
    for name, x in views.items():
        y = wo.gemm(x, o.qweight, o.scales)
        assert y.shape == (*x.shape[:-1], 72), name
        assert torch.equal(y, (x.double() @ o.w64).half()), name


def test_scales_and_bias_may_be_views(cuda_device: torch.device, generator: torch.Generator) -> None:
    o = make(Case(256, 72), generator, own_layout(), exact=True)
    x = torch.randint(-3, 4, (6, 256), generator=generator).half().cuda()
    base = torch.zeros(o.scales.numel() + 1, dtype=torch.float16, device="cuda")
    base[1:] = o.scales.flatten()
    misaligned = base[1:].view(o.scales.shape)
    transposed = o.scales.t().contiguous().t()
    bias = torch.randint(-8, 9, (144,), generator=generator).half().cuda()[::2]
    expected = (x.double() @ o.w64 + bias.double()).half()
    for scales in (misaligned, transposed):
        for m in (1, 6):
            assert torch.equal(wo.gemm(x[:m], o.qweight, scales, bias=bias), expected[:m])


def test_no_rows(cuda_device: torch.device, generator: torch.Generator) -> None:
    o = make(Case(256, 72), generator, own_layout(), exact=True)
    y = wo.gemm(torch.empty(2, 0, 256, dtype=torch.float16, device="cuda"), o.qweight, o.scales)
    assert y.shape == (2, 0, 72)
    assert y.dtype == torch.float16


def test_cuda_graph_and_side_stream(cuda_device: torch.device, generator: torch.Generator) -> None:
    o = make(Case(2048, 264), generator, own_layout(), exact=True)
    for m in (1, 16, 128):
        x = torch.randint(-3, 4, (m, 2048), generator=generator).half().cuda()
        expected = (x.double() @ o.w64).half()
        config = next(c for c in wo.kernels() if c.layout == own_layout() and c.max_m >= m).with_split_k(4)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.equal(wo.gemm(x, o.qweight, o.scales), expected)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        y = torch.empty_like(expected)
        z = torch.empty_like(expected)
        with torch.cuda.graph(graph):
            wo.gemm(x, o.qweight, o.scales, out=y)
            wo.gemm(x, o.qweight, o.scales, out=z, config=config)
        x.neg_()
        for _ in range(2):
            y.fill_(float("nan"))
            z.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, -expected)
            assert torch.equal(z, -expected)


def outputs_of(calls: int, chain: Chain, *, graph: bool) -> list[torch.Tensor]:
    """The results of `calls` rounds of a chain, queued without a pause, from a graph or one by one."""
    results = [torch.full_like(chain.y, float("nan")) for _ in range(calls)]
    if not graph:
        for i, y in enumerate(results):
            chain.round(i, y)
        return results
    chain.round(0, results[0])  # gemm makes its plans outside of the capture
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for i, y in enumerate(results):
            chain.round(i, y)
    for y in results:
        y.fill_(float("nan"))
    captured.replay()
    return results


class Chain:
    """A gemm that writes what the gemm after it reads: its x, its scales, its bias or its bytes.

    Each round writes something else to the same place. What a kernel reads too early is of the round before it.
    """

    K = N = 512

    def __init__(self, written: str, m: int, generator: torch.Generator) -> None:
        k, n, groups = self.K, self.N, self.K // 128
        # Integers below 2^24 throughout: every sum is exact, and bf16 rounds each once.
        first = {
            "x": (m, k),
            "scales": (groups, n),
            "channel": (1, n),
            "bias": (1, n),
            "weight": (16, k * n // 2 // 2 // 16),
        }[written]
        # One of 64 each: what is written are values of q. Their products with the consumer's q are exact in bf16,
        # to which gemm_sm90 rounds its weights.
        ones = [torch.randint(0, 64, (first[0],), generator=generator) for _ in range(3)]
        self.inputs = [torch.nn.functional.one_hot(i, 64).bfloat16().cuda() for i in ones]
        self.producer = make(Case(64, first[1], "int4", "bf16", -1), generator, own_layout(), exact=True)
        self.producer.scales.fill_(1)
        self.w64 = wo.unpack(self.producer.qweight).double()
        self.place = torch.zeros(first, dtype=torch.bfloat16, device="cuda")
        group_size = -1 if written == "channel" else 128
        self.consumer = make(Case(k, n, "int4", "bf16", group_size), generator, own_layout(), exact=True)
        self.bias = self.place.view(-1) if written == "bias" else None
        self.x = torch.randint(-1, 2, (m, k), generator=generator).bfloat16().cuda()
        self.y = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        self.written = written
        c = self.consumer
        if written == "x":
            self.x = self.place
        elif written in ("scales", "channel"):
            c.scales = self.place
        elif written == "weight":
            c.qweight = wo.PackedWeight(self.place.view(torch.uint8).view(-1), k, n, "int4", own_layout())

    def round(self, i: int, out: torch.Tensor) -> None:
        p, c = self.producer, self.consumer
        wo.gemm(self.inputs[i % 3], p.qweight, p.scales, out=self.place)
        wo.gemm(self.x, c.qweight, c.scales, bias=self.bias, out=out)

    def expected(self, i: int) -> torch.Tensor:
        self.place.copy_((self.inputs[i % 3].double() @ self.w64).bfloat16())
        c = self.consumer
        scales = c.scales.double().repeat_interleave(self.K // c.scales.shape[0], 0)
        y = self.x.double() @ (wo.unpack(c.qweight).double() * scales)
        return (y if self.bias is None else y + self.bias.double()).bfloat16()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("m", [1, 16, 40])
@pytest.mark.parametrize("written", ["x", "scales", "channel", "bias", "weight"])
def test_the_kernel_before_may_write_anything(
    cuda_device: torch.device, generator: torch.Generator, overlap: None, written: str, m: int, graph: bool
) -> None:
    """Launches that overlap wait for what they read, and write no earlier than others have read it."""
    if this_gpu() < 80:
        pytest.skip("bf16 needs compute capability 8.0")
    chain = Chain(written, m, generator)
    together = outputs_of(24, chain, graph=graph)
    torch.cuda.synchronize()
    wo.set_launch_overlap(False)
    apart = outputs_of(24, chain, graph=graph)
    torch.cuda.synchronize()
    expected = [chain.expected(i) for i in range(3)]
    for i, (a, b) in enumerate(zip(together, apart, strict=True)):
        assert torch.equal(a, b), i
        assert torch.equal(a, expected[i % 3]), i


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("m", [1, 9, 33])
def test_any_kernel_before_may_write_anything(
    cuda_device: torch.device, generator: torch.Generator, m: int, graph: bool
) -> None:
    """PyTorch's copies write x, the scales and the weight just before each gemm, on a stream of their own."""
    case = Case(4096, 1032, "int4", "f16", 128)
    sources = [make(case, generator, own_layout(), exact=True) for _ in range(2)]
    xs = [torch.randint(-1, 2, (m, case.k), generator=generator).half().cuda() for _ in range(2)]
    expected = [(x.double() @ o.w64).half() for x, o in zip(xs, sources, strict=True)]
    x = torch.zeros_like(xs[0])
    w = wo.PackedWeight(torch.zeros_like(sources[0].qweight.data), case.k, case.n, "int4", own_layout())
    scales = torch.zeros_like(sources[0].scales)
    results = [torch.full_like(expected[0], float("nan")) for _ in range(8)]

    def calls() -> None:
        for i, y in enumerate(results):
            x.copy_(xs[i % 2])
            scales.copy_(sources[i % 2].scales)
            w.data.copy_(sources[i % 2].qweight.data)
            wo.gemm(x, w, scales, out=y)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
    stream.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            calls()
        for y in results:
            y.fill_(float("nan"))
        captured.replay()
        torch.cuda.synchronize()
    for i, y in enumerate(results):
        assert torch.equal(y, expected[i % 2]), i


def test_overlap_of_launches_changes_no_bit(
    cuda_device: torch.device, generator: torch.Generator, overlap: None
) -> None:
    for config in wo.kernels():
        if config.shares_cluster:
            case = Case(1024, 200, config.formats[0], "bf16", 128)
            require(config, case)
            o = make(case, generator, config.layout, exact=False)
            m = min(config.max_m, 40)
            x = torch.randn(m, case.k, generator=generator).bfloat16().cuda()
            for split in splits(config, m, case, (1, 4)):
                results = []
                for enabled in (True, False, True):
                    wo.set_launch_overlap(enabled)
                    results += [run(x, o, config=split) for _ in range(3)]
                assert all(torch.equal(y, results[0]) for y in results), split


def test_compiled_function(cuda_device: torch.device, generator: torch.Generator) -> None:
    o = make(Case(256, 72), generator, own_layout(), exact=True)
    x = torch.randint(-3, 4, (6, 256), generator=generator).half().cuda()
    function = torch.compile(lambda x: wo.gemm(x, o.qweight, o.scales) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(function(x), (x.double() @ o.w64).half() + 1)


def test_more_than_two_to_the_31_weights(cuda_device: torch.device, generator: torch.Generator) -> None:
    """Offsets are 64 bits wide: 66560 x 33024 is 2.2e9 weights; the last rows and columns are the ones that wrap."""
    k, n = 66560, 33024
    if torch.cuda.get_device_properties(0).total_memory < 24e9:
        pytest.skip("needs 24 GB of GPU memory")
    data = torch.randint(0, 256, (k * n // 2,), dtype=torch.uint8, device="cuda")
    scales = torch.ones(k // 128, n, dtype=torch.float16, device="cuda")
    for layout in layouts_of(this_gpu()):
        qweight = wo.PackedWeight(data, k, n, "int4", layout)
        # The last 256 columns: of a line (4 columns) or a stripe (64) each k * 2 or k * 32 bytes.
        tail = wo.PackedWeight(data[-256 * k // 2 :].clone(), k, 256, "int4", layout)
        w = wo.unpack(tail).double()
        for m in (1, 16):
            x = torch.zeros(m, k, dtype=torch.float16, device="cuda")
            x[:, -64:] = torch.randint(-3, 4, (m, 64), generator=generator).half().cuda()
            y = wo.gemm(x, qweight, scales)
            assert torch.equal(y[:, -256:], (x.double() @ w).half())


def test_preprocess_on_the_gpu_equals_the_cpu(cuda_device: torch.device, generator: torch.Generator) -> None:
    for bits, limit in ((4, 8), (8, 128)):
        q = torch.randint(-limit, limit, (200, 130), generator=generator, dtype=torch.int8)
        for layout in ("tiled", "interleaved", "row_major"):
            on_gpu = wo.preprocess(q.cuda(), bits=bits, layout=layout)
            assert torch.equal(on_gpu.data.cpu(), wo.preprocess(q, bits=bits, layout=layout).data)
            assert torch.equal(wo.unpack(on_gpu).cpu(), q)
