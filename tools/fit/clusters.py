"""Fits the kernels of Hopper, to times of whole launches.

As for the others, least squares of log(time) comes first, then a random search that moves the constants so that the
choices cost least. It starts from START, whatever h200.py holds, so that the same measurements give the same constants;
only a kernel that was not measured keeps its constants.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from weightonly.heuristics import KernelConfig, Problem
from weightonly.heuristics.configs import FITTED_CONFIGS
from weightonly.heuristics.constants import DecodeSm90Constants, GemmSm90Constants, TileTimes
from weightonly.heuristics.cost import total_us
from weightonly.heuristics.families import FAMILIES as ALL_FAMILIES
from weightonly.heuristics.families.clusters import ClusterFamily
from weightonly.heuristics.machine import MAX_CLUSTER

from .choices import Choices

Cost = DecodeSm90Constants | GemmSm90Constants

FAMILIES: dict[str, ClusterFamily] = {
    name: family for name, family in ALL_FAMILIES.items() if isinstance(family, ClusterFamily) and not family.grouped
}

CELL = ["k", "n", "m", "format", "group_size", "arch", "sm_count", "layout", "zeros"]

# Constants of a family: start, least, most.
START: dict[str, dict[str, tuple[float, float, float]]] = {
    "decode_sm90": {
        "fixed_us": (2.6, 1.0, 6.0),
        "cluster_us": (0.5, 0.05, 3.0),
        "cta_us": (0.05, 0.005, 0.5),
        "tb_s": (4.4, 3.0, 6.0),
        "unhidden": (0.05, 0.002, 0.5),
        "sm_kb_us": (40.0, 25.0, 120.0),
        "x_kb_us": (45.0, 20.0, 300.0),
        "token_us": (0.03, 0.001, 0.3),
    },
    "gemm_sm90": {
        "fixed_us": (3.0, 1.0, 6.0),
        "cluster_us": (0.5, 0.05, 3.0),
        "cta_us": (0.05, 0.005, 0.5),
        "tb_s": (4.4, 3.0, 4.6),
        "unhidden": (0.05, 0.002, 0.5),
        "idle": (0.15, 0.002, 0.5),
    },
}
START["gemm_sm90_fp8"] = START["gemm_sm90_fp8_mx"] = START["gemm_sm90"]
_UNIT_BOUNDS = (0.25, 4.0)  # times its start
_END_BOUNDS = (0.02, 15.0)

# A constant that is an e-fold away from START weighs as much as an error of this in the best time of one problem: it
# decides only what the measurements leave open.
_PRIOR = 0.02

# In the search that moves constants for the sake of choices, times that differ by less tie: else it would end where the
# best is ahead by no more than the digits that are written.
_TIE = 0.004
# And predicted times are off by this, at random, in several draws: what wins by a hair here loses on another shape.
_MODEL_ERROR = 0.012
_DRAWS = 5


def usable(frame: pd.DataFrame) -> pd.Series:
    """Which rows of `tools.regret --csv` are of these kernels, in one launch."""
    return frame.config.isin(_configs())


def measured(frame: pd.DataFrame) -> list[str]:
    """The families that a frame has times of."""
    return [name for name in FAMILIES if (frame.family == name).any()]


def start_times(config: KernelConfig) -> TileTimes:
    """Where the search for a kernel's constants starts."""
    if config.k_tile != config.block_k:  # warps share K: times are of one k-tile and 16 columns
        return TileTimes(0.016 + 0.001 * config.block_m, 0.4)
    outputs = config.block_m * config.block_n / (128 * 128)
    return TileTimes(0.8 * outputs**0.7 * config.block_k / 128, 0.5 + 3 * outputs)


@dataclass
class Constants:
    """The constants of a family, as logarithms."""

    shared: NDArray
    kernels: NDArray  # [kernel, (unit, end)]

    def copy(self) -> Constants:
        return Constants(self.shared.copy(), self.kernels.copy())


