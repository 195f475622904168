"""Which configuration computes a grouped product, and which cannot."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from weightonly.heuristics import Problem, candidates, grouped, h200
from weightonly.heuristics.configs import CONFIGS, GROUPED_CONFIGS, KernelConfig, kernel_types
from weightonly.heuristics.constants import GroupedTimes
from weightonly.heuristics.families import grouped_decode_sm90, grouped_sm90, hopper_grouped
from weightonly.heuristics.families.grouped_decode_sm90 import MAX_ROW_TILES, MAX_SORTED_CHOICES
from weightonly.heuristics.families.grouped_sm80 import MAX_EXPERTS as MAX_INTERLEAVED
from weightonly.heuristics.families.grouped_sm80 import GroupedSm80
from weightonly.heuristics.families.grouped_sm90 import MAX_EXPERTS, MAX_TILES, GroupedSm90
from weightonly.heuristics.families.hopper_grouped import grouped_us
from weightonly.heuristics.grouped import select_grouped, select_layer, why_not_grouped
from weightonly.heuristics.machine import HOPPER_SMEM_BYTES, MACHINES
from weightonly.heuristics.routing import ALIKE, tiles_along_m, with_rows

FORMATS = ["int4", "int8", "code4"]


INTERLEAVED = next(c for c in GROUPED_CONFIGS if c.family == GroupedSm80.name)


def problem(rows: int, n: int = 4096, k: int = 4096, format: str = "int4", group_size: int = 128) -> Problem:
    return Problem(rows, n, k, format, group_size, 90, 132)


def test_grouped_kernels_are_a_list_of_their_own() -> None:
    """Nothing that computes one product is chosen among them."""
    assert not set(CONFIGS) & set(GROUPED_CONFIGS)
    assert all(c.rules.grouped for c in GROUPED_CONFIGS) and not any(c.rules.grouped for c in CONFIGS)
    assert not any(c.rules.grouped for c in candidates(problem(64)))
    names = [f"{c.kernel}_{t.name}" for c in GROUPED_CONFIGS for t in kernel_types(c)]
    assert len(names) == len(set(names))


def tile_of(config: KernelConfig) -> tuple[str, int, int, int]:
    """What formats have in common: a warp of decode has as many bytes of each, and so another k."""
    k = config.block_k * (2 if config.rules.sorts and config.formats == ("int8",) else 1)
    return config.family, config.block_m, config.block_n, k


def test_each_tile_has_every_format_once() -> None:
    """Formats differ in their stages alone."""
    configs = [c for c in GROUPED_CONFIGS if c == c.measured]
    for tile in {tile_of(c) for c in configs}:
        found = [f for c in configs if tile_of(c) == tile for f in c.formats]
        assert sorted(found) == sorted(FORMATS)


def test_each_family_of_hopper_has_groups_of_16_of_every_format() -> None:
    for family in ("grouped_decode_sm90", "grouped_sm90"):
        configs = [c for c in GROUPED_CONFIGS if c.groups_of_16 and c.family == family]
        assert sorted(f for c in configs for f in c.formats) == sorted(FORMATS)


def test_every_kernel_may_be_chosen() -> None:
    """A kernel that is not timed is never chosen: a change of its stages changes its name in h200.py."""
    missing = [(c.kernel, f) for c in GROUPED_CONFIGS for f in c.formats if not c.rules.is_calibrated(c, f)]
    assert missing == []


def test_shared_memory_of_all_kernels_fits() -> None:
    family = GroupedSm90()
    for config in (c for c in GROUPED_CONFIGS if c.family == family.name):
        for format in config.formats:
            needed = family.cta_smem_bytes(config, format, False, format != "code4")
            assert 100_000 < needed <= HOPPER_SMEM_BYTES, config


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 4096])
def test_tiles_grow_with_the_rows(group_size: int, format: str) -> None:
    """Every size has a configuration that computes it: of few rows for few, of many for many."""
    chosen = {}
    for rows in (1, 8, 64, 512, 1024, 2048, 4096, 1 << 14, 1 << 16):
        asked = problem(rows, format=format, group_size=group_size)
        config = select_grouped(asked, 64)
        assert config is not None and why_not_grouped(config, asked, 64) is None and format in config.formats
        assert config.groups_of_16 == (group_size == 16) and config.rules.in_layers
        chosen[rows] = config
    assert chosen[1].rules.sorts and chosen[1024].block_m <= 64 <= chosen[1 << 16].block_m
    assert group_size == 16 or chosen[1 << 16].block_m > 64


def test_the_choice_is_the_quickest_by_its_cost() -> None:
    for rows, experts, k, n in ((2, 8, 4096, 28672), (512, 128, 2048, 1536), (4096, 256, 7168, 4096)):
        asked = problem(rows, n, k)
        legal = [c for c in GROUPED_CONFIGS if c.layout == "tiled" and why_not_grouped(c, asked, experts) is None]
        times_us = {c: c.rules.grouped_us(c, asked, experts) for c in legal}
        assert len(times_us) >= 5 and select_grouped(asked, experts) is min(times_us, key=times_us.__getitem__)


def layer_problems(choices: int, format: str = "int4") -> tuple[Problem, Problem]:
    """Of a gated layer."""
    return problem(choices, 3072, 4096, format), problem(choices, 4096, 1536, format)


@pytest.mark.parametrize("format", FORMATS)
def test_the_choice_of_a_layer_is_the_quickest_as_a_whole(format: str) -> None:
    """Of all pairs of kernels that gate, with what is around them."""
    legal = [c for c in GROUPED_CONFIGS if c.layout == "tiled" and format in c.formats and not c.groups_of_16]
    for choices in (1, 8, 64, 128, 129, 256, 1024, 4096):
        first, second = layer_problems(choices, format)
        choice = select_layer(first, second, 64, is_gated=True)
        assert choice is not None and choice.first.rules.in_layers

        def us(one: KernelConfig, other: KernelConfig, sorts: bool) -> float:
            around_us = h200.GROUPED.around_sorting_us if sorts else h200.GROUPED.around_us
            around_us += h200.GROUPED.other_kernel_us if one != other else 0.0
            return around_us + one.rules.grouped_us(one, first, 64, True) + other.rules.grouped_us(other, second, 64)  # noqa: B023

        pairs = [(one, other) for one in legal for other in legal if one.rules.in_layers]
        pairs = [pair for pair in pairs if not any(why_not_grouped(c, first, 64) for c in pair)]
        best_us = min(us(*pair, sorts=False) for pair in pairs)
        if choices <= MAX_SORTED_CHOICES:
            best_us = min(best_us, *(us(*pair, sorts=True) for pair in pairs if all(c.rules.sorts for c in pair)))
        assert us(*choice) == pytest.approx(best_us, rel=1e-12)
        assert choice.sorts <= all(c.rules.sorts for c in choice[:2])


def test_few_choices_are_sorted_by_the_products() -> None:
    sorts = [
        choice is not None and choice.sorts for choice in (select_layer(*layer_problems(m), 64, True) for m in (1, 129))
    ]
    assert sorts == [True, False]


def test_a_layer_without_kernels_is_none() -> None:
    first, second = (dataclasses.replace(p, layout="interleaved", arch=80) for p in layer_problems(4))
    assert select_layer(first, second, 64, True) is None


def test_a_kernel_without_constants_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    best = select_grouped(problem(8), 8)
    assert best is not None
    others = {key: times for key, times in h200.GROUPED.kernels.items() if key[0] != best.kernel}
    monkeypatch.setattr(hopper_grouped, "GROUPED", dataclasses.replace(h200.GROUPED, kernels=others))
    monkeypatch.setattr(grouped_sm90, "GROUPED", hopper_grouped.GROUPED)
    monkeypatch.setattr(grouped_decode_sm90, "GROUPED", hopper_grouped.GROUPED)
    other = select_grouped(problem(8), 8)
    assert other is not None and other.kernel != best.kernel


def test_more_bytes_and_more_rows_take_longer() -> None:
    config = next(c for c in GROUPED_CONFIGS if c.rules.sorts and "int4" in c.formats)

    def us(rows: int, experts: int, n: int = 4096) -> float:
        return float(config.rules.grouped_us(config, problem(rows, n), experts))

    assert us(8, 8) < us(64, 8) and us(64, 64) < us(64, 64, 8192)
    assert us(64, 8) < us(64, 64), "more experts have rows"


@pytest.mark.parametrize(
    ("rows", "experts", "tile_m", "least", "most"),
    [
        (7, 1, 8, 1, 1),
        (9, 1, 8, 2, 2),
        (1, 256, 8, 0.99, 1),
        (8, 256, 8, 7.5, 8),
        (1 << 20, 8, 128, (1 << 13) + 4, (1 << 13) + 4),
        (800, 8, 100, 10, 14),  # half of the experts have more than their share
    ],
)
def test_tiles_along_m(rows: int, experts: int, tile_m: int, least: float, most: float) -> None:
    assert least <= tiles_along_m(rows, experts, tile_m)[0] <= most


def gammas(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch._standard_gamma(torch.full(shape, ALIKE, dtype=torch.float64), generator=generator)


def test_tiles_along_m_by_chance(generator: torch.Generator) -> None:
    """Beside numbers drawn from the distribution: shares of gamma's, rows of Poisson's."""
    for rows, experts, tile_m in ((256, 16, 8), (640, 32, 16), (4096, 64, 96)):
        gamma = gammas(generator, 40000) / ALIKE
        counts = torch.poisson(gamma * (rows / experts), generator=generator)
        wanted = float((counts / tile_m).ceil().mean()) * experts
        assert tiles_along_m(rows, experts, tile_m)[0] == pytest.approx(wanted, rel=0.03)
        assert with_rows(rows, experts) == pytest.approx(float((counts > 0).float().mean()) * experts, rel=0.03)


@pytest.mark.parametrize(("rows", "experts", "tile_m"), [(128, 8, 32), (1024, 8, 128), (512, 128, 8), (4096, 128, 32)])
def test_the_variance_of_tiles(rows: int, experts: int, tile_m: int, generator: torch.Generator) -> None:
    """Beside draws of a router with random favourites, whose rows add up."""
    shares = gammas(generator, 20000, experts).float()
    chosen = torch.multinomial(shares, rows, replacement=True, generator=generator)
    counts = torch.zeros(len(shares), experts).scatter_add_(1, chosen, torch.ones(chosen.shape))
    tiles = (counts / tile_m).ceil().sum(1)
    assert tiles_along_m(rows, experts, tile_m)[1] == pytest.approx(float(tiles.var()), rel=0.15)


@pytest.mark.parametrize(("rows", "experts", "tile_m"), [(32, 64, 8), (300, 16, 16), (900, 8, 32), (64, 128, 8)])
def test_tiles_along_m_as_a_sum(rows: int, experts: int, tile_m: int) -> None:
    """Of the chances of a negative binomial, up to rows that no expert has."""
    more = rows / experts / (rows / experts + ALIKE)
    chances = [
        math.exp(
            math.lgamma(i + ALIKE)
            - math.lgamma(ALIKE)
            - math.lgamma(i + 1)
            + ALIKE * math.log1p(-more)
            + i * math.log(more)
        )
        for i in range(60 * rows)
    ]
    tiles = sum(chance * math.ceil(count / tile_m) for count, chance in enumerate(chances))
    assert tiles_along_m(rows, experts, tile_m)[0] == pytest.approx(experts * tiles, rel=1e-4)
    assert with_rows(rows, experts) == pytest.approx(experts * (1 - chances[0]), rel=1e-9)


def test_the_cost_of_waves_and_of_bytes() -> None:
    config = next(c for c in GROUPED_CONFIGS if c.rules.sorts and c.formats == ("int8",) and c.block_k == 256)
    asked, k_us = problem(264, 64, 1024, "int8"), 3.0
    by_waves = grouped_us(config, asked, (264, 0.0, 0), GroupedTimes(2.0, k_us, 0.5, 0.0))
    assert by_waves == 2.0 + 2 * (k_us + 0.5), "two CTAs on each of 132 SMs, one wave"
    assert grouped_us(config, asked, (528, 0.0, 0), GroupedTimes(0.0, k_us, 0.0, 0.0)) == 2 * 2 * k_us
    # A CTA that has two tiles to compute one after another: half of the SMs have none of one wave.
    few = grouped_us(config, asked, (132, 0.0, 0), GroupedTimes(2.0, k_us, 0.5, 0.0), in_a_row=2)
    assert few == 2.0 + 2 * 2 * (k_us + 0.5)
    by_bytes = grouped_us(config, asked, (264, 0.0, 7), GroupedTimes(2.0, 0.0, 0.0, 0.0))
    assert by_bytes == pytest.approx(2.0 + 7 * 64 * (1024 + 2 * 8) / (h200.GROUPED.tb_s * 1e6))
    of_rows = [
        grouped_us(config, problem(m, 64, 1024, "int8"), (264, 0.0, 0), GroupedTimes(0, 1, 0, 0.25))
        for m in (264, 1056)
    ]
    assert of_rows == [2.0, 2.0 * (1 + 3 * 0.25)]
    # Half of the routings have a tile more than a wave has room for.
    varying = grouped_us(config, asked, (264.5, 1e-3, 0), GroupedTimes(0.0, k_us, 0.0, 0.0))
    assert varying == pytest.approx(2 * 1.5 * k_us)


def test_the_tallest_tile_there_is_takes_more_rows_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "GROUPED_CONFIGS", tuple(c for c in GROUPED_CONFIGS if c.block_m <= 64))
    config = select_grouped(problem(1 << 16), 8)
    assert config is not None and config.block_m == 64


def test_what_no_grouped_kernel_computes() -> None:
    assert select_grouped(problem(8), MAX_EXPERTS + 1) is None
    assert select_grouped(Problem(8, 512, 512, "int4", 128, 75, 40), 8) is None
    assert select_grouped(Problem(8, 512, 512, "int4", 128, 90, 132, "row_major"), 8) is None
    assert select_grouped(Problem(8, 512, 512, "int4", 128, 100, 148, "tiled"), 8) is None
    assert select_grouped(problem(1 << 30, 1 << 12), 8) is None, "tiles beyond 32 bits"


def test_as_many_experts_and_tiles_as_a_kernel_counts() -> None:
    """At the limit, and one beyond it. Every expert but one may end inside of a tile of 8 rows."""
    for config, asked, most in (
        (tiled(8, 64), problem(8), MAX_EXPERTS),
        (INTERLEAVED, interleaved(8), MAX_INTERLEAVED),
        (tiled(128, 128), problem(8), MAX_EXPERTS),
    ):
        assert why_not_grouped(config, asked, most) is None
        assert f"at most {most} experts" in str(why_not_grouped(config, asked, most + 1))
    columns = 1 << 10  # tiles of 64 along N
    for experts in (1, 5):
        rows = 8 * (MAX_TILES // columns - experts - 1)
        assert why_not_grouped(config, problem(rows, 64 * columns), experts) is None
        assert "at most 1073741824 tiles" in str(why_not_grouped(config, problem(rows + 8, 64 * columns), experts))
        assert "at most 1073741824 tiles" in str(why_not_grouped(config, problem(rows, 64 * columns + 1), experts))


def test_kernels_that_never_ran_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in {type(c.rules) for c in GROUPED_CONFIGS}:
        monkeypatch.setattr(family, "verified", False)
    assert select_grouped(problem(8), 8) is None
    assert select_grouped(interleaved(8), 8) is None


def tiled(tile_m: int, tile_n: int, format: str = "int4") -> KernelConfig:
    """A configuration for layout "tiled"."""
    return next(
        c
        for c in GROUPED_CONFIGS
        if c.layout == "tiled" and (c.block_m, c.block_n) == (tile_m, tile_n) and format in c.formats
    )


@pytest.mark.parametrize("format", FORMATS)
def test_groups_of_16_have_kernels_of_their_own(format: str) -> None:
    asked, other = problem(8, format=format, group_size=16), problem(8, format=format, group_size=32)
    for config in (c for c in GROUPED_CONFIGS if c.layout == "tiled" and format in c.formats):
        computes = why_not_grouped(config, asked, 8) is None, why_not_grouped(config, other, 8) is None
        assert computes == (config.groups_of_16, not config.groups_of_16), config


def test_why_not() -> None:
    config, few = tiled(64, 256), tiled(8, 64)
    dense = next(c for c in CONFIGS if c.family == "gemm_sm90" and "int4" in c.formats)
    assert why_not_grouped(config, problem(8), 8) is None
    for other, asked, experts, reason in (
        (dense, problem(8), 8, "computes single products"),
        (config.with_tail(dense), problem(8), 8, "two launches"),
        (config, problem(8), MAX_EXPERTS + 1, "at most 1024 experts, but qweight has 1025"),
        (config, problem(8, format="int8"), 8, "but qweight is int8"),
        (config, problem(8, group_size=16), 8, "those of scales are of 16"),
        (config, problem(1 << 30, 1 << 12), 8, "at most 1073741824 tiles"),
        (config.with_split_k(2), problem(8), 8, "expected split_k of 1 to 1"),
        (few, problem(8 * MAX_ROW_TILES + 1), 1, "lists at most 1024 tiles along M, but there may be 1025"),
        (few, problem(8 * MAX_ROW_TILES - 6 * 8), 8, "lists at most 1024 tiles along M, but there may be 1025"),
    ):
        assert reason in str(why_not_grouped(other, asked, experts))


# --- layout "interleaved" ---------------------------------------------------------------------------------------


@pytest.fixture
def with_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice as it is once a GPU has run the kernels."""
    monkeypatch.setattr(GroupedSm80, "verified", True)


