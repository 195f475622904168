"""The fit of the Hopper kernels' constants, on times made up by a model with other constants and noise."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests import ROOT

from tools.fit import __main__ as command
from tools.fit import grouped, unfused, waves, write
from tools.fit.choices import Choices
from tools.fit.clusters import (
    Model,
    as_constants,
    fit,
    from_file,
    is_looked_at,
    least_error,
    prepare,
    without_one_shape,
)
from tools.regret import regret
from tools.regret_experts import CELL, problem_of, with_layouts
from weightonly.heuristics import KernelConfig, Problem, candidates, h200
from weightonly.heuristics.configs import CONFIGS, GROUPED_CONFIGS, GROUPED_FP8_CONFIGS
from weightonly.heuristics.constants import (
    DecodeSm90Constants,
    GemmSm90Constants,
    GroupedTimes,
    TileTimes,
    UnfusedConstants,
)
from weightonly.heuristics.cost import total_us
from weightonly.heuristics.families.clusters import ClusterFamily
from weightonly.heuristics.families.dequantize_cublas import MIN_M, unfused_work
from weightonly.heuristics.families.hopper_grouped import expected_tiles, grouped_us
from weightonly.heuristics.h200 import DECODE_SM90, GEMM_SM90
from weightonly.heuristics.launches import estimate_us

MEASUREMENTS = ROOT / "bench" / "measurements"
SHAPES = [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192)]
BATCH = [1, 4, 8, 9, 16, 17, 32, 64, 128, 512]


def true_costs() -> tuple[Any, Any]:
    """Another GPU's: each constant off by up to a fifth or so, a kernel by more than its neighbour."""
    generator = np.random.default_rng(1)

    def moved(value: float, spread: float) -> float:
        return float(value * np.exp(generator.uniform(-spread, spread)))

    made = []
    costs: tuple[Any, Any] = (DECODE_SM90, GEMM_SM90)
    for cost in costs:
        names = [f.name for f in dataclasses.fields(cost) if f.name not in ("fitted_to", "kernels", "tb_s")]
        shared = {name: moved(getattr(cost, name), 0.2) for name in names}
        times = {key: TileTimes(moved(t.k_tile_us, 0.25), moved(t.end_us, 0.25)) for key, t in cost.kernels.items()}
        made.append(dataclasses.replace(cost, **shared, kernels=times))
    return made[0], made[1]


DECODE, GEMM = true_costs()


DENSE_CONFIG = next(c for c in CONFIGS if c.family == "dequantize_cublas_sm90")
DENSE_TRUE = UnfusedConstants("", slice_us=5.0, dequantize_bandwidth=0.7, sm_tflop_s=5.4, unhidden_y=1.6)


def us_by(config: KernelConfig, problem: Problem, decode: Any, gemm: Any, of_cublas: UnfusedConstants) -> float:
    family = config.rules
    if not isinstance(family, ClusterFamily):
        return float(total_us(unfused_work(unfused.counts_of(config, problem), 90, of_cublas)))
    constants = decode if isinstance(decode, type(family.constants)) else gemm
    times = constants.kernels[config.kernel, problem.format]
    return float(total_us(family.counted_work(family.counts(config, problem), constants, times)))


def true_us(config: KernelConfig, problem: Problem) -> float:
    return us_by(config, problem, DECODE, GEMM, DENSE_TRUE)


def with_own_times(p: Problem) -> list[KernelConfig]:
    """The candidates that are measured and fitted themselves."""
    return [c for c in candidates(p) if c.measured.kernel == c.kernel]


def measurements(format: str = "int4", noise: float = 0.02, seed: int = 0) -> pd.DataFrame:
    """As `tools.regret --layout tiled --csv` has them."""
    generator = np.random.default_rng(seed)
    rows = []
    for k, n in SHAPES:
        for m in BATCH:
            p = Problem(m, n, k, format, 128, 90, 132, "tiled", False)
            cell = {name: getattr(p, name) for name in ("k", "n", "m", "format", "group_size", "arch", "sm_count")}
            for config in with_own_times(p):
                us = true_us(config, p) * np.exp(generator.normal(0, noise))
                rows.append(
                    {
                        **cell,
                        "layout": p.layout,
                        "zeros": p.zeros,
                        "config": config.name,
                        "family": config.family,
                        "us": us,
                    }
                )
    frame = pd.DataFrame(rows)
    best_us = frame.groupby(["k", "n", "m"]).us.transform("min")
    return frame.assign(coarse=frame.us > 2.5 * best_us)


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return measurements()


def cheapest_by(cost: Callable[[KernelConfig, Problem], float]) -> Callable[[Problem], str]:
    return lambda p: min((c for c in with_own_times(p) if is_looked_at(c)), key=lambda c: cost(c, p)).name


