"""`tune`: measures the plausible configurations on the GPU; the quickest go into a tuned table (plan/tuned.py)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pandas as pd
import torch
from tqdm import tqdm

from weightonly.heuristics import KernelConfig, Problem, candidates, select
from weightonly.heuristics.launches import estimate_us, is_calibrated
from weightonly.heuristics.select import likely_pairs
from weightonly.kernels import cuda_built, kernels
from weightonly.packing import format_of
from weightonly.plan import tuned
from weightonly.plan.choose import DTYPE_NAMES
from weightonly.plan.tuned import Entry, Origin, Table

from . import command
from .config_timer import ConfigTimer
from .devices import require_gpu
from .shapes import resolve
from .sweep import check_arguments
from .weights import Weights

BATCH = tuple(2**i for i in range(14))  # 1 ... 8192
SECONDS = 100.0

_PLAUSIBLE = 1.5  # estimates of the cost model, in units of its smallest
_HOPELESS = 1.3  # after one quick measurement, in units of the best so far: not measured further
_FINALISTS = 3  # are measured again, beside the model's choice
_QUICK_MS, _CAREFUL_MS = 2.0, 10.0  # device time of a measurement
_ROUNDS = 2  # of the finalists, in turn
_SCREENING = 0.7  # part of a problem's time, after which no further configuration is looked at
_LEAST_GAIN = 1.01  # anything less may be noise: the model's choice stays


class Measure(Protocol):
    """Times a configuration of one weight."""

    def __call__(self, m: int, config: KernelConfig, *, budget_ms: float, give_up_us: float) -> float:
        """us per call with m rows. A first quick measurement above `give_up_us` may be returned as it is."""


@dataclass(frozen=True)
class Choice:
    """What was the quickest for a problem. us per call."""

    problem: Problem
    config: KernelConfig
    us: float
    model_config: KernelConfig
    model_us: float

    def entry(self, dtype: str) -> Entry:
        p = self.problem
        return Entry(
            m=p.m,
            n=p.n,
            k=p.k,
            format=p.format,
            group_size=p.group_size,
            zeros=p.zeros,
            layout=p.layout,
            dtype=dtype,
            config=self.config.name,
            us=self.us,
            model_config=self.model_config.name,
            model_us=self.model_us,
        )


def tune(
    shapes: str | Iterable[str | tuple[int, int]] = "llama3-8b",
    batch: int | Iterable[int] = BATCH,
    *,
    bits: int = 4,
    format: str | None = None,
    group_size: int = 128,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str | None = None,
    seconds: float = SECONDS,
    folder: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Find the quickest configuration for each weight shape and batch size, for `gemm` to run from then on.

    Measured are the configurations that the cost model holds for at most 1.5 times as slow as its choice, as
    `weightonly.bench` measures (CUDA graphs, weights rotated beyond L2), then the best of them and the model's choice
    once more. What is not faster by 1% leaves the model's choice. The table is merged into the one that is there.
    `gemm` follows it from its next call on; CUDA graphs keep the kernels that they captured.

    Args:
        shapes: (K, N) pairs, "KxN", or names of `weightonly.bench.NAMED` such as "llama3-8b".
        batch: rows of x, M; for those between them see plan/tuned.py.
        bits: 4 or 8.
        format: None for integers, or "nf4", "fp4". As for `preprocess`; its layout is tuned.
        group_size: rows of w per scale; -1: per channel.
        symmetric: without zero points.
        dtype: of x, torch.float16 or torch.bfloat16.
        device: a CUDA device; default: the current one.
        seconds: about how long all of it may take.
        folder: where the table goes, default `plan.tuned.folder()`. Other processes look there, or in the folder that
            the environment variable WEIGHTONLY_TUNED names.
        progress: whether to show a bar.

    Returns:
        A row per (k, n, m): `config` and `us` of the model's choice, `tuned_config`, `tuned_us`, and `gain`, the first
        time over the second.

    Raises:
        RuntimeError: no GPU, or no kernels.
        ValueError: naming an argument that does not fit.

    Examples:
        >>> frame = wo.bench.tune("512x768", 1, seconds=2, folder="tuned")  # doctest: +NEEDS_GPU
    """
    where = require_gpu("tune", device)
    if not cuda_built():
        raise RuntimeError("tune: expected compiled kernels to measure, but this installation was built without them")
    if not seconds > 0:
        raise ValueError(f"seconds: expected a positive number, got {seconds}")
    pairs, name = resolve(shapes), format_of(bits, format)
    sizes = check_arguments(pairs, batch, name, group_size, symmetric, dtype, _CAREFUL_MS)
    index = torch.cuda.current_device() if where.index is None else where.index
    where = torch.device("cuda", index)
    origin, built = Origin.of(index), kernels(index)
    path = table_path(origin, folder)
    problems = {
        (k, n): [Problem(m, n, k, name, group_size, origin.arch, origin.sm_count, zeros=not symmetric) for m in sizes]
        for k, n in pairs
    }

    def open_weight(k: int, n: int) -> Measure:
        weights = Weights.random(
            k, n, bits=bits, format=name, group_size=group_size, symmetric=symmetric, dtype=dtype, device=where
        )
        timer = ConfigTimer(weights, max(sizes))
        return lambda m, config, *, budget_ms, give_up_us: (
            timer(m, config, budget_ms=budget_ms, give_up_us=give_up_us).us
        )

    table = tuned.read_or_warn(path, origin, built, "it is replaced") or Table(origin, (), built)
    choices: list[Choice] = []
    with tqdm(total=len(pairs) * len(sizes), disable=not progress, unit="problem", desc="tune") as bar:
        for found in search(problems, open_weight, {config.kernel for config in built}, seconds, bar=bar):
            choices += found
            # After each weight, so that an interrupted run keeps what it has.
            table = Table(origin, [*table, *(choice.entry(DTYPE_NAMES[dtype]) for choice in found)], built)
            tuned.write(path, table)
            tuned.use(index, table)
    return as_frame(choices)