def interleaved(rows: int, format: str = "int4", arch: int = 80, n: int = 4096, group_size: int = 128) -> Problem:
    return Problem(rows, n, 4096, format, group_size, arch, 108, "interleaved")


def test_interleaved_kernels_fit_on_every_gpu() -> None:
    family = GroupedSm80()
    for config in (c for c in GROUPED_CONFIGS if c.family == family.name):
        for arch in (arch for arch in MACHINES if arch >= family.first_arch):
            for format in config.formats:
                for group_size in (32, 4096):
                    asked = interleaved(512, format, arch, group_size=group_size)
                    assert why_not_grouped(config, asked, MAX_INTERLEAVED) is None
        assert all(config.rules.is_calibrated(config, format) for format in config.formats)


@pytest.mark.usefixtures("with_interleaved")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_interleaved_tiles_grow_with_the_rows(arch: int, format: str) -> None:
    found = [select_grouped(interleaved(64 * rows, format, arch), 64) for rows in (1, 8, 32, 128, 1024)]
    assert all(c is not None and c.family == GroupedSm80.name and format in c.formats for c in found)
    tiles = [c.block_m for c in found if c is not None]
    assert tiles == sorted(tiles) and tiles[0] == 16 and tiles[-1] >= 64


@pytest.mark.usefixtures("with_interleaved")
def test_interleaved_choice_is_the_quickest_by_its_cost() -> None:
    family = GroupedSm80()
    for rows, experts in ((2, 8), (8, 128), (512, 128), (8192, 8)):
        asked = interleaved(rows)
        config = select_grouped(asked, experts)
        assert config is not None
        others = [c for c in GROUPED_CONFIGS if c.family == family.name]
        assert family.grouped_us(config, asked, experts) == min(family.grouped_us(c, asked, experts) for c in others)


@pytest.mark.usefixtures("with_interleaved")
def test_what_no_interleaved_kernel_computes() -> None:
    assert select_grouped(interleaved(8, arch=75), 8) is None
    assert select_grouped(interleaved(8), MAX_INTERLEAVED + 1) is None
    assert select_grouped(interleaved(1 << 30, n=1 << 12), 8) is None
    on_hopper = select_grouped(Problem(8, 512, 512, "int4", 128, 90, 132, "tiled"), 8)
    assert on_hopper is not None and on_hopper.layout == "tiled"