def both(model: Model) -> tuple[DecodeSm90Constants, GemmSm90Constants]:
    decode, gemm = as_constants(model).values()
    assert isinstance(decode, DecodeSm90Constants) and isinstance(gemm, GemmSm90Constants)
    return decode, gemm


def test_choices() -> None:
    cell, measured = np.array([7, 3, 7, 3, 3]), np.array([10.0, 4.0, 11.0, 6.0, 5.0])
    choices = Choices(cell, measured, np.array([10.0, 4.0, 10.0, 4.0, 4.0]))
    assert choices.cells.tolist() == [3, 7]
    assert choices.regret(np.array([2.0, 1.0, 1.0, 9.0, 9.0])).tolist() == pytest.approx([0, 0.1])
    assert choices.regret(np.array([1.0, 1.0, 2.0, 9.0, 1.0])).tolist() == pytest.approx([0.25, 0]), "a tie"
    close = np.array([1.0, 1.0, 1.004, 1.006, 1.0])
    assert choices.regret(close, tie=0.005).tolist() == pytest.approx([0.25, 0.1]), "and what is as good as one"


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_the_fit_computes_what_the_model_does(format: str) -> None:
    configs = {c.name: c for c in (k.with_split_k(s) for k in CONFIGS for s in range(1, 9))}
    frame = prepare(measurements(format))
    for rows, constants in zip((model := from_file(frame)).rows, model.constants, strict=True):
        own = frame[frame.family == rows.family].sort_values(["kernel", "format"], kind="stable")
        expected = [
            estimate_us(configs[r.config], Problem(r.m, r.n, r.k, r.format, r.group_size, r.arch, r.sm_count, r.layout))
            for r in own.itertuples()
        ]
        assert rows.predict(constants) == pytest.approx(np.array(expected))
        for i, part in enumerate(rows.parts):
            assert rows.predict(constants, i) == pytest.approx(np.array(expected[part]))


def test_least_squares_recovers_the_times(measured: pd.DataFrame) -> None:
    decode, gemm = both(least_error(prepare(measured)))
    configs = {c.name: c for c in (k.with_split_k(s) for k in CONFIGS for s in range(1, 9))}
    errors = []
    for row in measured[~measured.coarse].itertuples():
        p = Problem(row.m, row.n, row.k, row.format, row.group_size, row.arch, row.sm_count, row.layout)
        config = configs[row.config]
        us = us_by(config, p, decode, gemm, DENSE_TRUE)
        errors.append(np.log(us / true_us(config, p)))
    assert np.sqrt(np.mean(np.square(errors))) < 0.03


def test_the_fit_recovers_the_choices(measured: pd.DataFrame) -> None:
    """Judged by times without the noise that it was fitted to."""
    decode, gemm = both(fit(prepare(measured), moves=1500))

    def fitted_us(config: KernelConfig, p: Problem) -> float:
        return us_by(config, p, decode, gemm, DENSE_TRUE)

    exact = measurements(noise=0)
    configs = {c.name: c for c in (k.with_split_k(s) for k in CONFIGS for s in range(1, 9))}
    exact = exact[[is_looked_at(configs[name]) for name in exact.config]]
    before, after = (regret(exact, cheapest_by(cost)) for cost in (estimate_us, fitted_us))
    assert after.mean < 0.01 and after.worst < 0.08
    assert after.mean < before.mean / 4
    assert regret(exact, cheapest_by(true_us)).worst == 0


def test_the_fit_is_deterministic_and_generalizes(measured: pd.DataFrame) -> None:
    frame = prepare(measured[(measured.k != 14336) & (measured.m != 512)])
    assert as_constants(fit(frame, 100)) == as_constants(fit(frame, 100))
    left_out = without_one_shape(frame, 100)
    assert sorted(left_out.index) == sorted(frame.cell.unique())
    assert left_out.mean() < 0.04


def test_the_dense_constants_are_recovered() -> None:
    """From few problems, of which those with less than MIN_M rows do not count."""
    rows = []
    for m in (64, 512, 1024, 4096, 16384):
        for k, n in (*SHAPES, (28672, 8192)):
            p = Problem(m, n, k, "int4", 128, 90, 132, "tiled", False)
            us = us_by(DENSE_CONFIG, p, DECODE, GEMM, DENSE_TRUE) * (1 if m >= MIN_M else 3)
            cell = {
                f: getattr(p, f) for f in ("m", "n", "k", "format", "group_size", "arch", "sm_count", "layout", "zeros")
            }
            rows.append({**cell, "config": DENSE_CONFIG.name, "family": DENSE_CONFIG.family, "us": us})
    frame = pd.DataFrame(rows)
    usable = unfused.usable(frame)
    assert usable.sum() == 20
    fitted, expected = (dataclasses.astuple(cost) for cost in (unfused.fit(frame[usable]), DENSE_TRUE))
    assert fitted[0] == "20 times"
    assert fitted[1:] == pytest.approx(expected[1:], rel=0.05)


