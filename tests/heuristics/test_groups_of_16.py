"""Groups of 16 on GPUs: what computes them, which of it is chosen, and what is refused as long as no GPU has run it."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly.formats import records
from weightonly.heuristics import KernelConfig, Problem, candidates, select
from weightonly.heuristics.configs import CONFIGS, GROUPED_CONFIGS, TypeConfig, kernel_types
from weightonly.heuristics.cost import total_us
from weightonly.heuristics.families import FAMILIES
from weightonly.heuristics.grouped import select_grouped
from weightonly.heuristics.legal import check_kernel_group_size, computes_groups_of_16, why_not
from weightonly.heuristics.problem import layouts_of
from weightonly.slicing import rows_of_a_group

PLAN = sys.modules["weightonly.plan.choose"]
KERNELS = sys.modules["weightonly.kernels"]
OF_16 = [c for c in CONFIGS if c.groups_of_16]
GROUPED_OF_16 = [c for c in GROUPED_CONFIGS if c.groups_of_16]
SHAPES = [(4096, 4096), (4096, 6144), (14336, 4096)]


def chosen(m: int, k: int, n: int, arch: int, layout: str, format: str = "nvfp4") -> KernelConfig:
    return select(m, n, k, format, 16, arch, 132, layout)


def test_a_family_says_of_its_kernels_whether_a_gpu_has_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in OF_16 + GROUPED_OF_16:
        for verified in (True, False):
            monkeypatch.setattr(config.rules, "groups_of_16_verified", verified)
            assert config.is_verified == verified
            assert config.measured.is_verified


def test_they_are_others_for_groups_of_16() -> None:
    """The same tile in the same family, with another name, and without kernels per channel."""
    for config in OF_16:
        assert config.measured in {dataclasses.replace(c, formats=config.formats) for c in CONFIGS}
        assert config.kernel == f"{config.measured.kernel}_g16"
        modes = {t.scale_mode for t in kernel_types(config) if t.format != "code4"}
        assert modes <= {"group", "group_zeros"}


@pytest.mark.parametrize("config", OF_16, ids=str)
def test_they_compute_nothing_else(config: KernelConfig) -> None:
    arch = min(config.rules.last_arch, 90) if config.shares_cluster else max(config.rules.first_arch, 80)
    of_16, of_64 = (Problem(1, 64, 128, config.formats[0], g, arch, 132, config.layout) for g in (16, 64))
    assert why_not(config, of_16) is None and why_not(config.measured, of_64) is None
    assert why_not(config, of_64) == f"{config} computes groups of 16 alone, but those of scales are of 64"
    expected = f"{config.measured} computes groups of 32, 64 and their multiples, but those of scales are of 16"
    assert why_not(config.measured, of_16) == expected


def test_one_group_of_16_rows_is_all_of_k() -> None:
    for format in ("int4", "nvfp4"):
        assert Problem(1, 64, 16, format, 16, 90, 132).group_step == 64
    assert Problem(1, 64, 48, "int4", 16, 90, 132).group_step == 16


@pytest.mark.parametrize("arch", [70, 75, 80, 90, 100, 120])
def test_not_chosen_before_a_gpu_has_run_them(arch: int, no_groups_of_16: None) -> None:
    assert not computes_groups_of_16() and not computes_groups_of_16(arch)
    for layout in layouts_of(arch):
        p = Problem(1, 64, 128, "int4", 16, arch, 132, layout)
        assert candidates(p) == []
        with pytest.raises(ValueError, match="on a GPU; got 16, which the CPU alone computes"):
            select(p)
    with pytest.raises(ValueError, match="on a GPU; got 16, which the CPU alone computes"):
        check_kernel_group_size(16, 64)
    check_kernel_group_size(16, 16)
    check_kernel_group_size(32, 64, arch)


def test_chosen_by_the_number_of_rows_on_hopper(groups_of_16: None) -> None:
    for k, n in SHAPES:
        for format in ("nvfp4", "int4", "int8"):
            for m in (1, 4):
                assert chosen(m, k, n, 90, "tiled", format).family == "decode_sm90"
            for m in (9, 16, 32, 64):
                assert chosen(m, k, n, 90, "tiled", format).family == "gemm_sm90"
        assert chosen(4096, k, n, 90, "tiled", "nvfp4").unfused


def test_chosen_by_the_number_of_rows_on_ampere(groups_of_16: None) -> None:
    for k, n in SHAPES:
        assert chosen(1, k, n, 80, "interleaved", "int4").family == "gemv"
        assert chosen(4, k, n, 80, "interleaved", "nvfp4").family == "decode_sm80"
        assert chosen(16, k, n, 80, "interleaved", "nvfp4").family == "gemm_sm80"
        assert chosen(64, k, n, 80, "interleaved", "int8").family == "gemm_sm80"
        for arch, format in ((80, "nvfp4"), (75, "nvfp4"), (120, "int8")):
            assert chosen(4096, k, n, arch, "interleaved", format).unfused
        assert chosen(16, k, n, 75, "interleaved", "int4").unfused


@pytest.mark.parametrize(("arch", "layout"), [(75, "interleaved"), (80, "interleaved"), (90, "tiled"), (120, "")])
def test_any_number_of_rows_where_the_unfused_product_is_verified(
    arch: int, layout: str, no_groups_of_16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in ("dequantize_cublas_sm75", "dequantize_cublas_sm90"):
        monkeypatch.setattr(FAMILIES[family], "groups_of_16_verified", True)
    for format, zeros in (("int4", True), ("int8", False), ("nf4", False), ("nvfp4", False)):
        for m in (1, 8, 9, 64, 65, 300, 8192):
            config = select(m, 4096, 4096, format, 16, arch, 132, layout, zeros)
            assert config.unfused and config.groups_of_16


def test_not_computed_where_a_part_of_the_kernels_is_verified(
    no_groups_of_16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused kernel leaves some rows to what dequantizes; that reads one layout."""
    for family in FAMILIES.values():
        monkeypatch.setattr(family, "groups_of_16_verified", not family.unfused)
    assert not computes_groups_of_16() and not computes_groups_of_16(90)
    monkeypatch.setattr(FAMILIES["dequantize_cublas_sm90"], "groups_of_16_verified", True)
    assert computes_groups_of_16() and computes_groups_of_16(90) and not computes_groups_of_16(80)
    assert computes_groups_of_16(90, "tiled") and not computes_groups_of_16(90, "interleaved")
    monkeypatch.setattr(FAMILIES["gemm_sm80"], "groups_of_16_verified", False)
    with pytest.raises(ValueError, match="on sm90 in layout 'interleaved'; got 16, which the CPU"):
        chosen(64, 4096, 4096, 90, "interleaved")


