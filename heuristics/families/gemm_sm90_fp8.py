"""gemm_sm90_fp8, gemm_sm90_fp8_mx: gemm_sm90 with x in E4M3 (kernels/gemm/sm90_fp8/)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ..h200 import GEMM_SM90_FP8, GEMM_SM90_FP8_MX
from ..problem import Problem
from .base import KernelConfig
from .gemm_sm90 import GemmSm90

_WARPGROUP_K = 128

# Tokens, columns, warpgroups along K, chunks of tokens that a warpgroup multiplies one after another, stages. Of few
# tokens warpgroups share K, so that there are more CTAs.
_SHAPES = (
    (16, 64, 4, 1, 5),
    (32, 64, 4, 1, 4),
    (64, 64, 4, 1, 3),
    (64, 128, 2, 1, 4),
    (128, 64, 2, 2, 4),
    (128, 128, 1, 2, 6),
    (192, 128, 1, 2, 5),
    (256, 128, 1, 4, 4),  # one stage more, and two CTAs could not share K
)
_CHUNKS = {(tokens, columns, warpgroups_k): chunks for tokens, columns, warpgroups_k, chunks, _ in _SHAPES}


class GemmSm90Fp8(GemmSm90):
    name = "gemm_sm90_fp8"
    layout = "tiled_fp8"
    header = "sm90_fp8/kernel.cuh"
    x_bytes = 1
    float_tiles = ()
    scale_modes: ClassVar[tuple[str, ...]] = ("channel", "group")
    takes_tail = False
    takes_order = False
    verified = True
    constants = GEMM_SM90_FP8
    shapes: ClassVar[tuple[tuple[int, ...], ...]] = _SHAPES
    formats: ClassVar[tuple[str, ...]] = ("int4",)

    def configs(self) -> Iterable[KernelConfig]:
        for tokens, columns, warpgroups_k, _, stages in self.shapes:
            block_k = _WARPGROUP_K * warpgroups_k
            yield KernelConfig(self.name, tokens, columns, block_k, tokens, 64, stages, 1, self.formats)

    def least_group(self, config: KernelConfig) -> int:
        """The largest tile has no registers for a second main loop."""
        return 128 if config.block_m >= 192 else 32

    def why_unsupported(self, config: KernelConfig, problem: Problem, dtype: str | None = None) -> str | None:
        if (reason := super().why_unsupported(config, problem, dtype)) is not None:
            return reason
        if problem.per_channel or problem.group_step >= config.least_group:
            return None
        return f"{config} computes groups of 128 and its multiples, but those of scales are of {problem.group_size}"

    def warpgroups_k(self, config: KernelConfig) -> int:
        return config.block_k // _WARPGROUP_K

    def loops(self, config: KernelConfig) -> bool:
        return config.block_m >= 128 and self.warpgroups_k(config) == 1

    def stages_y(self, config: KernelConfig) -> bool:
        return config.block_m % 32 == 0 and self.warpgroups_k(config) == 1

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        shape = (config.block_m, config.block_n, self.warpgroups_k(config))
        return super().code_constants(config, format) | {"kChunks": _CHUNKS[shape]}


class GemmSm90Fp8Mx(GemmSm90Fp8):
    """Scales become part of the operand, or, of few tokens, multiply sums of 32 k: one main loop for all groups."""

    name = "gemm_sm90_fp8_mx"
    launcher = GemmSm90Fp8.name
    scale_modes = ("group",)
    verified = True
    constants = GEMM_SM90_FP8_MX
    formats = ("mxfp4",)

    def least_group(self, config: KernelConfig) -> int:
        return 32

    def stage_bytes(self, config: KernelConfig, format: str, per_channel: bool, zeros: bool) -> int:
        """There are always scales."""
        return super().stage_bytes(config, format, False, zeros)
