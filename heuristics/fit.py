"""Fits the cost model to measurements: `python -m weightonly.heuristics.fit MEASUREMENTS.csv...`.

MEASUREMENTS.csv is what `python -m weightonly.bench regret --csv` writes: the time of every configuration on many
problems. Those of the kernels of Hopper (`regret --layout tiled`) make calibration_sm90.py: see fit_sm90.py; those of
dequantizing and cuBLAS calibration_dense.py: see fit_dense.py.

The others make calibration.py. For each kernel and format the three numbers of cost.py are those with the least squared
error of log(time); the launch and reduction constants are shared by all. Registers come from the compiler's logs:
`--log BUILD_LOG_DIR`. Needs scipy and pandas.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from . import fit_dense, fit_sm90
from .configs import CONFIGS, MAX_SPLIT_K, KernelConfig
from .cost import ctas_per_sm, machine, problem_bytes, tiles, units
from .fit_choices import Choices
from .legal import worth_a_look
from .problem import Problem

HEADER = '''"""Constants of the cost model, by fit.py: fitted to H200 times, then moved so that choices cost least."""

from __future__ import annotations

from typing import NamedTuple


class KernelCost(NamedTuple):
    """One kernel for one format: registers of a thread, and the three times of cost.py."""

    registers: int
    unit_us: float
    latency_us: float
    fixed_us: float


LAUNCH_US = {launch:.3f}
REDUCE_LAUNCH_US = {reduce_launch:.3f}
REDUCE_TB_S = {reduce_tb_s:.3f}

KERNELS: dict[tuple[str, str], KernelCost] = {{
{rows}
}}
'''


def fitted_configs() -> list[KernelConfig]:
    """Those that cost.waves_us describes. The kernels of Hopper are fitted by fit_sm90.py."""
    return [c for c in CONFIGS if c.family in ("gemm_sm80", "gemv")]


def registers_of(logs: Path) -> dict[tuple[str, str], int]:
    """(kernel, format) -> registers of a thread, the most over dtypes and scale modes, from ptxas -v logs."""
    found: dict[tuple[str, str], int] = {}
    for log in logs.rglob("*.log"):
        match = re.search(r"((?:gemm|gemv)_\w+?)_(?:f16|bf16)_(int4|int8)_", log.name)
        used = re.findall(r"Used (\d+) registers", log.read_text())
        if match and used:
            key = match[1], match[2]
            found[key] = max(found.get(key, 0), *map(int, used))
    return found


@dataclass(frozen=True)
class Rows:
    """The measurements of one kernel and format, as arrays of what the model needs of each."""

    resident: int
    sm_count: NDArray
    ctas: NDArray
    work: NDArray
    memory_us: NDArray
    partial_bytes: NDArray  # of split-K, written and read; 0 without
    us: NDArray
    weight: NDArray
    cell: NDArray  # number of the problem

    def predict(self, kernel: NDArray, shared: NDArray) -> NDArray:
        """Times in us (cost.estimate_us), for the logarithms of the constants."""
        unit, latency, fixed = np.exp(kernel)
        launch, reduce_launch, reduce_tb_s = np.exp(shared)
        full, rest = np.divmod(self.ctas, self.sm_count * self.resident)
        us = full * (fixed + self.work * max(latency, self.resident * unit))
        on_one_sm = -(-rest // self.sm_count)
        us = us + (rest > 0) * (fixed + self.work * np.maximum(latency, on_one_sm * unit))
        us = launch + np.maximum(us, self.memory_us)
        return us + (self.partial_bytes > 0) * (reduce_launch + self.partial_bytes / (reduce_tb_s * 1e6))

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
            partial_bytes = 2 * 4 * row.m * row.n * row.split_k if row.split_k > 1 else 0
            ctas = tiles(config, row.m, row.n) * row.split_k
            work = units(config, problem.k_padded, row.split_k)
            columns.append((row.sm_count, ctas, work, memory_us, partial_bytes, row.us, row.weight, row.cell))
        resident = ctas_per_sm(config, key[1], 90, registers[key])
        found[key] = Rows(resident, *np.array(columns, dtype=np.float64).T)
    return found


def fit(rows: dict[tuple[str, str], Rows]) -> tuple[dict[tuple[str, str], NDArray], NDArray]:
    """Alternates between each kernel's constants and the shared ones; all are fitted as logarithms."""
    shared = np.log([2.0, 1.5, 3.0])
    shared_bounds = np.log([1.0, 0.3, 0.5]), np.log([2.5, 4.0, 20.0])
    kernel_bounds = np.log([0.01, 0.05, 0.01]), np.log([10.0, 10.0, 10.0])
    starts = [np.log(start) for start in ([0.1, 0.5, 1.0], [0.5, 0.5, 2.0], [2.0, 1.0, 1.0], [0.02, 0.3, 0.5])]
    kernels: dict[tuple[str, str], NDArray] = {}
    for _ in range(12):
        for key, part in rows.items():
            begin = [*starts, kernels.get(key, starts[0])]
            tried = [least_squares(part.residuals, s, bounds=kernel_bounds, args=(shared,)) for s in begin]
            kernels[key] = min(tried, key=lambda solution: solution.cost).x

        def all_residuals(values: NDArray) -> NDArray:
            return np.concatenate([part.residuals(kernels[key], values) for key, part in rows.items()])

        shared = least_squares(all_residuals, shared, bounds=shared_bounds).x
    return kernels, shared


