"""Every compiled kernel against two oracles: exact-grid inputs, bit for bit, and fp64 on random inputs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests.fp8_cases import random_e4m3
from tests.gemm_cases import (
    ACTIVATIONS,
    DTYPES,
    Case,
    check_exact,
    check_random,
    formats_of,
    make,
    own_groups,
    own_layout,
    require,
    run,
    splits,
    this_gpu,
)

import weightonly as wo
from weightonly.device import sm_count
from weightonly.heuristics import select
from weightonly.heuristics.configs import CONFIGS, FAMILIES, KernelConfig
from weightonly.heuristics.machine import resident_clusters
from weightonly.heuristics.problem import CODE_LAYOUTS, INTEGER_FORMATS, layouts_of
from weightonly.kernels import is_compiled
from weightonly.plan import cache

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fp32_sums")]

MODES = {"channel": (-1, False), "group128": (128, False), "group32zeros": (32, True), "channelzeros": (-1, True)}
MODES_OF_16 = {"group16": (16, False), "group16zeros": (16, True)}
KERNELS = [
    pytest.param(config, format, dtype, mode, id=f"{config.kernel}-{dtype}-{format}-{mode}")
    for config in CONFIGS
    for format in config.formats
    if format != "code4" or not config.unfused  # test_unfused_gpu.py
    for dtype in FAMILIES[config.family].dtypes
    for mode, (_, zeros) in (MODES_OF_16 if config.groups_of_16 else MODES).items()
    if not (zeros and config.has_floats)
]


@pytest.mark.parametrize(("config", "format", "dtype", "mode"), KERNELS)
def test_every_kernel_is_bit_exact_on_the_grid(
    cuda_device: torch.device, generator: torch.Generator, config: KernelConfig, format: str, dtype: str, mode: str
) -> None:
    group_size, zeros = (MODES | MODES_OF_16)[mode]
    ragged = Case(k=640, n=328, format=format, dtype=dtype, group_size=group_size, zeros=zeros)
    require(config, ragged)
    m = min(config.max_m, config.block_m + 5)
    for split in splits(config, m, ragged, (1, 2, 3, 4, 8) if config.shares_cluster else (1, 3)):
        check_exact(m, ragged, split, generator)
    if config.shares_cluster:
        check_exact(config.block_m - 3, ragged, config, generator)  # rows of the tile that are not there
    if config.rules.loops(config) and group_size in (-1, 32):
        # Two CTAs that share x, which ends within a block of 64 k.
        check_exact(m, replace(ragged, k=672 - 8 * (group_size == -1), n=2 * config.block_n - 24), config, generator)


@pytest.mark.parametrize(("config", "format", "dtype", "mode"), KERNELS)
def test_every_kernel_is_as_accurate_as_cublas(
    cuda_device: torch.device, generator: torch.Generator, config: KernelConfig, format: str, dtype: str, mode: str
) -> None:
    group_size, zeros = (MODES | MODES_OF_16)[mode]
    case = Case(k=1024, n=520, format=format, dtype=dtype, group_size=group_size, zeros=zeros)
    require(config, case)
    m = min(config.max_m, 2 * config.block_m - 1)
    # Kernels that loop split K in fewer parts: their accumulators leave no room for more.
    for split in splits(
        config, m, case, (1, 2, 4) if config.rules.loops(config) else (1, 4) if config.shares_cluster else (1,)
    ):
        check_random(m, case, split, generator, "silu")


@pytest.mark.parametrize("format", ["int4", "int8", "code4", "fp8"])
def test_clusters_that_go_through_many_tiles(
    cuda_device: torch.device, generator: torch.Generator, format: str
) -> None:
    """Five n-tiles and a ragged one per cluster: stages and barriers are used twice, and CTAs share n-tiles."""
    for config in wo.kernels():
        if config.family != "decode_sm90" or format not in config.formats:
            continue
        for split_k, k in ((1, 256), (3, 1216), (5, 1216), (8, 1600)):
            slots = resident_clusters(sm_count(torch.cuda.current_device()), split_k)
            case = Case(k, 5 * slots * config.block_n + 40, format, "f16", own_groups(config, 64))
            for split in splits(config, config.max_m, case, (split_k,)):
                check_exact(config.max_m, case, split, generator)


@pytest.mark.parametrize("n", [8, 72, 136, 200, 264])
def test_tiles_that_do_not_divide_the_columns(cuda_device: torch.device, generator: torch.Generator, n: int) -> None:
    """Two to five panels of 64 columns: n-tiles of 48 lie across them, and the last begins in the panel before."""
    for config in wo.kernels():
        if config.family == "decode_sm90":
            for format in config.formats:
                group_size, zeros = (32, True) if format == "int8" else (128, False)
                zeros = zeros or (config.groups_of_16 and format == "int4")
                case = Case(640, n, format, "bf16", own_groups(config, group_size), zeros)
                for split in splits(config, 3, case, (1, 2)):
                    check_exact(3, case, split, generator)


@pytest.mark.parametrize("tiles", ["odd", "even"])
@pytest.mark.parametrize("k", [64, 448, 1216])
def test_ctas_that_go_through_many_tiles(
    cuda_device: torch.device, generator: torch.Generator, k: int, tiles: str
) -> None:
    """Two tiles and more for each CTA, the last ones ragged: stages and rows of y come round. k 64 fills one stage.

    With an even number of tiles along N two CTAs share x.
    """
    for config in wo.kernels():
        if config.rules.loops(config):
            columns = -(-(2 * sm_count(torch.cuda.current_device()) + 7) // 3) // 2 * 2 + (tiles == "odd")
            for format in config.formats:
                zeros = k == 448 and format in INTEGER_FORMATS
                case = Case(k, columns * config.block_n - 24, format, "f16", 64, zeros)
                check_exact(3 * config.block_m - 3, case, config, generator)
                check_random(3 * config.block_m - 3, case, config, generator, "gelu")


@pytest.mark.parametrize("n", [72, 1000])
def test_swizzled_token_tiles(cuda_device: torch.device, generator: torch.Generator, n: int) -> None:
    """The tile swizzle makes two groups of four token tiles and one of three: each tile is computed once."""
    for config in wo.kernels():
        if config.family == "gemm_sm90":
            case = Case(256, n, config.formats[0], "f16", own_groups(config, 128))
            for split in splits(config, 1, case, (1, 2)):
                check_exact(11 * config.block_m - 3, case, split, generator)


@pytest.mark.parametrize("layout", ["own", "interleaved"])
@pytest.mark.parametrize(("k", "n"), [(512, 328), (4096, 1000), (14336, 72)], ids=str)
def test_every_small_batch(cuda_device: torch.device, generator: torch.Generator, k: int, n: int, layout: str) -> None:
    check_small_batches(k, n, layout, 128, generator)


@pytest.mark.parametrize("layout", ["own", "interleaved"])
@pytest.mark.parametrize(("k", "n"), [(512, 328), (4112, 1000)], ids=str)
def test_every_small_batch_in_groups_of_16(
    cuda_device: torch.device, compiled_groups_of_16: None, generator: torch.Generator, k: int, n: int, layout: str
) -> None:
    check_small_batches(k, n, layout, 16, generator)


def check_small_batches(k: int, n: int, layout: str, group_size: int, g: torch.Generator) -> None:
    """Every M from 1 to 72: the heuristic goes from one kernel to the next without a gap."""
    read = layouts_of(this_gpu())
    if layout not in ("own", *read[1:]):
        pytest.skip("this GPU has one layout")
    layout = read[0] if layout == "own" else layout
    for format in formats_of(layout):
        o = make(Case(k, n, format, group_size=group_size), g, layout, exact=True)
        x = torch.randint(-1, 2, (72, k), generator=g).half().cuda()
        expected = (x.double() @ o.w64).half()
        for m in range(1, 73):
            assert torch.equal(run(x[:m], o), expected[:m]), (format, m)


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 17, 33, 64, 65, 100, 129, 300])
@pytest.mark.parametrize(("k", "n"), [(16, 33), (32, 1), (48, 65), (80, 31), (272, 130), (4112, 66)], ids=str)
def test_any_shape_in_groups_of_16(
    cuda_device: torch.device, compiled_groups_of_16: None, generator: torch.Generator, m: int, k: int, n: int
) -> None:
    for format in formats_of(own_layout()):
        for dtype in ("f16", "bf16"):
            check_exact(m, Case(k, n, format, dtype, group_size=16), None, generator)
            if format != "code4":
                check_exact(m, Case(k, n, format, dtype, group_size=16, zeros=True), None, generator)


def test_nvfp4(cuda_device: torch.device, compiled_groups_of_16: None, generator: torch.Generator) -> None:
    """From floats to y: the codes and scales that `quantize` makes, in every number of rows."""
    w = torch.randn(1040, 328, generator=generator).half()
    q, scales, _ = wo.quantize(w, format="nvfp4")
    for layout in layouts_of(this_gpu()):
        packed = wo.preprocess(q, format="nvfp4", layout=layout)
        qweight, w64 = packed.to(cuda_device), wo.dequantize(packed, scales).to(cuda_device).double()
        for m in (1, 5, 8, 16, 64, 200, 700):
            x = torch.randn(m, 1040, generator=generator).half().cuda()
            expected, peer = x.double() @ w64, x @ w64.half()
            y = wo.gemm(x, qweight, scales.cuda())
            error = (y.double() - expected).norm()
            assert error <= 2 * (peer.double() - expected).norm() + 1e-6 * expected.norm(), (layout, m)


SHAPES = [(1, 1), (8, 1), (63, 65), (64, 64), (72, 31), (128, 4096), (200, 130), (257, 33), (4104, 66), (4096, 1)]


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 9, 17, 64, 100, 129, 300])
@pytest.mark.parametrize(("k", "n"), SHAPES, ids=[f"{k}x{n}" for k, n in SHAPES])
def test_any_shape(cuda_device: torch.device, generator: torch.Generator, m: int, k: int, n: int) -> None:
    for format in formats_of(own_layout()):
        for dtype in ("f16", "bf16"):
            check_exact(m, Case(k, n, format, dtype, group_size=-1), None, generator)


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 192, 320, 960])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
def test_group_sizes(cuda_device: torch.device, generator: torch.Generator, group_size: int, zeros: bool) -> None:
    k = 1920
    for config in wo.kernels():
        if config.layout != "row_major" and config.groups_of_16 == (group_size == 16):
            formats = config.formats if config.shares_cluster else {config.formats[0], config.formats[-1]}
            for format in formats:
                if zeros and format not in INTEGER_FORMATS:
                    continue  # codes have none
                case = Case(k, 100, format, "f16", group_size, zeros)
                require(config, case)
                check_exact(min(config.max_m, 20), case, config, generator)


@pytest.mark.parametrize("split_k", range(1, 9))
def test_split_k(cuda_device: torch.device, generator: torch.Generator, split_k: int) -> None:
    for config in wo.kernels():
        case = Case(7 * 1024, 72, config.formats[0], "f16", own_groups(config, 64))
        require(config, case)
        m = min(config.max_m, 18)
        for split in splits(config, m, case, (split_k,)):
            check_exact(m, case, split, generator)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(cuda_device: torch.device, generator: torch.Generator, activation: str | None) -> None:
    for m in (1, 4, 40, 200):
        for config in wo.kernels():
            if m <= config.max_m:
                case = Case(512, 96, config.formats[0], group_size=own_groups(config, 128))
                for split in splits(config, m, case, (1, 2)):
                    check_random(m, case, split, generator, activation)


def test_huge_and_tiny_bf16(cuda_device: torch.device, generator: torch.Generator) -> None:
    """bf16 spans fp32's exponents; kernels that work on bit patterns must not overflow or flush."""
    kinds = (("int4", 128), ("int4", 16), ("fp8", 128))
    for layout, (format, group_size) in itertools.product(layouts_of(this_gpu()), kinds):
        o = make(Case(512, 64, format, "bf16", group_size), generator, layout, exact=True)
        for exponent in (-110, -60, 0, 60, 110):
            x = (torch.randn(1, 512, generator=generator).double() * 2.0**exponent).bfloat16().cuda()
            expected = x.double() @ o.w64
            for config in wo.kernels():
                can_bf16 = "bf16" in FAMILIES[config.family].dtypes
                has_groups = config.groups_of_16 == (group_size == 16)
                if config.layout == layout and format in config.formats and can_bf16 and has_groups:
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
    case = Case(2048, 264)
    o = make(case, generator, own_layout(), exact=True)
    for m in (1, 16, 128):
        x = torch.randint(-3, 4, (m, 2048), generator=generator).half().cuda()
        expected = (x.double() @ o.w64).half()
        of_format = (c for c in wo.kernels() if case.format in c.formats)
        readers = (c for c in of_format if c.layout == own_layout() and c.max_m >= m)
        config = next(split for c in readers for split in splits(c, m, case, (4,)))
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
    o = make(Case(256, 72), generator, own_layout(), exact=True)
    x = torch.randint(-3, 4, (6, 256), generator=generator).half().cuda()
    function = torch.compile(lambda x: wo.gemm(x, o.qweight, o.scales) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(function(x), (x.double() @ o.w64).half() + 1)


@pytest.mark.parametrize("format", ["int4", "nf4"])
def test_a_compiled_function_makes_one_plan(cuda_device: torch.device, generator: torch.Generator, format: str) -> None:
    """Which the eager call finds, too."""
    if format == "nf4" and own_layout() not in CODE_LAYOUTS:
        pytest.skip("no kernel of this GPU reads codes")
    q = torch.randint(0, 8, (256, 72), generator=generator, dtype=torch.int8).cuda()
    qweight = wo.preprocess(q, format=format)
    scales, x = torch.ones(2, 72, device="cuda").half(), torch.ones(6, 256, device="cuda").half()
    function = torch.compile(lambda x: wo.gemm(x, qweight, scales), fullgraph=True, backend="aot_eager")
    first = function(x)
    for _ in range(99):
        assert torch.equal(function(x), first)
    assert torch.equal(wo.gemm(x, qweight, scales), first)
    assert len(cache.plans()) == 1


def test_layers_of_one_shape_share_plans(cuda_device: torch.device, generator: torch.Generator) -> None:
    for seed in range(3):
        o = make(Case(256, 72), generator, own_layout(), exact=True)
        x = torch.randint(-3, 4, (6, 256), generator=generator).half().cuda()
        assert torch.equal(wo.gemm(x, o.qweight, o.scales), (x.double() @ o.w64).half()), seed
    assert len(cache.plans()) == 1


def test_more_than_two_to_the_31_weights(cuda_device: torch.device, generator: torch.Generator) -> None:
    """Offsets are 64 bits wide: 66560 x 33024 is 2.2e9 weights; the last rows and columns are the ones that wrap."""
    k, n = 66560, 33024
    if torch.cuda.get_device_properties(0).total_memory < 24e9:
        pytest.skip("needs 24 GB of GPU memory")
    data = torch.randint(0, 256, (k * n // 2,), dtype=torch.uint8, device="cuda")
    scales = torch.ones(k // 128, n, dtype=torch.float16, device="cuda")
    for layout in layouts_of(this_gpu()):
        qweight = wo.PackedWeight(data, k, n, "int4", layout)
        # The last 256 columns: of a line (4 columns) or a panel (64) each k * 2 or k * 32 bytes.
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


@pytest.mark.parametrize("scales", ["tensor", "blocks", "powers"])
def test_fp8_as_checkpoints_have_it(
    cuda_device: torch.device, floats: None, generator: torch.Generator, scales: str
) -> None:
    """One scale, or those of 128 x 128 or, powers of two, of 32 x 32, repeated along N: by what `gemm` chooses."""
    k, n, block = 1024, 640, {"tensor": 1024, "blocks": 128, "powers": 32}[scales]
    q = random_e4m3((k, n), generator, exact=False)
    blocks = torch.exp2(torch.randint(-9, -5, (k // block, -(-n // block)), generator=generator).float())
    if scales == "blocks":
        blocks = (torch.rand(blocks.shape, generator=generator) * 0.02 + 0.001).half().float()
    spread = blocks.repeat_interleave(block, 1)[:, :n]
    w64 = (q.double() * spread.double().repeat_interleave(block, 0)).cuda()
    qweight = wo.preprocess(q, format="fp8", layout=own_layout()).to("cuda")
    given = spread.half().cuda()
    if not is_compiled(select(1, n, k, "fp8", -1 if block == k else block, this_gpu(), 132, own_layout())):
        pytest.skip("the kernels of fp8 are not built")
    for m in (1, 8, 40, 300):
        x = torch.randn(m, k, generator=generator).half().cuda()
        y, peer = wo.gemm(x, qweight, given), (x @ w64.half()).double()
        expected = x.double() @ w64
        assert (y.double() - expected).norm() <= 2 * (peer - expected).norm() + 1e-6 * expected.norm()


def test_gradients_of_fp8(cuda_device: torch.device, floats: None, generator: torch.Generator) -> None:
    o = make(Case(512, 264, "fp8", "bf16"), generator, own_layout(), exact=False)
    if not is_compiled(select(16, 264, 512, "fp8", 128, this_gpu(), 132, own_layout())):
        pytest.skip("the kernels of fp8 are not built")
    x = torch.randn(16, 512, generator=generator).bfloat16().cuda().requires_grad_()
    weights = torch.randn(16, 264, generator=generator).bfloat16().cuda()
    wo.gemm(x, o.qweight, o.scales).backward(weights)
    assert x.grad is not None
    expected = weights.double() @ o.w64.t()
    assert (x.grad.double() - expected).norm() <= 0.01 * expected.norm()
