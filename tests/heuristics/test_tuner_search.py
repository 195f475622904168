"""The tuner's search for the quickest configurations, with made-up times and clock."""

from __future__ import annotations

import math

import pytest
from tests.tuned_cases import BUILT, Bench, of_model, problem
from tqdm import tqdm

from weightonly.bench.tune import plausible, quickest, search
from weightonly.heuristics import candidates
from weightonly.heuristics.launches import estimate_us
from weightonly.heuristics.select import likely_pairs


def test_plausible_are_those_near_the_models_choice() -> None:
    p = problem(64)
    found = plausible(p, BUILT)
    assert found[0] == of_model(p) and len(found) == len(set(found)) > 3
    best_us = min(estimate_us(config, p) for config in found)
    estimates = [estimate_us(config, p) for config in found]
    assert estimates[1:] == sorted(estimates[1:]) and estimates[-1] <= 1.5 * best_us
    left_out = set(candidates(p)) - set(found)
    assert left_out and all(estimate_us(config, p) > 1.5 * best_us for config in left_out)
    without = {kernel for kernel in BUILT if not kernel.startswith("gemm_sm90_32x")}
    assert {config.kernel for config in plausible(p, without)[1:]} <= without


def test_pairs_of_launches_are_plausible_too() -> None:
    p = problem(512, 8192, 10240)
    pairs = [config for config in plausible(p, BUILT) if config.tail is not None]
    assert set(likely_pairs(p)) == set(pairs) != set()
    tails = {config.tail.kernel for config in pairs if config.tail is not None}
    assert all(config.tail is None for config in plausible(p, BUILT - tails)[1:])


def test_the_quickest_is_found_wherever_the_model_places_it() -> None:
    p = problem(64)
    configs = plausible(p, BUILT)
    for target in (configs[0], configs[1], configs[-1]):
        bench = Bench({target.name: 0.3})
        choice = quickest(p, configs, bench.open_weight(p.k, p.n), 1e6, bench.clock)
        assert choice.config == target and choice.model_config == configs[0]
        assert choice.us == pytest.approx(0.3 * estimate_us(target, p))
        expected_us = estimate_us(configs[0], p) * (0.3 if target == configs[0] else 1)
        assert choice.model_us == pytest.approx(expected_us)


def test_a_gain_within_the_noise_leaves_the_models_choice() -> None:
    p = problem(64)
    configs = plausible(p, BUILT)
    target = configs[1]
    even = estimate_us(configs[0], p) / estimate_us(target, p)
    for factor, config in ((0.995, configs[0]), (0.95, target)):
        bench = Bench({target.name: even * factor} | {c.name: 10.0 for c in configs[2:]})
        choice = quickest(p, configs[:2], bench.open_weight(p.k, p.n), 1e6, bench.clock)
        assert choice.config == config
        if config == configs[0]:
            assert choice.us == choice.model_us


def test_hopeless_configurations_are_given_up_early() -> None:
    p = problem(64)
    configs = plausible(p, BUILT)
    bench = Bench()
    quickest(p, configs, bench.open_weight(p.k, p.n), 1e6, bench.clock)
    assert bench.asked[0][2] == math.inf
    assert bench.asked[1][2] == pytest.approx(1.3 * estimate_us(configs[0], p))


def test_a_drifting_clock_favours_no_finalist() -> None:
    """The model's choice, the first of the round, would win by the drift alone; one 5% quicker is still found."""
    p = problem(64)
    configs = plausible(p, BUILT)
    target = configs[1]
    even = estimate_us(configs[0], p) / estimate_us(target, p)
    bench = Bench({target.name: 0.95 * even} | {c.name: 3.0 for c in configs[2:]}, drift=0.002)
    assert quickest(p, configs, bench.open_weight(p.k, p.n), 1e6, bench.clock).config == target


def test_the_time_is_kept() -> None:
    problems = {(k, n): [problem(m, k, n) for m in (1, 16, 256)] for k, n in ((4096, 4096), (4096, 6144))}
    configs = sum(len(plausible(p, BUILT)) for of_weight in problems.values() for p in of_weight)
    unbounded = Bench()
    list(search(problems, unbounded.open_weight, BUILT, 1e6, clock=unbounded.clock))
    assert unbounded.now >= configs
    bounded = Bench()
    found = list(search(problems, bounded.open_weight, BUILT, 120.0, clock=bounded.clock))
    assert bounded.now <= 120 + 6 * 4  # the last round of finalists of each may end late
    assert [len(choices) for choices in found] == [3, 3]
    hasty = Bench()
    list(search(problems, hasty.open_weight, BUILT, 1e-9, clock=hasty.clock))
    assert hasty.now == 6 * 2  # the model's choice alone, quickly and carefully
    assert {name for _, name, _ in hasty.asked} == {
        of_model(p).name for of_weight in problems.values() for p in of_weight
    }


def test_unused_time_is_for_later_problems() -> None:
    problems = {(4096, 4096): [problem(m) for m in (4096, 64)]}
    plenty = sum(len(plausible(p, BUILT)) for p in problems[4096, 4096]) + 20
    bench = Bench()
    list(search(problems, bench.open_weight, BUILT, 2.0 * plenty, clock=bench.clock))
    assert {name for m, name, _ in bench.asked if m == 64} == {c.name for c in plausible(problem(64), BUILT)}


def test_progress_counts_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    problems = {(4096, 4096): [problem(m) for m in (1, 16)], (4096, 6144): [problem(1, n=6144)]}
    bench = Bench()
    with tqdm(total=3, mininterval=0) as bar:
        list(search(problems, bench.open_weight, BUILT, 30.0, clock=bench.clock, bar=bar))
        assert bar.n == 3
    shown = capsys.readouterr().err
    assert "3/3" in shown and "4096x6144 m=1" in shown
    assert bench.opened == [(4096, 4096), (4096, 6144)]
