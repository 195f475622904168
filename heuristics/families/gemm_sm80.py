"""gemm_sm80: mma.sync with a cp.async pipeline, from Ampere on (kernels/gemm/sm80.cuh)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ..problem import FORMATS, INTEGER_FORMATS, KERNEL_FORMATS
from .base import KernelConfig
from .waves import WaveFamily

CODEBOOK_BYTES = 256 * 128
"""Pairs of codes, for each lane (cutlass_ext/convert/codebook.h)."""


class GemmSm80(WaveFamily):
    name = "gemm_sm80"
    layout = "interleaved"
    first_arch = 80
    header = "sm80.cuh"
    float_tiles: ClassVar[tuple[tuple[int, int, int, int], ...] | None] = (
        (16, 64, 64, 4),
        (32, 128, 64, 4),
        (64, 128, 64, 4),
        (64, 256, 64, 3),
        (128, 128, 64, 3),
    )

    def configs(self) -> Iterable[KernelConfig]:
        # A warp covers all rows of its tile, so that each weight is converted once per CTA. Measured against these,
        # 64 x 64 warps (weights converted twice) and 128 x 256, 256 x 128 tiles (one CTA an SM) lost on the cells
        # tried: int4, group 128, three shapes, before the epilogue was last changed.
        for block_m, block_n, stages in (
            (16, 64, (4,)),
            (16, 128, (2, 3, 4)),
            (32, 128, (2, 3, 4)),
            (64, 128, (2, 3, 4)),
            (64, 256, (3,)),
            (128, 128, (2, 3, 4)),
        ):
            for s in stages:
                has_codes = s == code_stages(block_m, block_n)
                formats = KERNEL_FORMATS if has_codes else INTEGER_FORMATS
                config = KernelConfig(self.name, block_m, block_n, 64, block_m, 32, s, 1, formats)
                yield config
                if block_m in (16, 64) and block_n == 128 and has_codes:  # beyond, cuBLAS has what is dequantized
                    yield config.for_groups_of_16()

    def cta_smem_bytes(self, config: KernelConfig, format: str) -> int:
        return pipeline_bytes(config, format)

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        return {**tile_constants(config), "kStages": config.stages, "kLeastGroup": config.least_group}

    def splits(self, config: KernelConfig) -> Iterable[int]:
        """None for kernels of two cp.async stages, nor on short tiles for kernels of three.

        This keeps a new shape quick to decide, and is not free: of 110 measured cells an excluded kernel was the best
        in 6 (two stages, M >= 512), by 1.6 to 6.1% in three of them. The excluded are compiled, legal, and open to
        `config=`.
        """
        is_deep = config.stages > (3 if config.block_m <= 32 else 2)
        return super().splits(config) if is_deep else ()


def pipeline_bytes(config: KernelConfig, format: str) -> int:
    """Shared memory of the stages, x, weights, scales and zero points, in whose place y is collected at the end."""
    c = config
    scales_and_zeros = 2 * (c.block_k // c.least_group) * c.block_n * 2
    stage = c.block_m * c.block_k * 2 + c.block_n * c.block_k * FORMATS[format] // 8 + scales_and_zeros
    codebook_bytes = CODEBOOK_BYTES if format == "code4" else 0
    return max(c.stages * stage + codebook_bytes, c.block_m * (c.block_n + 8) * 2)


def tile_constants(config: KernelConfig) -> dict[str, int]:
    return {
        "kBlockM": config.block_m,
        "kBlockN": config.block_n,
        "kWarpM": config.warp_m,
        "kWarpN": config.warp_n,
    }


def code_stages(block_m: int, block_n: int) -> int:
    """Stages of codes: as many as leave room for the codebook on every GPU."""
    return 3 if block_m * block_n > 64 * 128 else 4


def calibrated_as(config: KernelConfig, format: str) -> str:
    """Turing and Volta borrow the constants of the Ampere tile with as many rows."""
    stages = code_stages(config.block_m, 128) if format == "code4" else 2
    return f"{GemmSm80.name}_{config.block_m}x128x64_w{config.block_m}x32_s{stages}"
