"""Which configuration computes a grouped product, and which cannot."""

from __future__ import annotations

import pytest

from weightonly.heuristics import Problem, candidates, grouped
from weightonly.heuristics.configs import CONFIGS, GROUPED_CONFIGS, KernelConfig, kernel_types
from weightonly.heuristics.families.grouped_sm80 import GroupedSm80
from weightonly.heuristics.families.grouped_sm90 import MAX_EXPERTS, MAX_TILES, GroupedSm90
from weightonly.heuristics.grouped import select_grouped, why_not_grouped
from weightonly.heuristics.machine import HOPPER_SMEM_BYTES, MACHINES

FORMATS = ["int4", "int8", "code4"]


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
    k = config.block_k * (2 if config.rules.lists_rows and config.formats == ("int8",) else 1)
    return config.family, config.block_m, config.block_n, k


def test_each_tile_has_every_format_once() -> None:
    """Formats differ in their stages alone."""
    tiles = {tile_of(c) for c in GROUPED_CONFIGS}
    for tile in tiles:
        found = [f for c in GROUPED_CONFIGS if tile_of(c) == tile for f in c.formats]
        assert sorted(found) == sorted(FORMATS)


def test_shared_memory_of_all_kernels_fits() -> None:
    family = GroupedSm90()
    for config in (c for c in GROUPED_CONFIGS if c.family == family.name):
        for format in config.formats:
            needed = family.cta_smem_bytes(config, format, False, format != "code4")
            assert 100_000 < needed <= HOPPER_SMEM_BYTES, config


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("group_size", [32, 64, 128, 4096])
def test_tiles_grow_with_the_rows(group_size: int, format: str) -> None:
    """Every size has a configuration that computes it; one that most experts fill with one tile."""
    last = 0
    for rows in (1, 8, 64, 512, 1024, 2048, 4096, 1 << 16):
        asked = problem(rows, format=format, group_size=group_size)
        config = select_grouped(asked, 64)
        assert config is not None and why_not_grouped(config, asked, 64) is None
        assert format in config.formats and config.block_m >= min(128, rows / 64) and config.block_m >= last
        last = config.block_m
    assert last == 128


@pytest.mark.parametrize(("share", "tile"), [(1, 8), (5, 8), (6, 16), (24, 16), (48, 64), (49, 128), (4096, 128)])
@pytest.mark.parametrize("experts", [8, 128])
def test_the_tile_is_that_of_an_even_share(experts: int, share: int, tile: int) -> None:
    config = select_grouped(problem(share * experts), experts)
    assert config is not None and config.block_m == tile


def test_the_tallest_tile_there_is_takes_more_rows_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "GROUPED_CONFIGS", tuple(c for c in GROUPED_CONFIGS if c.block_m <= 16))
    config = select_grouped(problem(1 << 16), 8)
    assert config is not None and config.block_m == 16


@pytest.mark.parametrize(
    ("experts", "top_k", "k", "n", "columns"),
    [(8, 2, 14336, 4096, 64), (8, 2, 4096, 28672, 64), (128, 8, 768, 2048, 128), (128, 8, 2048, 1536, 128)],
    ids=["mixtral down", "mixtral gate and up", "qwen3 down", "qwen3 gate and up"],
)
def test_one_token_takes_the_columns_that_fill_the_gpu(experts: int, top_k: int, k: int, n: int, columns: int) -> None:
    config = select_grouped(problem(top_k, n, k), experts)
    assert config is not None and (config.block_m, config.block_n) == (8, columns)


def test_what_no_grouped_kernel_computes() -> None:
    assert select_grouped(problem(8), MAX_EXPERTS + 1) is None
    assert select_grouped(Problem(8, 512, 512, "int4", 128, 75, 40), 8) is None
    assert select_grouped(Problem(8, 512, 512, "int4", 128, 90, 132, "row_major"), 8) is None
    assert select_grouped(Problem(8, 512, 512, "int4", 128, 100, 148, "tiled"), 8) is None
    assert select_grouped(problem(1 << 30, 1 << 12), 8) is None, "tiles beyond 32 bits"


