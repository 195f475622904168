"""The configuration that `gemm` runs: of all legal ones of one launch, and of pairs of launches, the cheapest.

The kernels of a GPU, a format and a kind of scales are kept. For a new problem each has a lower bound of its time: the
search goes through them in the order of these bounds, until they are above the best time found.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import overload

from .arch import Arch, parse_arch
from .configs import CONFIGS, FP8_CONFIGS, KernelConfig
from .cost import column_bytes, moved_bytes, problem_bytes, total_us
from .families.base import Launch
from .invariant import check_class, computes_class, quickest_class
from .launches import first_columns
from .legal import candidates, check_kernel_group_size, considered, ever_legal, has_kernels
from .problem import FP8_LAYOUT, K_ALIGNMENT, Problem, is_read, layouts_of
from .slices import longest_k

TAIL_MIN_M = 64
"""Rows of x from which `select` considers two launches."""

_LEAST_GAIN = 0.97  # less of a gain by two launches is less than the model's error
_LIKELY_PAIRS, _LIKELY = 3, 1.1  # and the most that such a pair takes, in times of one launch
_MANY_BYTES = 1e15
_ROUNDING = 1 - 1e-6  # of bounds, which are of the same terms as times


class Kernel:
    """A kernel on one GPU, for one format and kind of scales: its launches, and what bounds their time from below.

    launches        (fixed_us, launch) for each split_k that `select` considers, fewest parts of K first: none is
                    quicker than its fixed_us
    fixed_us        the least of these
    start_us, k_us  see `Launch`
    byte_us         of the memory for one byte
    unhidden        see `Work`
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        config, first = launches[0].config, launches[0]
        family = config.rules
        self.min_m, self.max_m = family.min_m(config) or 1, config.max_m
        self.block_m, self.block_n = config.block_m, config.block_n
        self.takes_tail, self.tail_overlap_us = family.takes_tail, family.tail_overlap_us
        self.first_parts = family.first_parts(config)
        self.start_us = min(launch.start_us for launch in launches) * _ROUNDING
        self.k_us = min(launch.k_us for launch in launches) * _ROUNDING
        # The rest is asked of the model: of launches without bytes, and of one with so many that nothing else counts.
        self.launches = [(launch.work(1, 1, K_ALIGNMENT, 1, 0.0)[0] * _ROUNDING, launch) for launch in launches]
        self.fixed_us = min(fixed_us for fixed_us, _ in self.launches)
        _, _, memory_us, self.unhidden = first.work(1, 1, K_ALIGNMENT, 1, _MANY_BYTES)
        self.byte_us = memory_us / _MANY_BYTES * _ROUNDING


@functools.lru_cache(maxsize=256)
def kernels_of(
    format: str, arch: int, sm_count: int, layout: str, group_step: int, per_channel: bool, zeros: bool
) -> tuple[Kernel, ...]:
    """What `select` considers: the kernels that are calibrated, verified and legal for some M, N and K."""
    k = group_step if per_channel else 2 * group_step  # any with such groups
    problem = Problem(1, 1, k, format, -1 if per_channel else group_step, arch, sm_count, layout, zeros)
    launches: dict[str, list[Launch]] = {}
    for config in considered(problem):
        launches.setdefault(config.kernel, []).append(config.rules.launch(config, problem))
    return tuple(map(Kernel, launches.values()))


def kernels_for(problem: Problem) -> tuple[Kernel, ...]:
    """`kernels_of` a problem. Raises ValueError for a layout that its GPU's kernels do not read."""
    p = problem
    if not is_read(p.layout, p.arch):
        read = ", ".join(layouts_of(p.arch))
        raise ValueError(f"layout must be one that sm{p.arch} reads, {read}, got {p.layout!r}")
    if p.invariant:
        return invariant_kernels(replace(p, m=1))[1]
    return kernels_of(p.format, p.arch, p.sm_count, p.layout, p.group_step, p.per_channel, p.zeros)


def invariant_class(problem: Problem) -> Hashable:
    """The class of a problem's weight in the batch-invariant mode. Raises ValueError where it has none."""
    return invariant_kernels(replace(problem, m=1, invariant=True))[0]


