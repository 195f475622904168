"""candidates -> legal -> cheapest.

`candidates` and `legal` (legal.py) are the definition; `select` gives the cheapest of them by cost.py, and is written
to be quick: a new shape costs some microseconds (what a kernel's cost does not depend on is computed once per
architecture), a shape seen before a dictionary look-up.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

from .calibration import LAUNCH_US, REDUCE_LAUNCH_US, REDUCE_TB_S
from .configs import CONFIGS, MAX_SPLIT_K, KernelConfig
from .cost import ctas_per_sm, dense_us, is_calibrated, kernel_cost, machine, problem_bytes
from .legal import is_worth_dequantizing, runs_on, worth_a_look
from .problem import Problem, layouts_of
from .select_tiled import select_tiled
from .slices import longest_k

_ALL_OF_M = 2**31
_BOUND = operator.itemgetter(0)


class _Kernel(NamedTuple):
    """What the search needs of one kernel, for one format and architecture."""

    splits: tuple[KernelConfig, ...]  # with split_k = 1, 2, ...
    tile_m: int  # rows of a tile; _ALL_OF_M for the GEMV
    tile_n: int
    max_m: int
    part_k: int  # k that split-K hands out
    parts_per_unit: int  # part_k in one unit of work
    resident: int
    unit_us: float
    latency_us: float
    full_us: float  # a unit when `resident` CTAs share the SM
    fixed_us: float
    us_per_k: float  # of one CTA on a busy SM


@functools.cache
def _kernels(format: str, arch: int, layout: str) -> tuple[_Kernel, ...]:
    gpu = machine(arch)
    found = []
    for config in CONFIGS:
        if format not in config.formats or not runs_on(config, arch, layout) or config.is_dense:
            continue
        if config.smem_bytes(format) > gpu.smem_bytes:
            continue
        if not is_calibrated(config, format) or not worth_a_look(config):
            continue  # (a kernel not measured yet is compiled, but not chosen: see fit.py)
        cost = kernel_cost(config, format)
        gemv = config.family == "gemv"
        resident = ctas_per_sm(config, format, arch, cost.registers)
        unit_us, latency_us = cost.unit_us / gpu.speed, cost.latency_us / gpu.speed
        part_k = config.piece_k
        found.append(
            _Kernel(
                splits=tuple(config.with_split_k(s) for s in range(1, MAX_SPLIT_K + 1)),
                tile_m=_ALL_OF_M if gemv else config.block_m,
                tile_n=config.block_n,
                max_m=config.max_m,
                part_k=part_k,
                parts_per_unit=config.block_k // part_k,
                resident=resident,
                unit_us=unit_us,
                latency_us=latency_us,
                full_us=max(latency_us, resident * unit_us),
                fixed_us=cost.fixed_us / gpu.speed,
                us_per_k=unit_us / config.block_k,
            )
        )
    return tuple(k for k in found if not any(_dominates(other, k) for other in found))


def _dominates(a: _Kernel, b: _Kernel) -> bool:
    """Whether `a`, of the same tile as `b`, is at least as quick in every respect: `b` need not be looked at."""
    same = a[1:6] == b[1:6]  # tile, rows, parts of K
    costs = [(a.unit_us, b.unit_us), (a.latency_us, b.latency_us), (a.fixed_us, b.fixed_us), (-a.resident, -b.resident)]
    return same and all(x <= y for x, y in costs) and any(x < y for x, y in costs)


@functools.lru_cache(maxsize=65536)
def select(
    m: int,
    n: int,
    k: int,
    format: str,
    group_size: int,
    arch: int,
    sm_count: int,
    layout: str | None = None,
    zeros: bool = False,
) -> KernelConfig:
    """The configuration that `gemm` runs for y [m, n] = x [m, k] @ w [k, n], but for tuned tables; needs no GPU.

    format is one of problem.FORMATS; group_size in elements of K, -1 per channel; arch the compute capability as an
    integer (80, 90); sm_count any; layout that of the packed weight, None for the one that `preprocess` makes for arch.
    Raises ValueError naming the argument for values out of range, and for a layout that arch's kernels do not read.
    """
    problem = Problem(m, n, k, format, group_size, arch, sm_count, layout or "", zeros)
    if problem.layout not in layouts_of(arch):
        read = ", ".join(layouts_of(arch))
        raise ValueError(f"layout must be one that sm{arch} reads, {read}, got {problem.layout!r}")
    search = select_tiled if problem.layout == "tiled" else _select_waves
    dense = _dense(problem) if is_worth_dequantizing(problem) else None
    best = search(problem, dense_us(dense, problem) if dense else float("inf")) or dense or _dense(problem)
    if best is None:  # too many rows for gemm_sm90 or none of its kernels, and K too long for slices
        most_rows = max(
            (c.max_m for c in CONFIGS if c.family == "gemm_sm90" and problem.format in c.formats), default=0
        )
        name, most, value = ("m", most_rows, m) if most_rows else ("k", longest_k(), k)
        raise ValueError(f"{name}: expected at most {most}, got {value}")
    return best


def _dense(problem: Problem) -> KernelConfig | None:
    """What dequantizes this for cuBLAS."""
    config = _dense_config(problem.format, problem.arch, problem.layout)
    return config if problem.k <= longest_k() else None


@functools.cache
def _dense_config(format: str, arch: int, layout: str) -> KernelConfig | None:
    of_format = (c for c in CONFIGS if c.is_dense and format in c.formats)
    return next((c for c in of_format if runs_on(c, arch, layout)), None)


def _select_waves(problem: Problem, limit_us: float) -> KernelConfig | None:
    """Among the kernels that cost.waves_us describes; None if none takes less than limit_us."""
    m, n, arch, sm_count = problem.m, problem.n, problem.arch, problem.sm_count
    k_padded = problem.k_padded
    memory_us = problem_bytes(problem) / (machine(arch).tb_s * 1e6)
    # No split_k beats the SMs' throughput. Kernels go by that bound, until it is above the best time found.
    bounded = []
    for kernel in _kernels(problem.format, arch, problem.layout):
        if m <= kernel.max_m:
            tiles = -(-m // kernel.tile_m) * -(-n // kernel.tile_n)
            bounded.append((kernel.fixed_us + tiles * k_padded * kernel.us_per_k / sm_count, tiles, kernel))
    bounded.sort(key=_BOUND)
    reduce_us, partial_us = REDUCE_LAUNCH_US, 2 * m * n * 4 / (REDUCE_TB_S * 1e6)
    best, best_split_k, best_us = None, 1, limit_us - LAUNCH_US
    for bound_us, tiles, kernel in bounded:
        if bound_us >= best_us:
            break
        _, _, _, _, part_k, parts_per_unit, resident, unit_us, latency_us, full_us, fixed_us, _ = kernel
        parts = -(-k_padded // part_k)
        slots = sm_count * resident
        for split_k in range(1, min(MAX_SPLIT_K, parts, 1 + 2 * slots // tiles) + 1):  # no more than the GPU can hold
            per_part = -(-parts // split_k)
            if (split_k - 1) * per_part >= parts:
                continue  # a part would be empty
            # waves_us and reduction_us of cost.py, inline: this loop is the time of a new shape.
            work = -(-per_part // parts_per_unit)
            ctas = tiles * split_k
            full = ctas // slots
            us = full * (fixed_us + work * full_us)
            rest = ctas - full * slots
            if rest:
                busy_us = -(-rest // sm_count) * unit_us
                us += fixed_us + work * (busy_us if busy_us > latency_us else latency_us)
            if us < memory_us:
                us = memory_us
            if split_k > 1:
                us += reduce_us + split_k * partial_us
            if us < best_us:
                best, best_split_k, best_us = kernel, split_k, us
    return None if best is None else best.splits[best_split_k - 1]
