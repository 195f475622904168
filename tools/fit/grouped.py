"""Fits the grouped kernels of Hopper: least squares of log(time), with the tiles that the routings made. Then constants
are moved so that choices, which do not know the routings, cost least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from pandas.core.groupby import DataFrameGroupBy
from scipy.optimize import least_squares

from weightonly.heuristics.configs import GROUPED_CONFIGS, GROUPED_FP8_CONFIGS
from weightonly.heuristics.constants import GroupedConstants, GroupedTimes
from weightonly.heuristics.families.hopper_grouped import Tiles, expected_tiles, grouped_us
from weightonly.heuristics.problem import CODE_FORMATS, FP8_LAYOUT
from weightonly.layout import TILED

from ..regret_experts import CELL, problem_of, rows_of_experts, with_layouts
from .choices import Choices

_CONFIGS = {c.kernel: c for c in (*GROUPED_CONFIGS, *GROUPED_FP8_CONFIGS) if c.layout in (TILED, FP8_LAYOUT)}

# Constants of a kernel: start, least, most.
_START = {
    "start_us": (4.0, 0.5, 8.0),
    "k_us": (2.0, 0.2, 20.0),
    "end_us": (0.5, 0.05, 8.0),
    "row": (0.05, 0.001, 0.3),
}
_PRIOR = 0.01
"""A constant that is an e-fold away from its start weighs as much as an error of this in one time."""


def usable(frame: pd.DataFrame) -> pd.Series:
    """Which rows are of these kernels (`tools.regret_experts`)."""
    return frame.config.isin(_CONFIGS)


def tiles_of(cell: Mapping[str, Any], block_m: int) -> Tiles:
    """The tiles that were timed."""
    counts = rows_of_experts(cell)
    tiles = [np.ceil(c / block_m).sum() for c in counts]
    return float(np.mean(tiles)), float(np.var(tiles)), float(np.mean([(c > 0).sum() for c in counts]))


def fit(frame: pd.DataFrame, before: GroupedConstants) -> GroupedConstants:
    """The constants with the least squares of log(predicted / measured). What was not measured stays as it is."""
    kernels = dict(before.kernels)
    start, least, most = np.log(list(_START.values())).T
    for (name, format), rows in _by_kernel(frame):
        config = _CONFIGS[name]
        cells = [row[CELL].to_dict() for _, row in rows.iterrows()]
        problems = [problem_of(cell)[0] for cell in cells]
        tiles = [tiles_of(cell, config.block_m) for cell in cells]
        measured_us = rows.us.to_numpy()

        def residuals(values: np.ndarray) -> np.ndarray:
            times = GroupedTimes(*np.exp(values))
            predicted = [grouped_us(config, p, t, times) for p, t in zip(problems, tiles, strict=True)]  # noqa: B023
            return np.concatenate([np.log(np.array(predicted) / measured_us), _PRIOR * (values - start)])  # noqa: B023

        found = np.exp(least_squares(residuals, start, bounds=(least, most)).x)
        kernels[name, format] = _times_of(found)
    return replace(before, fitted_to=f"{len(frame)} times", kernels=dict(sorted(kernels.items())))


def polish(frame: pd.DataFrame, fitted: GroupedConstants) -> GroupedConstants:
    """Moves the constants of the kernels that were measured a little, as `waves.polish` does."""
    generator = np.random.default_rng(0)
    frame = with_layouts(frame).reset_index(drop=True)
    best = frame.groupby(CELL).us.transform("min").to_numpy()
    choices = Choices(frame.groupby(CELL).ngroup().to_numpy(), frame.us.to_numpy(), best)
    rows = {key: part for key, part in _by_kernel(frame)}  # noqa: C416 - dict() would call its `keys`
    keys, start = list(rows), {key: np.log(fitted.kernels[key]) for key in rows}
    kernels, cases = dict(start), {}
    for name, format in keys:
        problems = [problem_of(row[CELL].to_dict()) for _, row in rows[name, format].iterrows()]
        cases[name, format] = [(p, expected_tiles(_CONFIGS[name], p, experts)) for p, experts in problems]

    def put_times(predicted: np.ndarray, key: tuple[str, str]) -> np.ndarray:
        times, config = GroupedTimes(*np.exp(kernels[key])), _CONFIGS[key[0]]
        predicted[rows[key].index] = [grouped_us(config, p, tiles, times) for p, tiles in cases[key]]
        return predicted

    def loss(times: np.ndarray) -> float:
        return choices.loss(times, sum(np.abs(kernels[key] - start[key]).sum() for key in keys) / len(keys))

    predicted = np.zeros(len(frame))
    for key in keys:
        put_times(predicted, key)
    lowest = loss(predicted)
    for _ in range(200 * len(keys)):
        key = keys[generator.integers(len(keys))]
        before = kernels[key]
        step = 0.3 * generator.random() ** 2
        kernels[key] = before + generator.normal(0, step, len(before)) * (generator.random(len(before)) < 0.5)
        times = put_times(predicted.copy(), key)
        if (value := loss(times)) < lowest:
            lowest, predicted = value, times
        else:
            kernels[key] = before
    moved = {key: _times_of(np.exp(values)) for key, values in kernels.items()}
    note = f"{fitted.fitted_to}, then moved so that choices cost least"
    return replace(fitted, fitted_to=note, kernels=fitted.kernels | moved)


def _by_kernel(frame: pd.DataFrame) -> DataFrameGroupBy:
    """Groups of (configuration, format of its kernels)."""
    frame = with_layouts(frame)
    is_code4 = frame.format.isin(CODE_FORMATS) & (frame.layout == TILED)  # see Problem.format
    return frame.groupby(["config", frame.format.where(~is_code4, "code4")], sort=True)


def _times_of(values: np.ndarray) -> GroupedTimes:
    return GroupedTimes(*(float(f"{value:.4g}") for value in values))
