"""The cheapest configuration for tiled weights: the kernels of Hopper.

The times are those of cost.decode_us and cost.gemm_sm90_us, written out so that a new shape costs some microseconds:
what does not depend on the problem is computed once, and a kernel is left when its bound is above the best time found.
"""

from __future__ import annotations

import bisect
import functools
import math
import operator
from typing import NamedTuple

from .calibration_sm90 import DECODE_SM90, GEMM_SM90
from .configs import CONFIGS, MAX_TOKEN_TILES, KernelConfig, tiled_columns
from .cost import (
    TILE_PIECE_BYTES,
    cluster_slots,
    cluster_us,
    decode_turns,
    is_calibrated,
    machine,
    overlapped_us,
    problem_bytes,
)
from .legal import CLUSTERS, runs_on
from .problem import Problem

TWO_LAUNCHES_MIN_M = 64
"""Rows of x from which `select` looks at two launches."""


class _Split(NamedTuple):
    split_k: int
    config: KernelConfig
    slots: int  # clusters at once
    fixed_us: float  # launch and cluster
    smem_bytes: int  # without what grows with M and K
    token_bytes: int  # of shared memory for one token, without its x


class _Decode(NamedTuple):
    """What the search needs of one kernel of decode_sm90, for one GPU, format and size of groups."""

    splits: tuple[_Split, ...]  # by fixed_us
    max_m: int
    block_n: int
    piece_k: int
    warps_k: int
    round_us: float  # all warps along K multiply a piece by the columns of a unit
    stream_us: float  # an SM reads a piece of a unit
    x_us: float  # an SM copies a piece of x, one token
    end_us: float


class _GemmSm90(NamedTuple):
    splits: tuple[_Split, ...]  # by fixed_us
    block_m: int
    block_n: int
    piece_k: int
    unit_us: float
    end_us: float


@functools.cache
def _decode_kernels(
    format: str, arch: int, sm_count: int, group_step: int, scales: bool, zeros: bool
) -> tuple[_Decode, ...]:
    """group_step: 128, 64 or 32, the largest that divides the group size."""
    cost, found = DECODE_SM90, []
    of_format = [c for c in CONFIGS if c.family == "decode_sm90" and format in c.formats and is_calibrated(c, format)]
    for config in of_format if of_format and runs_on(of_format[0], arch, "tiled") else ():
        row_tiles = config.block_n // 16
        warps_k = config.block_k // config.piece_k
        ring_bytes = config.decode_ring_bytes(group_step, scales, zeros)
        splits = [config.with_split_k(s) for s in CLUSTERS]
        times = cost.kernels[config.kernel, format]
        found.append(
            _Decode(
                splits=tuple(
                    _Split(
                        c.split_k,
                        c,
                        cluster_slots(sm_count, c.split_k),
                        cost.fixed_us + cluster_us(cost, c.split_k),
                        128 + config.table_bytes(format) + ring_bytes,
                        c.decode_sum_bytes() + 16,
                    )
                    for c in splits
                ),
                max_m=config.max_m,
                block_n=config.block_n,
                piece_k=config.piece_k,
                warps_k=warps_k,
                round_us=warps_k * row_tiles * times.unit_us,
                stream_us=row_tiles * TILE_PIECE_BYTES / (cost.sm_kb_us * 1e3),
                x_us=config.piece_k * 2 / (cost.x_kb_us * 1e3),
                end_us=times.end_us,
            )
        )
    return tuple(found)


@functools.cache
def _gemm_sm90_kernels(format: str, arch: int, sm_count: int, per_channel: bool, zeros: bool) -> tuple[_GemmSm90, ...]:
    cost, found = GEMM_SM90, []
    limit_bytes = machine(arch).smem_bytes
    for config in CONFIGS:
        is_of = config.family == "gemm_sm90" and format in config.formats
        if is_of and is_calibrated(config, format) and runs_on(config, arch, "tiled"):
            splits = []
            for c in (config.with_split_k(s) for s in CLUSTERS if s <= config.max_split_k):
                smem_bytes = c.gemm_sm90_smem_bytes(format, per_channel, zeros)
                if smem_bytes <= limit_bytes:
                    fixed_us = cost.fixed_us + cluster_us(cost, c.split_k)
                    splits.append(_Split(c.split_k, c, cluster_slots(sm_count, c.split_k), fixed_us, smem_bytes, 0))
            times = cost.kernels[config.kernel, format]
            found.append(_GemmSm90(tuple(splits), config.block_m, config.block_n, config.piece_k, *times))
    return tuple(found)


