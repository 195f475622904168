"""Tuned tables: files, what `gemm` takes from them, and the search that fills them, with made-up times and clock."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

import weightonly as wo
from weightonly import __main__ as command
from weightonly import tuned
from weightonly.bench import config_timer, providers, timing
from weightonly.heuristics import KernelConfig, Problem, candidates, select
from weightonly.heuristics.configs import CONFIGS, TypeConfig
from weightonly.heuristics.cost import estimate_us
from weightonly.tuned import Entry, Origin, Table
from weightonly.tuner import as_frame, plausible, quickest, search, table_path

PLAN = sys.modules["weightonly.plan"]

H200 = Origin("0.1.0", "NVIDIA H200", 90, 132, "580.65.06")
BUILT = {config.kernel for config in CONFIGS}


def problem(m: int, k: int = 4096, n: int = 4096, format: str = "int4", group_size: int = 128) -> Problem:
    return Problem(m, n, k, format, group_size, H200.arch, H200.sm_count)


def of_model(p: Problem) -> KernelConfig:
    return select(p.m, p.n, p.k, p.format, p.group_size, p.arch, p.sm_count, p.layout, p.zeros)


def another(p: Problem) -> KernelConfig:
    """A legal configuration that the model does not pick."""
    return next(config for config in candidates(p) if config.kernel != of_model(p).kernel)


def entry(p: Problem, config: KernelConfig | None = None, dtype: str = "f16") -> Entry:
    config = config or another(p)
    names = config.name, 5.0, of_model(p).name, 6.0
    return Entry(p.m, p.n, p.k, p.format, p.group_size, p.zeros, p.layout, dtype, *names)


def table(*entries: Entry) -> Table:
    return Table(H200, entries, CONFIGS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a table of two problems."""
    file = tmp_path / "cache" / H200.file_name
    tuned.write(file, table(entry(problem(1)), entry(problem(16))))
    return file


# --- tables and files --------------------------------------------------------------------------------------


def test_a_file_gives_back_the_table(path: Path) -> None:
    assert path.name == "nvidia-h200-sm90-132.json"
    again = tuned.read(path, H200, CONFIGS)
    assert list(again) == [entry(problem(1)), entry(problem(16))]
    assert again.config(problem(16), "f16") == another(problem(16))
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing unfinished is left


def test_a_write_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        tuned.write(path, table())
    assert len(tuned.read(path, H200, CONFIGS)) == 2
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_later_of_two_entries_counts() -> None:
    first, second = [config for config in candidates(problem(16)) if config != of_model(problem(16))][:2]
    merged = table(entry(problem(16), first), entry(problem(1)), entry(problem(16), second))
    assert len(merged) == 2
    assert merged.config(problem(16), "f16") == second


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda record: "{", "it is damaged (Expecting"),
        (lambda record: "[]", "it is not a tuned table of this library"),
        (lambda record: json.dumps(record | {"schema": 2}), "it is not a tuned table of this library"),
        (lambda record: json.dumps(record | {"entries": None}), "it is damaged (no list of entries)"),
        (lambda record: json.dumps(record | {"origin": {"gpu": "x"}}), "it is damaged (expected library, gpu,"),
        (lambda record: _with(record, m="16"), "it is damaged (m: expected int, got '16')"),
        (lambda record: _with(record, zeros=0), "it is damaged (zeros: expected bool, got 0)"),
        (lambda record: _with(record, config="gemm_k1"), "config 'gemm_k1' is none of this installation"),
        (lambda record: _with(record, config="gemm"), "config 'gemm' is none of this installation"),
        (lambda record: _with(record, m=4000), "does not compute m=4000, k=4096, n=4096"),
        (lambda record: _with(record, m=0), "m must be at least 1, got 0"),
        (lambda record: _with(record, format="int3"), "format must be one of"),
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[Any], str], reason: str, path: Path) -> None:
    path.write_text(damage(json.loads(path.read_text())))
    message = f"^{re.escape(str(path))}: tuned table refused: .*{re.escape(reason)}.*; the cost model is used$"
    with pytest.warns(RuntimeWarning, match=message):
        assert tuned.read_or_warn(path, H200, CONFIGS, "the cost model is used") is None


def _with(record: Any, **fields: object) -> str:
    decode = next(config for config in candidates(problem(1)) if config.family == "decode_sm90")
    record["entries"][0] |= {"config": decode.name} | fields
    return json.dumps(record)


@pytest.mark.parametrize(
    "change",
    [{"library": "0.0.9"}, {"gpu": "NVIDIA H100"}, {"arch": 80}, {"sm_count": 114}, {"driver": "570.0"}],
    ids=lambda change: next(iter(change)),
)
def test_a_foreign_file_is_refused(change: dict[str, Any], path: Path) -> None:
    here = dataclasses.replace(H200, **change)
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"^it was made with {name} {getattr(H200, name)!r}, here it is {value!r}$"):
        tuned.read(path, here, CONFIGS)


