"""decode_sm80: up to 8 tokens of codes on tensor cores, from Ampere on (kernels/gemm/sm80_decode.cuh)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..problem import Problem
from .base import KernelConfig
from .gemm_sm80 import CODEBOOK_BYTES
from .waves import WaveFamily

PASS_K = 128
"""k that one warp covers in one pass."""


class DecodeSm80(WaveFamily):
    name = "decode_sm80"
    layout = "interleaved"
    first_arch = 80
    header = "sm80_decode.cuh"

    def configs(self) -> Iterable[KernelConfig]:
        for columns in (16, 32):
            for warps in (8, 16):
                config = KernelConfig(self.name, 8, columns, warps * PASS_K, 8, columns, 1, 1, ("code4",))
                yield config
                if warps == 8:
                    yield config.for_groups_of_16()

    def k_tile(self, config: KernelConfig) -> int:
        return PASS_K

    def max_m(self, config: KernelConfig) -> int:
        return config.block_m  # tokens are the 8 columns of an MMA

    def warps(self, config: KernelConfig) -> int:
        return config.block_k // PASS_K

    def bits_class(self, config: KernelConfig, problem: Problem) -> Hashable | None:
        """Warps take turns along K, and their sums are added."""
        return self.name, self.warps(config), config.split_k

    def cta_smem_bytes(self, config: KernelConfig, format: str) -> int:
        return max(CODEBOOK_BYTES, self.warps(config) * config.block_m * config.block_n * 4)  # the last sums

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        tile = {"kColumnTiles": config.block_n // 16, "kWarps": self.warps(config)}
        return {**tile, "kLeastGroup": config.least_group}
