"""Every compiled kernel against two oracles: exact-grid inputs, bit for bit, and fp64 on random inputs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import weightonly as wo
from weightonly.heuristics.configs import CONFIGS, KernelConfig
from weightonly.kernels import device_arch, kernel_numbers, runs_on

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


def check_exact(
    m: int, case: Case, config: KernelConfig | None, g: torch.Generator, layout: str = "interleaved"
) -> None:
    o = make(case, g, layout, exact=True)
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
    layout: str = "interleaved",
) -> None:
    """The error against fp64 is at most twice that of cuBLAS on the dequantized weight in the same dtype."""
    o = make(case, g, layout, exact=False)
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
    if not runs_on(config, device_arch(torch.cuda.current_device())):
        pytest.skip(f"{config.kernel} does not run on this GPU with this build")


MODES = {"channel": (-1, False), "group128": (128, False), "group32zeros": (32, True), "channelzeros": (-1, True)}
PAIRS = [
    pytest.param(config, format, dtype, id=f"{config.kernel}-{dtype}-{format}")
    for config in CONFIGS
    for format in config.formats
    for dtype in (["f16"] if config.family in ("gemm_sm70", "gemm_sm75") else ["f16", "bf16"])
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
    for split_k in (1, 3):
        check_exact(m, ragged, config.with_split_k(split_k), generator, config.layout)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("config", "format", "dtype"), PAIRS)
def test_every_kernel_is_as_accurate_as_cublas(
    cuda_device: torch.device, generator: torch.Generator, config: KernelConfig, format: str, dtype: str, mode: str
) -> None:
    group_size, zeros = MODES[mode]
    case = Case(k=1024, n=520, format=format, dtype=dtype, group_size=group_size, zeros=zeros)
    require(config, case)
    check_random(min(config.max_m, 2 * config.block_m - 1), case, config, generator, "silu", config.layout)


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
        if config.layout == "interleaved":
            case = Case(k, 100, config.formats[0], "f16", group_size, zeros)
            require(config, case)
            check_exact(min(config.max_m, 20), case, config, generator)


@pytest.mark.parametrize("split_k", range(1, 8))
def test_split_k(cuda_device: torch.device, generator: torch.Generator, split_k: int) -> None:
    for config in wo.kernels():
        case = Case(7 * 1024, 72, config.formats[0], "f16", 64)
        require(config, case)
        check_exact(min(config.max_m, 18), case, config.with_split_k(split_k), generator, config.layout)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(cuda_device: torch.device, generator: torch.Generator, activation: str | None) -> None:
    for m in (1, 4, 40, 200):
        for split_k in (1, 2):
            for config in wo.kernels():
                if m <= config.max_m:
                    case = Case(512, 96, config.formats[0])
                    check_random(m, case, config.with_split_k(split_k), generator, activation, config.layout)


def test_huge_and_tiny_bf16(cuda_device: torch.device, generator: torch.Generator) -> None:
    """bf16 spans fp32's exponents; the GEMV works on scaled bit patterns and must not overflow or flush."""
    o = make(Case(512, 64, "int4", "bf16", 128), generator, "interleaved", exact=True)
    for exponent in (-110, -60, 0, 60, 110):
        x = (torch.randn(1, 512, generator=generator).double() * 2.0**exponent).bfloat16().cuda()
        expected = x.double() @ o.w64
        for config in wo.kernels():
            if config.layout == "interleaved" and "int4" in config.formats and config.min_arch <= 80:
                if config.family in ("gemm_sm75",):
                    continue
                y = wo.gemm(x, o.qweight, o.scales, config=config)
                assert ((y.double() - expected).norm() / expected.norm()) < 0.01, (config, exponent)


def test_nan_and_inf_in_x_reach_y(cuda_device: torch.device, generator: torch.Generator) -> None:
    for dtype in ("f16", "bf16"):
        o = make(Case(512, 64, "int4", dtype), generator, "interleaved", exact=False)
        for m in (1, 16):
            for bad in (float("nan"), float("inf")):
                x = torch.randn(m, 512, generator=generator).to(DTYPES[dtype]).cuda()
                x[0, 77] = bad
                y = wo.gemm(x, o.qweight, o.scales)
                assert not y[0].isfinite().any()
                assert y[1:].isfinite().all()


def test_strided_misaligned_and_batched_x(cuda_device: torch.device, generator: torch.Generator) -> None:
    o = make(Case(256, 72), generator, "interleaved", exact=True)
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
    o = make(Case(256, 72), generator, "interleaved", exact=True)
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
    o = make(Case(256, 72), generator, "interleaved", exact=True)
    y = wo.gemm(torch.empty(2, 0, 256, dtype=torch.float16, device="cuda"), o.qweight, o.scales)
    assert y.shape == (2, 0, 72)
    assert y.dtype == torch.float16


def test_cuda_graph_and_side_stream(cuda_device: torch.device, generator: torch.Generator) -> None:
    o = make(Case(2048, 264), generator, "interleaved", exact=True)
    for m in (1, 16, 128):
        x = torch.randint(-3, 4, (m, 2048), generator=generator).half().cuda()
        expected = (x.double() @ o.w64).half()
        config = next(c for c in wo.kernels() if c.family == "gemm_sm80").with_split_k(4)
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


def test_compiled_function(cuda_device: torch.device, generator: torch.Generator) -> None:
    o = make(Case(256, 72), generator, "interleaved", exact=True)
    x = torch.randint(-3, 4, (6, 256), generator=generator).half().cuda()
    function = torch.compile(lambda x: wo.gemm(x, o.qweight, o.scales) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(function(x), (x.double() @ o.w64).half() + 1)


def test_more_than_two_to_the_31_weights(cuda_device: torch.device, generator: torch.Generator) -> None:
    """Offsets are 64 bits wide: 66560 x 33024 is 2.2e9 weights; the last rows and columns are the ones that wrap."""
    k, n = 66560, 33024
    if torch.cuda.get_device_properties(0).total_memory < 24e9:
        pytest.skip("needs 24 GB of GPU memory")
    from weightonly.layout import INTERLEAVED

    data = torch.randint(0, 256, (k * n // 2,), dtype=torch.uint8, device="cuda")
    qweight = wo.PackedWeight(data, k, n, "int4", INTERLEAVED)
    scales = torch.ones(k // 128, n, dtype=torch.float16, device="cuda")
    for m in (1, 16):
        x = torch.zeros(m, k, dtype=torch.float16, device="cuda")
        x[:, -64:] = torch.randint(-3, 4, (m, 64), generator=generator).half().cuda()
        # A line (4 columns) is k * 2 bytes; the last 64 lines hold the last 256 columns.
        tail = wo.PackedWeight(data[-64 * k * 2 :].clone(), k, 256, "int4", INTERLEAVED)
        expected = x.double() @ wo.unpack(tail).double()
        y = wo.gemm(x, qweight, scales)
        assert torch.equal(y[:, -256:], expected.half())


def test_preprocess_on_the_gpu_equals_the_cpu(cuda_device: torch.device, generator: torch.Generator) -> None:
    for bits, limit in ((4, 8), (8, 128)):
        q = torch.randint(-limit, limit, (200, 130), generator=generator, dtype=torch.int8)
        for layout in ("interleaved", "row_major"):
            on_gpu = wo.preprocess(q.cuda(), bits=bits, layout=layout)
            assert torch.equal(on_gpu.data.cpu(), wo.preprocess(q, bits=bits, layout=layout).data)
            assert torch.equal(wo.unpack(on_gpu).cpu(), q)