def table_path(origin: Origin, folder: str | Path | None) -> Path:
    """The file of a table. Raises ValueError where no folder is given and the environment says that there is none."""
    where = tuned.folder() if folder is None else Path(folder)
    if where is None:
        raise ValueError(f"folder: expected one, as the environment variable {tuned.VARIABLE} is empty, got None")
    return where / origin.file_name


def as_frame(choices: Sequence[Choice]) -> pd.DataFrame:
    """What `tune` returns."""
    return pd.DataFrame(
        {
            "k": choice.problem.k,
            "n": choice.problem.n,
            "m": choice.problem.m,
            "config": choice.model_config.name,
            "us": choice.model_us,
            "tuned_config": choice.config.name,
            "tuned_us": choice.us,
            "gain": choice.model_us / choice.us,
        }
        for choice in choices
    )


def search(
    problems: dict[tuple[int, int], list[Problem]],
    open_weight: Callable[[int, int], Measure],
    built: Set[str],
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    bar: tqdm | None = None,
) -> Iterator[list[Choice]]:
    """The choices for the problems of each weight, one weight after the other.

    problems: of (k, n). open_weight(k, n): what measures its configurations. built: names of the kernels that run here.
    A problem gets an equal share of what is left of `seconds` on `clock`; what it does not use is for those after it.
    """
    end = clock() + seconds
    left = sum(map(len, problems.values()))
    for (k, n), of_weight in problems.items():
        measure = open_weight(k, n)
        found = []
        for problem in of_weight:
            if bar is not None:
                bar.set_postfix_str(f"{k}x{n} m={problem.m}")
            share = max(0.0, end - clock()) / left
            found.append(quickest(problem, plausible(problem, built), measure, share, clock))
            left -= 1
            if bar is not None:
                bar.update()
        del measure  # the weight's memory, before the next one
        yield found


def plausible(problem: Problem, built: Set[str]) -> list[KernelConfig]:
    """The model's choice, then the other configurations that it holds for nearly as quick, by its estimates."""
    model = select(problem)
    estimates = {
        config: estimate_us(config, problem)
        for config in (*candidates(problem), *likely_pairs(problem))
        if config.kernels() <= built and is_calibrated(config, problem.format)
    }
    limit_us = _PLAUSIBLE * min(estimates.values(), default=math.inf)
    others = [config for config, us in estimates.items() if us <= limit_us and config != model]
    return [model, *sorted(others, key=estimates.__getitem__)]


def quickest(
    problem: Problem,
    configs: Sequence[KernelConfig],
    measure: Measure,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """The quickest of `configs`, the first of which is the model's choice and is measured whatever the time.

    All are looked at quickly, for a part of `seconds`; then the best of them and the model's choice in turn, so that a
    clock that drifts favours none.
    """
    start, model = clock(), configs[0]
    screened: dict[KernelConfig, float] = {}
    for config in configs:
        if screened and clock() - start > _SCREENING * seconds:
            break
        give_up_us = _HOPELESS * min(screened.values(), default=math.inf)
        screened[config] = measure(problem.m, config, budget_ms=_QUICK_MS, give_up_us=give_up_us)
    finalists = [model, *(c for c in sorted(screened, key=screened.__getitem__)[:_FINALISTS] if c != model)]
    times = dict.fromkeys(finalists, math.inf)
    for number in range(_ROUNDS):
        if number and clock() - start > seconds:
            break
        for config in finalists:
            us = measure(problem.m, config, budget_ms=_CAREFUL_MS, give_up_us=math.inf)
            times[config] = min(times[config], us)
    best = min(times, key=times.__getitem__)
    if times[model] < _LEAST_GAIN * times[best]:
        best = model
    return Choice(problem, best, times[best], model, times[model])


def _add_options(parser: command.Parser) -> None:
    command.add_shapes(parser, "llama3-8b")
    command.add_batch(parser, BATCH)
    command.add_weights(parser)
    command.add_run(parser, budget=False)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"about how long (default {SECONDS})")
    parser.add_argument("--folder", help=f"where the table goes (default: ${tuned.VARIABLE}, else the user's cache)")


def _run(options: command.Options) -> int:
    frame = tune(**command.keywords(options, tune))
    print(frame.to_string(index=False, float_format="{:.2f}".format))
    device = require_gpu("tune", options.device)
    index = torch.cuda.current_device() if device.index is None else device.index
    print(describe_gains(frame["gain"].tolist()))
    print(f"gemm uses it from now on: {table_path(Origin.of(index), options.folder)}")
    return 0


def describe_gains(gains: Sequence[float]) -> str:
    """How much faster the tuned choices are than the cost model's."""
    mean = math.exp(math.fsum(map(math.log, gains)) / len(gains))
    faster = sum(gain > 1 for gain in gains)
    return f"{faster} of {len(gains)} choices changed; gain: geometric mean {mean:.3f}, largest {max(gains):.2f}"


COMMAND = command.Command(
    "measure which configurations are the quickest on this GPU, for gemm to run them", _add_options, _run
)