class Rows:
    """The measurements of a family by (kernel, format), and what the model needs of each.

    best_us  of the best configuration of the same problem, of any family
    cell     number of the problem
    """

    def __init__(self, family: str, frame: pd.DataFrame) -> None:
        self.family = family
        frame = frame[frame.family == family].sort_values(["kernel", "format"], kind="stable")
        by_kernel = frame.groupby(["kernel", "format"], sort=True)
        self.keys: list[tuple[str, str]] = list(by_kernel.groups)
        ends = np.cumsum(by_kernel.size().to_numpy()) if len(frame) else np.zeros(0, int)
        self.parts = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=False)]
        self.kernel = np.repeat(np.arange(len(self.keys)), np.diff([0, *ends]))
        self.us, self.best_us = frame.us.to_numpy(float), frame.best_us.to_numpy(float)
        self.cell = frame.cell.to_numpy(int)
        # Those near the best weigh most: among them select chooses.
        self.weight = np.where(frame.coarse.to_numpy(bool), 0.0, (self.best_us / self.us) ** 2)
        configs = _configs()
        pairs = [(configs[row.config], _problem(row)) for row in frame.itertuples(index=False)]
        self.is_candidate = np.array([is_looked_at(c) for c, _ in pairs], dtype=bool)
        rules = FAMILIES[family]
        self.counts = np.array([rules.counts(c, p) for c, p in pairs], dtype=float)
        self.counts = self.counts.reshape(len(pairs), -1).T

    def start(self) -> Constants:
        """START, of the kernels that were measured."""
        of = {c.kernel: start_times(c) for c in FITTED_CONFIGS}
        shared = np.log([start for start, _, _ in START[self.family].values()])
        return Constants(shared, np.log([of[kernel] for kernel, _ in self.keys]).reshape(-1, 2))

    def bounds(self) -> tuple[Constants, Constants]:
        """The least and the most that the constants may be."""
        least, most = self.start(), self.start()
        for bound, i in ((least, 0), (most, 1)):
            bound.shared = np.log([limits[1 + i] for limits in START[self.family].values()])
            bound.kernels[:, 0] += np.log(_UNIT_BOUNDS[i])
            bound.kernels[:, 1] = np.log(_END_BOUNDS[i])
        return least, most

    def predict(self, constants: Constants, kernel: int | None = None) -> NDArray:
        """Times in us, of one of the kernels or of all."""
        part = slice(None) if kernel is None else self.parts[kernel]
        rules = FAMILIES[self.family]
        times = TileTimes(*np.exp(constants.kernels[self.kernel[part]]).T)
        of_family: type[Any] = type(rules.constants)
        shared = of_family("", *np.exp(constants.shared), kernels={})
        return total_us(rules.counted_work(tuple(self.counts[:, part]), shared, times, np.maximum), np.maximum)


def is_looked_at(config: KernelConfig) -> bool:
    """Whether `select` looks at a configuration."""
    return config.split_k in config.rules.splits(config)


def _configs() -> dict[str, KernelConfig]:
    splits = (c.with_split_k(s) for c in FITTED_CONFIGS if c.family in FAMILIES for s in range(1, MAX_CLUSTER + 1))
    return {c.name: c for c in splits}


def _problem(row: object) -> Problem:
    m, n, k, format, group_size, arch, sm_count, layout, zeros = (
        getattr(row, name) for name in ("m", "n", "k", "format", "group_size", "arch", "sm_count", "layout", "zeros")
    )
    return Problem(m, n, k, format, group_size, arch, sm_count, layout, bool(zeros))


