"""The choice for x in E4M3: legal for every problem of the layout, and what the family refuses."""

from __future__ import annotations

import random

import pytest

from weightonly.heuristics import Problem, select
from weightonly.heuristics.configs import CONFIGS, FP8_CONFIGS, kernel_types
from weightonly.heuristics.families import FAMILIES
from weightonly.heuristics.legal import candidates, why_not
from weightonly.heuristics.problem import FP8_LAYOUT

FAMILY = FAMILIES["gemm_sm90_fp8"]


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    monkeypatch.setattr(FAMILY, "verified", True)


def problem(m: int, n: int = 4096, k: int = 4096, group_size: int = 128) -> Problem:
    return Problem(m, n, k, "int4", group_size, 90, 132, FP8_LAYOUT)


@pytest.mark.parametrize("group_size", [-1, 32, 64, 128, 192, 256])
def test_the_choice_is_legal(group_size: int, verified: None, seed: int) -> None:
    draw = random.Random(seed)
    for m in (*range(1, 300), 500, 512, 1000, 1024, 4096, 5000, 1 << 20):
        k = 768 * draw.randint(1, 20)
        p = problem(m, draw.randint(1, 30000), k, group_size)
        chosen = select(p)
        assert chosen in FP8_CONFIGS or chosen.with_split_k(1) in FP8_CONFIGS
        assert why_not(chosen, p, "bf16") is None and chosen.tail is None


def test_more_rows_have_larger_tiles(verified: None) -> None:
    """The tiles that were best in the probe: K = N = 8192."""
    tiles = {m: select(problem(m, 8192, 8192)) for m in (16, 64, 128, 256, 4096)}
    assert [tiles[m].block_m for m in (16, 64, 128)] == [16, 64, 128]
    assert (tiles[256].block_m, tiles[256].block_n) == (128, 128)
    assert tiles[4096].block_m >= 128


def test_an_unverified_family_is_not_chosen(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILY, "verified", False)
    with pytest.raises(ValueError, match="layout: no kernel that a GPU has run reads 'tiled_fp8'"):
        select(problem(64))


def test_x_in_16_bits_has_no_such_kernel(verified: None) -> None:
    assert not {c.kernel for c in CONFIGS} & {c.kernel for c in FP8_CONFIGS}
    for layout in ("tiled", "interleaved"):
        p = Problem(64, 4096, 4096, "int4", 128, 90, 132, layout)
        assert not any(c.rules.x_bytes == 1 for c in candidates(p))
        reason = why_not(FP8_CONFIGS[0], p)
        assert reason is not None and "reads layout 'tiled_fp8'" in reason


def test_groups_that_the_largest_tile_has_no_registers_for() -> None:
    of_128 = [c for c in FP8_CONFIGS if c.least_group == 128]
    assert of_128
    for config in of_128:
        assert "groups of 128 and its multiples" in (why_not(config, problem(64, k=768, group_size=192)) or "")
        for group_size in (-1, 128, 256):
            assert why_not(config, problem(64, k=768, group_size=group_size)) is None
    assert why_not(of_128[0], problem(64, k=64, group_size=-1)) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "int8"}, "format must be int4 or mxfp4 without zeros in layout 'tiled_fp8', got int8"),
        ({"format": "nf4"}, "got nf4"),
        ({"zeros": True}, "format must be int4 or mxfp4 without zeros in layout 'tiled_fp8', got int4 with zeros"),
    ],
    ids=str,
)
def test_what_the_layout_has_not(changed: dict[str, object], message: str) -> None:
    sizes = {"m": 1, "n": 64, "k": 64, "format": "int4", "group_size": -1, "arch": 90, "sm_count": 132}
    with pytest.raises(ValueError, match=message):
        Problem(**{**sizes, "layout": FP8_LAYOUT, **changed})  # type: ignore[arg-type]


def test_other_gpus_do_not_read_it(verified: None) -> None:
    with pytest.raises(ValueError, match="layout must be one that sm80 reads"):
        select(Problem(1, 64, 64, "int4", -1, 80, 108, FP8_LAYOUT))


def test_types() -> None:
    names = {t.name for t in kernel_types(FP8_CONFIGS[0])}
    assert names == {f"{d}_int4_{mode}" for d in ("f16", "bf16") for mode in ("channel", "group")}
