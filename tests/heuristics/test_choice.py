"""Which kernel `gemm` runs, decided without a GPU, and what it says where there is none.

The same errors through `gemm` itself are in test_arguments_gpu.py; here every GPU can be asked for.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import weightonly as wo
from weightonly import build_info
from weightonly.args import GemmArgs
from weightonly.heuristics import KernelConfig, Problem
from weightonly.heuristics.configs import CONFIGS, TypeConfig, kernel_types
from weightonly.launch import LaunchOverlap
from weightonly.plan.base import Plan

# `weightonly.kernels` is a function; this is the module.
PLAN = sys.modules["weightonly.plan.choose"]
KERNELS = sys.modules["weightonly.kernels"]


def problem(arch: int, m: int = 3, format: str = "int4", k: int = 192) -> Problem:
    return Problem(m, 40, k, format, 64, arch, 16)


def of_family(family: str, **fields: object) -> KernelConfig:
    """The first configuration of a family with these fields."""
    matching = (c for c in CONFIGS if c.family == family)
    return next(c for c in matching if all(getattr(c, name) == value for name, value in fields.items()))


GEMV = of_family("gemv", block_m=1, formats=("int4",))
SM80 = of_family("gemm_sm80")
SM75 = of_family("gemm_sm75")
SM70 = of_family("gemm_sm70")
DECODE = of_family("decode_sm90", block_m=8, formats=("int4", "code4"))
SM90 = of_family("gemm_sm90", block_m=32, block_n=256, formats=("int4",))
SM90_TALL = of_family("gemm_sm90", block_m=256)
DEEP = dataclasses.replace(SM80, stages=100)
BAD_CONFIGS = {
    "row_major kernel": (
        SM70, problem(90), "f16", "interleaved",
        f"config: {SM70} reads layout 'row_major', but qweight is packed as 'interleaved'"),
    "interleaved kernel": (
        SM80, problem(90), "f16", "row_major",
        f"config: {SM80} reads layout 'interleaved', but qweight is packed as 'row_major'"),
    "format": (
        GEMV, problem(90, m=1, format="int8"), "f16", "interleaved",
        f"config: {GEMV} reads int4, but qweight is int8"),
    "rows": (
        GEMV, problem(90, m=2), "f16", "interleaved", f"config: {GEMV} computes at most 1 rows, but x has 2"),
    "bf16 on sm75's": (
        SM75, problem(90), "bf16", "interleaved", f"config: {SM75} computes fp16 alone, but x is bf16"),
    "newer kernel": (
        SM80, problem(75), "f16", "interleaved",
        f"config: {SM80} needs compute capability 8.0, but the GPU has 7.5"),
    "shared memory": (
        DEEP, problem(90, format="int8"), "f16", "interleaved",
        f"config: {DEEP} needs {DEEP.rules.smem_bytes(DEEP, problem(90, format='int8'))} bytes of shared memory "
        "for int8, but the GPU has 232448"),
    "split_k 0": (
        SM80.with_split_k(0), problem(90), "f16", "interleaved",
        "config: expected split_k of 1 to 7, got 0"),
    "split_k 8": (
        SM80.with_split_k(8), problem(90, k=4096), "f16", "interleaved",
        "config: expected split_k of 1 to 7, got 8"),
    "split_k beyond K": (
        SM80.with_split_k(4), problem(90), "f16", "interleaved",
        f"config: split_k of 4 leaves a part of K without work: K = 192 is 3 k-tiles of {SM80.kernel}"),
    "split_k with an empty part": (
        SM80.with_split_k(4), problem(90, k=5 * 64), "f16", "interleaved",
        f"config: split_k of 4 leaves a part of K without work: K = 320 is 5 k-tiles of {SM80.kernel}"),
    "tiled kernel": (
        SM90, problem(90), "f16", "interleaved",
        f"config: {SM90} reads layout 'tiled', but qweight is packed as 'interleaved'"),
    "tiled weight": (
        SM80, problem(90), "f16", "tiled",
        f"config: {SM80} reads layout 'interleaved', but qweight is packed as 'tiled'"),
    "hopper before hopper": (
        SM90, problem(80), "f16", "tiled",
        f"config: {SM90} needs compute capability 9.0, but the GPU has 8.0"),
    "hopper after hopper": (
        DECODE, problem(100), "f16", "tiled",
        f"config: {DECODE} runs on compute capability 9.0 alone, but the GPU has 10.0"),
    "tokens of decode": (
        DECODE, problem(90, m=9), "f16", "tiled", f"config: {DECODE} computes at most 8 rows, but x has 9"),
    "x of decode": (
        DECODE, problem(90, m=8, k=32768), "f16", "tiled",
        f"config: {DECODE} needs {DECODE.rules.smem_bytes(DECODE, problem(90, m=8, k=32768))} bytes of shared "
        "memory for int4, but the GPU has 232448"),
    "cluster of 9": (
        DECODE.with_split_k(9), problem(90, k=4096), "f16", "tiled", "config: expected split_k of 1 to 8, got 9"),
    "cluster of a tall tile": (
        SM90_TALL.with_split_k(2), problem(90, k=4096), "f16", "tiled", "config: expected split_k of 1 to 1, got 2"),
    "cluster beyond K": (
        SM90.with_split_k(3), problem(90), "f16", "tiled",
        f"config: split_k of 3 leaves a part of K without work: K = 192 is 2 k-tiles of {SM90.kernel}"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_config_that_cannot_compute_this(name: str) -> None:
    config, asked, dtype, layout, message = BAD_CONFIGS[name]
    types = TypeConfig(dtype, asked.format, "group")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        PLAN.choose(dataclasses.replace(asked, layout=layout), types, config)


@pytest.mark.parametrize(
    ("arch", "packed", "read"),
    [
        (70, "interleaved", "'row_major'"),
        (80, "row_major", "'interleaved'"),
        (80, "tiled", "'interleaved'"),
        (100, "tiled", "'interleaved'"),
        (90, "row_major", "'tiled' or 'interleaved'"),
    ],
)
def test_weight_packed_for_another_gpu(arch: int, packed: str, read: str) -> None:
    message = (
        f"qweight: packed in layout {packed!r}, but a GPU of compute capability {arch / 10} reads {read}; "
        f"call repack(qweight, arch='sm{arch}')"
    )
    asked = dataclasses.replace(problem(arch), layout=packed)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PLAN.choose(asked, TypeConfig("f16", "int4", "group"), None)
    made = wo.preprocess(torch.zeros(64, 64, dtype=torch.int8), arch=f"sm{arch}").layout
    assert read.startswith(repr(made))


@pytest.mark.parametrize(
    ("arch", "cure"),
    [(70, "dequantize it"), (80, "call repack(qweight, arch='sm80')"), (100, "call repack(qweight, arch='sm100')")],
)
def test_code_table_on_another_gpu(arch: int, cure: str) -> None:
    """Volta has no layout to pack it in."""
    asked = dataclasses.replace(problem(90, format="nf4"), arch=arch)
    with pytest.raises(ValueError, match=rf"^qweight: packed in layout 'tiled', but .* reads .*; {re.escape(cure)}$"):
        PLAN.choose(asked, TypeConfig("f16", "code4", "group"), None)


@pytest.mark.parametrize("layout", ["tiled", "interleaved"])
def test_hopper_reads_two_layouts(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were packed for Ampere still run, with Ampere's kernels."""
    monkeypatch.setattr(KERNELS, "built_archs", lambda: ("80", "90a"))
    everything = {f"{c.kernel}_{t.name}": 0 for c in CONFIGS for t in kernel_types(c)}
    monkeypatch.setattr(KERNELS, "kernel_numbers", lambda: everything)
    for m in (1, 16, 100):
        asked = dataclasses.replace(problem(90, m=m), layout=layout)
        assert PLAN.choose(asked, TypeConfig("bf16", "int4", "group"), None).layout == layout


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"m": 2**31}, "x: expected M of at most 2147479552 on a GPU, got 2147483648"),
        ({"m": 2**31 - 4095}, "x: expected M of at most 2147479552 on a GPU, got 2147479553"),
        ({"n": 2**30}, "qweight: expected N of at most 1073741760 on a GPU, got 1073741824"),
        ({"k": 2**20 + 128}, "qweight: expected K of at most 1048576 on a GPU, got 1048704"),
        ({"m": 2**30 + 1, "n": 1000}, "x: expected M * N of at most 1099511627776 on a GPU, got 1099511628800"),
        ({"n": 2**24, "k": 2**19}, "qweight: expected K * N of at most 4398046511104 on a GPU, got 8796093022208"),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("arch", [80, 90])
