"""The choice in the batch-invariant mode: every M of a weight has kernels of one class. Without it nothing changed."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import tuned_cases as tuned

import weightonly as wo
from weightonly.heuristics import KernelConfig, Problem, select
from weightonly.heuristics.configs import CONFIGS, FP8_CONFIGS, GROUPED_CONFIGS, GROUPED_FP8_CONFIGS, TypeConfig
from weightonly.heuristics.families.gemm_sm90 import GemmSm90
from weightonly.heuristics.grouped import invariant_grouped_class, select_grouped, select_layer
from weightonly.heuristics.invariant import MEAN_ROWS, MOST_ROWS, class_of, computes_class
from weightonly.heuristics.launches import estimate_us
from weightonly.heuristics.legal import candidates, considered
from weightonly.heuristics.problem import FP8_LAYOUT
from weightonly.heuristics.select import invariant_class
from weightonly.plan import choose
from weightonly.plan.choose import check_config, is_of_class, preferred
from weightonly.plan.grouped import check_grouped_class

F16 = TypeConfig("f16", "int4", "group")
SWEEP = (*range(1, 70), 100, 127, 128, 129, 200, 256, 300, 512, 777, 1024, 2048, 3000, 4096, 10000, MOST_ROWS)
WEIGHTS = {
    "int4": ("int4", 128, False),
    "int4-zeros": ("int4", 128, True),
    "int4-64": ("int4", 64, False),
    "int4-16": ("int4", 16, False),
    "int4-channel": ("int4", -1, False),
    "int8": ("int8", -1, False),
    "nf4": ("nf4", 64, False),
    "mxfp4": ("mxfp4", 32, False),
    "nvfp4": ("nvfp4", 16, False),
}


def problem(m: int, k: int = 4096, n: int = 4096, weight: str = "int4", arch: int = 90, sms: int = 132) -> Problem:
    format, group_size, zeros = WEIGHTS[weight]
    return Problem(m, n, k, format, group_size, arch, sms, "", zeros, invariant=True)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize(("arch", "sms"), [(75, 40), (80, 108), (89, 128), (90, 132)])
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (8192, 1024), (14336, 4096), (1024, 12288), (640, 200)])
def test_a_weight_has_one_class(k: int, n: int, arch: int, sms: int, weight: str) -> None:
    p = problem(1, k, n, weight, arch, sms)
    if p.group_step == 16 and arch < 80:
        with pytest.raises(ValueError, match=r"^batch_invariant: expected a weight that kernels of sm75 compute in"):
            invariant_class(p)
        return
    expected = invariant_class(p)
    assert expected is not None
    for m in SWEEP:
        config = select(replace(p, m=m))
        assert computes_class(config, p, expected) and not config.unfused, (m, config)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 5000),
    n=st.integers(1, 20000),
    k=st.integers(1, 100).map(lambda groups: 128 * groups),
    weight=st.sampled_from(["int4", "int4-64", "int8", "nf4"]),
    arch=st.sampled_from([(80, 108), (86, 84), (90, 132)]),
)
def test_of_the_class_it_is_the_quickest(m: int, n: int, k: int, weight: str, arch: tuple[int, int]) -> None:
    p = problem(m, k, n, weight, *arch)
    expected, config = invariant_class(p), select(p)
    assert computes_class(config, p, expected)
    one = [c for c in candidates(p) if c in considered(p) and computes_class(c, p, expected)]
    limits = [c.rules.launch(c, p, expected).most_tiles for c in one]
    us = min(estimate_us(c, p, expected) for c, most in zip(one, limits, strict=True) if c.rules.tiles(c, m, n) <= most)
    assert estimate_us(config, p, expected) <= us * (1 + 1e-9)
    assert (config.tail is None) or estimate_us(config, p, expected) < us


def test_the_class_is_the_quickest_on_average() -> None:
    p = problem(1, 4096, 14336)
    means = {}
    for of in {class_of(c, p) for c in considered(p)} - {None}:
        times = []
        for m in MEAN_ROWS:
            of_m = replace(p, m=m)
            legal = [c for c in candidates(of_m) if computes_class(c, p, of) and c in considered(p)]
            times.append(min((estimate_us(c, of_m, of) for c in legal), default=math.inf))
        means[of] = math.prod(times)
    chosen = invariant_class(p)
    # Pairs of launches, which the class may have too, make it no slower.
    us = [estimate_us(select(replace(p, m=m)), replace(p, m=m), chosen) for m in MEAN_ROWS]
    assert math.prod(us) <= min(means.values())
    assert means[chosen] <= 1.3 * min(means.values()) and len(means) > 3


def test_without_the_mode_a_problem_is_what_it_was() -> None:
    for m in (1, 16, 300, 4096):
        p = replace(problem(m), invariant=False)
        before = select(p)
        invariant_class(p)
        select.cache_clear()  # type: ignore[attr-defined]
        assert select(p) == before == select(m, p.n, p.k, p.format, p.group_size, p.arch, p.sm_count)
        assert Problem(m, p.n, p.k, p.format, p.group_size, p.arch, p.sm_count) == p
    p = problem(16)
    assert select(16, p.n, p.k, p.format, p.group_size, p.arch, p.sm_count, invariant=True) == select(p)


def of(family: str, tile: tuple[int, int, int], format: str = "int4", split_k: int = 1) -> KernelConfig:
    """By tokens, columns, k of a block."""
    found = (c for c in (*CONFIGS, *FP8_CONFIGS) if c.family == family and format in c.formats and not c.groups_of_16)
    return next(c for c in found if (c.block_m, c.block_n, c.block_k) == tile).with_split_k(split_k)


def test_what_bits_of_gemm_sm90_depend_on() -> None:
    """As they were measured: gpu_results.md. Scales multiply weights in all of them."""
    p = problem(1)
    few, many = of("gemm_sm90", (8, 256, 128)), of("gemm_sm90", (128, 192, 128))
    assert class_of(few, p) == class_of(of("gemm_sm90", (64, 192, 128)), p) == class_of(many, p)
    assert class_of(of("gemm_sm90", (256, 128, 64)), p) == class_of(many, p), "with one warpgroup k_tiles are a chain"
    along_k = of("gemm_sm90", (16, 64, 256))
    assert class_of(along_k, p) == class_of(of("gemm_sm90", (32, 128, 256)), p) != class_of(few, p)
    assert len({class_of(c, p) for c in (few, along_k)} | {class_of(few.with_split_k(s), p) for s in (2, 3)}) == 4
    assert class_of(along_k.with_split_k(3), p) not in (None, class_of(few.with_split_k(3), p))
    # Parts of 1088 k, in k_tiles of 64 or of 128.
    odd = problem(1, 2112, weight="int8")
    two = [class_of(of("gemm_sm90", tile, "int8", 2), odd) for tile in ((192, 128, 64), (128, 128, 128))]
    assert two[0] is None is not two[1]


def test_which_kernels_follow_another_order() -> None:
    p = problem(1)
    tile, large = of("gemm_sm90", (128, 128, 128)), of("gemm_sm90", (256, 128, 64))
    quick, slow = (c for c in CONFIGS if (c.family, c.block_m) == ("gemm_sm90", 192) and "int4" in c.formats)
    for split_k in range(1, 9):
        order = class_of(of("gemm_sm90", (16, 64, 512), split_k=split_k), p)
        assert computes_class(tile, p, order) and computes_class(tile.with_split_k(split_k), p, order)
        assert not computes_class(tile.with_split_k(9 - split_k), p, order) or split_k == 8
        assert not any(computes_class(large.with_split_k(s), p, order) for s in (1, split_k))
        assert computes_class(slow, p, order) and not computes_class(quick, p, order)
        assert computes_class(tile.with_tail(tile), p, order) and not computes_class(tile.with_tail(large), p, order)
    x8 = of("gemm_sm90_fp8", (128, 128, 128))
    assert computes_class(x8, p, class_of(x8, p)) and not computes_class(x8, p, class_of(tile, p))
    assert not computes_class(tile, p, class_of(x8, p))


def test_two_launches_have_a_class_if_both_have_it() -> None:
    p = problem(512, 8192, 10240)
    first = of("gemm_sm90", (128, 192, 128))
    assert class_of(first.with_tail(of("gemm_sm90", (96, 128, 128))), p) == class_of(first, p)
    assert class_of(first.with_tail(of("gemm_sm90", (32, 128, 256))), p) is None
    assert class_of(first.with_tail(first.with_split_k(3)), p) is None


def test_others_have_classes_of_their_own() -> None:
    p = problem(1, arch=80, sms=108)
    split = of("gemm_sm80", (16, 128, 64)).with_split_k
    assert class_of(split(3), p) == class_of(of("gemm_sm80", (128, 128, 64), split_k=3), p) != class_of(split(2), p)
    gemv = [c for c in CONFIGS if c.family == "gemv" and "int4" in c.formats and c.block_k == 2048 and c.block_n == 16]
    assert len({class_of(c, p) for c in gemv}) == 1 and class_of(gemv[0], p) != class_of(split(1), p)
    hopper = problem(1)
    assert {class_of(c, hopper) for c in CONFIGS if c.family == "decode_sm90"} == {None}
    assert {class_of(c, p) for c in CONFIGS if c.unfused} == {None}


def test_tokens_and_columns_are_in_no_class() -> None:
    """Two configurations of a family that differ in these alone have one class."""
    for weight in ("int4", "int4-64", "int8"):
        p = problem(1, weight=weight)
        seen: dict[object, set[object]] = {}
        for config in considered(p):
            if isinstance(config.rules, GemmSm90) and config.split_k == 1:
                seen.setdefault(config.rules.warpgroups_k(config), set()).add(class_of(config, p))
        assert all(len(classes) == 1 for classes in seen.values()) and len(seen) == 3


@pytest.mark.parametrize(("format", "group_size"), [("int4", 128), ("int4", -1), ("mxfp4", 32)])
def test_x_in_8_bits(format: str, group_size: int) -> None:
    p = Problem(1, 4096, 4096, format, group_size, 90, 132, FP8_LAYOUT, invariant=True)
    assert all(computes_class(select(replace(p, m=m)), p, invariant_class(p)) for m in SWEEP)
    experts = {class_of(c, p) for m in SWEEP if (c := select_grouped(replace(p, m=m), 16)) is not None}
    assert len(experts) == 1 and len(GROUPED_FP8_CONFIGS) > 1


@pytest.mark.parametrize("experts", [8, 128])
@pytest.mark.parametrize(("arch", "sms"), [(80, 108), (90, 132)])
@pytest.mark.parametrize("weight", ["int4", "int4-64", "int8", "mxfp4"])
def test_experts_have_one_class(weight: str, arch: int, sms: int, experts: int) -> None:
    p = problem(1, 2048, 1536, weight, arch, sms)
    expected = invariant_grouped_class(p, experts)
    assert expected is not None
    for m in SWEEP:
        config = select_grouped(replace(p, m=m), experts)
        assert config is not None and class_of(config, p) == expected
    second = problem(1, 768, 2048, weight, arch, sms)
    for m in SWEEP:
        choice = select_layer(replace(p, m=m), replace(second, m=m), experts, is_gated=True)
        assert (choice is None) == (arch < 90)
        if choice is not None:
            assert not choice.sorts
            assert class_of(choice.first, p) == expected
            assert class_of(choice.second, second) == invariant_grouped_class(second, experts)


def test_experts_without_a_class_are_one_product_each_for_any_number_of_rows() -> None:
    p = problem(1, arch=80, sms=108)
    assert invariant_grouped_class(p, 1000) is None, "more than there is room for"
    assert {select_grouped(replace(p, m=m), 1000) for m in (1, 64, 4096)} == {None}


def test_more_rows_than_the_class_computes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^m: expected at most \d+ in the batch-invariant mode, got 2147483647$"):
        select(problem(2**31 - 1))
    with pytest.raises(ValueError, match=r"^x: expected fewer rows of experts in the batch-invariant mode, got 2147"):
        select_grouped(problem(2**31 - 1, n=1 << 16), 8)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("nvfp4", "code4 in groups of 16.*: it has no such kernels"),
        ("int4-16", "int4.*: each class has .* some M alone"),
    ],
)
def test_a_weight_without_a_class_is_refused(kind: str, why: str) -> None:
    """No kernel of Turing has groups of 16 for every M but those that dequantize."""
    expected = r"^batch_invariant: expected a weight that kernels of sm75 compute in one order for every M, got "
    with pytest.raises(ValueError, match=expected + why):
        select(problem(16, weight=kind, arch=75, sms=40))


def test_a_weight_that_is_dequantized_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    w = wo.QuantizedWeight(
        wo.preprocess(torch.zeros(64, 64).to(torch.float8_e4m3fn), format="fp8", arch="sm90"), torch.ones(1, 64).half()
    )
    x = SimpleNamespace(device=SimpleNamespace(type="cuda"), numel=lambda: 64, get_device=lambda: 0)
    args: Any = SimpleNamespace(x=x, weight=w, config=None, invariant=True, check=lambda: None)
    monkeypatch.setattr(choose, "device_arch", lambda device: 90)
    monkeypatch.setattr(choose, "has_kernels", lambda *_: False)
    with pytest.raises(
        ValueError, match=r"^batch_invariant: expected a weight that kernels compute, got fp8 in groups"
    ):
        choose.make_plan(args)


def test_a_tuned_table_of_another_class_is_ignored() -> None:
    p = problem(16)
    plain = replace(p, invariant=False)
    other = next(c for c in candidates(plain) if not is_of_class(c, p))
    same = next(c for c in candidates(plain) if is_of_class(c, p) and c != select(p))
    for config, expected in ((other, select(p)), (same, same)):
        table = tuned.table(tuned.entry(plain, config))
        assert preferred(p, "f16", table) == expected
        assert preferred(plain, "f16", table) == config


def test_another_config_is_refused() -> None:
    p = problem(16)
    other = next(c for c in candidates(p) if not is_of_class(c, p))
    with pytest.raises(ValueError, match=r"^config: expected one of class .* in the batch-invariant mode, .*, got "):
        check_config(other, p, F16)
    check_config(other, replace(p, invariant=False), F16)
    check_config(select(p), p, F16)
    decode = next(c for c in GROUPED_CONFIGS if c.family == "grouped_decode_sm90" and "int4" in c.formats)
    with pytest.raises(
        ValueError, match=r"^config: expected one of class .* these experts .*, got grouped_decode_sm90"
    ):
        check_grouped_class(decode, p, 8)
    check_grouped_class(decode, replace(p, invariant=False), 8)
    chosen = select_grouped(p, 8)
    assert chosen is not None
    check_grouped_class(chosen, p, 8)