def prepare(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `tools.regret --csv` that are of use here, with `kernel`, `cell` and `best_us`.

    What was measured more than once (in several files) counts once, with its median.
    """
    configs = _configs()
    frame = frame[frame.config.isin(configs)]
    times = frame.groupby([*CELL, "config", "family"], as_index=False)
    frame = times.agg(us=("us", "median"), coarse=("coarse", "max"))
    frame["kernel"] = [configs[name].kernel for name in frame.config]
    cells = frame.groupby(CELL)
    frame["cell"] = cells.ngroup()
    frame["best_us"] = cells.us.transform("min")
    return frame.reset_index(drop=True)


@dataclass
class Model:
    """Measurements of families and the constants that go with them."""

    rows: list[Rows]
    constants: list[Constants]

    def predict(self) -> NDArray:
        """Times of all measurements that may be chosen, for `choices`."""
        return np.concatenate([r.predict(c)[r.is_candidate] for r, c in zip(self.rows, self.constants, strict=True)])

    def choices(self) -> Choices:
        joined = [
            np.concatenate([getattr(r, name)[r.is_candidate] for r in self.rows]) for name in ("cell", "us", "best_us")
        ]
        return Choices(*joined)

    def regret(self) -> pd.Series:
        """Chosen / best - 1, by cell."""
        choices = self.choices()
        return pd.Series(choices.regret(self.predict()), index=choices.cells)

    def apply_to(self, frame: pd.DataFrame) -> Model:
        """The same constants with other measurements; new kernels have the constants of START."""
        model = Model([Rows(family, frame) for family in measured(frame)], [])
        for rows, mine, constants in zip(model.rows, self.rows, self.constants, strict=True):
            theirs = rows.start()
            theirs.shared = constants.shared.copy()
            for i, key in enumerate(rows.keys):
                if key in mine.keys:
                    theirs.kernels[i] = constants.kernels[mine.keys.index(key)]
            model.constants.append(theirs)
        return model


def from_file(frame: pd.DataFrame) -> Model:
    """The constants of h200.py."""
    model = Model([Rows(family, frame) for family in measured(frame)], [])
    for rows in model.rows:
        cost, constants = FAMILIES[rows.family].constants, rows.start()
        constants.shared = np.log([getattr(cost, name) for name in START[rows.family]])
        for i, key in enumerate(rows.keys):
            constants.kernels[i] = np.log(cost.kernels.get(key, np.exp(constants.kernels[i])))
        model.constants.append(constants)
    return model


def least_error(frame: pd.DataFrame) -> Model:
    """The constants with the least weighted squares of log(predicted / measured)."""
    model = Model([Rows(family, frame) for family in measured(frame)], [])
    for rows in model.rows:
        start, (least, most) = rows.start(), rows.bounds()
        count = len(start.shared)
        flat = [np.concatenate([c.shared, c.kernels.ravel()]) for c in (start, least, most)]

        def residuals(values: NDArray, rows: Rows = rows, count: int = count, first: NDArray = flat[0]) -> NDArray:
            constants = Constants(values[:count], values[count:].reshape(-1, 2))
            error = rows.weight * np.log(rows.predict(constants) / rows.us)
            return np.concatenate([error, _PRIOR * (values - first)])

        values = least_squares(residuals, flat[0], bounds=(flat[1], flat[2])).x
        constants = Constants(values[:count], values[count:].reshape(-1, 2).copy())
        model.constants.append(constants)
    return model


def polish(model: Model, moves: int) -> None:
    """Moves the constants a little, in place, so that the choices among the measurements cost least.

    A random search with a fixed seed minimizes mean regret + 3 x mean squared regret + a twentieth of the worst, and
    holds on to the fitted values (each e-fold away costs as much as 2% of mean regret). Now and then it moves what the
    kernels of a family share. Regret is the mean of some draws of noise, as large as the model's error.
    """
    generator = np.random.default_rng(0)
    choices = model.choices()
    fitted = [constants.copy() for constants in model.constants]
    limits = [rows.bounds() for rows in model.rows]
    kernels = [(f, i) for f, rows in enumerate(model.rows) for i in range(len(rows.keys))]
    families = range(len(model.rows))
    # Where the times of a kernel lie among the times of all that may be chosen.
    offsets = np.cumsum([0, *(rows.is_candidate.sum() for rows in model.rows)])
    places = {}
    for f, i in kernels:
        rows = model.rows[f]
        before = offsets[f] + rows.is_candidate[: rows.parts[i].start].sum()
        places[f, i] = slice(before, before + rows.is_candidate[rows.parts[i]].sum())

    predicted = model.predict()
    noise = [np.ones(len(predicted)), *(1 + _MODEL_ERROR * generator.standard_normal((_DRAWS, len(predicted))))]

    def loss(times: NDArray) -> float:
        regret = np.mean([choices.regret(times * factors, _TIE) for factors in noise], axis=0)
        moved = sum(
            np.abs(now.kernels - then.kernels).sum() + np.abs(now.shared - then.shared).sum()
            for now, then in zip(model.constants, fitted, strict=True)
        )
        return float(regret.mean() + 3 * (regret**2).mean() + 0.05 * regret.max() + 0.02 * moved / len(kernels))

    lowest = loss(predicted)
    for _ in range(moves):
        step = 0.3 * generator.random() ** 2  # mostly small moves, now and then a large one
        times = predicted.copy()
        if generator.random() < 0.1:
            f = families[int(generator.integers(len(families)))]
            rows, constants = model.rows[f], model.constants[f]
            before = constants.shared
            change = generator.normal(0, step, len(before)) * (generator.random(len(before)) < 0.3)
            constants.shared = np.clip(before + change, limits[f][0].shared, limits[f][1].shared)
            times[offsets[f] : offsets[f + 1]] = rows.predict(constants)[rows.is_candidate]
            if (value := loss(times)) < lowest:
                lowest, predicted = value, times
            else:
                constants.shared = before
            continue
        f, i = kernels[int(generator.integers(len(kernels)))]
        rows, constants = model.rows[f], model.constants[f]
        before = constants.kernels[i].copy()
        change = generator.normal(0, step, 2) * (generator.random(2) < 0.7)
        constants.kernels[i] = np.clip(before + change, limits[f][0].kernels[i], limits[f][1].kernels[i])
        times[places[f, i]] = rows.predict(constants, i)[rows.is_candidate[rows.parts[i]]]
        if (value := loss(times)) < lowest:
            lowest, predicted = value, times
        else:
            constants.kernels[i] = before


def fit(frame: pd.DataFrame, moves: int) -> Model:
    """Least squares, then `polish`."""
    model = least_error(frame)
    polish(model, moves)
    return model


def without_one_shape(frame: pd.DataFrame, moves: int) -> pd.Series:
    """Regret by cell, each shape (K, N) judged by constants that were fitted to all others."""
    found = []
    for _, part in frame.groupby(["k", "n"]):
        others = frame.drop(part.index)
        if len(others):
            found.append(fit(others, moves).apply_to(part).regret())
    return pd.concat(found) if found else pd.Series(dtype=float)


def regret_table(frame: pd.DataFrame, regrets: dict[str, pd.Series]) -> str:
    """Mean / worst regret by M, and of all cells.

    The first column is what is lost anyway, by configurations that `select` does not look at.
    """
    candidates = frame[[is_looked_at(config) for config in map(_configs().__getitem__, frame.config)]]
    reached = candidates.groupby("cell").us.min() / candidates.groupby("cell").best_us.first() - 1
    regrets = {"not looked at": reached, **regrets}
    m_of = frame.groupby("cell").m.first()
    groups: list[tuple[str, Iterable[int]]] = [(str(m), m_of.index[m_of == m]) for m in sorted(m_of.unique())]
    lines = [f"{'M':>6} {'cells':>6} " + " ".join(f"{name:>20}" for name in regrets)]
    for title, cells in [*groups, ("all", m_of.index)]:
        values = []
        for regret in regrets.values():
            part = regret[regret.index.isin(cells)]
            values.append(f"{part.mean():9.1%} / {part.max():8.1%}" if len(part) else "-")
        lines.append(f"{title:>6} {len(list(cells)):>6} " + " ".join(f"{value:>20}" for value in values))
    return "\n".join(lines)


def as_constants(model: Model, note: str = "") -> dict[str, Cost]:
    """Constants by family, as h200.py has them; kernels that were not measured keep their own."""

    def digits(value: float) -> float:
        return float(f"{value:.4g}")

    made: dict[str, Cost] = {}
    for rows, constants in zip(model.rows, model.constants, strict=True):
        old = FAMILIES[rows.family].constants
        shared = {name: digits(v) for name, v in zip(START[rows.family], np.exp(constants.shared), strict=True)}
        times = dict(zip(rows.keys, np.exp(constants.kernels), strict=True))
        kernels = {}
        for config in (c for c in FITTED_CONFIGS if c.family == rows.family):
            for format in config.formats:
                key = config.kernel, format
                found = times.get(key, old.kernels.get(key, start_times(config)))
                kernels[key] = TileTimes(*map(digits, found))
        made[rows.family] = type(old)(fitted_to=note, **shared, kernels=kernels)
    return made


def run(frame: pd.DataFrame, moves: int) -> dict[str, Cost]:
    """Fit, print what the choices cost."""
    frame = prepare(frame)
    families = measured(frame)
    wanted = {(c.kernel, f) for c in FITTED_CONFIGS if c.family in families for f in c.formats}
    if missing := sorted(wanted - set(zip(frame.kernel, frame.format, strict=True))):
        names = ", ".join(f"{kernel} {format}" for kernel, format in missing)
        print(f"not measured, constants left as they are: {names}", file=sys.stderr)
    before, fitted = from_file(frame).regret(), least_error(frame)
    model = Model(fitted.rows, [constants.copy() for constants in fitted.constants])
    polish(model, moves)
    regrets = {
        "before": before,
        "least squares": fitted.regret(),
        "in sample": model.regret(),
        "shape left out": without_one_shape(frame, moves // 4),
    }
    print("Regret, mean / worst:\n" + regret_table(frame, regrets))
    note = f"{len(frame)} times of {frame.cell.nunique()} problems, then moved so that choices cost least"
    return as_constants(model, note)
