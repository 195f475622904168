"""FP8 weights on GPUs: what computes them, what of it is chosen, and what is not built where no GPU has run it."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests import ROOT

from weightonly.heuristics import KernelConfig, Problem, candidates, select
from weightonly.heuristics.configs import CONFIGS, FITTED_CONFIGS, GROUPED_CONFIGS, TypeConfig, kernel_types
from weightonly.heuristics.families import FAMILIES
from weightonly.heuristics.families.base import Family
from weightonly.heuristics.grouped import select_grouped
from weightonly.heuristics.launches import estimate_us
from weightonly.heuristics.legal import has_kernels, why_not
from weightonly.heuristics.problem import FLOAT_FORMATS, MEASURED_AS

PLAN = sys.modules["weightonly.plan.choose"]
KERNELS = sys.modules["weightonly.kernels"]
EVERY = (*CONFIGS, *GROUPED_CONFIGS)
OF_FLOATS = [c for c in EVERY if c.has_floats]
KINDS = [(75, "interleaved"), (80, "interleaved"), (90, "tiled"), (90, "interleaved"), (120, "interleaved")]


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "kernels"))
    import generate

    return generate


def test_each_has_the_kernel_of_int8() -> None:
    of_int8 = {c.kernel for c in EVERY if "int8" in c.formats and c.layout != "row_major" and not c.groups_of_16}
    assert {c.measured.kernel for c in OF_FLOATS} <= of_int8
    assert all(c.kernel == f"{c.measured.kernel}_fp8" for c in OF_FLOATS)
    assert all(c.formats == ("fp8",) and c.measured.formats == ("int8",) for c in OF_FLOATS)
    assert all(c not in FITTED_CONFIGS for c in OF_FLOATS)


def test_no_kernel_reads_zeros() -> None:
    for config in OF_FLOATS:
        assert {t.scale_mode for t in kernel_types(config)} == {"channel", "group"}
        assert not any(t.reads_zeros for t in kernel_types(config))


@pytest.mark.parametrize("verified", [False, True])
def test_a_family_says_whether_a_gpu_has_run_them(monkeypatch: pytest.MonkeyPatch, verified: bool) -> None:
    for config in OF_FLOATS:
        monkeypatch.setattr(config.rules, "floats_verified", verified)
        assert config.is_verified == verified and config.measured.is_verified


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_the_tiles_of_a_family_are_its_own(family: Family) -> None:
    tiles = [(c.block_m, c.block_n, c.block_k, c.stages) for c in family.configs() if not c.groups_of_16]
    assert family.float_tiles is None or set(family.float_tiles) <= set(tiles)


@pytest.mark.parametrize(("arch", "layout"), KINDS)
@pytest.mark.parametrize("group_size", [-1, 64, 128])
def test_fewer_tiles_than_int8_has_cost_little(arch: int, layout: str, group_size: int, floats: None) -> None:
    """By the constants of int8, for the same bytes."""
    assert has_kernels("fp8", group_size, arch, layout)
    ratios = []
    for n, k in ((4096, 4096), (28672, 8192), (1536, 7168), (6144, 4096)):
        for m in (1, 4, 16, 64, 300, 4096):
            of_fp8, of_int8 = (Problem(m, n, k, format, group_size, arch, 132, layout) for format in ("fp8", "int8"))
            ratios.append(estimate_us(select(of_fp8), of_fp8) / estimate_us(select(of_int8), of_int8))
    assert min(ratios) >= 1 and max(ratios) < 1.2 and statistics.geometric_mean(ratios) < 1.02


@pytest.mark.parametrize(("arch", "layout"), KINDS)
def test_not_chosen_before_a_gpu_has_run_them(arch: int, layout: str, no_floats: None) -> None:
    assert not has_kernels("fp8", 128, arch, layout) and has_kernels("int8", 128, arch, layout)
    problem = Problem(1, 256, 256, "fp8", 128, arch, 132, layout)
    assert candidates(problem) == [] and select_grouped(problem, 4) is None
    with pytest.raises(ValueError, match=rf"multiplies by fp8 in groups of 128 in layout '{layout}' on sm{arch}"):
        select(problem)


def test_groups_of_16_have_none(floats: None) -> None:
    assert not has_kernels("fp8", 16, 90, "tiled") and has_kernels("fp8", 32, 90, "tiled")
    with pytest.raises(ValueError, match="no kernel that a GPU has run multiplies by fp8 in groups of 16"):
        select(1, 64, 128, "fp8", 16, 90, 132)


def test_other_gpus_and_layouts_have_none(floats: None) -> None:
    assert not has_kernels("fp8", 128, 70, "interleaved") and not has_kernels("fp8", 128, 80, "tiled")
    with pytest.raises(ValueError, match=r"layout must be .* for fp8, got 'row_major'"):
        Problem(1, 64, 128, "fp8", 128, 70, 80)


def test_experts(floats: None) -> None:
    for rows in (16, 4096):
        config = select_grouped(Problem(rows, 512, 512, "fp8", 128, 90, 132), 8)
        assert config is not None and config.has_floats
        of_int8 = select_grouped(Problem(rows, 512, 512, "int8", 128, 90, 132), 8)
        assert config.measured.kernel == of_int8.kernel  # type: ignore[union-attr]


@pytest.mark.parametrize("config", OF_FLOATS, ids=str)
def test_they_compute_nothing_else(config: KernelConfig) -> None:
    arch = max(config.rules.first_arch, 80)
    of_fp8, of_int8 = (Problem(1, 64, 128, f, 64, arch, 132, config.layout) for f in ("fp8", "int8"))
    assert config.rules.why_not(config, of_fp8) is None
    assert config.rules.why_not(config, of_int8) == f"{config} reads fp8, but qweight is int8"
    assert config.rules.why_not(config.measured, of_fp8) == f"{config.measured} reads int8, but qweight is fp8"


def test_a_kernel_is_run_by_its_name_before_it_is_verified(no_floats: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tests on a GPU do."""
    config = next(c for c in OF_FLOATS if c.family == "decode_sm90")
    problem = Problem(1, 64, 128, "fp8", 64, 90, 132)
    monkeypatch.setattr(PLAN, "runs_on", lambda *_: True)
    monkeypatch.setattr(PLAN, "is_compiled", lambda *_: True)
    assert why_not(config, problem) is None
    assert PLAN.choose(problem, TypeConfig("f16", "fp8", "group"), config) == config