def test_sizes_that_kernels_cannot_count(sizes: dict[str, int], message: str, arch: int) -> None:
    asked = dataclasses.replace(problem(arch), **sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PLAN.choose(asked, TypeConfig("f16", "int4", "group"), None)


def test_sizes_that_kernels_just_count() -> None:
    for m, n, k in ((2**31 - 4096, 64, 64), (1, 2**30 - 64, 64), (1, 64, 2**20), (2**30, 1000, 64), (1, 2**22, 2**20)):
        PLAN.check_sizes(dataclasses.replace(problem(90), m=m, n=n, k=k, group_size=64))


def test_no_rows_take_no_kernel() -> None:
    """Nor do they need one that was built, or a GPU. These tensors are on one that is not there."""
    with FakeTensorMode():
        data = torch.empty(64 * 64 // 2, dtype=torch.uint8, device="cuda")
        x, scales = (torch.empty(rows, 64, dtype=torch.float16, device="cuda") for rows in (0, 1))
        w = wo.QuantizedWeight(wo.PackedWeight(data, 64, 64, "int4", "tiled"), scales)
        plan = PLAN.make_plan(GemmArgs(x, w))
    assert type(plan) is Plan and plan.shape == (0, 64)


def test_bf16_before_ampere() -> None:
    message = "x: expected dtype torch.float16 on a GPU of compute capability 7.5 (bf16 needs 8.0), got"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        PLAN.choose(problem(75), TypeConfig("bf16", "int4", "group"), None)


def test_gpu_that_the_build_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (PLAN, KERNELS):
        monkeypatch.setattr(module, "built_archs", lambda: ("80", "90a"))
    with pytest.raises(RuntimeError) as error:
        PLAN.choose(problem(120), TypeConfig("f16", "int4", "group"), None)
    assert "for a GPU of compute capability 12.0: built for 80, 90a" in str(error.value)
    assert "WEIGHTONLY_ARCHS=120 pip install" in str(error.value)


def test_no_kernels_says_how_to_build_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "cuda_built", lambda: False)
    monkeypatch.setattr(KERNELS, "_HAS_MODULE", True)
    with pytest.raises(RuntimeError, match=r"^x: is a CUDA tensor, .* is without kernels; install the wheel ") as error:
        KERNELS.check_kernels(90)
    assert str(error.value).endswith(
        f"weightonly-kernels {wo.__version__}, or build them: WEIGHTONLY_CUDA=on WEIGHTONLY_ARCHS=90 pip install ."
    )


def test_kernels_without_a_module_for_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "cuda_built", lambda: False)
    monkeypatch.setattr(KERNELS, "_HAS_MODULE", False)
    (library := tmp_path / "library.so").touch()
    monkeypatch.setattr(build_info, "LIBRARY", library)
    with pytest.raises(RuntimeError, match=r"^x: .* the kernels cannot be used: there is no compiled module for this"):
        KERNELS.check_kernels(90)


