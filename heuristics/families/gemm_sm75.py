"""gemm_sm75: mma.sync of Turing, two stages through registers (kernels/gemm/sm75.cuh)."""

from __future__ import annotations

from collections.abc import Iterable

from ..problem import KERNEL_FORMATS
from . import gemm_sm80
from .base import KernelConfig
from .waves import WaveFamily


class GemmSm75(WaveFamily):
    name = "gemm_sm75"
    layout = "interleaved"
    first_arch, last_arch = 75, 79
    floats_verified = False
    dtypes = ("f16",)
    header = "sm75.cuh"

    def configs(self) -> Iterable[KernelConfig]:
        for m in (16, 32, 64):  # 128 tokens and a codebook are more than an SM has room for
            yield KernelConfig(self.name, m, 128, 64, min(m, 32), 64 if m > 16 else 32, 2, 1, KERNEL_FORMATS)
        yield KernelConfig(self.name, 128, 128, 64, 64, 32, 2)

    def cta_smem_bytes(self, config: KernelConfig, format: str) -> int:
        return gemm_sm80.pipeline_bytes(config, format)

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        return {**gemm_sm80.tile_constants(config), "kStages": config.stages}

    def calibrated_as(self, config: KernelConfig, format: str) -> str:
        return gemm_sm80.calibrated_as(config, format)