def polish(rows: dict[tuple[str, str], Rows], kernels: dict[tuple[str, str], NDArray], shared: NDArray) -> None:
    """Moves the kernels' constants a little, in place, so that the choices among the measurements cost least.

    Least squares spreads the model's error evenly; what matters is the order of the configurations near the best. A
    random search with a fixed seed minimizes mean regret + 3 x mean squared regret, and holds on to the fitted values
    (each e-fold away costs as much as 2% of mean regret).
    """
    generator = np.random.default_rng(0)
    searched = {config.kernel for config in CONFIGS if worth_a_look(config)}
    keys = [key for key in rows if key[0] in searched]
    fitted = {key: kernels[key].copy() for key in keys}
    cells = np.concatenate([rows[key].cell for key in keys]).astype(int)
    measured = np.concatenate([rows[key].us for key in keys])
    ends = np.cumsum([len(rows[key].us) for key in keys])
    predicted = np.concatenate([rows[key].predict(kernels[key], shared) for key in keys])
    best = pd.Series(measured).groupby(cells).transform("min").to_numpy()
    choices = Choices(cells, measured, best)

    def loss(times: NDArray) -> float:
        regret = choices.regret(times)
        moved = sum(np.abs(kernels[key] - fitted[key]).sum() for key in keys)
        return float(regret.mean() + 3 * (regret**2).mean() + 0.02 * moved / len(keys))

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


def run(frame: pd.DataFrame, logs: Path, out: Path) -> None:
    """Fit what is not of Hopper, write `out`."""
    registers = registers_of(logs)
    rows_by_kernel = collect(frame, registers)
    wanted = {(c.kernel, f) for c in fitted_configs() for f in c.formats}
    if missing := sorted(wanted - set(rows_by_kernel)):
        raise SystemExit(f"not measured: {', '.join(f'{kernel} {format}' for kernel, format in missing)}")
    kernels, shared = fit(rows_by_kernel)
    polish(rows_by_kernel, kernels, shared)
    rows = []
    for (kernel, format), values in kernels.items():
        times = ", ".join(f"{value:.4g}" for value in np.exp(values))
        rows.append(f'    ("{kernel}", "{format}"): KernelCost({registers[kernel, format]}, {times}),')
    launch, reduce_launch, reduce_tb_s = np.exp(shared)
    out.write_text(
        HEADER.format(launch=launch, reduce_launch=reduce_launch, reduce_tb_s=reduce_tb_s, rows="\n".join(rows))
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", nargs="+", type=Path)
    parser.add_argument("--log", type=Path, help="folder with the ptxas logs of the build, for kernels before Hopper")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder (default: that of this file)")
    parser.add_argument("--moves", type=int, default=40000, help="of the random search, for the kernels of Hopper")
    arguments = parser.parse_args(argv)
    frame = pd.concat([pd.read_csv(path) for path in arguments.measurements], ignore_index=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    is_hopper = frame.family.isin(list(fit_sm90.FAMILIES))
    is_other = ~is_hopper & ~frame.family.isin(fit_dense.DENSE_FAMILIES)
    is_dense = fit_dense.usable(frame)
    if is_other.any() and arguments.log is None:
        parser.error("--log is needed: there are times of kernels before Hopper")
    if is_dense.any():
        fit_dense.run(frame[is_dense], arguments.out / "calibration_dense.py")
    if is_hopper.any():
        fit_sm90.run(frame[is_hopper], arguments.out / "calibration_sm90.py", arguments.moves)
    if is_other.any():
        run(frame[is_other], arguments.log, arguments.out / "calibration.py")


if __name__ == "__main__":
    main()