def test_a_file_with_kernels_that_this_build_lacks_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="is none of this installation"):
        tuned.read(path, H200, [config for config in CONFIGS if config.family == "gemv"])


def test_no_file_is_no_reason_to_warn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert tuned.read_or_warn(tmp_path / "none.json", H200, CONFIGS, "") is None
    assert not recwarn.list


def test_where_tables_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEIGHTONLY_TUNED", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.folder() == tmp_path / "weightonly" / "tuned"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.folder() == tmp_path / ".cache" / "weightonly" / "tuned"
    monkeypatch.setenv("WEIGHTONLY_TUNED", str(tmp_path / "mine"))
    assert table_path(H200, None) == tmp_path / "mine" / H200.file_name
    assert table_path(H200, tmp_path) == tmp_path / H200.file_name
    monkeypatch.setenv("WEIGHTONLY_TUNED", "")
    assert tuned.folder() is None
    with pytest.raises(
        ValueError, match=r"^folder: expected one, as the environment variable WEIGHTONLY_TUNED is empty"
    ):
        table_path(H200, None)


# --- what gemm takes from a table --------------------------------------------------------------------------


def test_a_problem_that_was_not_tuned_is_the_models() -> None:
    of = table(entry(problem(16)))
    assert of.config(problem(16), "f16") is not None
    assert of.config(problem(16), "bf16") is None
    for other in (
        problem(16, k=8192),
        problem(16, n=8192),
        problem(16, group_size=64),
        problem(16, format="int8"),
        dataclasses.replace(problem(16), zeros=True),
        dataclasses.replace(problem(16), layout="interleaved"),
    ):
        assert of.config(other, "f16") is None


def test_a_group_of_all_of_k_is_per_channel() -> None:
    of = table(entry(problem(16, group_size=-1)))
    assert of.config(problem(16, group_size=4096), "f16") == another(problem(16, group_size=-1))


def test_between_two_measured_m_the_larger_counts() -> None:
    wide = next(config for config in candidates(problem(64)) if config.family == "gemm_sm90")
    of = table(entry(problem(16)), entry(problem(64), wide))
    assert [of.config(problem(m), "f16") for m in (33, 48, 63, 64)] == [wide] * 4
    # Twice as large or more is too far, and beyond the largest there is none.
    assert [of.config(problem(m), "f16") for m in (8, 17, 32, 65)] == [None] * 4
    assert of.config(problem(9), "f16") == another(problem(16))


def test_a_neighbour_that_is_not_legal_leaves_the_choice_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    of = table(entry(problem(16)))
    monkeypatch.setattr(tuned, "legal", lambda config, p: p.m == 16)
    assert of.config(problem(12), "f16") is None
    assert of.config(problem(16), "f16") is not None


def test_gemm_runs_the_tuned_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    types = TypeConfig("f16", "int4", "group")
    monkeypatch.setattr(PLAN, "runs_on", lambda config, arch: True)
    monkeypatch.setattr(PLAN, "is_compiled", lambda config, types: True)
    p, of = problem(16), table(entry(problem(16)))
    assert PLAN.choose(p, types, None, of) == another(p)
    assert PLAN.choose(p, types, None, None) == of_model(p) == PLAN.choose(p, types, None)
    assert PLAN.choose(problem(1000), types, None, of) == of_model(problem(1000))
    given = candidates(p)[-1]
    assert PLAN.choose(p, types, given, of) == given
    assert of_model(p) != another(p)  # and select itself knows nothing of it


def test_a_table_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "_tables", {})
    monkeypatch.setattr(Origin, "of", classmethod(lambda cls, device: H200))
    monkeypatch.setattr(tuned, "kernels", lambda device: list(CONFIGS))
    monkeypatch.setenv("WEIGHTONLY_TUNED", str(path.parent))
    first = tuned.table_of(0)
    assert first is not None and len(first) == 2
    path.unlink()
    assert tuned.table_of(0) is first
    assert tuned.table_of(1) is None  # of another device: no file now
    replaced = table()
    tuned.use(0, replaced)
    assert tuned.table_of(0) is replaced
    monkeypatch.setattr(tuned, "_tables", {})
    monkeypatch.setenv("WEIGHTONLY_TUNED", "")
    assert tuned.table_of(0) is None


# --- the search --------------------------------------------------------------------------------------------


