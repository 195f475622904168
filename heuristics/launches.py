"""What each launch of a configuration computes: one of all columns, or one of full waves and a tail."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from .cost import total_us
from .families import KernelConfig
from .machine import resident_clusters
from .problem import Problem


def first_columns(config: KernelConfig, problem: Problem) -> int:
    """Columns of the first of two launches, which computes its full waves. From n on nothing is left."""
    clusters, token_tiles = resident_clusters(problem.sm_count, config.split_k), -(-problem.m // config.block_m)
    tiles = config.rules.tiles(config, problem.m, problem.n)
    return tiles // clusters * clusters // token_tiles * config.block_n


def has_tail(config: KernelConfig, problem: Problem) -> bool:
    """Whether a configuration is two launches, of a family that takes a tail and both with columns to compute."""
    tail = config.tail
    return (
        tail is not None
        and tail.tail is None
        and config.family == tail.family
        and config.rules.takes_tail
        and problem.m <= config.max_m
        and 0 < first_columns(config, problem) < problem.n
    )


def launches(config: KernelConfig, problem: Problem) -> list[tuple[KernelConfig, Problem]]:
    """What each launch of a legal configuration computes, from the first column to the last."""
    if config.tail is None:
        return [(config, problem)]
    columns = first_columns(config, problem)
    return [
        (config.with_tail(None), replace(problem, n=columns)),
        (config.tail, replace(problem, n=problem.n - columns)),
    ]


def estimate_us(config: KernelConfig, problem: Problem, order: Hashable = None) -> float:
    """Estimated time of a legal, calibrated configuration, us: of a launch (with its reduction), or of two.

    order: the class that it computes in, in the batch-invariant mode.
    """
    us = sum(total_us(c.rules.work(c, p, order)) for c, p in launches(config, problem))
    return us if config.tail is None else us - config.rules.tail_overlap_us


def is_calibrated(config: KernelConfig, format: str) -> bool:
    """Whether h200.py has the constants of a kernel."""
    return config.rules.is_calibrated(config, format)
