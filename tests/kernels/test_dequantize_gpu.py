"""The kernel that dequantizes, bit for bit against the CPU."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.gemm_cases import DTYPES
from tests.kernels.dequantize_cases import random_weight

import weightonly as wo
from weightonly import reference
from weightonly.kernels import dequantizes_fp8, dequantizes_groups_of_16
from weightonly.plain import aligned_rows

pytestmark = pytest.mark.gpu

DEQUANTIZE = sys.modules["weightonly.ops.dequantize"]
LAYOUTS = ["tiled", "interleaved"]
needs_fp8 = pytest.mark.skipif(not dequantizes_fp8(), reason="the kernel for floats is not built")
FP8 = pytest.param("fp8", marks=needs_fp8)
FORMATS = ["int4", "int8", "nf4", "fp4", "code4", "nvfp4"]
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
SHAPES_OF_16 = [
    (64, 64),
    (512, 256),
    (1536, 328),
    (1040, 136),
    (208, 77),
    (80, 33),
    (48, 1),
    (32, 4097),
    (4112, 72),
]


def skip_unless_read(format: str, layout: str, zeros: bool) -> None:
    if format in ("nf4", "fp4", "code4", "nvfp4", "fp8") and (layout == "row_major" or zeros):
        pytest.skip("codes are interleaved or tiled, without zeros")


@pytest.fixture
def kernel_only(cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The GPU, and PyTorch's way of dequantizing there is closed."""
    by_operators = reference.dequantize

    def on_the_cpu(qweight: wo.PackedWeight, *arguments: torch.Tensor | None) -> torch.Tensor:
        assert qweight.device.type == "cpu", "expected the kernel"
        return by_operators(qweight, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "dequantize", on_the_cpu)
    return cuda_device


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", [*FORMATS, FP8])
def test_dequantize_equals_the_cpu(
    kernel_only: torch.device,
    floats: None,
    generator: torch.Generator,
    format: str,
    layout: str,
    dtype: str,
    zeros: bool,
) -> None:
    skip_unless_read(format, layout, zeros)
    if format == "nvfp4":
        pytest.skip("its groups are of 16")
    for k, n, group_size in SHAPES:
        check(kernel_only, k, n, format, layout, dtype, group_size, zeros, generator)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_groups_of_16_equal_the_cpu(
    kernel_only: torch.device,
    compiled_groups_of_16: None,
    generator: torch.Generator,
    format: str,
    layout: str,
    dtype: str,
    zeros: bool,
) -> None:
    skip_unless_read(format, layout, zeros)
    for k, n in SHAPES_OF_16:
        check(kernel_only, k, n, format, layout, dtype, 16, zeros, generator)


def check(
    device: torch.device,
    k: int,
    n: int,
    format: str,
    layout: str,
    dtype: str,
    group_size: int,
    zeros: bool,
    g: torch.Generator,
) -> None:
    weight = random_weight(k, n, format, layout, DTYPES[dtype], group_size, zeros, g)
    expected = wo.dequantize(weight.qweight, weight.scales, weight.zeros)
    w = wo.dequantize(*weight.on(device))
    assert w.shape == (k, n) and w.dtype == DTYPES[dtype] and w.is_contiguous()
    assert torch.equal(w.cpu(), expected), (k, n, group_size)


@pytest.mark.parametrize("exponent", [-140, -133, -24, -15, 8, 14, 124])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_smallest_and_largest_scales(
    kernel_only: torch.device, generator: torch.Generator, layout: str, dtype: str, exponent: int
) -> None:
    check_scales_around(kernel_only, exponent, layout, dtype, 64, generator)


@pytest.mark.parametrize("exponent", [-140, -24, 8, 124])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_smallest_and_largest_scales_of_groups_of_16(
    kernel_only: torch.device,
    compiled_groups_of_16: None,
    generator: torch.Generator,
    layout: str,
    dtype: str,
    exponent: int,
) -> None:
    check_scales_around(kernel_only, exponent, layout, dtype, 16, generator)


def check_scales_around(
    device: torch.device, exponent: int, layout: str, dtype: str, group_size: int, g: torch.Generator
) -> None:
    """Denormal results, zeros with a sign, infinities."""
    for format in (f for f in FORMATS if f != "nvfp4" or group_size == 16):
        for zeros in (False, True):
            if format in ("int4", "int8") or (layout == "tiled" and not zeros):
                weight = random_weight(256, 200, format, layout, DTYPES[dtype], group_size, zeros, g, exponent)
                expected = wo.dequantize(weight.qweight, weight.scales, weight.zeros)
                w = wo.dequantize(*weight.on(device)).cpu()
                nan = expected.isnan()  # infinite scales times 0
                assert torch.equal(w.isnan(), nan)
                assert torch.equal(w[~nan].view(torch.int16), expected[~nan].view(torch.int16)), (format, zeros)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", [*FORMATS, FP8])