def test_as_many_experts_and_tiles_as_a_kernel_counts() -> None:
    """At the limit, and one beyond it. Every expert but one may end inside of a tile of 8 rows."""
    config = next(c for c in GROUPED_CONFIGS if (c.block_m, c.block_n) == (8, 128) and "int4" in c.formats)
    assert why_not_grouped(config, problem(8), MAX_EXPERTS) is None
    assert why_not_grouped(config, problem(8), MAX_EXPERTS + 1) is not None
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


@pytest.mark.parametrize(
    ("tile_m", "tile_n", "computes"),
    [(8, 64, False), (8, 128, False), (16, 64, True), (16, 128, False), (64, 128, True), (128, 128, True)],
)
def test_groups_of_32(tile_m: int, tile_n: int, computes: bool) -> None:
    """Sixteen warps of small tiles have no code for them."""
    config = next(c for c in GROUPED_CONFIGS if (c.block_m, c.block_n) == (tile_m, tile_n) and "int4" in c.formats)
    reason = why_not_grouped(config, problem(8, group_size=32), 8)
    assert reason is None if computes else "those of scales are of 32" in str(reason)


def test_why_not() -> None:
    config = next(c for c in GROUPED_CONFIGS if (c.block_m, c.block_n) == (8, 128) and "int4" in c.formats)
    dense = next(c for c in CONFIGS if c.family == "gemm_sm90" and "int4" in c.formats)
    assert why_not_grouped(config, problem(8), 8) is None
    for other, asked, experts, reason in (
        (dense, problem(8), 8, "computes single products"),
        (config.with_tail(dense), problem(8), 8, "two launches"),
        (config, problem(8), MAX_EXPERTS + 1, "at most 512 experts, but qweight has 513"),
        (config, problem(8, format="int8"), 8, "but qweight is int8"),
        (config, problem(8, group_size=32), 8, "those of scales are of 32"),
        (config, problem(1 << 30, 1 << 12), 8, "at most 1073741824 tiles"),
        (config.with_split_k(2), problem(8), 8, "expected split_k of 1 to 1"),
    ):
        assert reason in str(why_not_grouped(other, asked, experts))


# --- layout "interleaved" ---------------------------------------------------------------------------------------


def interleaved(rows: int, format: str = "int4", arch: int = 80, n: int = 4096, group_size: int = 128) -> Problem:
    return Problem(rows, n, 4096, format, group_size, arch, 108, "interleaved")


def test_interleaved_kernels_fit_on_every_gpu() -> None:
    family = GroupedSm80()
    for config in (c for c in GROUPED_CONFIGS if c.family == family.name):
        for arch in (arch for arch in MACHINES if arch >= family.first_arch):
            for format in config.formats:
                for group_size in (32, 4096):
                    asked = interleaved(512, format, arch, group_size=group_size)
                    assert why_not_grouped(config, asked, MAX_EXPERTS) is None
        assert all(config.rules.is_calibrated(config, format) for format in config.formats)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_interleaved_tiles_grow_with_the_rows(arch: int, format: str) -> None:
    found = [select_grouped(interleaved(64 * rows, format, arch), 64) for rows in (1, 8, 32, 128, 1024)]
    assert all(c is not None and c.family == GroupedSm80.name and format in c.formats for c in found)
    tiles = [c.block_m for c in found if c is not None]
    assert tiles == sorted(tiles) and tiles[0] == 16 and tiles[-1] >= 64


def test_interleaved_choice_is_the_quickest_by_its_cost() -> None:
    family = GroupedSm80()
    for rows, experts in ((2, 8), (8, 128), (512, 128), (8192, 8)):
        asked = interleaved(rows)
        config = select_grouped(asked, experts)
        assert config is not None
        others = [c for c in GROUPED_CONFIGS if c.family == family.name]
        assert family.grouped_us(config, asked, experts) == min(family.grouped_us(c, asked, experts) for c in others)


def test_what_no_interleaved_kernel_computes() -> None:
    assert select_grouped(interleaved(8, arch=75), 8) is None
    assert select_grouped(interleaved(8), MAX_EXPERTS + 1) is None
    assert select_grouped(interleaved(1 << 30, n=1 << 12), 8) is None
    on_hopper = select_grouped(Problem(8, 512, 512, "int4", 128, 90, 132, "tiled"), 8)
    assert on_hopper is not None and on_hopper.layout == "tiled"