class Bench:
    """Makes times up: the model's estimate times a factor per configuration. A measurement takes a second."""

    def __init__(self, factors: dict[str, float] | None = None, drift: float = 0.0) -> None:
        self.factors = factors or {}
        self.drift = drift  # by so much the clock of the GPU goes down with each measurement
        self.now = 0.0
        self.asked: list[tuple[int, str, float]] = []
        self.opened: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now

    def open_weight(self, k: int, n: int) -> Callable[..., float]:
        self.opened.append((k, n))

        def measure(m: int, config: KernelConfig, *, budget_ms: float, give_up_us: float) -> float:
            self.now += 1
            self.asked.append((m, config.name, give_up_us))
            of_codes = Problem(m, n, k, "nf4", 64, H200.arch, H200.sm_count)
            asked = problem(m, k, n) if "int4" in config.formats else of_codes
            us = estimate_us(config, asked) * self.factors.get(config.name, 1.0)
            return us * (1 + self.drift) ** len(self.asked)

        return measure


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


def test_the_frame_and_its_summary() -> None:
    p = problem(64)
    target = plausible(p, BUILT)[1]
    bench = Bench({target.name: 0.5})
    choice = quickest(p, plausible(p, BUILT), bench.open_weight(p.k, p.n), 1e6, bench.clock)
    frame = as_frame([choice])
    assert list(frame.columns) == ["k", "n", "m", "config", "us", "tuned_config", "tuned_us", "gain"]
    row = frame.iloc[0]
    assert (row["k"], row["n"], row["m"]) == (4096, 4096, 64)
    assert (row["config"], row["tuned_config"]) == (of_model(p).name, target.name)
    assert row["gain"] == pytest.approx(row["us"] / row["tuned_us"]) and row["gain"] > 1.5
    assert table(choice.entry("bf16")).config(p, "bf16") == target
    text = command.describe_gains([1.0, 1.21, 1.0])
    assert text == "1 of 3 choices changed; gain: geometric mean 1.066, largest 1.21"


def test_tune_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match=r"^device: expected a CUDA device, whose kernels are measured, got cpu$"):
        wo.tune("256x128", 1, device="cpu")
    assert command.main(["tune", "--device", "cpu"]) == 1
    assert "error: device: expected a CUDA device" in capsys.readouterr().err


def test_tune_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["weightonly.tuner"], "cuda_built", lambda: False)
    with pytest.raises(RuntimeError, match=r"^tune: expected compiled kernels to measure"):
        wo.tune("256x128", 1, device="cuda")


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An H200 as far as `tune` asks for one, whose times are made up. The clock is real."""
    bench = Bench()

    class Timer:
        def __init__(self, shape: tuple[int, int], max_m: int) -> None:
            self.measure = bench.open_weight(*shape)

        def __call__(self, m: int, config: KernelConfig, *, budget_ms: float, give_up_us: float) -> timing.Timing:
            return timing.Timing.of([self.measure(m, config, budget_ms=budget_ms, give_up_us=give_up_us)])

    module = sys.modules["weightonly.tuner"]
    monkeypatch.setattr(module, "cuda_built", lambda: True)
    monkeypatch.setattr(module, "kernels", lambda device: list(CONFIGS))
    monkeypatch.setattr(Origin, "of", classmethod(lambda cls, device: H200))
    monkeypatch.setattr(config_timer, "ConfigTimer", Timer)
    monkeypatch.setattr(providers.Weights, "random", lambda k, n, **options: (k, n))
    monkeypatch.setattr(tuned, "_tables", {})
    return bench


def test_tune_writes_merges_and_uses(pretended_gpu: Bench, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`path` has a table of M = 1 and 16 for the first shape already."""
    everywhere = [set(plausible(problem(m, n=n), BUILT)) for n in (4096, 6144) for m in (16, 64)]
    target = min(set.intersection(*everywhere), key=str)
    pretended_gpu.factors[target.name] = 0.2
    options: dict[str, Any] = {"device": "cuda:0", "folder": path.parent}
    frame = wo.tune([(4096, 4096), "4096x6144"], [16, 64], **options)
    assert "4/4" in capsys.readouterr().err
    assert list(frame[["k", "n", "m"]].itertuples(index=False, name=None)) == [
        (4096, n, m) for n in (4096, 6144) for m in (16, 64)
    ]
    assert set(frame["tuned_config"]) == {target.name}
    of = tuned.read(path, H200, CONFIGS)
    assert len(of) == 5 and of.config(problem(1), "f16") == another(problem(1))
    assert of.config(problem(16), "f16") == of.config(problem(64, n=6144), "f16") == target
    used = tuned.table_of(0)
    assert used is not None and list(used) == list(of)
    wo.tune("4096x4096", 64, dtype=torch.bfloat16, zeros=True, progress=False, **options)
    assert len(tuned.read(path, H200, CONFIGS)) == 6


def test_tune_replaces_a_damaged_table(pretended_gpu: Bench, path: Path) -> None:
    path.write_text("")
    with pytest.warns(RuntimeWarning, match="tuned table refused: it is damaged .*; it is replaced$"):
        wo.tune("4096x4096", 64, device="cuda:0", folder=path.parent, progress=False)
    assert [e.m for e in tuned.read(path, H200, CONFIGS)] == [64]