def test_the_grouped_constants_are_recovered() -> None:
    """From the cells that were measured, with the times of other constants; kernels without rows stay as they are."""
    frame = with_layouts(pd.read_csv(MEASUREMENTS / "h200_grouped.csv.xz"))
    assert (
        grouped.usable(frame).all() and not grouped.usable(frame.assign(config="gemm_sm90_16x128x256_w16x64_s7")).any()
    )
    true = {
        ("grouped_decode_sm90_8x64x512_w8x64_s2", "int4"): GroupedTimes(3.0, 1.1, 0.4, 0.1),
        ("grouped_sm90_64x256x128_w64x64_s4", "code4"): GroupedTimes(5.0, 3.0, 1.5, 0.002),
    }
    configs = {c.kernel: c for c in GROUPED_CONFIGS}
    formats = frame.format.where(frame.format != "mxfp4", "code4")
    frame = frame[[key in true for key in zip(frame.config, formats, strict=True)]]
    us = []
    for _, row in frame.iterrows():
        config, cell = configs[row.config], row[CELL].to_dict()
        times = true[row.config, "int4" if row.format == "int4" else "code4"]
        us.append(grouped_us(config, problem_of(cell)[0], grouped.tiles_of(cell, config.block_m), times))
    found = grouped.fit(frame.assign(us=us), h200.GROUPED)
    assert found.fitted_to == f"{len(frame)} times" and len(frame) >= 80
    for key, times in found.kernels.items():
        if key not in true:
            assert times == h200.GROUPED.kernels[key]
        else:
            assert times[:3] == pytest.approx(true[key][:3], rel=0.1), key
            assert times.row == pytest.approx(true[key].row, abs=0.03), key


def test_grouped_constants_are_moved_to_where_choices_cost_less() -> None:
    """From constants by which tiles of 32 rows seem a third quicker; the same each time; kernels without rows stay."""
    frame = pd.read_csv(MEASUREMENTS / "h200_grouped_fp8.csv.xz")
    frame = frame[(frame.format == "int4") & (frame.model == "mixtral-8x7b")]
    configs, keys = {c.kernel: c for c in GROUPED_FP8_CONFIGS}, {(name, "int4") for name in frame.config}
    wrong = ("grouped_sm90_fp8_32x256x128_w32x64_s7", "int4")
    quick = {wrong: h200.GROUPED.kernels[wrong]._replace(k_us=2.0)}
    fitted = dataclasses.replace(h200.GROUPED, fitted_to="180 times", kernels=h200.GROUPED.kernels | quick)

    def regret(kernels: Mapping[tuple[str, str], GroupedTimes]) -> float:
        found = []
        for _, rows in frame.groupby(CELL):
            problem, experts = problem_of(rows.iloc[0][CELL].to_dict())
            us = []
            for name in rows.config:
                tiles = expected_tiles(configs[name], problem, experts)
                us.append(grouped_us(configs[name], problem, tiles, kernels[name, "int4"]))
            found.append(rows.us.iloc[int(np.argmin(us))] / rows.us.min() - 1)
        return float(np.mean(found))

    moved = grouped.polish(frame, fitted)
    assert moved.fitted_to == "180 times, then moved so that choices cost least"
    assert regret(moved.kernels) < 0.5 * regret(fitted.kernels)
    assert {key for key, times in moved.kernels.items() if times != fitted.kernels[key]} <= keys
    assert moved == grouped.polish(frame, fitted)


def test_the_file_that_stands_is_what_would_be_written() -> None:
    constants = write.Constants(**{name: getattr(h200, name.upper()) for name in write.Constants._fields})
    assert write.source(constants) == Path(h200.__file__).read_text()


