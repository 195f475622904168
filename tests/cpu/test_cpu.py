"""The native kernels of CPUs, at every level that this CPU has, against fp64."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tests.cpu.cpu_cases import Case, check

import weightonly as wo
from weightonly import info, reference
from weightonly.cpu import library, native
from weightonly.plan.cpu import CpuPlan

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ROWS = [1, 3, 5, 13, 16, 17, 40]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
formats = pytest.mark.parametrize("format", ["int4", "int8", "nf4", "fp4", "code4"])
layouts = pytest.mark.parametrize("layout", ["cpu", "tiled", "interleaved", "row_major"])


@dtypes
@formats
@pytest.mark.parametrize("exact", [True, False], ids=["grid", "random"])
def test_every_format_against_fp64(
    backend: library.Backend, dtype: torch.dtype, format: str, exact: bool, generator: torch.Generator
) -> None:
    for m in ROWS:
        for k, n, groups in ((192, 77, 6), (96, 40, 3), (48, 40, 3), (640, 130, 1), (100, 33, 1)):
            for zeros in (False, True)[: 2 if format.startswith("int") else 1]:
                case = Case.make(k, n, format, dtype, generator, groups=groups, zeros=zeros, exact=exact)
                check(backend, m, case, dtype, generator, exact)


@layouts
@formats
def test_weights_of_every_layout(
    backend: library.Backend, layout: str, format: str, generator: torch.Generator
) -> None:
    if not format.startswith("int") and layout in ("interleaved", "row_major"):
        pytest.skip("codes have no such layout")
    for n in (32, 64, 150, 300):
        case = Case.make(256, n, format, torch.float32, generator, groups=2, exact=True, layout=layout)
        for m in (1, 7, 33):
            check(backend, m, case, torch.float32, generator, exact=True)


@dtypes
def test_many_rows_and_long_columns(backend: library.Backend, dtype: torch.dtype, generator: torch.Generator) -> None:
    """More rows than are packed at a time; groups longer than a block of the weight, and groups across blocks."""
    for k, groups in ((1536, 1), (1920, 3), (1344, 7)):
        case = Case.make(k, 48, "int4", dtype, generator, groups=groups, zeros=True, exact=True)
        check(backend, 530, case, dtype, generator, exact=True)


@dtypes
def test_numbers_that_are_not_finite_stay_in_their_row(
    backend: library.Backend, dtype: torch.dtype, generator: torch.Generator
) -> None:
    case = Case.make(128, 40, "int4", dtype, generator, exact=True)
    for m in (2, 20):
        x = torch.ones(m, 128, dtype=dtype)
        x[0, 3], x[1, 5] = float("nan"), float("inf")
        if dtype == torch.float32:
            x.view(torch.int32)[0, 3] = 0x7F800001  # NaN, and Inf without its last bits
        y = native.gemm(backend, x, case.qweight, case.scales)
        assert y[0].isnan().all()
        w = case.w64[5]
        assert (
            (y[1][w > 0] == float("inf")).all() and (y[1][w < 0] == -float("inf")).all() and y[1][w == 0].isnan().all()
        )
        assert torch.equal(y[2:], (x.double()[2:] @ case.w64).to(dtype))


def test_the_ends_of_the_range(backend: library.Backend) -> None:
    """Numbers whose next power of two is beyond fp32, and subnormal results of 16 bits."""
    q = torch.ones(64, 32, dtype=torch.int8)
    qweight = wo.preprocess(q, layout="cpu")
    x = torch.zeros(20, 64)
    x[:, 0] = torch.finfo(torch.float32).max
    ones = torch.ones(1, 32)
    assert torch.equal(native.gemm(backend, x, qweight, ones), x[:, :1].expand(20, 32))
    tiny = torch.zeros(20, 64, dtype=torch.float16)
    tiny[:, 0] = 2**-24
    assert torch.equal(native.gemm(backend, tiny, qweight, ones.half()), tiny[:, :1].expand(20, 32))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_bits(best: library.Backend, threads: int, generator: torch.Generator) -> None:
    case = Case.make(512, 1000, "int4", torch.float32, generator, groups=4, zeros=True)
    before = torch.get_num_threads()
    for m in (1, 8, 40):
        x = torch.randn(m, 512, generator=generator)
        expected = native.gemm(best, x, case.qweight, case.scales, case.zeros)
        try:
            torch.set_num_threads(threads)
            for _ in range(3):
                assert torch.equal(native.gemm(best, x, case.qweight, case.scales, case.zeros), expected)
        finally:
            torch.set_num_threads(before)


def test_calls_from_several_threads(best: library.Backend, generator: torch.Generator) -> None:
    case = Case.make(256, 700, "int8", torch.float32, generator, exact=True)
    inputs = [torch.randint(-2, 3, (m, 256), generator=generator).float() for m in (1, 4, 20, 40)]
    wrong: list[int] = []

    def repeat(x: torch.Tensor) -> None:
        expected = (x.double() @ case.w64).float()
        wrong.extend(
            len(x) for _ in range(20) if not torch.equal(native.gemm(best, x, case.qweight, case.scales), expected)
        )

    threads = [threading.Thread(target=repeat, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@layouts
@pytest.mark.parametrize("wide", ["x", "scales", "zeros", "bias", "out"])
def test_each_operand_has_rows_of_its_own(
    backend: library.Backend, wide: str, layout: str, generator: torch.Generator
) -> None:
    case = Case.make(256, 72, "int4", torch.float32, generator, groups=4, zeros=True, exact=True, layout=layout)
    assert case.zeros is not None
    for m in (1, 5, 40):
        x = torch.randint(-2, 3, (m, 256), generator=generator).float()
        tensors = {"x": x, "scales": case.scales, "zeros": case.zeros, "bias": torch.ones(72), "out": torch.ones(m, 72)}
        frame = torch.full((*tensors[wide].shape[:-1], tensors[wide].shape[-1] + 9), float("nan"))
        tensors[wide] = frame[..., 4:-5].copy_(tensors[wide])
        x, scales, zeros, bias, out = tensors.values()
        native.gemm(backend, x, case.qweight, scales, zeros, bias, None, out)
        assert torch.equal(out, (x.double() @ case.w64 + 1).float())


# --- through gemm --------------------------------------------------------------------------------------------


def test_gemm_runs_the_backend_of_this_process(generator: torch.Generator) -> None:
    case = Case.make(192, 50, "int4", torch.float32, generator, groups=3, zeros=True)
    x = torch.randn(4, 192, generator=generator)
    y = wo.gemm(x, case.qweight, case.scales, zeros=case.zeros)
    found = library.backend()
    operands = (x, case.qweight, case.scales, case.zeros)
    assert torch.equal(y, reference.gemm(*operands) if found.library is None else native.gemm(found, *operands))


def test_x_and_out_of_any_strides(generator: torch.Generator) -> None:
    case = Case.make(96, 40, "int4", torch.float32, generator, groups=3, exact=True)
    x = torch.randint(-2, 3, (3, 96, 2), generator=generator).float().permute(2, 0, 1)  # (2, 3, 96)
    expected = (x.double() @ case.w64).float()
    assert torch.equal(wo.gemm(x, case.qweight, case.scales), expected)
    one = x[:, :1].expand(2, 3, 96)  # rows that are one row in memory
    assert torch.equal(wo.gemm(one, case.qweight, case.scales), expected[:, :1].expand(2, 3, 40))
    row = x[0, :1].contiguous().expand(3, 96)
    assert torch.equal(wo.gemm(row, case.qweight, case.scales), expected[0, :1].expand(3, 40))
    flipped = torch.ones(96, 3).t()
    assert torch.equal(wo.gemm(flipped, case.qweight, case.scales), (flipped.double() @ case.w64).float())
    wide = torch.full((3, 100), float("nan"))
    assert torch.equal(wo.gemm(x[0], case.qweight, case.scales, out=wide[:, 30:70]), expected[0])
    assert wide[:, :30].isnan().all() and wide[:, 70:].isnan().all()
    scales = torch.stack((case.scales, case.scales), dim=2)[:, :, 0]  # columns apart
    assert torch.equal(wo.gemm(x, case.qweight, scales), expected)
    for lead in ((0,), (2, 0)):
        assert wo.gemm(torch.zeros(*lead, 96), case.qweight, case.scales).shape == (*lead, 40)


def test_buffers_are_on_the_cpu_whatever_the_default_device(generator: torch.Generator) -> None:
    case = Case.make(192, 50, "int8", torch.bfloat16, generator, exact=True, layout="interleaved")
    x = torch.randint(-2, 3, (4, 192), generator=generator).to(torch.bfloat16)
    with torch.device("meta"):
        y = wo.gemm(x, case.qweight, case.scales, activation="relu")
    assert torch.equal(y, (x.double() @ case.w64).relu().to(torch.bfloat16))


def test_under_torch_compile(generator: torch.Generator) -> None:
    case = Case.make(128, 64, "nf4", torch.float32, generator, groups=2)
    x = torch.randn(5, 128, generator=generator)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def product(x: torch.Tensor) -> torch.Tensor:
        return wo.gemm(x, case.qweight, case.scales)

    assert torch.equal(product(x), wo.gemm(x, case.qweight, case.scales))


# --- the choice of the backend -------------------------------------------------------------------------------


def test_without_the_library_pytorch_computes(tmp_path: Path) -> None:
    assert library.choose("pytorch", library._PATH) == library.Backend(None, -1, "WEIGHTONLY_CPU=pytorch")
    missing = library.choose("auto", tmp_path / "libweightonly_cpu.so")
    assert missing.name == "pytorch" and "C++ compiler" in missing.reason
    assert info.describe_cpu(missing).startswith("CPU: pytorch, ")
    with pytest.raises(RuntimeError, match=r"^WEIGHTONLY_CPU=avx2: the native kernels were not built"):
        library.choose("avx2", tmp_path / "libweightonly_cpu.so")
    (tmp_path / "libweightonly_cpu.so").write_bytes(b"no library")
    assert "cannot be loaded" in library.choose("auto", tmp_path / "libweightonly_cpu.so").reason
    with pytest.raises(ValueError, match=r"^WEIGHTONLY_CPU: expected auto, pytorch, generic, .*got 'fast'"):
        library.choose("fast", library._PATH)


class Stub:
    """A library of a CPU that has AVX2."""

    def __init__(self, version: int = library._ABI_VERSION, size: int = ctypes.sizeof(library.Params)) -> None:
        self.wo_cpu_gemm = self.wo_cpu_kernel = self.wo_cpu_error = Mock()
        self.wo_cpu_abi_version, self.wo_cpu_params_bytes = lambda: version, lambda: size
        self.wo_cpu_level = lambda: library.LEVELS.index("avx2")


def test_the_cpu_limits_the_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libweightonly_cpu.so"
    path.touch()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Stub())
    assert library.choose("auto", path).name == "native (avx2)"
    assert library.choose("generic", path).name == "native (generic)"
    with pytest.raises(RuntimeError, match=r"^WEIGHTONLY_CPU=avx512: expected at most avx2, which this CPU has$"):
        library.choose("avx512", path)


@pytest.mark.parametrize("stub", [Stub(version=2), Stub(size=8), object()], ids=["version", "size", "no library"])
def test_a_library_of_another_version_is_left_alone(
    stub: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "libweightonly_cpu.so"
    path.touch()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: stub)
    found = library.choose("auto", path)
    assert found.library is None and found.reason == f"{path.name} is of another version of weightonly: install again"


def test_pytorch_computes_the_same(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlan.__init__.__globals__["library"], "backend", lambda: library.Backend(None, -1, "a test"))
    case = Case.make(128, 70, "int4", torch.float16, generator, groups=2, zeros=True, exact=True)
    x = torch.randint(-2, 3, (6, 128), generator=generator).half()
    assert torch.equal(wo.gemm(x, case.qweight, case.scales, zeros=case.zeros), (x.double() @ case.w64).half())


def test_info_says_which_backend_runs(best: library.Backend) -> None:
    line = info.describe_cpu(best)
    assert line.startswith(f"CPU: native ({library.LEVELS[best.level]}), {torch.get_num_threads()} threads")
