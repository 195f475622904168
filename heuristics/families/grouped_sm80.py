"""grouped_sm80: gemm_sm80 for the rows of many experts, in one launch (kernels/gemm/sm80_grouped.cuh)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..problem import KERNEL_FORMATS, Problem
from ..routing import tiles_along_m
from .base import KernelConfig
from .gemm_sm80 import GemmSm80, pipeline_bytes
from .waves import ctas_per_sm, iterations, waves_us

MAX_EXPERTS = 512
"""That the CTAs have room to count tiles of on every GPU: kMaxExperts of struct GroupedTiles."""

# Of gemm_sm80: tokens, columns, stages. Those with which it is quick, and that every GPU has room for with a codebook.
_SHAPES = ((16, 64, 4), (16, 128, 4), (32, 128, 4), (64, 128, 4), (128, 128, 3))


class GroupedSm80(GemmSm80):
    name = "grouped_sm80"
    header = "sm80_grouped.cuh"
    float_tiles = None
    grouped = True
    max_experts = MAX_EXPERTS

    def configs(self) -> Iterable[KernelConfig]:
        for m, n, stages in _SHAPES:
            yield KernelConfig(self.name, m, n, 64, m, 32, stages, 1, KERNEL_FORMATS)

    def max_split_k(self, config: KernelConfig) -> int:
        return 1

    def cta_smem_bytes(self, config: KernelConfig, format: str) -> int:
        """struct GroupedTiles of kernels/gemm, with MAX_EXPERTS."""
        return pipeline_bytes(config, format) + 2 * 4 * MAX_EXPERTS

    def calibrated_as(self, config: KernelConfig, format: str) -> str:
        """The dense kernel with the same main loop."""
        return config.measured.kernel.replace(self.name, GemmSm80.name)

    def grouped_us(self, config: KernelConfig, problem: Problem, experts: int, is_gated: bool = False) -> float:
        """Time of all waves of CTAs. problem.m: the rows of all experts.

        Reading weights once is no part of it, as it is the same for every configuration.
        """
        p, times = problem, self.times(config, problem.format, problem.arch)
        tiles = math.ceil(tiles_along_m(p.m, experts, config.block_m)[0]) * -(-p.n // config.block_n)
        resident = ctas_per_sm(config, p.format, p.arch, times.registers)
        turns = iterations(-(-p.k_padded // config.k_tile), 1, config.k_tile, config.block_k)
        return float(waves_us(tiles, p.sm_count, resident, turns, times))
