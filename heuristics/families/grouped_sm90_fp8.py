"""grouped_sm90_fp8, grouped_sm90_fp8_mx: grouped_sm90 with x in E4M3 (kernels/gemm/sm90_fp8/grouped.cuh)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ..problem import Problem
from .base import KernelConfig
from .gemm_sm90_fp8 import GemmSm90Fp8
from .grouped_sm90 import GroupedSm90

_BLOCK_K = 128

# Tokens, columns, chunks of tokens, stages: as in grouped_sm90. A tile multiplies the chunks that have rows.
_SHAPES = (
    (16, 256, 1, 8),
    (32, 256, 1, 7),
    (64, 256, 2, 6),
    (128, 128, 2, 6),
    (256, 128, 4, 4),
)
_CHUNKS = {(tokens, columns): chunks for tokens, columns, chunks, _ in _SHAPES}


class GroupedSm90Fp8(GroupedSm90):
    name = "grouped_sm90_fp8"
    layout = GemmSm90Fp8.layout
    header = "sm90_fp8/grouped.cuh"
    x_bytes = 1
    scale_modes: ClassVar[tuple[str, ...]] = GemmSm90Fp8.scale_modes
    verified = True
    formats: ClassVar[tuple[str, ...]] = ("int4",)

    def configs(self) -> Iterable[KernelConfig]:
        for tokens, columns, _, stages in _SHAPES:
            yield KernelConfig(self.name, tokens, columns, _BLOCK_K, tokens, 64, stages, 1, self.formats)

    def warpgroups_k(self, config: KernelConfig) -> int:
        return 1

    def scaled(self, config: KernelConfig, problem: Problem) -> str:
        return "sums"

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        chunks = _CHUNKS[config.block_m, config.block_n]
        return super().code_constants(config, format) | {"kChunks": chunks}


class GroupedSm90Fp8Mx(GroupedSm90Fp8):
    name = "grouped_sm90_fp8_mx"
    launcher = GroupedSm90Fp8.name
    scale_modes = ("group",)
    formats = ("mxfp4",)