def test_volta_has_none(groups_of_16: None) -> None:
    """Its layout is none that the kernel which dequantizes reads."""
    check_kernel_group_size(16, 64)
    check_kernel_group_size(16, 64, "sm75")
    message = "on sm70.*; got 16, which the CPU and other GPUs compute"
    with pytest.raises(ValueError, match=message):
        check_kernel_group_size(16, 64, "sm70")
    with pytest.raises(ValueError, match=message):
        select(4, 64, 128, "int4", 16, 70, 80)
    linear = torch.nn.Linear(64, 64)
    with pytest.raises(ValueError, match=message):
        wo.nn.Linear.from_linear(linear, format="int4", group_size=16, arch="sm70")


def test_what_is_refused_before_is_not_after(groups_of_16: None) -> None:
    linear = torch.nn.Linear(64, 64)
    assert wo.nn.Linear.from_linear(linear, format="nvfp4", arch="sm90").qweight.shape[0] == 1
    layer = wo.nn.Linear.from_linear(linear, format="int4", group_size=16, arch="sm80")
    assert layer.scales.shape == (4, 64)
    q, scales, _ = wo.quantize(torch.randn(64, 64), bits=4, group_size=16)
    record = records.QuantizedLayer("a", wo.preprocess(q, 4), scales, None, None, None)
    assert record.to_linear(arch="sm90").scales.shape == (4, 64)


def test_experts_take_kernels_of_their_own(groups_of_16: None) -> None:
    for rows in (64, 4096):
        for group_size in (16, 32):
            config = select_grouped(Problem(rows, 512, 512, "int4", group_size, 90, 132), 8)
            assert config is not None and config.groups_of_16 == (group_size == 16)
    ampere = Problem(64, 512, 512, "int4", 16, 80, 108, "interleaved")
    assert select_grouped(ampere, 8) is None, "Ampere takes a product for each expert"


def test_cuts_of_a_weight() -> None:
    assert rows_of_a_group(192, 64, 16, 96) == 16
    assert rows_of_a_group(384, 192, 96, 384) == 32
    with pytest.raises(ValueError, match=r"begin, end: expected multiples of 16, .* got 8, 96"):
        rows_of_a_group(192, 64, 8, 96)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
def test_scales_take_time(zeros: bool) -> None:
    """A launch has four times the scales of groups of 64 to read, beside what that one is measured to take."""
    for config in OF_16:
        if config.unfused or "int4" not in config.formats:
            continue
        of_16, of_64 = (Problem(1, 4096, 4096, "int4", g, 90, 132, config.layout, zeros) for g in (16, 64))
        work, measured = config.rules.work(config, of_16), config.measured.rules.work(config.measured, of_64)
        scale_bytes = (4096 // 16 - 4096 // 64) * 2 * 4096 * (2 if zeros else 1)
        per_byte = measured[2] / (4096 * 4096 / 2 + 64 * 2 * 4096 * (2 if zeros else 1) + 2 * (4096 + 4096))
        assert work[2] == pytest.approx(measured[2] + scale_bytes * per_byte)
        assert total_us(work) >= total_us(measured)


@pytest.mark.parametrize("built", [False, True], ids=["without", "with"])
def test_the_unfused_product_asks_the_library(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "built_archs", lambda: ("80", "90a"))
    monkeypatch.setattr(KERNELS, "dequantizes_groups_of_16", lambda: built)
    for config in OF_16:
        if config.unfused:
            assert KERNELS.is_compiled(config) == built
            assert KERNELS.is_compiled(config.measured)


def test_a_kernel_is_run_by_its_name_before_it_is_verified(
    no_groups_of_16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the tests on a GPU do."""
    config: Any = next(c for c in OF_16 if c.family == "decode_sm90" and "int4" in c.formats)
    p, types = Problem(1, 64, 128, "int4", 16, 90, 132), TypeConfig("f16", "int4", "group")
    monkeypatch.setattr(PLAN, "runs_on", lambda *_: True)
    monkeypatch.setattr(PLAN, "is_compiled", lambda *_: True)
    assert PLAN.choose(p, types, config) == config
    with pytest.raises(ValueError, match="got 16, which the CPU alone computes"):
        PLAN.choose(p, types, None)
