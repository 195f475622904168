"""Estimated time of a configuration, in us: waves of CTAs over the SMs, and the time a CTA takes.

A kernel is described by three fitted numbers (calibration.py), all for one CTA on one SM of the reference GPU:

    unit_us     the SM's time for one unit along K, when enough CTAs are resident to keep it busy
    latency_us  the time of one unit for a CTA that is alone: copy, barrier, conversion, one after another
    fixed_us    prologue and epilogue: filling the pipeline, storing the tile

`c` resident CTAs take max(latency, c * unit) for one unit of each. A launch is a number of full waves and a last one:

    time = launch + sum over waves (fixed + units * max(latency, c * unit)) [+ the reduction of split-K]

but no less than its bytes take from memory. Other architectures scale the reference: see `Machine`.

The kernels of Hopper (`decode_us`, `gemm_sm90_us`) have one CTA on each SM, and clusters of split_k CTAs that share K.
Of the two limits below the longer counts in full, of the shorter the part that is not hidden behind it (`unhidden`):

    time = fixed + what the cluster adds + turns * end + longer + unhidden * shorter
           memory   bytes / bandwidth
           work     decode_sm90   copy of x + the greater of an SM's products and its part of the stream of weights
                    gemm_sm90     waves of tiles * pieces of a CTA * unit

`turns` are the units that a CTA of decode_sm90 computes one after another, or the waves of gemm_sm90. The end of a
unit of decode_sm90 is longer the more tokens have sums. It gives every CTA the same number of pieces, so there is no
last wave. In a wave that does not fill the GPU the SMs of gemm_sm90 are quicker, by up to `idle` of their time.

Their constants are in calibration_sm90.py.

Dequantizing and cuBLAS (`dense_us`, calibration_dense.py) is two kernels for each slice of the columns:

    time = slices * slice_us + (bytes of the weight, packed and dense, and of y) / bandwidth
           + the greater of flops / rate and bytes / bandwidth

without waves: cuBLAS is taken to choose tiles, or a split of K, that keep as many SMs busy as there are.

Two launches (`KernelConfig.rest`) take their times, less what is fixed of the second.

All of this is monotone: no term of a launch shrinks when M grows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from .calibration import KERNELS, LAUNCH_US, REDUCE_LAUNCH_US, REDUCE_TB_S, KernelCost
from .calibration_dense import DENSE, DenseCost
from .calibration_sm90 import DECODE_SM90, GEMM_SM90, DecodeCost, GemmSm90Cost
from .configs import HOPPER_SMEM_BYTES, KernelConfig, tiled_columns
from .problem import Problem
from .slices import slice_columns


@dataclass(frozen=True)
class Machine:
    """What the cost model knows of an architecture. Rates are per SM and relative to the reference GPU, an H200.

    smem_bytes  shared memory of one CTA
    sm_smem_bytes  of one SM
    speed       clock times mma.sync operations per clock, relative; estimates, nothing but the H200 was measured
    dense_speed  what cuBLAS makes of it, relative; likewise estimates (datasheets)
    tb_s        memory bandwidth of a typical board, TB/s (datasheets; the H200's is measured, reads alone)
    """

    smem_bytes: int
    sm_smem_bytes: int
    speed: float
    dense_speed: float
    tb_s: float


_KB = 1024
MACHINES: dict[int, Machine] = {
    70: Machine(96 * _KB, 96 * _KB, 0.25, 0.2, 0.9),
    75: Machine(64 * _KB, 64 * _KB, 0.25, 0.17, 0.32),
    80: Machine(163 * _KB, 164 * _KB, 0.57, 0.38, 1.9),
    86: Machine(99 * _KB, 100 * _KB, 0.35, 0.23, 0.6),
    87: Machine(163 * _KB, 164 * _KB, 0.25, 0.17, 0.2),
    89: Machine(99 * _KB, 100 * _KB, 0.5, 0.34, 0.86),
    90: Machine(HOPPER_SMEM_BYTES, 228 * _KB, 1.0, 1.0, 4.47),
    100: Machine(227 * _KB, 228 * _KB, 1.0, 2.0, 7.5),
    120: Machine(99 * _KB, 100 * _KB, 0.6, 0.41, 1.7),
}

TILE_PIECE_BYTES = 1024
"""Weights of a piece of decode_sm90 for 16 columns: 128 k of int4, 64 of int8."""

_REGISTERS = 65536
_MAX_WARPS = 48


@functools.cache
def machine(arch: int) -> Machine:
    """The description of an architecture; one that is not in the table is taken for the nearest one below it."""
    return MACHINES[max(a for a in MACHINES if a <= arch)]


def ctas_per_sm(config: KernelConfig, format: str, arch: int, registers: int) -> int:
    """CTAs of a configuration that are resident on an SM: limited by shared memory, registers and warps."""
    by_smem = machine(arch).sm_smem_bytes // (config.smem_bytes(format) + 1024)  # the system keeps 1 KB of each
    by_registers = _REGISTERS // (32 * config.warps * (-(-registers // 8) * 8))
    return max(1, min(by_smem, by_registers, _MAX_WARPS // config.warps))


def _calibrated_as(config: KernelConfig) -> str:
    """The kernel whose constants count: Turing and Volta borrow those of the Ampere tile with as many rows."""
    if config.family in ("gemm_sm70", "gemm_sm75"):
        return f"gemm_sm80_{config.block_m}x128x64_w{config.block_m}x32_s2"
    return config.kernel


def is_calibrated(config: KernelConfig, format: str) -> bool:
    """Whether calibration.py has the constants of a kernel."""
    if config.shares_cluster:
        return (config.kernel, format) in (DECODE_SM90 if config.family == "decode_sm90" else GEMM_SM90).kernels
    return (_calibrated_as(config), format) in KERNELS


def kernel_cost(config: KernelConfig, format: str) -> KernelCost:
    """The measured constants of a kernel (KeyError: see `is_calibrated`); not for the kernels of Hopper."""
    return KERNELS[_calibrated_as(config), format]


def units(config: KernelConfig, k_padded: int, split_k: int) -> int:
    """Units along K that one CTA works through: k blocks, or passes of all warps of the GEMV."""
    parts = -(-k_padded // config.piece_k)
    per_part = -(-parts // split_k)
    return -(-per_part * config.piece_k // config.block_k)


def tiles(config: KernelConfig, m: int, n: int) -> int:
    """Output tiles of the launch."""
    rows = 1 if config.family in ("gemv", "decode_sm90") else -(-m // config.block_m)
    return rows * -(-n // config.block_n)


def waves_us(
    ctas: int, sm_count: int, resident: int, work: int, unit_us: float, latency_us: float, fixed_us: float
) -> float:
    """Time of `ctas` CTAs of `work` units each, `resident` at once on each SM."""
    full, rest = divmod(ctas, sm_count * resident)
    us = full * (fixed_us + work * max(latency_us, resident * unit_us))
    if rest:
        on_one_sm = -(-rest // sm_count)
        us += fixed_us + work * max(latency_us, on_one_sm * unit_us)
    return us


def weight_bytes(problem: Problem) -> int:
    """Packed weights, scales and zeros."""
    scale_rows = (1 if problem.per_channel else -(-problem.k // problem.group_size)) * (2 if problem.zeros else 1)
    return problem.k_padded * problem.n * problem.bits // 8 + 2 * scale_rows * problem.n


def problem_bytes(problem: Problem) -> int:
    """Bytes that must move: packed weights, scales, zeros, x and y, each once."""
    return weight_bytes(problem) + 2 * problem.m * (problem.k + problem.n)


def reduction_us(m: int, n: int, split_k: int) -> float:
    """Writing and reading the fp32 partials, and the launch of the kernel that sums them."""
    if split_k == 1:
        return 0.0
    return REDUCE_LAUNCH_US + 2 * split_k * m * n * 4 / (REDUCE_TB_S * 1e6)


def estimate_us(config: KernelConfig, problem: Problem) -> float:
    """Estimated time of a launch (with its reduction), or of two, us."""
    m, n = problem.m, problem.n
    if config.rest is not None:
        # The second launch is under way while the first one runs.
        return sum(estimate_us(c, p) for c, p in launches(config, problem)) - GEMM_SM90.fixed_us
    if config.family == "decode_sm90":
        return decode_us(config, problem)
    if config.family == "gemm_sm90":
        return gemm_sm90_us(config, problem)
    if config.is_dense:
        return dense_us(config, problem)
    gpu = machine(problem.arch)
    cost = kernel_cost(config, problem.format)
    us = waves_us(
        tiles(config, m, n) * config.split_k,
        problem.sm_count,
        ctas_per_sm(config, problem.format, problem.arch, cost.registers),
        units(config, problem.k_padded, config.split_k),
        cost.unit_us / gpu.speed,
        cost.latency_us / gpu.speed,
        cost.fixed_us / gpu.speed,
    )
    memory_us = problem_bytes(problem) / (gpu.tb_s * 1e6)
    return LAUNCH_US + max(us, memory_us) + reduction_us(m, n, config.split_k)


# --- dequantizing and cuBLAS -------------------------------------------------------------------------------

_MOST_PARTS = 8  # of K, that cuBLAS is taken to compute at once where tiles are few


class DenseWork(NamedTuple):
    """What a problem is in slices of dense weights."""

    slices: int
    weight_mb: float  # packed and dense, 10**6 bytes
    product_mb: float  # what cuBLAS reads and writes
    sm_tflops: float  # 10**12 operations of the busiest SM, counted in whole tiles
    y_mb: float


def dense_work(config: KernelConfig, problem: Problem) -> DenseWork:
    """A problem that is legal for a configuration of dense weights."""
    m, n, k = problem.m, problem.n, problem.k
    columns = slice_columns(n, k)
    slices = -(-n // columns)
    dense_bytes, y_bytes = 2 * k * n, 2 * m * n
    all_tiles = -(-m // config.block_m) * -(-n // config.block_n)
    busy = min(problem.sm_count, _MOST_PARTS * -(-m // config.block_m) * -(-columns // config.block_n))
    return DenseWork(
        slices,
        (weight_bytes(problem) + dense_bytes) / 1e6,
        (dense_bytes + slices * 2 * m * k + y_bytes) / 1e6,
        all_tiles * 2 * config.block_m * config.block_n * k / busy / 1e12,
        y_bytes / 1e6,
    )


def dense_us(config: KernelConfig, problem: Problem, cost: DenseCost = DENSE) -> float:
    """Estimated time of dequantizing and cuBLAS, us."""
    work = dense_work(config, problem)
    gpu = machine(problem.arch)
    product_us = max(work.sm_tflops * 1e6 / (cost.sm_tflop_s * gpu.dense_speed), work.product_mb / gpu.tb_s)
    apart_us = (work.weight_mb / cost.stream + work.y_mb / cost.y_stream) / gpu.tb_s
    return work.slices * cost.slice_us + apart_us + product_us


# --- Hopper ------------------------------------------------------------------------------------------------


_CLUSTER_SMS = {1: 132, 2: 132, 3: 117, 4: 120, 5: 110, 6: 102, 7: 105, 8: 120}
"""CTAs of a cluster -> SMs that clusters of so many fill on an H200, of its 132 (cudaOccupancyMaxActiveClusters)."""


@functools.cache
def cluster_slots(sm_count: int, split_k: int) -> int:
    """Clusters of split_k CTAs, one CTA on an SM, that run at once; at least 1: where none fits the launch says so.

    A cluster lies in one GPC, whose SMs it rarely divides. Other GPUs are taken for an H200 with more or fewer GPCs.
    """
    return max(1, sm_count * _CLUSTER_SMS[split_k] // 132 // split_k)


def cluster_us(cost: DecodeCost | GemmSm90Cost, split_k: int) -> float:
    """What a cluster of split_k CTAs takes beyond a single CTA."""
    return cost.cluster_us + (split_k - 2) * cost.cta_us if split_k > 1 else 0.0


def overlapped_us(memory_us: float, work_us: float, unhidden: float) -> float:
    """The memory's time and the SM's, mostly at once."""
    return max(memory_us, work_us) + unhidden * min(memory_us, work_us)


class DecodeWork(NamedTuple):
    """What one SM does for a problem, by decode_sm90."""

    turns: int  # units of columns, whole or shared, one after another
    pieces: int  # of 16 columns and `piece_k`, that it reads
    products: int  # the same, counted as if all warps along K had as many as the busiest
    x_bytes: float  # an SM's share of what all of them copy


def decode_turns(run_pieces: int, pieces: int, units: int) -> int:
    """Units that a CTA has a part of, where a cluster's `units` of `pieces` pieces are cut into runs."""
    if run_pieces < pieces:
        return 1 if units == 1 or pieces % run_pieces == 0 else 2  # an end of a unit lies within a run
    return -(-run_pieces // pieces)


def decode_work(config: KernelConfig, problem: Problem) -> DecodeWork:
    """The part of a problem that falls to an SM."""
    clusters = cluster_slots(problem.sm_count, config.split_k)
    run_pieces = config.decode_run_pieces(problem.n, problem.k_padded, clusters)
    pieces = -(-problem.k_padded // config.piece_k)
    warps_k = config.block_k // config.piece_k
    rounds = -(-run_pieces * -(-pieces // warps_k) // pieces)
    tiles = config.block_n // 16
    units = -(-tiled_columns(problem.n) // config.block_n)
    cluster_units = -(-units // clusters)
    ctas = -(-units // cluster_units) * config.split_k
    x_bytes = problem.m * min(run_pieces, pieces) * config.piece_k * 2 * ctas / problem.sm_count
    turns = decode_turns(run_pieces, pieces, cluster_units)
    return DecodeWork(turns, tiles * run_pieces, tiles * rounds * warps_k, x_bytes)


def decode_us(config: KernelConfig, problem: Problem, cost: DecodeCost = DECODE_SM90) -> float:
    """Estimated time of decode_sm90, us."""
    work = decode_work(config, problem)
    unit_us, end_us = cost.kernels[config.kernel, problem.format]
    stream_us = work.pieces * TILE_PIECE_BYTES / (cost.sm_kb_us * 1e3)
    work_us = work.x_bytes / (cost.x_kb_us * 1e3) + max(stream_us, work.products * unit_us)
    memory_us = problem_bytes(problem) / (cost.tb_s * 1e6)
    end_us += problem.m * cost.token_us
    fixed_us = cost.fixed_us + cluster_us(cost, config.split_k) + work.turns * end_us
    return fixed_us + overlapped_us(memory_us, work_us, cost.unhidden)


class GemmSm90Work(NamedTuple):
    """What one SM does for a problem, by gemm_sm90."""

    full: int  # waves that keep every SM busy
    rest: float  # the part of the SMs that a last wave keeps busy; 0 without one
    pieces: int  # of block_k, of one CTA


def gemm_sm90_work(config: KernelConfig, problem: Problem) -> GemmSm90Work:
    """The waves of a problem, and a CTA's part of K."""
    slots = cluster_slots(problem.sm_count, config.split_k)
    full, rest = divmod(tiles(config, problem.m, problem.n), slots)
    pieces = -(-problem.k_padded // config.piece_k)
    return GemmSm90Work(full, rest / slots, -(-pieces // config.split_k))


def gemm_sm90_us(config: KernelConfig, problem: Problem, cost: GemmSm90Cost = GEMM_SM90) -> float:
    """Estimated time of gemm_sm90, us."""
    work = gemm_sm90_work(config, problem)
    unit_us, end_us = cost.kernels[config.kernel, problem.format]
    turns, waves = work.full, float(work.full)
    if work.rest:
        turns, waves = turns + 1, waves + 1 - cost.idle * (1 - work.rest)
    memory_us = problem_bytes(problem) / (cost.tb_s * 1e6)
    fixed_us = cost.fixed_us + cluster_us(cost, config.split_k) + turns * end_us
    return fixed_us + overlapped_us(memory_us, waves * work.pieces * unit_us, cost.unhidden)


def first_columns(config: KernelConfig, problem: Problem) -> int:
    """Columns of the first of two launches of gemm_sm90: those of its full waves. From n on nothing is left."""
    slots, token_tiles = cluster_slots(problem.sm_count, config.split_k), -(-problem.m // config.block_m)
    return tiles(config, problem.m, problem.n) // slots * slots // token_tiles * config.block_n


def launches(config: KernelConfig, problem: Problem) -> list[tuple[KernelConfig, Problem]]:
    """What each launch of a legal configuration computes, from the first column to the last."""
    if config.rest is None:
        return [(config, problem)]
    columns = first_columns(config, problem)
    return [
        (config.with_rest(None), replace(problem, n=columns)),
        (config.rest, replace(problem, n=problem.n - columns)),
    ]
