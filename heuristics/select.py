"""candidates -> bound -> cheapest: the configuration that `gemm` runs.

What M and N do not change of a configuration is computed once (space.py). The search then takes kernels in an order
that is likely to begin with the best, and leaves those whose lower bound is above the best time found. Few are
estimated: a new shape costs some microseconds, one seen before a dictionary look-up.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import overload

from .arch import Arch, parse_arch
from .configs import CONFIGS, KernelConfig
from .cost import moved_bytes, problem_bytes, total_us
from .families.base import Split
from .legal import candidates, check_kernel_group_size
from .problem import Problem
from .slices import longest_k
from .space import AtK, Order, Row, space_at, space_for

TAIL_MIN_M = 64
"""Rows of x from which `select` looks at two launches."""

_TYPES = (int, int, int, int, int, str)  # of m, n, k, group_size, sm_count and format
_LEAST_GAIN = 0.97  # less of a gain by two launches is less than the model's error
_LIKELY_PAIRS, _LIKELY = 3, 1.1  # and the estimate of such a pair, in those of one launch
_FIRSTS = 1  # launch that is looked at for each pair wanted, by a bound of the time of both


def search(
    at: AtK, rows: Sequence[Row], by_m: bool, m: int, n: int, total_bytes: float, limit_us: float
) -> tuple[Split | None, float]:
    """The quickest configuration of one launch and its time, if that is less than limit_us.

    Of equal times that of the kernel that computes for less. rows, by_m: see `Order`.
    """
    space, k, splits_of = at.space, at.k_padded, at.splits
    sm_count, panel = space.sm_count, space.panel_columns
    outputs, columns = m * n, -(-n // panel) * panel
    counted = k * outputs if by_m else k * n
    best, best_us, best_compute_us = None, limit_us, 0.0
    for rest_us, rest_column_us, bound_us, column_us, byte_us, looked in rows:
        if rest_us + counted * rest_column_us > best_us:
            break
        memory_us = total_bytes * byte_us
        if bound_us + counted * column_us > best_us or bound_us + memory_us > best_us:
            continue
        number, min_m, max_m, tile_m, tile_n, kernel, bounds, _, _ = looked
        launch_us, end_us, token_us, copy_us, start_us, k_us, last_us, _, unhidden = bounds
        tiles = -(-m // tile_m) * -(-columns // tile_n)
        compute_us = start_us + tiles * k * k_us
        if bound_us + compute_us > best_us or not min_m <= m <= max_m:
            continue
        # At least, whatever split_k: the ends of tiles, and what is beside all that is fixed.
        end_us += m * token_us
        ends_us = end_us * tiles / sm_count if tiles > sm_count else end_us
        both_us = total_us((0.0, compute_us, memory_us, unhidden))
        bound_us = launch_us + ends_us + both_us
        if bound_us >= best_us and (bound_us > best_us or compute_us >= best_compute_us):
            continue
        least_us, unhidden_us = ends_us + both_us, unhidden * memory_us
        rest_us, copy_us = ends_us + unhidden_us, copy_us * m * k
        for split in splits_of[number] or at.make(looked):
            parts, slots, most_tiles, most_m, fixed_us, output_us, share_us, ends, wave_us, tile_us, turns, _, _ = split
            fixed_us += outputs * output_us
            if fixed_us + least_us > best_us or fixed_us + rest_us + tiles * share_us > best_us or tiles > most_tiles:
                break
            waves = -(-tiles * parts // slots)
            ends *= waves
            if ends < 1.0:
                fixed_us += end_us
            elif m > most_m:
                continue
            else:
                fixed_us += ends * end_us
            bound_us = fixed_us + waves * wave_us + tiles * tile_us + unhidden_us
            if last_us:
                bound_us -= turns * last_us[-(-(tiles * parts - (waves - 1) * slots) // sm_count)]
            elif copy_us:
                ctas = -(-tiles // waves) * split[-1].split_k
                bound_us += copy_us * (ctas if ctas < tiles else tiles)
            if bound_us > best_us or fixed_us + both_us > best_us:
                continue
            us = total_us(kernel.work(split, m, n, tiles, total_bytes))
            if (us < best_us or (us == best_us and compute_us < best_compute_us)) and kernel.fits(split, m, n):
                best, best_us, best_compute_us = split, us, compute_us
    return best, best_us


def search_pairs(
    at: AtK, order: Order, m: int, n: int, limit_us: float, count: int
) -> list[tuple[float, KernelConfig]]:
    """The quickest configurations of two launches, and their times: at most `count`, below limit_us, the best first.

    A first launch takes its full waves of CTAs, the best of all others the columns that are left. A few first launches
    are looked at, those with the least bound for both.
    """
    space, k, of_column, splits_of = at.space, at.k_padded, at.column_bytes, at.splits
    sm_count, overlap_us = space.sm_count, space.tail_overlap_us
    tail_us = space.tail_us - overlap_us
    found: list[tuple[float, KernelConfig]] = []
    if space.tail_us + tail_us + (m * n if order.by_m else n) * k * order.pair_column_us >= limit_us:
        return found
    column_us, most, first_limit_us = m * k * space.output_us, _FIRSTS * count, limit_us
    firsts: list[tuple[float, float, int, KernelConfig]] = []
    for looked in order.firsts:
        number, _, max_m, tile_m, tile_n, kernel, bounds, first_parts, _ = looked
        row_tiles = -(-m // tile_m)
        # Its columns take more than the least. Fewer are left than a wave and a column of tiles have.
        more_us = row_tiles * k * bounds.k_us / tile_n - column_us
        bound_us = bounds.launch_us + bounds.end_us + tail_us + n * column_us
        if bound_us + (n - (sm_count // row_tiles + 1) * tile_n) * more_us >= first_limit_us or m > max_m:
            continue
        all_tiles = row_tiles * -(-n // tile_n)
        for split in (splits_of[number] or at.make(looked))[:first_parts]:
            _, slots, _, _, fixed_us, _, _, ends, wave_us, tile_us, _, _, config = split
            column_tiles = all_tiles // slots * slots // row_tiles  # whole columns of them
            columns, tiles = column_tiles * tile_n, column_tiles * row_tiles
            left = n - columns
            if columns == 0 or left <= 0:
                continue
            rest_us = tail_us + left * column_us
            wave_us += ends * bounds.end_us
            if fixed_us + -(-tiles // slots) * wave_us + tiles * tile_us + rest_us >= first_limit_us:
                continue
            us = total_us(kernel.work(split, m, columns, tiles, moved_bytes(m, columns, at.k, of_column)))
            if us + rest_us < first_limit_us:
                firsts.append((us + rest_us, us - overlap_us, left, config))
                firsts.sort(key=_BOUND)
                del firsts[most:]
                if len(firsts) == most:
                    first_limit_us = firsts[-1][0]
    for bound_us, us, left, config in firsts:
        if bound_us >= limit_us:
            break
        left_bytes = moved_bytes(m, left, at.k, of_column)
        tail, left_us = search(at, order.pair_rows, order.by_m, m, left, left_bytes, limit_us - us)
        if tail is not None:
            found.append((us + left_us, config.with_tail(tail[-1])))
            found.sort(key=_BOUND)
            del found[count:]
            if len(found) == count:
                limit_us = found[-1][0]
    return found


def two_launches(problem: Problem, limit_us: float = math.inf, count: int = 1) -> list[tuple[float, KernelConfig]]:
    """`search_pairs` for a problem."""
    at = space_for(problem)
    return search_pairs(at, at.space.order(problem.m), problem.m, problem.n, limit_us, count)


def likely_pairs(problem: Problem) -> list[KernelConfig]:
    """Of the many configurations of two launches the few worth measuring: the quickest, if they might be the best."""
    m, n, at = problem.m, problem.n, space_for(problem)
    if m < TAIL_MIN_M:
        return []
    order = at.space.order(m)
    _, one_us = search(at, order.pair_rows, order.by_m, m, n, problem_bytes(problem), math.inf)
    return [config for _, config in two_launches(problem, _LIKELY * one_us, _LIKELY_PAIRS)]


@overload
def select(m: Problem) -> KernelConfig: ...


@overload
def select(
    m: int,
    n: int,
    k: int,
    format: str,
    group_size: int,
    arch: Arch,
    sm_count: int,
    layout: str | None = None,
    zeros: bool = False,
) -> KernelConfig: ...


@functools.lru_cache(maxsize=65536, typed=True)
def select(
    m: int | Problem,
    n: int = 0,
    k: int = 0,
    format: str = "",
    group_size: int = 0,
    arch: Arch = 0,
    sm_count: int = 0,
    layout: str | None = None,
    zeros: bool = False,
) -> KernelConfig:
    """The configuration that `gemm` runs, but for tuned tables; needs no GPU: select(problem), or what a problem has.

    y [m, n] = x [m, k] @ w [k, n]. format is one of problem.FORMATS; group_size in elements of K, -1 per channel; arch
    that of the GPU in any spelling that `parse_arch` knows (90, "sm90", (9, 0)); sm_count any; layout that of the
    packed weight, None for the one that `preprocess` makes for arch. Raises ValueError naming the argument for values
    out of range, and for a layout that arch's kernels do not read; TypeError for a size that is no int.
    """
    if isinstance(m, Problem):
        p = m
        return select(p.m, p.n, p.k, p.format, p.group_size, p.arch, p.sm_count, p.layout, p.zeros)
    types = (type(m), type(n), type(k), type(group_size), type(sm_count), type(format))
    if types != _TYPES or m < 1 or n < 1:
        Problem(m, n, k, format, group_size, parse_arch(arch), sm_count, layout or "", zeros)  # it says which
    at = space_at(k, format, group_size, arch, sm_count, layout, zeros)
    order = at.space.order(m)
    one, us = search(at, order.rows, order.by_m, m, n, moved_bytes(m, n, k, at.column_bytes), math.inf)
    best = None if one is None else one[-1]
    if m >= TAIL_MIN_M and order.firsts:
        for _, pair in search_pairs(at, order, m, n, _LEAST_GAIN * us, 1):
            best = pair
    return best or _last_resort(Problem(m, n, k, format, group_size, parse_arch(arch), sm_count, layout or "", zeros))


def _last_resort(problem: Problem) -> KernelConfig:
    """For what no kernel computes that the search looks at. Raises ValueError where nothing else does either."""
    p = problem
    if (unfused := next((config for config in candidates(p) if config.unfused), None)) is not None:
        return unfused
    check_kernel_group_size(p.group_size, p.k, p.arch, p.layout)
    # Too many rows or no fused kernel, and K too long for slices.
    of_format = [
        c
        for c in CONFIGS
        if p.format in c.formats
        and c.layout == p.layout
        and c.groups_of_16 == (p.group_step == 16)
        and c.is_verified
        and not c.unfused
    ]
    most_rows = max((config.max_m for config in of_format), default=0)
    name, most, value = ("m", most_rows, p.m) if most_rows else ("k", longest_k(), p.k)
    raise ValueError(f"{name}: expected at most {most}, got {value}")


_BOUND = operator.itemgetter(0)
