"""gemv: few tokens on CUDA cores (kernels/gemm/gemv.cuh)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..problem import FORMATS, FORMATS_BY_BITS, INTEGER_FORMATS, Problem
from .base import KernelConfig
from .waves import WaveFamily

PASS_K = 256
"""k that one warp covers in one pass (cutlass_ext/mainloop/gemv_stage.h)."""


class Gemv(WaveFamily):
    name = "gemv"
    layout = "interleaved"
    first_arch = 75
    header = "gemv.cuh"
    float_tiles = ((1, 8, 1024, 2), (2, 8, 1024, 2), (2, 8, 2048, 2), (4, 8, 2048, 2))

    def configs(self) -> Iterable[KernelConfig]:
        # 4 lines of the layout per CTA (16 columns of 4 bits, 8 of 8), which is what 64 registers hold for one token:
        # 32 warps an SM. More warps per CTA suit long K, fewer suit many columns.
        for formats in FORMATS_BY_BITS:
            integers = tuple(format for format in formats if format in INTEGER_FORMATS)
            columns = 4 * _line_columns(formats[0])
            for warps, tokens in ((4, (1, 2)), (8, (1, 2, 4, 8)), (16, (1,))):
                for t in tokens:
                    config = KernelConfig(self.name, t, columns, warps * PASS_K, t, columns, 2, 1, integers)
                    yield config
                    if warps == 8:
                        yield config.for_groups_of_16()

    def kernel_name(self, config: KernelConfig) -> str:
        return f"{self.name}_{config.block_m}x{config.block_n}x{config.block_k}"

    def k_tile(self, config: KernelConfig) -> int:
        return PASS_K

    def max_m(self, config: KernelConfig) -> int:
        return config.block_m  # all accumulators are in registers

    def warps(self, config: KernelConfig) -> int:
        return config.block_k // PASS_K

    def bits_class(self, config: KernelConfig, problem: Problem) -> Hashable | None:
        """Warps take turns along K, and their sums are added."""
        return self.name, self.warps(config), config.split_k

    def cta_smem_bytes(self, config: KernelConfig, format: str) -> int:
        # fp32 x of one pass per warp and token, each segment padded by 16 bytes (gemv_stage.h).
        segment_k = 128 // FORMATS[format]
        return 4 * config.block_k * config.block_m * (segment_k + 4) // segment_k

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        tile = {"kTokens": config.block_m, "kLines": config.block_n // _line_columns(format)}
        return {**tile, "kWarps": self.warps(config), "kLeastGroup": config.least_group}


def _line_columns(format: str) -> int:
    """Columns of a line of layout "interleaved"."""
    return 16 // FORMATS[format]
