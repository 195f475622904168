"""THE list of kernel configurations: code generation, selection, tests and bench all read it from here."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

GEMV_PASS_K = 256
"""k that one warp of the GEMV covers in one pass (cutlass_ext/activation_stage.h)."""

MAX_SPLIT_K = 7


@dataclass(frozen=True)
class KernelConfig:
    """Tile shape, pipeline and split of one kernel. The data types are not part of it: see `TypeConfig`.

    family   "gemm_sm80" (sm80 and up), "gemm_sm75", "gemm_sm70", or "gemv" (CUDA cores, sm75 and up)
    block_*  tile of one CTA: tokens x columns x k per step
    warp_*   tile of one warp; of block_k, the GEMV gives GEMV_PASS_K to each warp
    stages   k blocks in shared memory (1: none beyond the one that is computed)
    split_k  parts of K that are computed by CTAs of their own and summed in a fixed order
    formats  weight formats that the configuration is compiled for
    """

    family: str
    block_m: int
    block_n: int
    block_k: int
    warp_m: int
    warp_n: int
    stages: int
    split_k: int = 1
    formats: tuple[str, ...] = ("int4", "int8")

    @functools.cached_property
    def kernel(self) -> str:
        """Name of the compiled kernel, less its types: everything but split_k, which is a launch parameter."""
        tile = f"{self.family}_{self.block_m}x{self.block_n}x{self.block_k}"
        return tile if self.family == "gemv" else f"{tile}_w{self.warp_m}x{self.warp_n}_s{self.stages}"

    @property
    def name(self) -> str:
        return f"{self.kernel}_k{self.split_k}"

    @property
    def layout(self) -> str:
        """The weight layout that the kernel reads."""
        return "row_major" if self.family == "gemm_sm70" else "interleaved"

    @property
    def min_arch(self) -> int:
        return {"gemm_sm70": 70, "gemm_sm75": 75, "gemv": 75, "gemm_sm80": 80}[self.family]

    @property
    def warps(self) -> int:
        if self.family == "gemv":
            return self.block_k // GEMV_PASS_K
        return (self.block_m // self.warp_m) * (self.block_n // self.warp_n)

    @property
    def max_m(self) -> int:
        """Rows of x that one launch handles: the GEMV keeps all of them in registers."""
        return self.block_m if self.family == "gemv" else 2**31 - 1

    def smem_bytes(self, format: str) -> int:
        """Dynamic shared memory of one CTA, bytes, with scales and zero points."""
        if self.family == "gemv":
            # fp32 x of one pass per warp and token, each segment padded by 16 bytes (activation_stage.h).
            segment_k = 32 if format == "int4" else 16
            return 4 * self.block_k * self.block_m * (segment_k + 4) // segment_k
        if self.family == "gemm_sm70":
            return 2 * (self.block_m * (self.block_k + 4) + self.block_k * (self.block_n + 4))
        bits = {"int4": 4, "int8": 8}[format]
        scales_and_zeros = 2 * 2 * self.block_n * 2
        stage = self.block_m * self.block_k * 2 + self.block_n * self.block_k * bits // 8 + scales_and_zeros
        return max(self.stages * stage, self.block_m * (self.block_n + 8) * 2)

    def with_split_k(self, split_k: int) -> KernelConfig:
        return replace(self, split_k=split_k)

    def __str__(self) -> str:
        return self.name


def _sm80(block_m: int, block_n: int, warp_m: int, warp_n: int, stages: tuple[int, ...]) -> list[KernelConfig]:
    return [KernelConfig("gemm_sm80", block_m, block_n, 64, warp_m, warp_n, s) for s in stages]


def _gemv(format: str, columns: int, warps: int, tokens: tuple[int, ...]) -> list[KernelConfig]:
    return [KernelConfig("gemv", t, columns, warps * GEMV_PASS_K, t, columns, 2, 1, (format,)) for t in tokens]


CONFIGS: tuple[KernelConfig, ...] = (
    # GEMV: 4 lines of the layout per CTA (16 columns of int4, 8 of int8), which is what 64 registers hold for one
    # token: 32 warps an SM. More warps per CTA suit long K, fewer suit many columns.
    *_gemv("int4", 16, 4, (1, 2)),
    *_gemv("int4", 16, 8, (1, 2, 4, 8)),
    *_gemv("int4", 16, 16, (1,)),
    *_gemv("int8", 8, 4, (1, 2)),
    *_gemv("int8", 8, 8, (1, 2, 4, 8)),
    *_gemv("int8", 8, 16, (1,)),
    # Ampere class. A warp covers all rows of its tile, so that each weight is converted once per CTA. Measured against
    # these, 64 x 64 warps (weights converted twice) and 128 x 256, 256 x 128 tiles (one CTA an SM) lost on the cells
    # tried: int4, group 128, three shapes, before the epilogue was last changed.
    *_sm80(16, 64, 16, 32, (4,)),
    *_sm80(16, 128, 16, 32, (2, 3, 4)),
    *_sm80(32, 128, 32, 32, (2, 3, 4)),
    *_sm80(64, 128, 64, 32, (2, 3, 4)),
    *_sm80(64, 256, 64, 32, (3,)),
    *_sm80(128, 128, 128, 32, (2, 3, 4)),
    # Turing: two stages through registers.
    *(KernelConfig("gemm_sm75", m, 128, 64, min(m, 32), 64 if m > 16 else 32, 2) for m in (16, 32, 64)),
    KernelConfig("gemm_sm75", 128, 128, 64, 64, 32, 2),
    # Volta: one buffer, dequantized on the way into it.
    *(KernelConfig("gemm_sm70", m, 128, 32, min(m, 32), 64 if m > 16 else 32, 1) for m in (16, 32, 64)),
)


@dataclass(frozen=True)
class TypeConfig:
    """The types that a kernel is compiled for: activation dtype, weight format and how scales are applied."""

    dtype: str  # "f16" or "bf16"
    format: str
    scale_mode: str  # "channel", "group" or "group_zeros", as ScaleMode in cutlass_ext/scale_mode.h

    @property
    def name(self) -> str:
        return f"{self.dtype}_{self.format}_{self.scale_mode}"


TYPES: tuple[TypeConfig, ...] = tuple(
    TypeConfig(dtype, format, mode)
    for dtype in ("f16", "bf16")
    for format in ("int4", "int8")
    for mode in ("channel", "group", "group_zeros")
)


def kernel_types(config: KernelConfig) -> list[TypeConfig]:
    """The types that a configuration is compiled for: tensor cores before sm80 have no bf16."""
    half_only = config.family in ("gemm_sm70", "gemm_sm75")
    return [t for t in TYPES if t.format in config.formats and not (half_only and t.dtype == "bf16")]
