"""The kernel that dequantizes, bit for bit against the CPU, and `gemm` by slices of what it makes and cuBLAS."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch
from gemm_cases import DTYPES, Case, Operands, check_exact, check_random, make, own_layout, require, run, this_gpu

import weightonly as wo
from weightonly import cpu
from weightonly.heuristics import select, slices
from weightonly.heuristics.configs import CONFIGS, KernelConfig
from weightonly.heuristics.problem import layouts_of
from weightonly.kernels import sm_count

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fp32_sums")]

DEQUANTIZE = sys.modules["weightonly.dequantize"]  # `weightonly.dequantize` is the function
LAYOUTS = ["tiled", "interleaved"]
FORMATS = ["int4", "int8", "nf4", "fp4", "code4"]
SHAPES = [
    # K, N, group size
    (64, 64, 64),
    (512, 256, -1),
    (512, 256, 32),
    (1536, 328, 128),
    (1152, 200, 192),
    (640, 136, 320),
    (200, 77, -1),
    (96, 33, 32),
    (1, 1, -1),
    (130, 4097, -1),
    (4096, 72, 64),
]


@dataclass
class Weight:
    """A packed weight with its scales and zeros, on the CPU."""

    qweight: wo.PackedWeight
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def on(self, device: torch.device) -> tuple[wo.PackedWeight, torch.Tensor, torch.Tensor | None]:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return self.qweight.to(device), self.scales.to(device), zeros


def random_weight(
    k: int,
    n: int,
    format: str,
    layout: str,
    dtype: torch.dtype,
    group_size: int,
    zeros: bool,
    g: torch.Generator,
    exponent: int = -6,
) -> Weight:
    """Fractional zeros, and scales of both signs around 2^exponent."""
    groups = 1 if group_size == -1 else k // group_size
    scales = (torch.randn(groups, n, generator=g).double() * 2.0**exponent).to(dtype)
    if format in ("int4", "int8"):
        bits = 4 if format == "int4" else 8
        limit = 1 << (bits - 1)
        q = torch.randint(-limit, limit, (k, n), dtype=torch.int8, generator=g)
        z = (torch.rand(groups, n, generator=g) * 2 * limit - limit).to(dtype) if zeros else None
        return Weight(wo.preprocess(q, bits=bits, layout=layout), scales, z)
    codes = torch.randint(0, 16, (k, n), dtype=torch.int8, generator=g)
    table = torch.randn(16, generator=g) if format == "code4" else None
    return Weight(wo.preprocess(codes, format=format, code=table), scales, None)


def skip_unless_read(format: str, layout: str, zeros: bool) -> None:
    if format in ("nf4", "fp4", "code4") and (layout != "tiled" or zeros):
        pytest.skip("codes are always tiled, without zeros")


@pytest.fixture
def kernel_only(cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The GPU, and PyTorch's way of dequantizing there is closed."""
    by_operators = cpu.dequantize

    def on_the_cpu(qweight: wo.PackedWeight, *arguments: torch.Tensor | None) -> torch.Tensor:
        assert qweight.device.type == "cpu", "expected the kernel"
        return by_operators(qweight, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu, "dequantize", on_the_cpu)
    return cuda_device


# --- dequantize --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_equals_the_cpu(
    kernel_only: torch.device, generator: torch.Generator, format: str, layout: str, dtype: str, zeros: bool
) -> None:
    skip_unless_read(format, layout, zeros)
    for k, n, group_size in SHAPES:
        weight = random_weight(k, n, format, layout, DTYPES[dtype], group_size, zeros, generator)
        expected = wo.dequantize(weight.qweight, weight.scales, weight.zeros)
        w = wo.dequantize(*weight.on(kernel_only))
        assert w.shape == (k, n) and w.dtype == DTYPES[dtype] and w.is_contiguous()
        assert torch.equal(w.cpu(), expected), (k, n, group_size)


