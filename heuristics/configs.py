"""THE list of kernel configurations: code generation, selection, tests and bench all read it from here."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

GEMV_PASS_K = 256
"""k that one warp of the GEMV covers in one pass (cutlass_ext/activation_stage.h)."""

MAX_SPLIT_K = 7
"""Parts of K whose sums meet in global memory."""

MAX_TOKEN_TILES = 65535
"""Tiles of tokens of gemm_sm90: they lie along a dimension of the grid that ends there."""

MAX_CLUSTER = 8
"""CTAs of a cluster, which share K and sum in each other's shared memory: the portable limit of CUDA."""

_STRIPE = 64  # columns of layout "tiled" that are padded together (weightonly/layout.py)


@dataclass(frozen=True)
class Family:
    """One kernel template: the layout it reads, and the targets that it is compiled for, from first to last."""

    layout: str
    first_arch: int
    last_arch: int
    dtypes: tuple[str, ...] = ("f16", "bf16")  # tensor cores before sm80 have no bf16
    is_hopper: bool = False  # clusters, and wgmma or programmatic launches: code for 90a, which runs on 9.0 alone


_NEWEST = 1 << 30

FAMILIES: dict[str, Family] = {
    "gemm_sm70": Family("row_major", 70, 70, ("f16",)),
    "gemm_sm75": Family("interleaved", 75, 75, ("f16",)),
    "gemm_sm80": Family("interleaved", 80, _NEWEST),
    "gemv": Family("interleaved", 75, _NEWEST),
    "decode_sm90": Family("tiled", 90, 90, is_hopper=True),
    "gemm_sm90": Family("tiled", 90, 90, is_hopper=True),
}


