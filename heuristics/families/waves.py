"""What the kernels before Hopper share: CTAs that are resident together on an SM, in waves over the GPU.

`c` resident CTAs take max(latency, c * k_tile_us) for one iteration of each. A launch is a number of full waves, and a
last one. Parts of K meet in global memory, where a second kernel adds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

from ..constants import WaveConstants, WaveTimes
from ..cost import Work
from ..h200 import WAVES
from ..machine import machine
from ..problem import MEASURED_AS, Problem, padded_k
from .base import Family, KernelConfig, Launch

MAX_SPLIT_K = 7
"""Parts of K: their sums meet in global memory."""

_REGISTERS = 65536
_MAX_WARPS = 48


def ctas_per_sm(config: KernelConfig, format: str, arch: int, registers: int) -> int:
    """CTAs of a configuration that are resident on an SM: limited by shared memory, registers and warps."""
    family = config.rules
    assert isinstance(family, WaveFamily)
    warps = family.warps(config)
    by_smem = machine(arch).sm_smem_bytes // (family.cta_smem_bytes(config, format) + 1024)  # the system keeps 1 KB
    by_registers = _REGISTERS // (32 * warps * (-(-registers // 8) * 8))
    return max(1, min(by_smem, by_registers, _MAX_WARPS // warps))


def waves_us(
    ctas: Any, sm_count: Any, resident: int, iterations: Any, times: WaveTimes, maximum: Callable[[Any, Any], Any] = max
) -> Any:
    """Time of `ctas` CTAs of so many iterations each, `resident` at once on each SM."""
    _, k_tile_us, latency_us, fixed_us = times
    full, left = divmod(ctas, sm_count * resident)
    us = full * (fixed_us + iterations * maximum(latency_us, resident * k_tile_us))
    on_one_sm = -(-left // sm_count)
    return us + (left > 0) * (fixed_us + iterations * maximum(latency_us, on_one_sm * k_tile_us))


def launch_and_output_us(split_k: Any, constants: WaveConstants) -> tuple[Any, Any]:
    """What is fixed of a launch, and the time for each output: fp32 partials, written and read. Numbers or arrays."""
    is_split = split_k > 1
    partial_us = 2 * 4 / (constants.reduce_tb_s * 1e6)
    return constants.launch_us + is_split * constants.reduce_launch_us, is_split * split_k * partial_us


def iterations(k_tiles: int, split_k: int, k_tile: int, block_k: int) -> int:
    """Of the main loop of one CTA. block_k: k of one."""
    return -(-(-(-k_tiles // split_k) * k_tile) // block_k)


class WaveLaunch(Launch):
    __slots__ = ("_byte_us", "_launch_us", "_output_us", "_resident", "_sm_count", "_times")

    def __init__(self, family: WaveFamily, config: KernelConfig, problem: Problem) -> None:
        self._times = family.times(config, problem.format, problem.arch)
        self._sm_count = problem.sm_count
        self._resident = ctas_per_sm(config, problem.format, problem.arch, self._times.registers)
        self._launch_us, self._output_us = launch_and_output_us(config.split_k, WAVES)
        self._byte_us = 1 / (machine(problem.arch).tb_s * 1e6)
        # Beside the CTAs of one part of K no more than twice what the GPU holds.
        most_ctas = 2 * self._resident * self._sm_count
        k_us = self._times.k_tile_us / (config.block_k * problem.sm_count)
        most_tiles = most_ctas // (config.split_k - 1) if config.split_k > 1 else math.inf
        super().__init__(config, k_us, self._times.fixed_us, most_tiles)

    def work(self, m: int, n: int, k: int, tiles: int, total_bytes: float) -> Work:
        c = self.config
        turns = iterations(-(-padded_k(k) // c.k_tile), c.split_k, c.k_tile, c.block_k)
        return (
            self._launch_us + m * n * self._output_us,
            waves_us(tiles * c.split_k, self._sm_count, self._resident, turns, self._times),
            total_bytes * self._byte_us,
            0.0,
        )


class WaveFamily(Family):
    """A family of such kernels."""

    def max_split_k(self, config: KernelConfig) -> int:
        return MAX_SPLIT_K

    def warps(self, config: KernelConfig) -> int:
        return (config.block_m // config.warp_m) * (config.block_n // config.warp_n)

    def cta_smem_bytes(self, config: KernelConfig, format: str) -> int:
        """Dynamic shared memory of one CTA, bytes, with scales and zero points."""
        raise NotImplementedError

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        return self.cta_smem_bytes(config, problem.format)

    def bits_class(self, config: KernelConfig, problem: Problem) -> Hashable | None:
        """A part of K is one chain of MMAs, whose weights are scaled before; parts are added in their order."""
        return self.name, config.split_k

    def calibrated_as(self, config: KernelConfig, format: str) -> str:
        """The kernel that lends its constants."""
        return config.measured.kernel

    def is_calibrated(self, config: KernelConfig, format: str) -> bool:
        return (self.calibrated_as(config, format), MEASURED_AS[format]) in WAVES.kernels

    def times(self, config: KernelConfig, format: str, arch: int) -> WaveTimes:
        """Of a kernel on an architecture. Raises KeyError for one that is not calibrated."""
        of_kernel = WAVES.kernels[self.calibrated_as(config, format), MEASURED_AS[format]]
        registers, k_tile_us, latency_us, fixed_us = of_kernel
        speed = machine(arch).speed
        return WaveTimes(registers, k_tile_us / speed, latency_us / speed, fixed_us / speed)

    def iterations(self, config: KernelConfig, k_padded: int) -> int:
        """Of the main loop of one CTA."""
        k_tiles = -(-k_padded // config.k_tile)
        return iterations(k_tiles, config.split_k, config.k_tile, config.block_k)

    def launch(self, config: KernelConfig, problem: Problem, order: Hashable = None) -> WaveLaunch:
        return WaveLaunch(self, config, problem)
