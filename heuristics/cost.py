"""Estimated time of a configuration, in us: waves of CTAs over the SMs, and the time a CTA takes.

A kernel is described by three fitted numbers (calibration.py), all for one CTA on one SM of the reference GPU:

    unit_us     the SM's time for one unit along K, when enough CTAs are resident to keep it busy
    latency_us  the time of one unit for a CTA that is alone: copy, barrier, conversion, one after another
    fixed_us    prologue and epilogue: filling the pipeline, storing the tile

`c` resident CTAs take max(latency, c * unit) for one unit of each. A launch is a number of full waves and a last one:

    time = launch + sum over waves (fixed + units * max(latency, c * unit)) [+ the reduction of split-K]

but no less than its bytes take from memory. Other architectures scale the reference: see `Machine`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .calibration import KERNELS, LAUNCH_US, REDUCE_LAUNCH_US, REDUCE_TB_S, KernelCost
from .configs import GEMV_PASS_K, KernelConfig
from .problem import Problem


@dataclass(frozen=True)
class Machine:
    """What the cost model knows of an architecture. Rates are per SM and relative to the reference GPU, an H200.

    smem_bytes  shared memory of one CTA
    sm_smem_bytes  of one SM
    speed       clock times mma.sync operations per clock, relative; estimates, nothing but the H200 was measured
    tb_s        memory bandwidth of a typical board, TB/s (datasheets; the H200's is measured, reads alone)
    """

    smem_bytes: int
    sm_smem_bytes: int
    speed: float
    tb_s: float


_KB = 1024
MACHINES: dict[int, Machine] = {
    70: Machine(96 * _KB, 96 * _KB, 0.25, 0.9),
    75: Machine(64 * _KB, 64 * _KB, 0.25, 0.32),
    80: Machine(163 * _KB, 164 * _KB, 0.57, 1.9),
    86: Machine(99 * _KB, 100 * _KB, 0.35, 0.6),
    87: Machine(163 * _KB, 164 * _KB, 0.25, 0.2),
    89: Machine(99 * _KB, 100 * _KB, 0.5, 0.86),
    90: Machine(227 * _KB, 228 * _KB, 1.0, 4.47),
    100: Machine(227 * _KB, 228 * _KB, 1.0, 7.5),
    120: Machine(99 * _KB, 100 * _KB, 0.6, 1.7),
}

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
    return (_calibrated_as(config), format) in KERNELS


def kernel_cost(config: KernelConfig, format: str) -> KernelCost:
    """The measured constants of a kernel (KeyError: see `is_calibrated`)."""
    return KERNELS[_calibrated_as(config), format]


def units(config: KernelConfig, k_padded: int, split_k: int) -> int:
    """Units along K that one CTA works through: k blocks, or passes of all warps of the GEMV."""
    step = GEMV_PASS_K if config.family == "gemv" else config.block_k
    parts = -(-k_padded // step)
    per_part = -(-parts // split_k)
    return -(-per_part * step // config.block_k)


def tiles(config: KernelConfig, m: int, n: int) -> int:
    """Output tiles of the launch."""
    rows = 1 if config.family == "gemv" else -(-m // config.block_m)
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


def problem_bytes(problem: Problem) -> int:
    """Bytes that must move: packed weights, scales, x and y, each once."""
    groups = 1 if problem.per_channel else problem.k // problem.group_size
    weights = problem.k_padded * problem.n * problem.bits // 8
    return weights + 2 * (groups * problem.n + problem.m * problem.k + problem.m * problem.n)


def reduction_us(m: int, n: int, split_k: int) -> float:
    """Writing and reading the fp32 partials, and the launch of the kernel that sums them."""
    if split_k == 1:
        return 0.0
    return REDUCE_LAUNCH_US + 2 * split_k * m * n * 4 / (REDUCE_TB_S * 1e6)


def estimate_us(config: KernelConfig, problem: Problem) -> float:
    """Estimated time of one launch (with its reduction), us."""
    m, n = problem.m, problem.n
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
