"""THE list of kernel configurations: code generation, selection, tests and bench all read it from here."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

GEMV_PASS_K = 256
"""k that one warp of the GEMV covers in one pass (cutlass_ext/activation_stage.h)."""

MAX_SPLIT_K = 7
"""Parts of K whose sums meet in global memory."""

MAX_TOKEN_TILES = 65535
"""Tiles of tokens of one launch of gemm_sm90: with those of columns they are counted in 32 bits."""

MAX_CLUSTER = 8
"""CTAs of a cluster, which share K and sum in each other's shared memory: the portable limit of CUDA."""

HOPPER_SMEM_BYTES = 227 * 1024
"""Shared memory of one CTA."""

_STRIPE = 64  # columns of layout "tiled" that are padded together (weightonly/layout.py)


@dataclass(frozen=True)
class Family:
    """One kernel template: the layout it reads, and the targets that it is compiled for, from first to last."""

    layout: str
    first_arch: int
    last_arch: int
    dtypes: tuple[str, ...] = ("f16", "bf16")  # tensor cores before sm80 have no bf16
    is_hopper: bool = False  # clusters, and wgmma or programmatic launches: code for 90a, which runs on 9.0 alone
    is_dense: bool = False  # dequantizes slices of the weight, which cuBLAS multiplies by


_NEWEST = 1 << 30

FAMILIES: dict[str, Family] = {
    "gemm_sm70": Family("row_major", 70, 70, ("f16",)),
    "gemm_sm75": Family("interleaved", 75, 75, ("f16",)),
    "gemm_sm80": Family("interleaved", 80, _NEWEST),
    "gemv": Family("interleaved", 75, _NEWEST),
    "decode_sm90": Family("tiled", 90, 90, is_hopper=True),
    "gemm_sm90": Family("tiled", 90, 90, is_hopper=True),
    "dequantize_cublas_sm75": Family("interleaved", 75, _NEWEST, is_dense=True),
    "dequantize_cublas_sm90": Family("tiled", 90, 90, is_dense=True),
}