def test_kernels_of_another_version_are_refused() -> None:
    KERNELS.check_version(build_info.BuildInfo(wo.__version__, True, ""))
    with pytest.raises(
        ImportError, match=rf"kernels of version 9\.9: pip install weightonly-kernels=={wo.__version__}, "
    ):
        KERNELS.check_version(build_info.BuildInfo("9.9", True, ""))


def test_gpu_older_than_volta() -> None:
    with pytest.raises(RuntimeError, match=r"^x: is on a GPU of compute capability 6\.1; .* need 7\.0$"):
        KERNELS.check_kernels(61)


def test_launches_overlap_unless_told_otherwise() -> None:
    assert wo.launch_overlap() is True
    try:
        modes: tuple[LaunchOverlap, ...] = (False, "constant_weights")
        for overlap in modes:
            wo.set_launch_overlap(overlap)
            assert wo.launch_overlap() == overlap
    finally:
        wo.set_launch_overlap(True)
    with pytest.raises(TypeError, match=r"^overlap: expected a bool or 'constant_weights', got int$"):
        wo.set_launch_overlap(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^overlap: expected a bool or 'constant_weights', got 'constant'$"):
        wo.set_launch_overlap("constant")  # type: ignore[arg-type]
    assert wo.launch_overlap() is True