@pytest.mark.parametrize("exponent", [-140, -133, -24, -15, 8, 14, 124])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_smallest_and_largest_scales(
    kernel_only: torch.device, generator: torch.Generator, layout: str, dtype: str, exponent: int
) -> None:
    """Denormal results, zeros with a sign, infinities."""
    for format in FORMATS:
        for zeros in (False, True):
            if format in ("int4", "int8") or (layout == "tiled" and not zeros):
                weight = random_weight(256, 200, format, layout, DTYPES[dtype], 64, zeros, generator, exponent)
                expected = wo.dequantize(weight.qweight, weight.scales, weight.zeros)
                w = wo.dequantize(*weight.on(kernel_only)).cpu()
                nan = expected.isnan()  # infinite scales times 0
                assert torch.equal(w.isnan(), nan)
                assert torch.equal(w[~nan].view(torch.int16), expected[~nan].view(torch.int16)), (format, zeros)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shift", [0, 8, 3], ids="{}in".format)
def test_columns_go_where_they_belong(
    kernel_only: torch.device, generator: torch.Generator, format: str, layout: str, shift: int
) -> None:
    """A range of columns in a frame of NaN that stays as it is: 16-byte stores, and rows not aligned for them."""
    skip_unless_read(format, layout, False)
    k, n = 328, 456
    weight = random_weight(k, n, format, layout, torch.float16, -1, format == "int8", generator)
    expected = wo.dequantize(weight.qweight, weight.scales, weight.zeros)
    qweight, scales, zeros = weight.on(kernel_only)
    scales = DEQUANTIZE.aligned_rows(scales, qweight.n_padded)
    zeros = None if zeros is None else DEQUANTIZE.aligned_rows(zeros, qweight.n_padded)
    for begin, end in ((0, n), (64, 128), (128, 129), (192, 455), (448, n)):
        for extra in (0, 5):
            frame = torch.full((k + 2, end - begin + 16 + extra), float("nan"), dtype=torch.float16, device="cuda")
            w = frame[1 : k + 1, shift : shift + end - begin]
            DEQUANTIZE.dequantize_columns(qweight, scales, zeros, begin, end, w)
            assert torch.equal(w.cpu(), expected[:, begin:end]), (begin, end, extra)
            w.fill_(float("nan"))
            assert frame.isnan().all(), (begin, end, extra)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_than_two_to_the_31_weights(cuda_device: torch.device, generator: torch.Generator, layout: str) -> None:
    """Offsets are 64 bits wide: 66560 x 33024 is 2.2e9 weights; the last columns are the ones that wrap."""
    k, n = 66560, 33024
    if torch.cuda.get_device_properties(0).total_memory < 24e9:
        pytest.skip("needs 24 GB of GPU memory")
    data = torch.randint(0, 256, (k * n // 2,), dtype=torch.uint8, device="cuda")
    scales = torch.randn(k // 128, n, device="cuda").half()
    tail = wo.PackedWeight(data[-256 * k // 2 :].cpu(), k, 256, "int4", layout)
    expected = wo.dequantize(tail, scales[:, -256:].cpu())
    w = wo.dequantize(wo.PackedWeight(data, k, n, "int4", layout), scales)
    assert torch.equal(w[:, -256:].cpu(), expected)


def test_scales_that_are_views(kernel_only: torch.device, generator: torch.Generator) -> None:
    weight = random_weight(512, 128, "int4", "tiled", torch.float16, 64, True, generator)
    expected = wo.dequantize(weight.qweight, weight.scales, weight.zeros)
    qweight, scales, zeros = weight.on(kernel_only)
    assert zeros is not None
    wide = torch.full((8, 300), float("nan"), dtype=torch.float16, device="cuda")
    wide[:, 1:129] = scales
    for view in (wide[:, 1:129], scales.t().contiguous().t()):
        assert torch.equal(wo.dequantize(qweight, view, zeros).cpu(), expected)
        assert torch.equal(wo.dequantize(qweight, scales, zeros.t().contiguous().t()).cpu(), expected)


def test_dequantize_in_a_graph_and_on_a_side_stream(kernel_only: torch.device, generator: torch.Generator) -> None:
    weight = random_weight(512, 200, "int4", "tiled", torch.float16, 128, True, generator)
    expected = wo.dequantize(weight.qweight, weight.scales, weight.zeros)
    qweight, scales, zeros = weight.on(kernel_only)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        w = wo.dequantize(qweight, scales, zeros)
    stream.synchronize()
    assert torch.equal(w.cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w = wo.dequantize(qweight, scales, zeros)
    scales.neg_()
    w.fill_(float("nan"))
    graph.replay()
    assert torch.equal(w.cpu(), -expected)


def test_where_pytorch_dequantizes(
    cuda_device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel does not read, and what wants more than numbers: the same values, and gradients."""
    calls: list[int] = []

    def no_kernel(*arguments: object) -> None:
        calls.append(1)
        raise AssertionError("expected PyTorch's operators")

    monkeypatch.setattr(DEQUANTIZE, "dequantize_columns", no_kernel)
    for layout, dtype, group_size in (
        ("row_major", torch.float16, 64),
        ("tiled", torch.float32, 64),
        ("interleaved", torch.bfloat16, 50),
    ):
        weight = random_weight(200 if group_size == 50 else 256, 77, "int4", layout, dtype, group_size, True, generator)
        expected = wo.dequantize(weight.qweight, weight.scales, weight.zeros)
        assert torch.equal(wo.dequantize(*weight.on(cuda_device)).cpu(), expected)
    weight = random_weight(256, 77, "int4", "tiled", torch.float16, 64, False, generator)
    qweight, scales, _ = weight.on(cuda_device)
    scales.requires_grad_()
    wo.dequantize(qweight, scales).sum().backward()
    assert scales.grad is not None and scales.grad.shape == scales.shape
    with torch.no_grad(), pytest.raises(AssertionError):
        wo.dequantize(qweight, scales)
    assert len(calls) == 1


BAD_PARAMETERS = {
    "weight": ({"weight": 0}, "weight must be a 16-byte aligned address, got 0"),
    "scales": ({"scales": 24}, "scales must be a 16-byte aligned address, got 24"),
    "zeros": ({"zeros": 8}, "zeros must be null or a 16-byte aligned address, got 8"),
    "table of 8 bits": ({"table": 64, "bits": 8}, "table must be null, or 4-byte aligned for a tiled weight of 4 bits"),
    "table of another layout": ({"table": 64, "layout": 0}, "table must be null, or 4-byte aligned for a tiled weight"),
    "table and zeros": ({"table": 64, "zeros": 64}, "table must be null, or .* without zeros, got 64"),
    "w": ({"w": 33}, "w must be an even address, got 33"),
    "layout": ({"layout": 2}, "layout must be 0 or 1, got 2"),
    "bits": ({"bits": 5}, "bits must be 4 or 8, got 5"),
    "type": ({"type": 2}, "type must be 0 or 1, got 2"),
    "k": ({"k": 0}, "k must be at least 1, got 0"),
    "k_padded below k": ({"k": 65}, "k_padded must be a multiple of 64 from k on, got 64"),
    "k_padded": ({"k_padded": 96}, "k_padded must be a multiple of 64 from k on, got 96"),
    "long k": ({"k_padded": (1 << 20) + 64}, "k_padded must be at most 2\\^20, got 1048640"),
    "n_padded": ({"n_padded": 160}, "n_padded must be a multiple of 32, for tiled weights of 64, got 160"),
    "n_begin": ({"n_begin": 32}, "n_begin must be a multiple of 64, got 32"),
    "no column": ({"n_begin": 64, "n_end": 64}, r"n_end must be from n_begin \+ 1 to n_padded, got 64"),
    "n_end": ({"n_end": 129}, r"n_end must be from n_begin \+ 1 to n_padded, got 129"),
    "ldw": ({"ldw": 99}, "ldw must be at least the number of columns, got 99"),
    "ld_scales": ({"ld_scales": 132}, "ld_scales must be a multiple of 8 from n_padded on, got 132"),
    "group_size": ({"group_size": 96}, "group_size must be 32 or a multiple of 64, got 96"),
}


@pytest.mark.parametrize("name", BAD_PARAMETERS)
def test_the_binding_refuses(cuda_device: torch.device, name: str) -> None:
    """What no argument of `dequantize` leads to: checked once more where it would touch memory."""
    good = {"device": 0, "bits": 4, "type": 0, "layout": 1, "k": 64, "k_padded": 64, "n_begin": 0, "n_end": 100}
    good |= {"n_padded": 128, "group_size": 64, "weight": 16, "scales": 16, "zeros": 0, "table": 0, "w": 16}
    good |= {"ld_scales": 128, "ldw": 100, "stream": 0}
    change, message = BAD_PARAMETERS[name]
    with pytest.raises(RuntimeError, match=f"^dequantize: {message}"):
        DEQUANTIZE._C.dequantize(**good | change)


# --- gemm --------------------------------------------------------------------------------------------------


def dense_configs() -> list[KernelConfig]:
    """Those of this GPU."""
    return [c for c in CONFIGS if c.is_dense and c.layout in layouts_of(this_gpu())]


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 columns of K = 1024 at a time."""
    monkeypatch.setattr(slices, "WORKSPACE_BYTES", 2 * 1024 * 64)


@pytest.mark.parametrize("m", [1, 7, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_slices(
    cuda_device: torch.device, small_slices: None, generator: torch.Generator, dtype: str, m: int
) -> None:
    for config in dense_configs():
        for case in (
            Case(1024, 1000, "int4", dtype, 128, zeros=True),
            Case(1000, 257, "int8", dtype, -1),
            Case(960, 65, "int4", dtype, 32),
        ):
            require(config, case)
            check_exact(m, case, config, generator)
            check_random(m, case, config, generator, "gelu")


def test_the_workspace_is_bounded(cuda_device: torch.device, generator: torch.Generator) -> None:
    """[8192, 16384] would be 256 MiB."""
    config = next(c for c in dense_configs() if c.layout == own_layout())
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
    m = next((m for m in (256, 1024, 8192, 65536) if choice(m, o, sms).is_dense), None)
    if m is None:
        pytest.skip("the fused kernels are quicker by the cost model")
    x = torch.randint(-3, 4, (m, 512), generator=generator).half().cuda()
    y = wo.gemm(x, o.qweight, o.scales)
    assert torch.equal(y, (x.double() @ o.w64).half())
    assert torch.equal(wo.gemm(x, o.qweight, o.scales, config=choice(m, o, sms)), y)


def choice(m: int, o: Operands, sms: int) -> KernelConfig:
    return select(m, o.qweight.n, o.qweight.k, o.qweight.format, 128, this_gpu(), sms, o.qweight.layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["nf4", "fp4", "code4"])
def test_code_tables(
    cuda_device: torch.device, small_slices: None, generator: torch.Generator, format: str, dtype: str
) -> None:
    config = next((c for c in dense_configs() if "code4" in c.formats), None)
    if config is None:
        pytest.skip("no kernel of this GPU reads tiled weights")
    weight = random_weight(960, 328, format, "tiled", DTYPES[dtype], 64, False, generator)
    w = cpu.dequantize(weight.qweight, weight.scales).to(cuda_device)
    qweight, scales, _ = weight.on(cuda_device)
    for m in (1, 40, 300):
        x = torch.randn(m, 960, generator=generator).to(DTYPES[dtype]).cuda()
        expected, peer = x.double() @ w.double(), x @ w
        y = run(x, Operands(qweight, scales, None, w.double()), config=config)
        assert (y.double() - expected).norm() <= 2 * (peer.double() - expected).norm() + 1e-6 * expected.norm()


def test_parameters_for_bias_and_scales(cuda_device: torch.device, generator: torch.Generator) -> None:
    """They may want gradients, which out= refuses where grad mode is on; x does not."""
    for config in dense_configs():
        o = make(Case(256, 72), generator, config.layout, exact=True)
        x = torch.randint(-3, 4, (6, 256), generator=generator).half().cuda()
        bias = torch.nn.Parameter(torch.randint(-8, 9, (72,), generator=generator).half().cuda())
        y = wo.gemm(x, o.qweight, torch.nn.Parameter(o.scales), bias=bias, config=config)
        assert torch.equal(y, (x.double() @ o.w64 + bias.detach().double()).half())
        assert not y.requires_grad


def test_views_of_x_and_out(cuda_device: torch.device, small_slices: None, generator: torch.Generator) -> None:
    for config in dense_configs():
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
    for config in dense_configs():
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
    for config in dense_configs():
        o = make(Case(4096, 1000), generator, config.layout, exact=False)
        x = torch.randn(500, 4096, generator=generator).half().cuda()
        y = run(x, o, config=config, activation="silu")
        assert torch.equal(run(x, o, config=config, activation="silu"), y)
