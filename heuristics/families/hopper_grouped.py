"""The time of grouped products on Hopper: waves of persistent CTAs, or the memory."""

from __future__ import annotations

import math

from ..constants import GroupedTimes
from ..h200 import GROUPED
from ..problem import Problem
from ..routing import tiles_along_m, with_rows
from .base import KernelConfig, measured

_FEW_WAVES = 3
"""Waves up to which the last one counts as a whole. With more, CTAs go on at times of their own."""

Tiles = tuple[float, float, float]
"""Tiles along M of all experts, the variance of that number, and the experts that have rows."""


def expected_tiles(config: KernelConfig, problem: Problem, experts: int) -> Tiles:
    return *tiles_along_m(problem.m, experts, config.block_m), with_rows(problem.m, experts)


def grouped_us(
    config: KernelConfig, problem: Problem, tiles: Tiles, times: GroupedTimes | None = None, in_a_row: int = 1
) -> float:
    """times: of the kernel, None: the times of h200.py. in_a_row: tiles that one CTA has to compute one after another.

    Raises KeyError where the kernel is not calibrated.
    """
    p, (row_tiles, variance, active) = problem, tiles
    if times is None:
        times = GROUPED.kernels[measured(config, p.format)]
    ctas = config.rules.ctas(config)
    of_wave = p.sm_count * ctas * in_a_row / -(-p.n // config.block_n)  # tiles along M
    waves = row_tiles / of_wave
    waves = in_a_row * (_whole_waves(row_tiles, variance, of_wave) if waves < _FEW_WAVES else waves + 0.5)
    k = -(-p.k_padded // config.k_tile) * config.k_tile
    k_us = k / 1024 * times.k_us * (1 + times.row * (p.m / row_tiles - 1))
    sm_us = waves * ctas * (k_us + times.end_us)
    bytes_us = memory_us(problem, active)
    return times.start_us + max(sm_us, bytes_us) + GROUPED.unhidden * min(sm_us, bytes_us)


def _whole_waves(row_tiles: float, variance: float, of_wave: float) -> float:
    """The waves of so many tiles along M, on average: sum_w P(there are more than w waves have room for)."""
    if variance == 0:
        return math.ceil(row_tiles / of_wave - 0.02)
    scale = math.sqrt(2 * variance)
    return 1 + sum(math.erfc((math.floor(w * of_wave) + 0.5 - row_tiles) / scale) / 2 for w in range(1, 2 * _FEW_WAVES))


def memory_us(problem: Problem, active: float) -> float:
    """Of the weights and scales of the experts that have rows."""
    p = problem
    groups = 1 if p.per_channel else p.k / p.group_size
    return active * p.n * (p.k * p.bits / 8 + 2 * groups) / (GROUPED.tb_s * 1e6)
