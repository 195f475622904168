"""Fits calibration_dense.py, for fit.py: four constants by least squares of log(time), over the H200's measurements."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from . import calibration_dense
from .calibration_dense import DenseCost
from .configs import CONFIGS, FAMILIES
from .cost import dense_us
from .legal import DENSE_MIN_M
from .problem import Problem

DENSE_FAMILIES = [name for name, family in FAMILIES.items() if family.is_dense]

# Constants: start, least, most.
_START: dict[str, tuple[float, float, float]] = {
    "slice_us": (6.0, 4.0, 20.0),  # no two launches take less
    "stream": (0.85, 0.3, 1.0),
    "sm_tflop_s": (6.1, 3.0, 7.5),
    "y_stream": (0.85, 0.2, 50.0),
}

# A constant that is an e-fold away from its start weighs as much as an error of this in one time.
_PRIOR = 0.02


def usable(frame: pd.DataFrame) -> pd.Series:
    """Which rows of `bench regret --csv` count: of these families on sm90, where `select` looks at them."""
    return frame.family.isin(DENSE_FAMILIES) & (frame.m >= DENSE_MIN_M) & (frame.arch == 90)


def fit(frame: pd.DataFrame) -> DenseCost:
    """The constants with the least squares of log(predicted / measured), over rows that are `usable`."""
    configs = {c.name: c for c in CONFIGS if c.is_dense}
    measured = [
        (configs[r.config], Problem(r.m, r.n, r.k, r.format, r.group_size, 90, r.sm_count, r.layout, bool(r.zeros)))
        for r in frame.itertuples()
    ]

    def residuals(values: np.ndarray) -> np.ndarray:
        cost = DenseCost(*np.exp(values))
        predicted = [dense_us(config, problem, cost) for config, problem in measured]
        return np.concatenate([np.log(predicted / frame.us.to_numpy()), _PRIOR * (values - start)])

    start, least, most = np.log(list(_START.values())).T
    values = np.exp(least_squares(residuals, start, bounds=(least, most)).x)
    return DenseCost(*(float(f"{value:.4g}") for value in values))


def source(cost: DenseCost, note: str) -> str:
    """The text of calibration_dense.py: its class as it is, these constants."""
    marker = "\n\n\n# Constants: "
    head = Path(calibration_dense.__file__).read_text().partition(marker)[0]
    values = ", ".join(f"{field.name}={getattr(cost, field.name)!r}" for field in fields(cost))
    return f"{head}{marker}{note}\n\nDENSE = DenseCost({values})\n"


def run(frame: pd.DataFrame, out: Path) -> None:
    """Fit, write `out`."""
    out.write_text(source(fit(frame), f"fitted to {len(frame)} times."))
