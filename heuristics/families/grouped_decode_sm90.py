"""grouped_decode_sm90: few rows of each of many experts, in one launch (kernels/gemm/sm90_decode/grouped.cuh)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from ..machine import HOPPER_SMEM_BYTES
from ..problem import FORMATS_BY_BITS, Problem
from .base import KernelConfig, measured
from .decode_sm90 import DecodeSm90, k_of_tile
from .grouped_sm90 import MAX_EXPERTS
from .hopper_grouped import GROUPED, expected_tiles, grouped_us

MAX_ROW_TILES = 1024
"""Tiles along M that the CTAs have room to list: kMaxRowTiles of cutlass_ext/grouped_params.h."""

MAX_SORTED_CHOICES = 128
"""Choices of tokens that the CTAs sort: kMaxSortedChoices."""

GATED_COLUMNS = 64
"""Gates of a gated product are a multiple of this: kGatedColumns."""

_ROWS_BYTES = -(-(8 * MAX_ROW_TILES + (2 + 2 + 8) * MAX_SORTED_CHOICES + 33 * 4) // 128) * 128  # of row_tiles.h


class GroupedDecodeSm90(DecodeSm90):
    name = "grouped_decode_sm90"
    header = "sm90_decode/grouped.cuh"
    grouped = True
    sorts = True
    in_layers = True
    max_experts = MAX_EXPERTS
    smem_grows = False

    def configs(self) -> Iterable[KernelConfig]:
        for formats in FORMATS_BY_BITS:
            for warps_k in (4, 8):
                config = KernelConfig(self.name, 8, 64, warps_k * k_of_tile(formats[0]), 8, 64, 2, 1, formats)
                yield config
                # A codebook leaves two CTAs no room for so many scales.
                of_16 = tuple(f for f in formats if (f == "code4") == (warps_k == 8))
                if of_16:
                    yield config.for_groups_of_16(formats=of_16)

    def bits_class(self, config: KernelConfig, problem: Problem) -> Hashable | None:
        """Warps take turns along K from its begin on, in every tile, and their sums are added."""
        return self.name, self.warps_k(config)

    def ctas(self, config: KernelConfig) -> int:
        """CTAs that share an SM: eight warps."""
        return 8 // self.warps_k(config)

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        return super().code_constants(config, format) | {"kCtas": self.ctas(config)}

    def max_m(self, config: KernelConfig) -> int:
        """Any number of rows: tiles are counted (heuristics/grouped.py)."""
        return (1 << 31) - 1

    def max_split_k(self, config: KernelConfig) -> int:
        return 1

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Dynamic shared memory of one CTA, bytes: struct GroupedTraits of kernels/gemm/sm90_decode."""
        if problem.format != "code4":
            return self._bytes(config, problem)
        # Rows of the codebook are wide where the kernel for the smallest groups has room for them, too.
        most_bytes = self._bytes(config, replace(problem, k=problem.k_padded, group_size=config.least_group))
        wide, narrow = 256 * 256, 256 * 128
        limit = (HOPPER_SMEM_BYTES + 1024) // self.ctas(config) - 1024
        return self._bytes(config, problem) + (wide if most_bytes + wide <= limit else narrow)

    def _bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Without the codebook."""
        warps_k, rows = self.warps_k(config), config.block_m
        x_bytes = warps_k * config.stages * rows * (config.k_tile * 2 + 16)
        partials_bytes = 2 * warps_k * rows * config.block_n * 4
        return 128 + _ROWS_BYTES + self._pipeline_bytes(config, problem) + x_bytes + partials_bytes

    def is_calibrated(self, config: KernelConfig, format: str) -> bool:
        return measured(config, format) in GROUPED.kernels

    def grouped_us(self, config: KernelConfig, problem: Problem, experts: int, is_gated: bool = False) -> float:
        # A CTA computes gates, then what they are multiplied with.
        tiles = expected_tiles(config, problem, experts)
        return grouped_us(config, problem, tiles, in_a_row=2 if is_gated else 1)