@functools.lru_cache(maxsize=1024)
def invariant_kernels(problem: Problem) -> tuple[Hashable, tuple[Kernel, ...]]:
    """The class of a weight in the batch-invariant mode, and its kernels. problem.m: 1.

    Raises ValueError where no class has kernels for every M.
    """
    configs = considered(problem)
    kernels: dict[Hashable, tuple[Kernel, ...]] = {}
    for of in {config.rules.bits_class(config, problem) for config in configs} - {None}:
        launches: dict[str, list[Launch]] = {}
        for config in configs:
            if computes_class(config, problem, of):
                launches.setdefault(config.kernel, []).append(config.rules.launch(config, problem, of))
        kernels[of] = tuple(map(Kernel, launches.values()))

    def time_us(of: Hashable, m: int) -> float | None:
        best, us = _best(kernels[of], replace(problem, m=m))
        return None if best is None else us

    found = quickest_class(kernels, time_us)
    check_class(problem, found, kernels)
    return found, kernels[found]


def quickest(
    kernels: Iterable[Kernel], problem: Problem, limit_us: float = math.inf
) -> tuple[KernelConfig | None, float]:
    """The quickest configuration of one launch and its time, if that is less than limit_us.

    Of equal times the kernel wins that computes for less.
    """
    m, n, k, total_bytes = problem.m, problem.n, problem.k, problem_bytes(problem)
    bounded = []
    for kernel in kernels:
        if kernel.min_m <= m <= kernel.max_m:
            tiles = -(-m // kernel.block_m) * -(-n // kernel.block_n)
            compute_us = kernel.start_us + tiles * k * kernel.k_us
            beside_us = total_us((0.0, compute_us, total_bytes * kernel.byte_us, kernel.unhidden))
            bound_us = kernel.fixed_us + beside_us
            if bound_us < limit_us:
                bounded.append((bound_us, beside_us, compute_us, tiles, kernel))
    bounded.sort(key=operator.itemgetter(0))
    best, best_us, best_compute_us = None, limit_us, 0.0
    for bound_us, beside_us, compute_us, tiles, kernel in bounded:
        if bound_us > best_us:
            break
        for fixed_us, launch in kernel.launches:
            if tiles > launch.most_tiles:
                break
            if fixed_us + beside_us > best_us:
                continue
            us = total_us(launch.work(m, n, k, tiles, total_bytes))
            is_better = us < best_us or (us == best_us and compute_us < best_compute_us)
            if is_better and launch.config.rules.why_not_sizes(launch.config, problem) is None:
                best, best_us, best_compute_us = launch.config, us, compute_us
    return best, best_us


def _best(kernels: Sequence[Kernel], problem: Problem) -> tuple[KernelConfig | None, float]:
    """The quickest configuration of these kernels, of one launch or two, and its time."""
    best, us = quickest(kernels, problem)
    if problem.m >= TAIL_MIN_M:
        for pair_us, pair in two_launches(problem, _LEAST_GAIN * us, kernels=kernels):
            best, us = pair, pair_us
    return best, us


def two_launches(
    problem: Problem, limit_us: float = math.inf, count: int = 1, kernels: Sequence[Kernel] | None = None
) -> list[tuple[float, KernelConfig]]:
    """The quickest configurations of two launches, and their times: at most `count`, below limit_us, the best first.

    kernels: those of the problem, if they are there already.

    A first launch takes its full waves of CTAs, the best of all others the columns that are left. Of the first launches
    `count` are considered, with the least bounds for both.
    """
    m, n, k, of_column = problem.m, problem.n, problem.k, column_bytes(problem)
    kernels = [kernel for kernel in (kernels or kernels_for(problem)) if kernel.takes_tail]
    if not kernels:
        return []
    overlap_us = kernels[0].tail_overlap_us
    tail_us = min(kernel.fixed_us for kernel in kernels) - overlap_us
    column_us = m * k * min(kernel.k_us / (kernel.block_m * kernel.block_n) for kernel in kernels)
    firsts = []
    for kernel in kernels:
        for _, launch in kernel.launches:
            if launch.config.split_k > kernel.first_parts:
                break
            columns = first_columns(launch.config, problem)
            if 0 < columns < n and m <= kernel.max_m:
                tiles = -(-m // kernel.block_m) * columns // kernel.block_n
                us = total_us(launch.work(m, columns, k, tiles, moved_bytes(m, columns, k, of_column)))
                bound_us = us + tail_us + (n - columns) * column_us
                if bound_us < limit_us:
                    firsts.append((bound_us, us - overlap_us, columns, launch.config))
    found: list[tuple[float, KernelConfig]] = []
    for bound_us, us, columns, config in heapq.nsmallest(count, firsts, key=lambda first: first[0]):
        if bound_us < limit_us:
            tail, left_us = quickest(kernels, replace(problem, n=n - columns), limit_us - us)
            if tail is not None:
                found.append((us + left_us, config.with_tail(tail)))
    return sorted(found, key=lambda pair: pair[0])


def likely_pairs(problem: Problem) -> list[KernelConfig]:
    """Of the many configurations of two launches the few worth measuring: the quickest, if they might be the best."""
    if problem.m < TAIL_MIN_M:
        return []
    _, one_us = quickest([kernel for kernel in kernels_for(problem) if kernel.takes_tail], problem)
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
    invariant: bool = False,
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
    invariant: bool = False,
) -> KernelConfig:
    """The configuration that `gemm` runs, but for tuned tables; needs no GPU: `select(problem)`, or what a problem has.

    Args:
        m: a `Problem`, or its m.
        n: as of a `Problem`.
        k: as of a `Problem`.
        format: as of a `Problem`.
        group_size: as of a `Problem`.
        arch: as of a `Problem`.
        sm_count: as of a `Problem`.
        layout: of the packed weight; None: the one that `preprocess` makes for arch.
        zeros: as of a `Problem`.
        invariant: as of a `Problem`: one of the kernels of one class, chosen for the weight.

    Raises:
        ValueError: naming the argument, values out of range, a layout that arch's kernels do not read, and `invariant`
            for a weight that no kernels compute in one order for every M.
        TypeError: a size that is no int.

    Examples:
        >>> wo.heuristics.select(m=16, n=6144, k=4096, format="int4", group_size=128, arch="sm90", sm_count=132).layout
        'tiled'
    """
    if isinstance(m, Problem):
        problem = m
    else:
        problem = Problem(m, n, k, format, group_size, parse_arch(arch), sm_count, layout or "", zeros, invariant)
    best, _ = _best(kernels_for(problem), problem)
    return best or _last_resort(problem)


def _last_resort(problem: Problem) -> KernelConfig:
    """For a problem that no considered kernel computes. Raises ValueError where no other one does either."""
    p = problem
    if p.invariant:
        most = max((kernel.max_m for kernel in kernels_for(p)), default=0)
        raise ValueError(f"m: expected at most {most} in the batch-invariant mode, got {p.m}")
    if (unfused := next((config for config in candidates(p) if config.unfused), None)) is not None:
        return unfused
    if not has_kernels(p.format, p.group_size, p.arch, p.layout):
        raise ValueError(
            f"format: no kernel that a GPU has run multiplies by {p.format} in groups of {p.group_size} in layout "
            f"{p.layout!r} on sm{p.arch}; slices of it are dequantized"
        )
    check_kernel_group_size(p.group_size, p.k, p.arch, p.layout)
    if p.layout == FP8_LAYOUT and not ever_legal(p):
        raise ValueError(f"layout: no kernel that a GPU has run reads {p.layout!r}; config= runs one of fp8_kernels()")
    # Too many rows or no fused kernel, and K too long for slices.
    of_format = [
        c
        for c in (*CONFIGS, *FP8_CONFIGS)
        if p.format in c.formats
        and c.layout == p.layout
        and c.groups_of_16 == (p.group_step == 16)
        and c.is_verified
        and not c.unfused
    ]
    most_rows = max((config.max_m for config in of_format), default=0)
    name, most, value = ("m", most_rows, p.m) if most_rows else ("k", longest_k(), p.k)
    raise ValueError(f"{name}: expected at most {most}, got {value}")
