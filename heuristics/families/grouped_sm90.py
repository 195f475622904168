"""grouped_sm90: gemm_sm90 for the rows of many experts, in one launch (kernels/gemm/sm90/grouped.cuh)."""

from __future__ import annotations

from collections.abc import Hashable

from ..problem import Problem
from .base import KernelConfig, measured
from .clusters import codebook_bytes
from .gemm_sm90 import BARRIERS_BYTES, GemmSm90
from .hopper_grouped import GROUPED, expected_tiles, grouped_us

MAX_EXPERTS = 1024
"""That the CTAs have room to count tiles of: kMaxGroupedExperts of cutlass_ext/grouped_params.h."""

MAX_TILES = 1 << 30
"""Output tiles of one launch, at most."""

_RECORD_BYTES = 44  # struct GroupedWork

# As in gemm_sm90: tokens, warpgroups along N and K, stages for int4, codes and int8. The MMA of a tile is as wide as
# its rows need, so that there are few shapes: many columns for few rows, more rows for more.
_SHAPES = (
    (16, 4, 1, 8, 6, 5),
    (32, 4, 1, 6, 5, 4),
    (64, 4, 1, 4, 4, 3),
    (128, 2, 1, 4, 4, 3),
    (256, 2, 1, 5, 4, 4),
)


class GroupedSm90(GemmSm90):
    name = "grouped_sm90"
    header = "sm90/grouped.cuh"
    shapes = _SHAPES
    of_16 = ((64, 4, 1),)
    float_tiles = None
    grouped = True
    in_layers = True
    max_experts = MAX_EXPERTS
    takes_tail = False
    takes_order = False
    verified = True

    def defines(self, config: KernelConfig) -> tuple[str, ...]:
        return ("CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",)  # MMAs of every multiple of 8 tokens

    def bits_class(self, config: KernelConfig, problem: Problem) -> Hashable | None:
        return super().bits_class(config, problem), self.scaled(config, problem)

    def scaled(self, config: KernelConfig, problem: Problem) -> str:
        """What scales of groups multiply, as launch_grouped_sm90 has it: "weights", or "sums" of 128 k.

        Integers of 4 bits have another kernel for few tokens.
        """
        has_scales = not problem.per_channel or problem.zeros
        is_few = config.block_m <= 32 and problem.format == "int4"
        return "sums" if is_few and has_scales and problem.group_step == 128 else "weights"

    def max_m(self, config: KernelConfig) -> int:
        """Any number of rows: tiles are counted (heuristics/grouped.py)."""
        return (1 << 31) - 1

    def max_split_k(self, config: KernelConfig) -> int:
        return 1

    def cta_smem_bytes(self, config: KernelConfig, format: str, per_channel: bool, zeros: bool) -> int:
        """Dynamic shared memory of one CTA, bytes: struct GroupedTraits of kernels/gemm/sm90, with MAX_EXPERTS."""
        c = config
        pipeline_bytes = c.stages * self.stage_bytes(c, format, per_channel, zeros) + codebook_bytes(c, format)
        epilogue_bytes = c.block_n // 64 * min(64, c.block_m) * (64 * 2 + 16)
        x_scales_bytes = c.block_n // 64 * c.block_m * 4 if self.x_bytes == 1 else 0
        rest_bytes = (c.stages + 2) * _RECORD_BYTES + 2 * 4 * MAX_EXPERTS
        return BARRIERS_BYTES + pipeline_bytes + epilogue_bytes + x_scales_bytes + rest_bytes

    def is_calibrated(self, config: KernelConfig, format: str) -> bool:
        return measured(config, format) in GROUPED.kernels

    def grouped_us(self, config: KernelConfig, problem: Problem, experts: int, is_gated: bool = False) -> float:
        return grouped_us(config, problem, expected_tiles(config, problem, experts))