@pytest.mark.parametrize("shift", [0, 8, 3], ids="{}in".format)
def test_columns_go_where_they_belong(
    kernel_only: torch.device, generator: torch.Generator, format: str, layout: str, shift: int
) -> None:
    """A range of columns in a frame of NaN that stays as it is: 16-byte stores, and rows not aligned for them."""
    skip_unless_read(format, layout, False)
    k, n, group_size = 328, 456, -1
    if format == "nvfp4":
        if not dequantizes_groups_of_16():
            pytest.skip("the kernels for groups of 16 are not built")
        k, group_size = 336, 16
    weight = random_weight(k, n, format, layout, torch.float16, group_size, format == "int8", generator)
    expected = wo.dequantize(weight.qweight, weight.scales, weight.zeros)
    qweight, scales, zeros = weight.on(kernel_only)
    scales = aligned_rows(scales, qweight.n_padded)
    zeros = None if zeros is None else aligned_rows(zeros, qweight.n_padded)
    for begin, end in ((0, n), (64, 128), (128, 129), (192, 455), (448, n)):
        for extra in (0, 5):
            frame = torch.full((k + 2, end - begin + 16 + extra), float("nan"), dtype=torch.float16, device="cuda")
            w = frame[1 : k + 1, shift : shift + end - begin]
            DEQUANTIZE.dequantize_columns(qweight, scales, zeros, begin, end, w)
            assert torch.equal(w.cpu(), expected[:, begin:end]), (begin, end, extra)
            w.fill_(float("nan"))
            assert frame.isnan().all(), (begin, end, extra)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["int4", "int8", "nf4", FP8])
@pytest.mark.parametrize("group_size", [32, 64, 256, -1])
def test_rows_go_where_they_belong(
    kernel_only: torch.device, generator: torch.Generator, format: str, layout: str, group_size: int
) -> None:
    """A range of rows, of whole groups or of one, in a frame of NaN that stays as it is."""
    skip_unless_read(format, layout, False)
    k, n = 512 if group_size > 0 else 456, 200
    weight = random_weight(k, n, format, layout, torch.bfloat16, group_size, format == "int8", generator)
    expected = wo.dequantize(weight.qweight, weight.scales, weight.zeros)
    qweight, scales, zeros = weight.on(kernel_only)
    scales = aligned_rows(scales, qweight.n_padded)
    zeros = None if zeros is None else aligned_rows(zeros, qweight.n_padded)
    for begin, end in ((0, 64), (64, 128), (192, 256), (256, k), (k // 64 * 64 - 64, k)):
        frame = torch.full((end - begin + 2, n + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
        w = frame[1:-1, :n]
        DEQUANTIZE.dequantize_columns(qweight, scales, zeros, 0, n, w, (begin, end))
        assert torch.equal(w.cpu(), expected[begin:end]), (begin, end)
        w.fill_(float("nan"))
        assert frame.isnan().all(), (begin, end)


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
    "codebook of 8 bits": ({"codebook": 64, "bits": 8}, "codebook must be null, or .* for a weight of 4 bits"),
    "codebook and zeros": ({"codebook": 64, "zeros": 64}, "codebook must be null, or .* without zeros, got 64"),
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
    "group_size": ({"group_size": 96}, "group_size must be (16, )?32 or a multiple of 64, got 96"),
}


@pytest.mark.parametrize("name", BAD_PARAMETERS)
def test_the_binding_refuses(cuda_device: torch.device, name: str) -> None:
    """What no argument of `dequantize` leads to: checked once more where it would touch memory."""
    good = {"device": 0, "bits": 4, "type": 0, "layout": 1, "k": 64, "k_padded": 64, "n_begin": 0, "n_end": 100}
    good |= {"n_padded": 128, "group_size": 64, "weight": 16, "scales": 16, "zeros": 0, "codebook": 0, "w": 16}
    good |= {"ld_scales": 128, "ldw": 100, "stream": 0}
    change, message = BAD_PARAMETERS[name]
    with pytest.raises(RuntimeError, match=f"^dequantize: {message}"):
        DEQUANTIZE._C.dequantize(**good | change)
