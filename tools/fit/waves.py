"""Fits the kernels before Hopper.

For each kernel and format the three times of `WaveTimes` are those with the least squared error of log(time); the
launch and reduction constants are shared by all. Then they are moved so that choices cost least. Registers come from
the compiler's logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from weightonly.heuristics import KernelConfig, Problem
from weightonly.heuristics.configs import FITTED_CONFIGS
from weightonly.heuristics.constants import WaveConstants, WaveTimes
from weightonly.heuristics.cost import problem_bytes, total_us
from weightonly.heuristics.families.waves import MAX_SPLIT_K, WaveFamily, ctas_per_sm, launch_and_output_us, waves_us
from weightonly.heuristics.machine import machine

from .choices import Choices


def fitted_configs() -> list[KernelConfig]:
    """Those with constants of their own."""
    waves = ((c, c.rules) for c in FITTED_CONFIGS)
    return [
        c
        for c, family in waves
        if isinstance(family, WaveFamily) and all(family.calibrated_as(c, f) == c.kernel for f in c.formats)
    ]


def usable(frame: pd.DataFrame) -> pd.Series:
    """Which rows of `tools.regret --csv` are of these kernels."""
    return frame.family.isin({config.family for config in fitted_configs()})


def registers_of(logs: Path) -> dict[tuple[str, str], int]:
    """(kernel, format) -> registers of a thread, the most over dtypes and scale modes, from ptxas -v logs."""
    found: dict[tuple[str, str], int] = {}
    for config in fitted_configs():
        # A unit has all kernels of its configuration. In their mangled names a length stands before the types.
        of_kernel = re.compile(rf"{config.kernel}\d+B?[Ff]16(Int4|Int8|Code4).*?Used (\d+) registers", re.DOTALL)
        for log in logs.rglob(f"{config.kernel}.*log"):
            for format, used in of_kernel.findall(log.read_text()):
                key = config.kernel, format.lower()
                found[key] = max(found.get(key, 0), int(used))
    return found


@dataclass(frozen=True)
class Rows:
    """The measurements of one kernel and format, as arrays of what the model needs of each."""

    resident: int
    sm_count: NDArray
    ctas: NDArray
    iterations: NDArray
    memory_us: NDArray
    split_k: NDArray
    outputs: NDArray  # m * n
    us: NDArray
    weight: NDArray
    cell: NDArray  # number of the problem

    def predict(self, kernel: NDArray, shared: NDArray) -> NDArray:
        """Times in us, for the logarithms of the constants."""
        launch_us, reduce_launch_us, reduce_tb_s = np.exp(shared)
        constants = WaveConstants("", launch_us, reduce_launch_us, reduce_tb_s, kernels={})
        times = WaveTimes(0, *np.exp(kernel))
        fixed_us, output_us = launch_and_output_us(self.split_k, constants)
        compute_us = waves_us(self.ctas, self.sm_count, self.resident, self.iterations, times, np.maximum)
        return total_us((fixed_us + self.outputs * output_us, compute_us, self.memory_us, 0.0), np.maximum)

    def residuals(self, kernel: NDArray, shared: NDArray) -> NDArray:
        """Weighted log(predicted / measured)."""
        return self.weight * np.log(self.predict(kernel, shared) / self.us)


def collect(frame: pd.DataFrame, registers: dict[tuple[str, str], int]) -> dict[tuple[str, str], Rows]:
    """Measurements by (kernel, format). Those near the best of their cell weigh most: among them select chooses."""
    configs = {c.with_split_k(s).name: c.with_split_k(s) for c in fitted_configs() for s in range(1, MAX_SPLIT_K + 1)}
    cell = ["k", "n", "m", "format", "group_size", "arch", "sm_count"]
    frame = frame[frame.config.isin(configs)].copy()
    best_us = frame.groupby(cell).us.transform("min")
    frame["weight"] = np.where(frame.coarse, 0.0, (best_us / frame.us) ** 2)
    frame["cell"] = frame.groupby(cell).ngroup()
    frame["kernel"] = [configs[name].kernel for name in frame.config]
    found = {}
    for key, part in frame.groupby(["kernel", "format"]):
        columns: list[tuple[float, ...]] = []
        for row in part.itertuples():
            config = configs[row.config]
            problem = Problem(
                *(getattr(row, name) for name in ("m", "n", "k", "format", "group_size", "arch", "sm_count"))
            )
            memory_us = problem_bytes(problem) / (machine(row.arch).tb_s * 1e6)
            family = config.rules
            assert isinstance(family, WaveFamily)
            ctas = family.tiles(config, row.m, row.n) * row.split_k
            iterations = family.iterations(config, problem.k_padded)
            sizes = row.sm_count, ctas, iterations, memory_us, row.split_k, row.m * row.n
            columns.append((*sizes, row.us, row.weight, row.cell))
        resident = ctas_per_sm(config, str(key[1]), 90, registers[key])
        found[key] = Rows(resident, *np.array(columns, dtype=np.float64).T)
    return found


def fit(
    rows: dict[tuple[str, str], Rows], known: WaveConstants | None
) -> tuple[dict[tuple[str, str], NDArray], NDArray]:
    """Alternates between each kernel's constants and the shared ones; all are fitted as logarithms.

    known: has the shared ones, which then stay as they are.
    """
    shared = np.log([2.0, 1.5, 3.0])
    if known is not None:
        shared = np.log([known.launch_us, known.reduce_launch_us, known.reduce_tb_s])
    shared_bounds = np.log([1.0, 0.3, 0.5]), np.log([2.5, 4.0, 20.0])
    kernel_bounds = np.log([0.01, 0.05, 0.01]), np.log([10.0, 10.0, 10.0])
    starts = [np.log(start) for start in ([0.1, 0.5, 1.0], [0.5, 0.5, 2.0], [2.0, 1.0, 1.0], [0.02, 0.3, 0.5])]
    kernels: dict[tuple[str, str], NDArray] = {}
    for _ in range(12):
        for key, part in rows.items():
            begin = [*starts, kernels.get(key, starts[0])]
            tried = [least_squares(part.residuals, s, bounds=kernel_bounds, args=(shared,)) for s in begin]
            kernels[key] = min(tried, key=lambda solution: solution.cost).x
        if known is not None:
            break

        def all_residuals(values: NDArray) -> NDArray:
            return np.concatenate([part.residuals(kernels[key], values) for key, part in rows.items()])

        shared = least_squares(all_residuals, shared, bounds=shared_bounds).x
    return kernels, shared


def polish(rows: dict[tuple[str, str], Rows], kernels: dict[tuple[str, str], NDArray], shared: NDArray) -> None:
    """Moves the kernels' constants a little, in place, so that the choices among the measurements cost least.

    Least squares spreads the model's error evenly; what matters is the order of the configurations near the best. A
    random search with a fixed seed minimizes `Choices.loss`.
    """
    generator = np.random.default_rng(0)
    searched = {config.kernel for config in FITTED_CONFIGS if any(config.rules.splits(config))}
    keys = [key for key in rows if key[0] in searched]
    fitted = {key: kernels[key].copy() for key in keys}
    cells = np.concatenate([rows[key].cell for key in keys]).astype(int)
    measured = np.concatenate([rows[key].us for key in keys])
    ends = np.cumsum([len(rows[key].us) for key in keys])
    predicted = np.concatenate([rows[key].predict(kernels[key], shared) for key in keys])
    best = pd.Series(measured).groupby(cells).transform("min").to_numpy()
    choices = Choices(cells, measured, best)

    def loss(times: NDArray) -> float:
        moved = sum(np.abs(kernels[key] - fitted[key]).sum() for key in keys)
        return choices.loss(times, moved / len(keys))

    lowest = loss(predicted)
    for _ in range(60000):
        index = int(generator.integers(len(keys)))
        key, end = keys[index], ends[index]
        before = kernels[key]
        step = 0.3 * generator.random() ** 2  # mostly small moves, now and then a large one
        kernels[key] = before + generator.normal(0, step, 3) * (generator.random(3) < 0.5)
        times = predicted.copy()
        times[end - len(rows[key].us) : end] = rows[key].predict(kernels[key], shared)
        if (value := loss(times)) < lowest:
            lowest, predicted = value, times
        else:
            kernels[key] = before


def run(frame: pd.DataFrame, logs: Path, known: WaveConstants) -> WaveConstants:
    """The constants by rows that are `usable`.

    known: the present ones. Unless every kernel was measured the shared ones stay, and so do the constants of kernels
    without times.
    """
    registers = registers_of(logs)
    rows = collect(frame, registers)
    is_all = all((c.kernel, f) in rows for c in fitted_configs() for f in c.formats)
    kernels, shared = fit(rows, None if is_all else known)
    polish(rows, kernels, shared)
    times = {key: WaveTimes(registers[key], *(_digits(v) for v in np.exp(values))) for key, values in kernels.items()}
    if not is_all:
        formats = " and ".join(sorted({format for _, format in times}))
        note = f"{known.fitted_to.split('; ')[0]}; {formats} by itself"
        return replace(known, fitted_to=note, kernels=dict(sorted((known.kernels | times).items())))
    count = sum(len(part.us) for part in rows.values())
    note = f"{count} times, then moved so that choices cost least"
    launch_us, reduce_launch_us, reduce_tb_s = (round(float(value), 3) for value in np.exp(shared))
    return WaveConstants(note, launch_us, reduce_launch_us, reduce_tb_s, kernels=times)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