def test_tune_of_codes(pretended_gpu: Bench, path: Path) -> None:
    wo.tune("4096x4096", 64, format="nf4", group_size=64, device="cuda:0", folder=path.parent, progress=False)
    p = Problem(64, 4096, 4096, "nf4", 64, H200.arch, H200.sm_count)
    assert tuned.read(path, H200, CONFIGS).config(p, "f16") is not None


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("seconds", {"seconds": 0}),
        ("shapes", {"shapes": "llama9"}),
        ("batch", {"batch": [0]}),
        ("bits", {"bits": 3}),
        ("group_size", {"group_size": 100}),
        ("zeros", {"format": "nf4", "zeros": True}),
        ("dtype", {"dtype": torch.float32}),
        ("folder", {"folder": None}),
    ],
)
def test_tune_refuses(argument: str, options: dict[str, Any], pretended_gpu: Bench, path: Path) -> None:
    arguments: dict[str, Any] = {"shapes": "4096x4096", "batch": 1, "device": "cuda:0", "folder": path.parent}
    with pytest.raises(ValueError, match=rf"^{argument}(:| must be) "):
        wo.tune(**(arguments | options))
    assert not pretended_gpu.asked


def test_command_prints_choices_and_the_file(
    pretended_gpu: Bench, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"tune --shapes 4096x4096 --batch 16,64 --device cuda:0 --quiet --folder {path.parent}"
    assert command.main(arguments.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["k", "n", "m", "config", "us", "tuned_config", "tuned_us", "gain"]
    assert lines[-2] == "0 of 2 choices changed; gain: geometric mean 1.000, largest 1.00"
    assert lines[-1] == f"gemm uses it from now on: {path}"


# --- on a GPU ----------------------------------------------------------------------------------------------

SHAPE = (1024, 512)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder for tables, and a process that has read none; afterwards as before."""
    monkeypatch.setenv("WEIGHTONLY_TUNED", str(tmp_path))
    monkeypatch.setattr(tuned, "_tables", {})
    return tmp_path


def run_gemm(m: int) -> str:
    """Multiplies by a new weight, checks the product, and returns the name of the configuration that `gemm` picked."""
    k, n = SHAPE
    qweight = wo.preprocess(torch.randint(-8, 8, (k, n), dtype=torch.int8).cuda(), bits=4)
    scales = torch.rand(k // 128, n, device="cuda").half() * 0.01
    x = torch.randn(m, k, device="cuda").half()
    y = wo.gemm(x, qweight, scales)
    expected = x.double() @ wo.dequantize(qweight, scales).double()
    assert (y.double() - expected).norm() < 2e-3 * expected.norm()
    (plan,) = qweight._plans.values()
    return str(plan.config.name)


@pytest.mark.gpu
def test_tune_and_run(cuda_device: torch.device, fresh: Path) -> None:
    started = time.perf_counter()
    frame = wo.tune([SHAPE], [1, 16, 64], seconds=6, device=cuda_device, progress=False)
    assert time.perf_counter() - started < 20
    assert list(frame["m"]) == [1, 16, 64] and (frame["gain"] >= 1).all()
    origin = Origin.of(torch.cuda.current_device())
    for row in frame.to_dict("records"):
        assert row["config"] == select(row["m"], 512, 1024, "int4", 128, origin.arch, origin.sm_count).name
        assert run_gemm(row["m"]) == row["tuned_config"]
    (file,) = fresh.iterdir()
    assert len(json.loads(file.read_text())["entries"]) == 3


@pytest.mark.gpu
def test_a_table_reaches_gemm_in_a_new_process_and_merges(
    cuda_device: torch.device, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = torch.cuda.current_device()
    origin, built = Origin.of(index), wo.kernels(index)
    p = Problem(16, 512, 1024, "int4", 128, origin.arch, origin.sm_count)
    kernels = {config.kernel for config in built}
    other = next(c for c in candidates(p) if c.kernel in kernels and c != of_model(p))
    file = fresh / origin.file_name
    tuned.write(file, Table(origin, [entry(p, other)], built))
    assert run_gemm(16) == other.name
    wo.tune([SHAPE], 1, seconds=2, progress=False)
    assert {e.m: e.config for e in tuned.read(file, origin, built)}[16] == other.name
    assert run_gemm(16) == other.name
    file.write_text("{")
    monkeypatch.setattr(tuned, "_tables", {})
    with pytest.warns(RuntimeWarning, match="tuned table refused: it is damaged"):
        assert run_gemm(16) == of_model(p).name
    assert run_gemm(1) == of_model(dataclasses.replace(p, m=1)).name
