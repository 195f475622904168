"""Fits the four constants of dequantizing and cuBLAS: least squares of log(time), over the H200's measurements."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from weightonly.heuristics import KernelConfig, Problem
from weightonly.heuristics.configs import FITTED_CONFIGS
from weightonly.heuristics.constants import UnfusedConstants
from weightonly.heuristics.cost import total_us
from weightonly.heuristics.families.dequantize_cublas import MIN_M, Counts, DequantizeCublas, unfused_work

_ARCH = 90

# Constants: start, least, most.
_START: dict[str, tuple[float, float, float]] = {
    "slice_us": (6.0, 4.0, 20.0),  # no two launches take less
    "dequantize_bandwidth": (0.85, 0.3, 1.0),
    "sm_tflop_s": (6.1, 3.0, 7.5),
    "unhidden_y": (1 / 0.85, 1 / 50, 1 / 0.2),
}

# A constant that is an e-fold away from its start weighs as much as an error of this in one time.
_PRIOR = 0.02


def usable(frame: pd.DataFrame) -> pd.Series:
    """Which rows of `tools.regret --csv` count: of these families on sm90, with the rows that `select` looks at."""
    configs = {config.family for config in FITTED_CONFIGS if config.unfused}
    return frame.family.isin(configs) & (frame.m >= MIN_M) & (frame.arch == _ARCH)


def counts_of(config: KernelConfig, problem: Problem) -> Counts:
    family = config.rules
    assert isinstance(family, DequantizeCublas)
    return family.counts(config, problem)


def fit(frame: pd.DataFrame) -> UnfusedConstants:
    """The constants with the least squares of log(predicted / measured), over rows that are `usable`."""
    configs = {c.name: c for c in FITTED_CONFIGS if c.unfused}
    rows = [
        counts_of(
            configs[r.config],
            Problem(r.m, r.n, r.k, r.format, r.group_size, _ARCH, r.sm_count, r.layout, bool(r.zeros)),
        )
        for r in frame.itertuples()
    ]
    counts, measured_us = Counts(*np.array(rows, dtype=float).T), frame.us.to_numpy()

    def residuals(values: np.ndarray) -> np.ndarray:
        constants = UnfusedConstants("", *np.exp(values))
        predicted_us = total_us(unfused_work(counts, _ARCH, constants), np.maximum)
        return np.concatenate([np.log(predicted_us / measured_us), _PRIOR * (values - start)])

    start, least, most = np.log(list(_START.values())).T
    values = np.exp(least_squares(residuals, start, bounds=(least, most)).x)
    return UnfusedConstants(f"{len(frame)} times", *(float(f"{value:.4g}") for value in values))
