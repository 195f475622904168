"""Two launches for one product: which columns each takes, when the search prefers them, what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightonly.heuristics import KernelConfig, Problem, legal, select
from weightonly.heuristics.configs import CONFIGS, TypeConfig
from weightonly.heuristics.launches import estimate_us, first_columns, has_tail, launches
from weightonly.heuristics.legal import candidates
from weightonly.heuristics.select import likely_pairs, two_launches
from weightonly.plan.choose import check_config


def of(tokens: int, columns: int, format: str = "int4", split_k: int = 1) -> KernelConfig:
    """A kernel of gemm_sm90 by its tile."""
    found = (c for c in CONFIGS if c.family == "gemm_sm90" and format in c.formats)
    return next(c for c in found if (c.block_m, c.block_n) == (tokens, columns)).with_split_k(split_k)


def problem(m: int, k: int, n: int, format: str = "int4", group_size: int = 128) -> Problem:
    return Problem(m, n, k, format, group_size, 90, 132)


def test_the_first_launch_takes_full_waves() -> None:
    pair = of(128, 192).with_tail(of(128, 128, split_k=4))
    assert str(pair) == "gemm_sm90_128x192x128_w128x64_s3_k1+gemm_sm90_128x128x128_w128x64_s3_k4"
    assert pair.kernels() == {of(128, 192).kernel, of(128, 128).kernel}
    p = problem(512, 8192, 10240)  # 54 x 4 tiles on 132 SMs: one wave, of 33 x 4
    assert first_columns(pair, p) == 33 * 192
    assert launches(pair, p) == [
        (of(128, 192), problem(512, 8192, 33 * 192)),
        (of(128, 128, split_k=4), problem(512, 8192, 10240 - 33 * 192)),
    ]
    assert launches(of(128, 192), p) == [(of(128, 192), p)]
    # Clusters of two: 66 at once, in two waves of 80 tiles, the first of which is full.
    assert first_columns(of(128, 128, split_k=2), problem(128, 8192, 10240)) == 66 * 128
    # A wave that the tokens do not divide: 132 tiles are 26 columns of 5 token tiles.
    assert first_columns(of(128, 128), problem(5 * 128, 512, 128 * 40)) == 26 * 128


def test_what_is_no_pair() -> None:
    p = problem(512, 8192, 10240)
    decode = next(c for c in CONFIGS if c.family == "decode_sm90" and "int4" in c.formats)
    pair = of(128, 192).with_tail(of(128, 128))
    assert has_tail(pair, p) and legal(pair, p)
    for config, at in [
        (pair, problem(512, 8192, 4096)),  # less than a wave
        (pair, problem(512, 8192, 66 * 192)),  # nothing left
        (of(128, 192).with_tail(pair), p),  # three
        (of(128, 192).with_tail(decode), p),
        (decode.with_tail(of(128, 128)), p),
    ]:
        assert not legal(config, at), (config, at)
        with pytest.raises(ValueError, match=r"^config: .* is two launches, expected of one family"):
            check_config(config, at, TypeConfig("f16", "int4", "group"))
    # Three, each with columns: full waves of 192 and of 128 columns, then what is left.
    wide, inner = problem(128, 8192, (132 + 131) * 192), of(128, 128).with_tail(of(128, 192))
    assert has_tail(inner, problem(128, 8192, 131 * 192)) and has_tail(of(128, 192).with_tail(of(128, 128)), wide)
    assert not has_tail(of(128, 192).with_tail(inner), wide)
    bad = of(128, 192).with_tail(of(128, 128, split_k=9))
    assert not legal(bad, p)
    with pytest.raises(ValueError, match=r"^config: expected split_k of 1 to 8, got 9$"):
        check_config(bad, p, TypeConfig("f16", "int4", "group"))
    with pytest.raises(ValueError, match="reads int8, but qweight is int4"):
        check_config(of(128, 192).with_tail(of(48, 192, "int8")), p, TypeConfig("f16", "int4", "group"))
    for tail in (of(128, 128).name, 4):
        with pytest.raises(TypeError, match=rf"^tail: expected a KernelConfig or None, got {type(tail).__name__}$"):
            of(128, 192).with_tail(tail)  # type: ignore[arg-type]
    check_config(pair, p, TypeConfig("f16", "int4", "group"))
    assert not any(config.tail for config in candidates(p))


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(64, 1200),
    n=st.integers(1, 30000),
    k=st.sampled_from([512, 4096, 14336]),
    format=st.sampled_from(["int4", "int8", "nf4"]),
)
def test_pairs_are_legal_and_their_times_those_of_the_model(m: int, n: int, k: int, format: str) -> None:
    p = problem(m, k, n, format, -1 if format == "int8" else 64)
    found = two_launches(p, count=3)
    assert [us for us, _ in found] == sorted(us for us, _ in found)
    for us, config in found:
        assert legal(config, p)
        assert us == pytest.approx(estimate_us(config, p), rel=1e-9)
    likely = likely_pairs(p)
    assert likely == [config for _, config in found][: len(likely)]
    if found:
        limit_us = found[0][0]
        assert all(us <= limit_us for us, _ in two_launches(p, limit_us))
        assert two_launches(p, limit_us * 1.0001, 3)[0] == found[0]


@pytest.mark.parametrize(("m", "k", "n"), [(128, 8192, 10240), (512, 8192, 10240), (256, 4096, 28672)], ids=str)
def test_the_search_for_pairs_misses_little(m: int, k: int, n: int) -> None:
    p = problem(m, k, n)
    singles = [c for c in candidates(p) if c.family == "gemm_sm90" and c.split_k in (1, 2, 3, 4, 5, 6, 8)]
    firsts = [c for c in singles if c.split_k <= 2 and c.block_m >= 64]
    pairs = (first.with_tail(tail) for first, tail in itertools.product(firsts, singles))
    quickest_us = min(estimate_us(c, p) for c in pairs if has_tail(c, p) and legal(c, p))
    assert quickest_us * 0.9999 <= two_launches(p)[0][0] <= quickest_us * 1.01


def test_select_takes_two_where_a_wave_would_be_nearly_empty() -> None:
    p = problem(512, 8192, 10240)
    choice = select(512, 10240, 8192, "int4", 128, 90, 132)
    assert choice.tail is not None and choice in likely_pairs(p)
    assert estimate_us(choice, p) < 0.97 * min(estimate_us(c, p) for c in candidates(p))
    assert select(512, 8192, 8192, "int4", 128, 90, 132).tail is None  # 128 tiles of 256 x 128
    assert select(16, 10240, 8192, "int4", 128, 90, 132).tail is None