@dataclass(frozen=True)
class KernelConfig:
    """Tile shape, pipeline and split of one kernel. The data types are not part of it: see `TypeConfig`.

    family   a key of FAMILIES: "gemm_sm70", "gemm_sm75", "gemm_sm80" (tensor cores), "gemv" (CUDA cores, sm75 and up),
             for layout "tiled" "decode_sm90" (few tokens) and "gemm_sm90" (wgmma), for many "dequantize_cublas_*"
    block_*  tile of one CTA: tokens x columns x k per step; of cuBLAS, which has many, what the cost model counts in
    warp_*   tile of one warp (gemm_sm90: of one warpgroup); of block_k, the GEMV gives GEMV_PASS_K to each warp, and
             decode_sm90 a piece (`piece_k`)
    stages   k blocks in shared memory (1: none beyond the one that is computed); decode_sm90: pieces that a warp has in
             flight
    split_k  parts of K that are computed by CTAs of their own and summed in a fixed order; with `shares_cluster` by the
             CTAs of a cluster
    formats  weight formats that the configuration is compiled for
    rest     None: one launch computes all columns. Else it computes those of its full waves of CTAs, and a second one,
             of this configuration, the columns that are left, which would keep few SMs busy (gemm_sm90 alone)
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
    rest: KernelConfig | None = None

    def __post_init__(self) -> None:
        if self.rest is not None and not isinstance(self.rest, KernelConfig):
            raise TypeError(f"rest: expected a KernelConfig or None, got {type(self.rest).__name__}")

    @functools.cached_property
    def kernel(self) -> str:
        """Name of the compiled kernel, less its types: everything but split_k, which is a launch parameter."""
        if self.is_dense:
            return self.family
        tile = f"{self.family}_{self.block_m}x{self.block_n}x{self.block_k}"
        return tile if self.family == "gemv" else f"{tile}_w{self.warp_m}x{self.warp_n}_s{self.stages}"

    def kernels(self) -> set[str]:
        """Names of the compiled kernels that it runs."""
        return {self.kernel} if self.rest is None else {self.kernel, self.rest.kernel}

    @property
    def name(self) -> str:
        name = f"{self.kernel}_k{self.split_k}"
        return name if self.rest is None else f"{name}+{self.rest.name}"

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
    def is_dense(self) -> bool:
        """Whether it has no kernel of its own, but the one that dequantizes (kernels/dequantize.cu) and cuBLAS."""
        return FAMILIES[self.family].is_dense

    @functools.cached_property
    def max_split_k(self) -> int:
        if self.is_dense:
            return 1
        if not self.shares_cluster:
            return MAX_SPLIT_K
        if self.family == "gemm_sm90" and not any(self.may_share_k(format, True, False) for format in self.formats):
            return 1
        return MAX_CLUSTER

    @property
    def warps(self) -> int:
        if self.family == "gemv":
            return self.block_k // GEMV_PASS_K
        if self.family == "gemm_sm90":
            return 4 * (self.block_n // self.warp_n) * self.warpgroups_k  # those that multiply
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
            return 64 if "int8" in self.formats else 128  # the same bytes
        return self.block_k

    @property
    def shared_sums(self) -> int:
        """What the CTAs of a cluster of gemm_sm90 divide among them to finish: sums of 8 tokens and 64 columns."""
        return self.block_n // 64 * (self.block_m // 8)

    @property
    def sent_sums(self) -> int:
        """Those that a CTA of gemm_sm90 gets from others of its cluster: of what it finishes, all their parts of K."""
        return (self.split_k - 1) * self.warpgroups_k * -(-self.shared_sums // self.split_k)

    @property
    def loops(self) -> bool:
        """Whether CTAs of gemm_sm90 go through several tiles, the next on its way while one is finished.

        They do so if K is not shared.
        """
        return self.family == "gemm_sm90" and self.block_m >= 128 and self.block_m * self.block_n > 128 * 128

    @property
    def stores_chunks(self) -> bool:
        """Whether gemm_sm90 has room beside its stages for chunks of y, if K is not shared (gemm_sm90_chunks.h)."""
        is_large = self.block_m >= 96 or self.block_m * self.block_n >= 128 * 128
        return self.family == "gemm_sm90" and self.warpgroups_k == 1 and is_large

    @property
    def warpgroups_k(self) -> int:
        """Warpgroups of gemm_sm90 that share the k of a block: each takes 128, for more than 128 tokens 64."""
        return self.block_k // (128 if self.block_m <= 128 else 64)

    def compiled_for(self, arch: str) -> bool:
        """Whether a build for `arch` ("80", "90a") has this configuration. 70 stands for the PTX of compute_75."""
        family = FAMILIES[self.family]
        in_range = family.first_arch <= int(arch.rstrip("af")) <= family.last_arch
        return in_range and (not family.is_hopper or arch.endswith("a"))

    def smem_bytes(self, format: str) -> int:
        """Dynamic shared memory of one CTA, bytes, with scales and zero points; not for `shares_cluster`."""
        if self.is_dense:
            return 0  # that anyone must ask for
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

    def decode_run_pieces(self, n: int, k_padded: int, clusters: int) -> int:
        """Pieces of K in the run of one CTA of decode_sm90, of all its units of columns together.

        The pieces of a cluster's units, one unit after another, are cut into split_k runs. clusters: at once.
        """
        units = -(-tiled_columns(n) // self.block_n // clusters)
        return -(-units * -(-k_padded // self.piece_k) // self.split_k)

    def decode_smem_bytes(
        self, format: str, m: int, n: int, k_padded: int, group_size: int, zeros: bool, clusters: int
    ) -> int:
        """Dynamic shared memory of one CTA of decode_sm90, bytes: struct Smem of kernels/decode_sm90.cuh.

        group_size: elements of K, -1 per channel. The result may be more than a GPU has: see heuristics/select.py.
        """
        run_pieces = self.decode_run_pieces(n, k_padded, clusters)
        x_row_bytes = min(run_pieces, -(-k_padded // self.piece_k)) * self.piece_k * 2 + 16
        ring_bytes = self.decode_ring_bytes(k_padded if group_size == -1 else group_size, group_size != -1, zeros)
        return 128 + self.table_bytes(format) + ring_bytes + m * (self.decode_sum_bytes() + x_row_bytes)

    def table_bytes(self, format: str) -> int:
        """Pairs of codes, for each lane (cutlass_ext/code_table.h)."""
        return 0 if format != "code4" else 256 * (256 if self.block_m <= 32 else 128)

    def decode_ring_bytes(self, group_size: int, scales: bool, zeros: bool) -> int:
        """Weights in flight, with their scales (not per channel) and zero points."""
        # Rows of scales that a piece needs, as the kernel counts them.
        groups = 1 if group_size % self.piece_k == 0 else self.piece_k // (64 if group_size % 64 == 0 else 32)
        stripes = 1 if _STRIPE % self.block_n == 0 else 2  # that a unit of columns may lie in
        scale_rows = groups * stripes * (2 if zeros else 1 if scales else 0)
        return self.stages * self.warps * (self.warp_n // 16 * 1024 + scale_rows * 64 * 2)

    def decode_sum_bytes(self) -> int:
        """fp32 sums of one token: two buffers of those of the warps, and those that other CTAs send."""
        return (2 * (self.block_k // self.piece_k) + self.split_k - 1) * self.block_n * 4

    def gemm_sm90_smem_bytes(self, format: str, per_channel: bool, zeros: bool) -> int:
        """Dynamic shared memory of one CTA of gemm_sm90, bytes: struct Smem of kernels/gemm_sm90.cuh."""
        bits = {"int4": 4, "int8": 8, "code4": 4}[format]
        scale_rows = 0 if per_channel and not zeros else self.block_k // 32 * (2 if zeros else 1)  # the smallest groups
        stage_bytes = self.block_m * self.block_k * 2 + self.block_n * (self.block_k * bits // 8 + scale_rows * 2)
        stages_bytes = self.stages * stage_bytes + self.table_bytes(format)
        # At the end the sums of its warpgroups take the stages' place. Beside them are those that other CTAs send, or,
        # in place of both, chunks of y.
        warpgroups = self.warps // 4
        item_bytes = 128 * 16
        sums_bytes = warpgroups * (self.block_m // 8) * item_bytes
        if self.split_k > 1:
            beside_bytes = self.sent_sums * item_bytes
        else:
            beside_bytes = warpgroups * 2 * 16 * (64 * 2 + 16) if self.stores_chunks else 0
        barriers_bytes = 1024
        return barriers_bytes + max(stages_bytes, sums_bytes) + beside_bytes

    def may_share_k(self, format: str, per_channel: bool, zeros: bool) -> bool:
        """Whether gemm_sm90 is compiled for clusters that share K: a CTA has room for the sums of another one."""
        return self.with_split_k(2).gemm_sm90_smem_bytes(format, per_channel, zeros) <= HOPPER_SMEM_BYTES

    def with_split_k(self, split_k: int) -> KernelConfig:
        return replace(self, split_k=split_k)

    def with_rest(self, rest: KernelConfig | None) -> KernelConfig:
        """The same for full waves, `rest` for the columns that are left. Raises TypeError for anything but these."""
        return replace(self, rest=rest)

    def __str__(self) -> str:
        return self.name


def tiled_columns(n: int) -> int:
    """N of a tiled weight, padding included."""
    return -(-n // _STRIPE) * _STRIPE


def _sm80(block_m: int, block_n: int, warp_m: int, warp_n: int, stages: tuple[int, ...]) -> list[KernelConfig]:
    return [KernelConfig("gemm_sm80", block_m, block_n, 64, warp_m, warp_n, s) for s in stages]


def _gemv(format: str, columns: int, warps: int, tokens: tuple[int, ...]) -> list[KernelConfig]:
    return [KernelConfig("gemv", t, columns, warps * GEMV_PASS_K, t, columns, 2, 1, (format,)) for t in tokens]


def _decode(formats: tuple[str, ...], row_tiles: int, warps_k: int, depth: int) -> KernelConfig:
    tokens, columns, piece_k = 8, 16 * row_tiles, 64 if "int8" in formats else 128
    return KernelConfig("decode_sm90", tokens, columns, piece_k * warps_k, tokens, columns, depth, 1, formats)


def _gemm_sm90(
    formats: tuple[str, ...], tokens: int, warpgroups_n: int, warpgroups_k: int, stages: int
) -> KernelConfig:
    block_k = warpgroups_k * (128 if tokens <= 128 else 64)
    return KernelConfig("gemm_sm90", tokens, 64 * warpgroups_n, block_k, tokens, 64, stages, 1, formats)


# tokens, warpgroups along N and K, stages for int4 (0: not compiled), for codes, whose table needs room, and for int8.
# Up to 16 tokens sixteen warps that multiply hide more than eight, where K is long; from 32 on eight leave fewer sums
# to add, and from 48 on have the registers to let scales multiply them. Up to 8 tokens int8 has decode_sm90 alone.
_GEMM_SM90_SHAPES = (
    (8, 1, 2, 6, 0, 0),
    (8, 1, 4, 5, 4, 0),
    (8, 2, 2, 6, 6, 0),
    (8, 3, 1, 8, 0, 0),
    (8, 4, 1, 7, 7, 0),
    (16, 1, 2, 6, 0, 8),
    (16, 1, 4, 5, 4, 4),
    (16, 2, 2, 6, 5, 4),
    (16, 3, 1, 9, 8, 6),
    (16, 4, 1, 7, 6, 5),
    (32, 1, 2, 6, 6, 6),
    (32, 2, 2, 4, 3, 4),
    (32, 3, 1, 6, 6, 5),
    (32, 4, 1, 6, 4, 4),
    (48, 1, 2, 5, 5, 5),
    (48, 2, 1, 7, 0, 0),
    (48, 3, 1, 6, 5, 4),
    (48, 4, 1, 5, 4, 3),
    (64, 1, 2, 5, 4, 4),
    (64, 2, 1, 6, 0, 6),
    (64, 2, 2, 0, 3, 0),
    (64, 3, 1, 4, 4, 3),
    (64, 4, 1, 4, 3, 3),
    (96, 1, 2, 3, 0, 0),
    (96, 2, 1, 5, 4, 4),
    (96, 3, 1, 4, 3, 4),
    (96, 3, 1, 0, 0, 3),
    (96, 4, 1, 4, 3, 3),
    (128, 2, 1, 3, 3, 3),
    (128, 3, 1, 3, 3, 3),
    (192, 2, 1, 5, 5, 5),
    (256, 2, 1, 5, 5, 5),
)


def _gemms_sm90() -> list[KernelConfig]:
    """Formats with the same number of stages share a configuration."""
    formats: dict[tuple[int, int, int, int], tuple[str, ...]] = {}
    for tokens, n, k, *stages in _GEMM_SM90_SHAPES:
        for format, count in zip(("int4", "code4", "int8"), stages, strict=True):
            if count:
                shape = (tokens, n, k, count)
                formats[shape] = (*formats.get(shape, ()), format)
    return [_gemm_sm90(names, *shape) for shape, names in formats.items()]


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
    # Decode on Hopper. More warps along K hide more latency, more columns a unit read x less often; 48 columns fit
    # N = 6144.
    *(
        _decode(formats, *shape)
        for formats in (("int4", "code4"), ("int8",))
        for shape in ((2, 16, 2), (3, 8, 2), (4, 8, 2))
    ),
    # Hopper's tensor cores. Fewer columns a CTA leave more CTAs, more columns read x less often; three warpgroups fit
    # N = 10240.
    *_gemms_sm90(),
    # Turing: two stages through registers.
    *(KernelConfig("gemm_sm75", m, 128, 64, min(m, 32), 64 if m > 16 else 32, 2) for m in (16, 32, 64)),
    KernelConfig("gemm_sm75", 128, 128, 64, 64, 32, 2),
    # Volta: one buffer, dequantized on the way into it.
    *(KernelConfig("gemm_sm70", m, 128, 32, min(m, 32), 64 if m > 16 else 32, 1) for m in (16, 32, 64)),
    KernelConfig("dequantize_cublas_sm75", 128, 128, 64, 128, 128, 1),
    KernelConfig("dequantize_cublas_sm90", 128, 128, 64, 128, 128, 1, 1, ("int4", "int8", "code4")),
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
) + tuple(TypeConfig(dtype, "code4", "group") for dtype in ("f16", "bf16"))


def kernel_types(config: KernelConfig) -> list[TypeConfig]:
    """The types that a configuration computes, each with a kernel of its own unless `is_dense`."""
    return [t for t in TYPES if t.format in config.formats and t.dtype in FAMILIES[config.family].dtypes]
