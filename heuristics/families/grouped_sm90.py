"""grouped_sm90: gemm_sm90 for the rows of many experts, in one launch (kernels/gemm/sm90/grouped.cuh)."""

from __future__ import annotations

from ..problem import Problem
from .base import KernelConfig
from .clusters import codebook_bytes
from .gemm_sm90 import BARRIERS_BYTES, REDUCTION_TILE_BYTES, GemmSm90
from .hopper_grouped import GROUPED, expected_tiles, grouped_us

MAX_EXPERTS = 512
"""That the CTAs have room to count tiles of."""

MAX_TILES = 1 << 30
"""Output tiles of one launch, at most."""

# As in gemm_sm90: tokens, warpgroups along N and K, stages for int4, codes and int8. CTAs are persistent, and the
# epilogue has shared memory of its own: more stages fit where K is not shared by a cluster. Fewer rows have
# grouped_decode_sm90. Tiles of 256 tokens were never the quickest.
_SHAPES = (
    (16, 2, 2, 7, 5, 4),
    (32, 3, 1, 8, 6, 5),
    (64, 2, 1, 6, 6, 6),
    (96, 2, 1, 5, 4, 4),
    (96, 3, 1, 4, 3, 3),
    (128, 2, 1, 5, 4, 4),
)


class GroupedSm90(GemmSm90):
    name = "grouped_sm90"
    header = "sm90/grouped.cuh"
    shapes = _SHAPES
    of_16 = ()
    grouped = True
    takes_tail = False
    verified = True

    def why_never(self, config: KernelConfig, problem: Problem, dtype: str | None = None) -> str | None:
        # As kMayHaveGroupsOf32 of grouped_scheduler.h.
        warpgroups = config.block_n // 64 * self.warpgroups_k(config)
        if problem.group_size == 32 and config.block_m <= 16 and warpgroups == 4:
            return f"{config} computes groups of 64 and more, but those of scales are of 32"
        return super().why_never(config, problem, dtype)

    def max_m(self, config: KernelConfig) -> int:
        """Any number of rows: tiles are counted (heuristics/grouped.py)."""
        return (1 << 31) - 1

    def max_split_k(self, config: KernelConfig) -> int:
        return 1

    def cta_smem_bytes(self, config: KernelConfig, format: str, per_channel: bool, zeros: bool) -> int:
        """Dynamic shared memory of one CTA, bytes: struct GroupedTraits of kernels/gemm/sm90, with MAX_EXPERTS."""
        c = config
        pipeline_bytes = c.stages * self.stage_bytes(c, format, per_channel, zeros) + codebook_bytes(c, format)
        if self.warpgroups_k(c) == 1:
            epilogue_bytes = c.block_n // 64 * 2 * 16 * (64 * 2 + 16)
        else:
            epilogue_bytes = c.block_n // 64 * (c.block_m // 8) * self.warpgroups_k(c) * REDUCTION_TILE_BYTES
        return BARRIERS_BYTES + pipeline_bytes + epilogue_bytes + (c.stages + 2) * 32 + 2 * 4 * MAX_EXPERTS

    def is_calibrated(self, config: KernelConfig, format: str) -> bool:
        return (config.kernel, format) in GROUPED.kernels

    def grouped_us(self, config: KernelConfig, problem: Problem, experts: int) -> float:
        return grouped_us(config, problem, expected_tiles(config, problem, experts))
