"""gemm_sm70: mma.sync of Volta, one buffer, dequantized on the way into it (kernels/gemm/sm70.cuh)."""

from __future__ import annotations

from collections.abc import Iterable

from . import gemm_sm80
from .base import KernelConfig
from .waves import WaveFamily


class GemmSm70(WaveFamily):
    name = "gemm_sm70"
    layout = "row_major"
    first_arch, last_arch = 70, 74
    dtypes = ("f16",)
    header = "sm70.cuh"

    def configs(self) -> Iterable[KernelConfig]:
        for m in (16, 32, 64):
            yield KernelConfig(self.name, m, 128, 32, min(m, 32), 64 if m > 16 else 32, 1)

    def cta_smem_bytes(self, config: KernelConfig, format: str) -> int:
        return 2 * (config.block_m * (config.block_k + 4) + config.block_k * (config.block_n + 4))

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        return gemm_sm80.tile_constants(config)

    def calibrated_as(self, config: KernelConfig, format: str) -> str:
        return gemm_sm80.calibrated_as(config, format)