@dataclass(frozen=True)
class KernelConfig:
    """Tile shape, pipeline and split of one kernel. The data types are not part of it: see `TypeConfig`.

    family   a key of FAMILIES: "gemm_sm70", "gemm_sm75", "gemm_sm80" (tensor cores), "gemv" (CUDA cores, sm75 and up),
             for layout "tiled" "decode_sm90" (few tokens) and "gemm_sm90" (wgmma)
    block_*  tile of one CTA: tokens x columns x k per step
    warp_*   tile of one warp (gemm_sm90: of one warpgroup); of block_k, the GEMV gives GEMV_PASS_K to each warp, and
             decode_sm90 a piece (`piece_k`)
    stages   k blocks in shared memory (1: none beyond the one that is computed); decode_sm90: pieces that a warp has in
             flight; gemm_sm90: steps of x (`gemm_sm90_step_k`)
    split_k  parts of K that are computed by CTAs of their own and summed in a fixed order; with `shares_cluster` by the
             CTAs of a cluster
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
        return FAMILIES[self.family].layout

    @property
    def min_arch(self) -> int:
        return FAMILIES[self.family].first_arch

    @property
    def shares_cluster(self) -> bool:
        """Whether the CTAs that share K are a cluster: their sums need no memory and no kernel of their own."""
        return FAMILIES[self.family].is_hopper

    @property
    def max_split_k(self) -> int:
        if not self.shares_cluster:
            return MAX_SPLIT_K
        return 1 if self.family == "gemm_sm90" and self.block_m > 128 else MAX_CLUSTER

    @property
    def warps(self) -> int:
        if self.family == "gemv":
            return self.block_k // GEMV_PASS_K
        if self.family == "gemm_sm90":
            return 4 * (self.block_n // self.warp_n)  # those that multiply
        along_k = self.block_k // self.piece_k if self.family == "decode_sm90" else 1
        return (self.block_m // self.warp_m) * (self.block_n // self.warp_n) * along_k

    @property
    def max_m(self) -> int:
        """Rows of x that one launch handles: the GEMV and decode_sm90 keep all of their sums in registers."""
        if self.family == "gemm_sm90":
            return MAX_TOKEN_TILES * self.block_m
        return self.block_m if self.family in ("gemv", "decode_sm90") else 2**31 - 1

    @property
    def piece_k(self) -> int:
        """The k that split-K hands out: of a k block, a pass of the GEMV's warps, a piece of tiled weights."""
        if self.family == "gemv":
            return GEMV_PASS_K
        if self.family == "decode_sm90":
            return 128 if self.formats == ("int4",) else 64  # the same bytes
        return self.block_k

    @property
    def shared_sums(self) -> int:
        """What the CTAs of a cluster divide among them to finish: quads of columns, or 8 tokens of 64 columns."""
        return self.block_n // 4 if self.family == "decode_sm90" else self.block_n // 64 * (self.block_m // 8)

    @property
    def gemm_sm90_step_k(self) -> int:
        """The k of x that gemm_sm90 waits for at a time: one block of 64, or two where they are small."""
        return 128 if self.block_m * (self.block_n // 64) <= 128 else 64

    @property
    def step_blocks(self) -> int:
        """Blocks of 64 k that gemm_sm90 multiplies at a time: two where the tile is small (kernels/gemm_sm90.cuh)."""
        return 2 if self.block_m * self.block_n <= 128 * 64 else 1

    def weight_depth(self, format: str) -> int:
        """Pieces of weights (128 k) that a warp of gemm_sm90 has in flight: what shared memory has room for."""
        return self.step_blocks + {"int4": 2, "int8": 1}[format]

    def compiled_for(self, arch: str) -> bool:
        """Whether a build for `arch` ("80", "90a") has this configuration. 70 stands for the PTX of compute_75."""
        family = FAMILIES[self.family]
        in_range = family.first_arch <= int(arch.rstrip("af")) <= family.last_arch
        return in_range and (not family.is_hopper or arch.endswith("a"))

    def smem_bytes(self, format: str) -> int:
        """Dynamic shared memory of one CTA, bytes, with scales and zero points; not for `shares_cluster`."""
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

    def decode_smem_bytes(self, m: int, k_padded: int, group_size: int, zeros: bool) -> int:
        """Dynamic shared memory of one CTA of decode_sm90, bytes: struct Smem of kernels/decode_sm90.cuh.

        group_size: elements of K, -1 per channel. The result may be more than a GPU has: see heuristics/select.py.
        """
        pieces = -(-k_padded // self.piece_k)
        x_row_bytes = -(-pieces // self.split_k) * self.piece_k * 2 + 16
        ring_bytes = self.decode_ring_bytes(k_padded if group_size == -1 else group_size, group_size != -1, zeros)
        return 128 + ring_bytes + m * (self.decode_sum_bytes() + x_row_bytes)

    def decode_ring_bytes(self, group_size: int, scales: bool, zeros: bool) -> int:
        """Weights in flight, with their scales (not per channel) and zero points."""
        # Rows of scales that a piece needs, as the kernel counts them.
        groups = 1 if group_size % self.piece_k == 0 else self.piece_k // (64 if group_size % 64 == 0 else 32)
        scale_rows = groups * 2 if zeros else groups if scales else 0
        return self.stages * self.warps * (self.warp_n // 16 * 1024 + scale_rows * 64 * 2)

    def decode_sum_bytes(self) -> int:
        """fp32 sums of one token: those of the warps, and two buffers of those of the CTAs."""
        of_warps = self.block_k // self.piece_k * self.block_n * 4
        return of_warps + (2 * self.split_k * -(-self.shared_sums // self.split_k) * 16 if self.split_k > 1 else 0)

    def gemm_sm90_smem_bytes(self, format: str, per_channel: bool, zeros: bool) -> int:
        """Dynamic shared memory of one CTA of gemm_sm90, bytes: struct Smem of kernels/gemm_sm90.cuh."""
        x_bytes = self.stages * self.block_m * self.gemm_sm90_step_k * 2
        scale_rows = 0 if per_channel and not zeros else 4 * (2 if zeros else 1)  # room for the smallest groups
        slot_bytes = 128 * 16 * (4 if format == "int4" else 8) // 8 + scale_rows * 64 * 2
        ring_bytes = self.warps * self.weight_depth(format) * slot_bytes
        items = -(-self.shared_sums // self.split_k)
        part_bytes = self.split_k * items * 128 * 16 if self.split_k > 1 else 0
        return 1024 + 1024 + x_bytes + ring_bytes + part_bytes  # alignment, barriers

    def with_split_k(self, split_k: int) -> KernelConfig:
        return replace(self, split_k=split_k)

    def __str__(self) -> str:
        return self.name


def tiled_columns(n: int) -> int:
    """N of a tiled weight, padding included."""
    return -(-n // _STRIPE) * _STRIPE


def _sm80(block_m: int, block_n: int, warp_m: int, warp_n: int, stages: tuple[int, ...]) -> list[KernelConfig]:
    return [KernelConfig("gemm_sm80", block_m, block_n, 64, warp_m, warp_n, s) for s in stages]


def _gemv(format: str, columns: int, warps: int, tokens: tuple[int, ...]) -> list[KernelConfig]:
    return [KernelConfig("gemv", t, columns, warps * GEMV_PASS_K, t, columns, 2, 1, (format,)) for t in tokens]


def _decode(format: str, tokens: int, row_tiles: int, warps_n: int, warps_k: int, depth: int) -> KernelConfig:
    piece_k = 128 if format == "int4" else 64
    columns = 16 * row_tiles
    return KernelConfig(
        "decode_sm90", tokens, columns * warps_n, piece_k * warps_k, tokens, columns, depth, 1, (format,)
    )


_DECODE_SHAPES = (
    # tokens, tiles of 16 columns of a warp, warps along N and K, pieces in flight
    (8, 2, 1, 16, 2),
    (8, 2, 2, 8, 2),
    (8, 4, 1, 8, 2),
    (16, 2, 2, 8, 2),
    (16, 4, 1, 8, 2),
)


def _gemm_sm90(tokens: int, warpgroups: int, stages: int, formats: tuple[str, ...] = ("int4", "int8")) -> KernelConfig:
    return KernelConfig("gemm_sm90", tokens, 64 * warpgroups, 128, tokens, 64, stages, 1, formats)


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
    # Decode on Hopper. More warps along K hide more latency, more columns a unit read x less often.
    *(_decode(format, *shape) for format in ("int4", "int8") for shape in _DECODE_SHAPES),
    # Hopper's tensor cores. Steps of x: at least as many as y needs, which takes their place.
    # Fewer columns a CTA leave more CTAs, more columns read x less often; three warpgroups fit N = 10240.
    _gemm_sm90(32, 2, 6),
    _gemm_sm90(32, 3, 6),
    _gemm_sm90(32, 4, 6, ("int4",)),  # int8 spills registers there
    _gemm_sm90(64, 2, 4),
    _gemm_sm90(64, 3, 8),
    _gemm_sm90(64, 4, 8),
    _gemm_sm90(128, 2, 5),
    _gemm_sm90(256, 2, 5),
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
    """The types that a configuration is compiled for."""
    return [t for t in TYPES if t.format in config.formats and t.dtype in FAMILIES[config.family].dtypes]
