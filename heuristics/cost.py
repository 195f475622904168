"""The cost model: one equation turns what a launch has to do (`Work`, which a family computes) into microseconds.

    time = fixed + longer + unhidden * shorter        of the SMs' time and the memory's

Nothing in it shrinks when M grows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .problem import Problem

Work = tuple[Any, Any, Any, Any]
"""What a launch has to do, us. For the fits each may be an array, of many launches.

    fixed_us    launch, cluster, ends of output tiles, reduction of partials: what nothing hides
    compute_us  the busiest SM computes
    memory_us   the bytes of the problem at the memory's bandwidth
    unhidden    part of the shorter of these two that is not hidden behind the longer

A plain tuple: the search makes some for each new problem.
"""


def total_us(work: Work, maximum: Callable[[Any, Any], Any] = max) -> Any:
    """Estimated time of a launch, us. maximum: np.maximum where the work is of arrays."""
    fixed_us, compute_us, memory_us, unhidden = work
    longer_us = maximum(compute_us, memory_us)
    return fixed_us + longer_us + unhidden * (compute_us + memory_us - longer_us)


def column_bytes(problem: Problem) -> int:
    """Packed weights, scales and zeros of a column."""
    scale_rows = (1 if problem.per_channel else -(-problem.k // problem.group_size)) * (2 if problem.zeros else 1)
    return problem.k_padded * problem.bits // 8 + 2 * scale_rows


def moved_bytes(m: int, n: int, k: int, of_column: int, x_bytes: int = 2) -> int:
    """Bytes that must move: packed weights, scales, zeros, x and y, each once. of_column: see `column_bytes`."""
    return n * of_column + m * (x_bytes * k + 2 * n)


def problem_bytes(problem: Problem) -> int:
    """`moved_bytes` of a problem."""
    return moved_bytes(problem.m, problem.n, problem.k, column_bytes(problem), problem.x_bytes)