class _ForK(NamedTuple):
    """A kernel of gemm_sm90, and what K alone decides of it."""

    splits: tuple[tuple[int, float, float, KernelConfig], ...]  # clusters at once, a tile's work and fixed us, config
    block_m: int
    block_n: int
    tile_us: float  # a tile's work, of all SMs
    end_us: float
    least_us: float  # beyond the memory's time
    output_us: float  # a tile's work, of all SMs, for each output


@functools.lru_cache(maxsize=64)  # a model has a few K
def _gemm_sm90_for_k(
    format: str, arch: int, sm_count: int, per_channel: bool, zeros: bool, k_padded: int
) -> tuple[_ForK, ...]:
    found = []
    for kernel in _gemm_sm90_kernels(format, arch, sm_count, per_channel, zeros):
        pieces = -(-k_padded // kernel.piece_k)
        splits = tuple(
            (s.slots, -(-pieces // s.split_k) * kernel.unit_us, s.fixed_us, s.config)
            for s in kernel.splits
            if (s.split_k - 1) * -(-pieces // s.split_k) < pieces
        )
        least_us = kernel.splits[0].fixed_us + kernel.end_us
        tile_us = pieces * kernel.unit_us / sm_count
        output_us = tile_us / (kernel.block_m * kernel.block_n)
        found.append(_ForK(splits, kernel.block_m, kernel.block_n, tile_us, kernel.end_us, least_us, output_us))
    return tuple(found)


_Key = tuple[str, int, int, bool, bool, int]


class _First(NamedTuple):
    """A kernel of gemm_sm90 as the first of two launches, for one K."""

    block_m: int
    block_n: int
    slots: int  # clusters at once
    work_us: float  # of a tile
    fixed_us: float
    end_us: float
    config: KernelConfig


@functools.lru_cache(maxsize=64)
def _firsts_for_k(
    format: str, arch: int, sm_count: int, per_channel: bool, zeros: bool, k_padded: int
) -> tuple[tuple[_First, ...], float, float]:
    """First launches, the least time of all SMs for an output, and that of a launch beyond its outputs, us."""
    kernels = _gemm_sm90_for_k(format, arch, sm_count, per_channel, zeros, k_padded)
    firsts = tuple(
        _First(k.block_m, k.block_n, slots, work_us, fixed_us, k.end_us, config)
        for k in kernels
        if k.block_m >= TWO_LAUNCHES_MIN_M  # tiles of fewer tokens are slow at waves of many
        for slots, work_us, fixed_us, config in k.splits[: 2 if _shares_as_first(k) else 1]
    )
    output_us = min((k.output_us for k in kernels), default=math.inf)
    return firsts, output_us, min((k.least_us for k in kernels), default=math.inf)


def _shares_as_first(kernel: _ForK) -> bool:
    """Whether K may be in two parts in a first launch, whose waves are of many columns: in large tiles, not loops."""
    return kernel.block_m >= 128 and not kernel.splits[0][3].loops


def select_tiled(problem: Problem, limit_us: float) -> KernelConfig | None:
    """Among the kernels of Hopper; None if none takes less than limit_us."""
    best, best_us = None, limit_us
    key, total_bytes = _key(problem), problem_bytes(problem)
    if problem.m <= _DECODE_MAX_M:
        best, best_us = _search_decode(problem, total_bytes, best_us)
    one, one_us = _search_gemm(_gemm_sm90_for_k(*key), problem.m, problem.n, total_bytes, best_us)
    if one is not None:
        best, best_us = one, one_us
    if problem.m >= TWO_LAUNCHES_MIN_M:
        for _, two in _search_two(problem, key, total_bytes, _LEAST_GAIN * best_us, 1):
            best = two
    return best


def _search_decode(problem: Problem, total_bytes: int, limit_us: float) -> tuple[KernelConfig | None, float]:
    """The quickest of decode_sm90 and its time, if that is less than limit_us: cost.decode_us, inline."""
    m, k_padded, sm_count = problem.m, problem.k_padded, problem.sm_count
    per_channel, zeros = problem.per_channel, problem.zeros
    best, best_us = None, limit_us
    columns, limit_bytes = tiled_columns(problem.n), machine(problem.arch).smem_bytes
    unhidden, memory_us = DECODE_SM90.unhidden, total_bytes / (DECODE_SM90.tb_s * 1e6)
    group_size = k_padded if per_channel else problem.group_size
    group_step = 128 if group_size % 128 == 0 else 64 if group_size % 64 == 0 else 32
    for kernel in _decode_kernels(problem.format, problem.arch, sm_count, group_step, not per_channel, zeros):
        splits, max_m, block_n, piece_k, warps_k, round_us, stream_us, x_us, end_us = kernel
        if m > max_m:
            continue
        units = -(-columns // block_n)
        all_pieces = -(-k_padded // piece_k)
        rounds = -(-all_pieces // warps_k)
        x_us *= m / sm_count
        end_us += m * DECODE_SM90.token_us
        # No split reads less than an SM's share of the columns, nor multiplies less.
        share_us = units / sm_count * max(all_pieces * stream_us, rounds * round_us)
        bound_us = overlapped_us(memory_us, share_us, unhidden)
        for split_k, config, slots, fixed_us, smem, token_bytes in splits:
            if fixed_us + bound_us + end_us >= best_us:
                break
            if (split_k - 1) * -(-all_pieces // split_k) < all_pieces:
                cluster_units = -(-units // slots)
                run_pieces = -(-(cluster_units * all_pieces) // split_k)
                fixed_us += decode_turns(run_pieces, all_pieces, cluster_units) * end_us
                if fixed_us + bound_us >= best_us:
                    continue
                x_pieces = run_pieces if run_pieces < all_pieces else all_pieces
                us, stream = -(-run_pieces * rounds // all_pieces) * round_us, run_pieces * stream_us
                ctas = -(-units // cluster_units) * split_k
                us = (us if us > stream else stream) + x_pieces * ctas * x_us
                us = us + unhidden * memory_us if us > memory_us else memory_us + unhidden * us
                us += fixed_us
                if us < best_us and smem + m * (token_bytes + x_pieces * piece_k * 2) <= limit_bytes:
                    best, best_us = config, us
    return best, best_us


def _search_gemm(
    kernels: tuple[_ForK, ...], m: int, n: int, total_bytes: float, limit_us: float
) -> tuple[KernelConfig | None, float]:
    """The quickest of gemm_sm90 and its time, if that is less than limit_us: cost.gemm_sm90_us, inline."""
    idle, unhidden, memory_us = GEMM_SM90.idle, GEMM_SM90.unhidden, total_bytes / (GEMM_SM90.tb_s * 1e6)
    best, best_us = None, limit_us
    outputs = m * n
    # Those likely to be the best first. The list goes from few tokens a tile to many; begin with the tile that holds
    # all tokens, and end with smaller ones.
    if m <= 32:
        order = kernels
    else:
        fitting = bisect.bisect_left(kernels, m, key=_BLOCK_M) if m <= 256 else len(kernels)
        order = kernels[fitting:] + kernels[fitting - len(kernels) - 1 :: -1]
    for parts, block_m, block_n, tile_us, end_us, least_us, output_us in order:
        room_us = best_us - least_us
        if outputs * output_us >= room_us or memory_us >= room_us or m > MAX_TOKEN_TILES * block_m:
            continue
        tiles = -(-m // block_m) * -(-n // block_n)
        bound_us = tiles * tile_us
        if bound_us < memory_us:
            bound_us = memory_us
        if bound_us >= room_us:
            continue
        for slots, work_us, fixed_us, config in parts:
            turns = -(-tiles // slots)
            fixed_us += turns * end_us
            if fixed_us + bound_us >= best_us:
                break  # a larger cluster has more turns, and more that is fixed
            missing = turns * slots - tiles  # in the last wave
            us = (turns - idle * missing / slots) * work_us if missing else turns * work_us
            us = us + unhidden * memory_us if us > memory_us else memory_us + unhidden * us
            us += fixed_us
            if us < best_us:
                best, best_us = config, us
    return best, best_us


def two_launches(problem: Problem, limit_us: float = math.inf, count: int = 1) -> list[tuple[float, KernelConfig]]:
    """The quickest configurations of two launches, and their times: at most `count`, below limit_us, the best first.

    A first launch takes its full waves of CTAs, the best of all others the columns that are left. A few first launches
    are looked at, those with the least bound for both.
    """
    return _search_two(problem, _key(problem), problem_bytes(problem), limit_us, count)


def _search_two(
    problem: Problem, key: _Key, total_bytes: int, limit_us: float, count: int
) -> list[tuple[float, KernelConfig]]:
    m, n = problem.m, problem.n
    all_firsts, output_us, least_us = _firsts_for_k(*key)
    found: list[tuple[float, KernelConfig]] = []
    if least_us + m * n * output_us >= limit_us:
        return found
    x_bytes = 2 * m * problem.k
    column_bytes = (total_bytes - x_bytes) // n
    idle, unhidden, bytes_per_us = GEMM_SM90.idle, GEMM_SM90.unhidden, GEMM_SM90.tb_s * 1e6
    firsts = []
    for block_m, block_n, slots, work_us, fixed_us, end_us, config in all_firsts:
        token_tiles = -(-m // block_m)
        waves = token_tiles * -(-n // block_n) // slots
        if not waves or waves * work_us >= limit_us:
            continue
        first_tiles = waves * slots // token_tiles
        columns = first_tiles * block_n
        left = n - columns
        if not columns or left <= 0 or token_tiles > MAX_TOKEN_TILES:
            continue
        # cost.estimate_us, inline.
        first_tiles *= token_tiles
        turns = -(-first_tiles // slots)
        us = (turns - idle * (turns * slots - first_tiles) / slots) * work_us
        memory_us = (x_bytes + column_bytes * columns) / bytes_per_us
        us = us + unhidden * memory_us if us > memory_us else memory_us + unhidden * us
        us += fixed_us + turns * end_us - GEMM_SM90.fixed_us
        bound_us = us + least_us + m * left * output_us
        if bound_us < limit_us:
            firsts.append((bound_us, us, left, config))
    firsts.sort(key=_US)
    for bound_us, us, left, config in firsts[: _FIRSTS * count]:
        if bound_us >= limit_us:
            break
        rest, rest_us = _search_gemm(_gemm_sm90_for_k(*key), m, left, x_bytes + column_bytes * left, limit_us - us)
        if rest is not None:
            found.append((us + rest_us, config.with_rest(rest)))
            found.sort(key=_US)
            del found[count:]
            if len(found) == count:
                limit_us = found[-1][0]
    return found


def likely_pairs(problem: Problem) -> list[KernelConfig]:
    """Of the many configurations of two launches the few worth measuring: the quickest, if they might be the best."""
    if problem.layout != "tiled" or problem.m < TWO_LAUNCHES_MIN_M:
        return []
    kernels = _gemm_sm90_for_k(*_key(problem))
    _, one_us = _search_gemm(kernels, problem.m, problem.n, problem_bytes(problem), math.inf)
    return [config for _, config in two_launches(problem, _LIKELY * one_us, _LIKELY_PAIRS)]


def _key(problem: Problem) -> _Key:
    """What `_gemm_sm90_for_k` and `_firsts_for_k` go by."""
    p = problem
    return p.format, p.arch, p.sm_count, p.per_channel, p.zeros, p.k_padded


_US = operator.itemgetter(0)
_BLOCK_M = operator.itemgetter(1)  # of _ForK
_LIKELY_PAIRS, _LIKELY = 3, 1.1  # and the estimate of such a pair, in those of one launch
_FIRSTS = 1  # launch that is looked at for each configuration wanted, by a bound of the time of both
_LEAST_GAIN = 0.97  # less of a gain by two launches is less than the model's error
_DECODE_MAX_M = max(c.max_m for c in CONFIGS if c.family == "decode_sm90")