@pytest.mark.parametrize("built", [False, True], ids=["without", "with"])
def test_the_unfused_product_asks_the_library(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "built_archs", lambda: ("80", "90a"))
    monkeypatch.setattr(KERNELS, "dequantizes_fp8", lambda: built)
    for config in OF_FLOATS:
        if config.unfused:
            assert KERNELS.is_compiled(config) == built and KERNELS.is_compiled(config.measured)


@pytest.mark.parametrize("verified", [False, True])
def test_units_of_their_own(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verified: bool
) -> None:
    """No other unit, nor the one that dequantizes, changes by them; they are built when they are asked for."""
    for config in (*generate.CONFIGS, *generate.GROUPED_CONFIGS):
        monkeypatch.setattr(config.rules, "floats_verified", verified)
    default, unverified = (generate.generate(tmp_path / str(asked), ["80", "90a"], asked) for asked in (False, True))
    texts = [{path.name: path.read_text() for path in (tmp_path / str(asked)).glob("*.cu")} for asked in (False, True)]
    own = {f"{c.kernel}.cu" for c in OF_FLOATS if not c.unfused and c.rules.first_arch in (75, 80, 90)}
    own -= {f"{c.kernel}.cu" for c in OF_FLOATS if c.family == "gemm_sm75"}
    assert own <= set(texts[1]) and (own <= set(texts[0])) == verified
    for name, text in texts[1].items():
        assert ("e4m3_weight.h" in text) == (name in own)
    for name, text in texts[0].items():
        assert name == "registry.cu" or text == texts[1][name]
    defined = [f"-D{generate.FLOATS}" in (tmp_path / str(asked) / "units.cmake").read_text() for asked in (False, True)]
    assert defined == [verified, True]
    assert {k.symbol for k in default} <= {k.symbol for k in unverified}


def test_every_format_of_floats_is_measured_as_integers() -> None:
    assert FLOAT_FORMATS == ("fp8",) and MEASURED_AS["fp8"] == "int8" and MEASURED_AS["nf4"] == "nf4"