def test_kernels_measured_by_themselves_leave_the_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of decode_sm80, on times of kernels twice as slow: their constants move, all others stay."""
    true = {
        key: times._replace(k_tile_us=2 * times.k_tile_us, latency_us=2 * times.latency_us)
        for key, times in h200.WAVES.kernels.items()
        if key[0].startswith("decode_sm80")
    }
    rows = []
    with monkeypatch.context() as patch:
        patch.setitem(vars(h200.WAVES), "kernels", h200.WAVES.kernels | true)
        for k, n in SHAPES:
            for m in (1, 4, 8):
                p = Problem(m, n, k, "nf4", 64, 90, 132, "interleaved")
                cell = {f: getattr(p, f) for f in ("m", "n", "k", "format", "group_size", "arch", "sm_count")}
                for config in candidates(p):
                    if config.family == "decode_sm80":
                        times_us = {"split_k": config.split_k, "us": estimate_us(config, p), "coarse": False}
                        rows.append({**cell, "config": config.name, "family": config.family, **times_us})
    for kernel, _ in true:
        used = f"{kernel}12F16Code4Group\nUsed 60 registers\n{kernel}13Bf16Code4Group\nUsed 72 registers\n"
        (tmp_path / f"{kernel}.cu.o.log").write_text(used)
    monkeypatch.setattr(waves, "polish", lambda rows, kernels, shared: None)
    fitted = waves.run(pd.DataFrame(rows), tmp_path, h200.WAVES)
    assert all(fitted.kernels[key] == times for key, times in h200.WAVES.kernels.items() if key not in true)
    assert all(fitted.kernels[key].registers == 72 for key in true)
    configs = {c.with_split_k(s).name: c.with_split_k(s) for c in CONFIGS for s in range(1, 8)}
    monkeypatch.setitem(vars(h200.WAVES), "kernels", fitted.kernels)
    sizes = ("m", "n", "k", "format", "group_size", "arch", "sm_count")
    problems = [Problem(**{f: row[f] for f in sizes}, layout="interleaved") for row in rows]
    errors = [np.log(estimate_us(configs[row["config"]], p) / row["us"]) for row, p in zip(rows, problems, strict=True)]
    assert np.median(np.abs(errors)) < 0.03
    assert (fitted.launch_us, fitted.reduce_tb_s) == (h200.WAVES.launch_us, h200.WAVES.reduce_tb_s)
    assert fitted.fitted_to.endswith("code4 by itself")


def test_the_fit_of_waves_computes_what_the_model_does() -> None:
    rows, kernels = [], set()
    for m, k, n in ((1, 4096, 4096), (40, 14336, 6144), (700, 8192, 8192)):
        p = Problem(m, n, k, "int4", 128, 90, 132, "interleaved")
        for config in candidates(p):
            if config.unfused:
                continue
            cell = {f: getattr(p, f) for f in ("m", "n", "k", "format", "group_size", "arch", "sm_count")}
            us = estimate_us(config, p)
            kernels.add((config.kernel, "int4"))
            rows.append(
                {
                    **cell,
                    "config": config.name,
                    "family": config.family,
                    "split_k": config.split_k,
                    "us": us,
                    "coarse": False,
                }
            )
    frame = pd.DataFrame(rows)
    assert waves.usable(frame).all()
    registers = {key: times.registers for key, times in h200.WAVES.kernels.items()}
    shared = np.log([h200.WAVES.launch_us, h200.WAVES.reduce_launch_us, h200.WAVES.reduce_tb_s])
    collected = waves.collect(frame, registers)
    assert collected.keys() == kernels
    for key, part in collected.items():
        assert part.predict(np.log(h200.WAVES.kernels[key][1:]), shared) == pytest.approx(part.us)


def test_the_command(
    measured: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """int4 alone, in two files, of which one repeats times of the other: int8 keeps its constants."""
    measured.to_csv(tmp_path / "a.csv", index=False)
    measured.head(500).to_csv(tmp_path / "b.csv", index=False)
    out = tmp_path / "h200.py"
    command.main([str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--out", str(out), "--moves", "100"])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[1].split() == [
        *("M", "cells", "not", "looked", "at", "before", "least", "squares", "in", "sample", "shape", "left", "out")
    ]
    assert [line.split()[:2] for line in lines[2:]] == [[str(m), "4"] for m in BATCH] + [["all", "40"]]
    assert "int8" in printed.err and "int4" not in printed.err
    written = runpy.run_path(str(out), run_name="weightonly.heuristics.h200")
    assert written["UNFUSED"].sm_tflop_s == pytest.approx(DENSE_TRUE.sm_tflop_s, rel=0.1)
    assert written["WAVES"] == h200.WAVES
    for name, cost in (("DECODE_SM90", DECODE_SM90), ("GEMM_SM90", GEMM_SM90)):
        kernels = {key: tuple(times) for key, times in written[name].kernels.items()}
        assert kernels.keys() == cost.kernels.keys()
        assert all(kernels[key] == times for key, times in cost.kernels.items() if key[1] == "int8")
        assert all(kernels[key] != times for key, times in cost.kernels.items() if key[1] == "int4")


def test_other_families_need_the_logs(measured: pd.DataFrame, tmp_path: Path) -> None:
    measured.head(3).assign(family="gemm_sm80").to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(SystemExit):
        command.main([str(tmp_path / "a.csv")])
