"""gemm_sm90: wgmma, from a few tokens to many (kernels/gemm/sm90/)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from ..constants import TileTimes
from ..cost import Work
from ..h200 import GEMM_SM90
from ..machine import HOPPER_SMEM_BYTES, MAX_CLUSTER, resident_clusters
from ..problem import FORMATS, FORMATS_BY_BITS, Problem, padded_k
from .base import KernelConfig, measured
from .clusters import ClusterFamily, ClusterLaunch, cluster_us, codebook_bytes

MAX_TOKEN_TILES = 65535
"""Tiles of tokens of one launch: all output tiles are counted in 32 bits."""

BARRIERS_BYTES = 1024
REDUCTION_TILE_BYTES = 128 * 16  # fp32 accumulators of 8 tokens and 64 columns

# tokens, warpgroups along N and K, stages for 4 bits (0: not compiled), for codes, whose codebook needs room, and for 8
# bits. Up to 16 tokens sixteen warps that multiply hide more than eight, where K is long; from 32 on eight leave fewer
# accumulators to add, and from 48 on have the registers to let scales multiply them. Up to 8 tokens int8 has
# decode_sm90 alone. Fewer columns a CTA leave more CTAs, more columns read x less often; three warpgroups fit
# N = 10240.
_SHAPES = (
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
    (64, 2, 2, 3, 3, 0),
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
    # For the batch-invariant mode: fewer stages leave room for a sum of parts of K.
    (192, 2, 1, 4, 3, 3),
)

# Tokens, warpgroups along N and K of the tiles that are compiled for groups of 16, too. decode_sm90 has fewer tokens;
# with many, dequantizing for cuBLAS is quicker.
_OF_16 = ((16, 1, 4), (16, 2, 2), (32, 2, 2), (64, 1, 2), (64, 2, 1), (64, 2, 2), (64, 4, 1))

# Of FP8 weights: without those that the cost model misses little (0.2% on average, at most 6%), for builds are long.
_OF_FLOATS = (
    (16, 64, 256, 8),
    (32, 64, 256, 6),
    (32, 256, 128, 4),
    (48, 64, 256, 5),
    (64, 64, 256, 4),
    (64, 128, 128, 6),
    (64, 192, 128, 3),
    (96, 128, 128, 4),
    (96, 192, 128, 3),
    (96, 192, 128, 4),
    (128, 128, 128, 3),
    (128, 192, 128, 3),
    (192, 128, 64, 5),
    (256, 128, 64, 5),
)


_ORDER_STEP = 128
"""k of a warpgroup in a block of the kernels whose order others follow: kOrderStep of kernels/gemm/sm90."""


class Order(NamedTuple):
    """The order in which a row's k are added, a class of kernels: those that share K like this, and those that follow.

    family: of the kernels; split_k: CTAs of a cluster; warpgroups: of a CTA, along K.
    """

    family: str
    split_k: int
    warpgroups: int


# What an order costs, fitted to bench/measurements/h200_invariant.csv.xz.
_SCALED = {4: (1.41, 1.06, 1.06), 8: (1.0, 1.1, 1.25)}
"""Bits -> how much longer a k-tile of up to 64 tokens takes where scales multiply weights: of 64 columns, of more, and
of more with 64 tokens."""

_FOLLOWS = {96: (1.04, 1.32, 0.81), 128: (1.02, 1.17, 0.41), 192: (0.92, 1.14, 1.68)}
"""Tokens -> how much longer a k-tile takes, of 4 and of 8 bits, and us of each further part of K."""

_FEWER_STAGES = 1.02
"""How much longer a k-tile takes where stages make room for sums that are not needed."""


class GemmSm90Launch(ClusterLaunch):
    __slots__ = ("_clusters",)

    def __init__(
        self, family: GemmSm90, config: KernelConfig, problem: Problem, times: TileTimes | None = None
    ) -> None:
        super().__init__(family, config, problem, times)
        self._clusters = resident_clusters(problem.sm_count, config.split_k)

    def counts(self, m: int, n: int, k: int, tiles: int, total_bytes: float) -> tuple[float, ...]:
        c = self.config
        k_tiles = -(-padded_k(k) // c.block_k)
        return tiles, self._clusters, -(-k_tiles // c.split_k), c.split_k, total_bytes


class GemmSm90(ClusterFamily):
    name = "gemm_sm90"
    constants = GEMM_SM90
    takes_tail = True
    takes_order = True
    tail_overlap_us = GEMM_SM90.fixed_us
    header = "sm90/kernel.cuh"
    shapes: ClassVar[tuple[tuple[int, ...], ...]] = _SHAPES
    of_16: ClassVar[tuple[tuple[int, ...], ...]] = _OF_16
    float_tiles: ClassVar[tuple[tuple[int, int, int, int], ...] | None] = _OF_FLOATS

    def configs(self) -> Iterable[KernelConfig]:
        formats: dict[tuple[int, ...], tuple[str, ...]] = {}  # those with as many stages share a configuration
        for tokens, n, k, of_4_bits, of_codes, of_8_bits in self.shapes:
            for format in chain(*FORMATS_BY_BITS):
                stages = of_codes if format == "code4" else of_4_bits if FORMATS[format] == 4 else of_8_bits
                if stages:
                    shape = (tokens, n, k, stages)
                    formats[shape] = (*formats.get(shape, ()), format)
        for (tokens, warpgroups_n, warpgroups_k, stages_), names in formats.items():
            block_k = warpgroups_k * _warpgroup_k(tokens)
            config = KernelConfig(self.name, tokens, 64 * warpgroups_n, block_k, tokens, 64, stages_, 1, names)
            yield config
            of_16 = config.for_groups_of_16()
            fitting = tuple(format for format in names if self._fits_of_16(of_16, format))
            if (tokens, warpgroups_n, warpgroups_k) in self.of_16 and fitting:
                yield config.for_groups_of_16(formats=fitting)

    def _fits_of_16(self, config: KernelConfig, format: str) -> bool:
        """Whether there is room for scales and zero points of groups of 16, beside what warpgroups along K exchange."""
        parts = config.with_split_k(1 if self.warpgroups_k(config) == 1 else 2)
        return self.cta_smem_bytes(parts, format, False, format != "code4") <= HOPPER_SMEM_BYTES

    def max_m(self, config: KernelConfig) -> int:
        return MAX_TOKEN_TILES * config.block_m

    def max_split_k(self, config: KernelConfig) -> int:
        """1 where a CTA has no room for the accumulators of another one: clusters are not compiled then."""
        if self.sums_in_smem(config):
            return 1
        pair = config.with_split_k(2)
        has_room = any(self.cta_smem_bytes(pair, f, True, False) <= HOPPER_SMEM_BYTES for f in config.formats)
        return MAX_CLUSTER if has_room else 1

    def first_parts(self, config: KernelConfig) -> int:
        """Tiles of few tokens are slow at waves of many columns. Large ones that do not loop may share K by two."""
        if config.block_m < 64:
            return 0
        return 2 if config.block_m >= 128 and not self.loops(config) else 1

    def warpgroups_k(self, config: KernelConfig) -> int:
        """Warpgroups that share the k of a block."""
        return config.block_k // _warpgroup_k(config.block_m)

    def bits_class(self, config: KernelConfig, problem: Problem) -> Hashable | None:
        """The warpgroups and CTAs that share K. Tokens, columns, stages and the place in a tile do not count.

        Scales multiply weights in all launches of gemm_sm90 that are given an order.
        """
        warpgroups = self.warpgroups_k(config)
        if config.split_k > 1 and config.block_k != warpgroups * _ORDER_STEP:  # other parts of K
            return None
        return Order(self.name, config.split_k, warpgroups)

    def may_follow(self, config: KernelConfig, order: Hashable) -> bool:
        """Tiles with room for a sum of parts beside the accumulators of one: kMayFollow of struct Traits."""
        in_registers = self._has_plain_parts(config) and 96 <= config.block_m <= 128
        has_room = in_registers or self.sums_in_smem(config)
        if not (has_room and self.takes_order and isinstance(order, Order) and order.family == self.name):
            return False
        return config.split_k in (1, order.split_k)

    def _has_plain_parts(self, config: KernelConfig) -> bool:
        return self.warpgroups_k(config) == 1 and config.block_n == 128 and not config.groups_of_16

    def sums_in_smem(self, config: KernelConfig) -> bool:
        """Whether a tile keeps the sum of parts in shared memory: kSumsInSmem of struct Traits."""
        return self.takes_order and self._has_plain_parts(config) and self.loops(config) and config.stages < 5

    def measured_stages(self, config: KernelConfig) -> int:
        return 5 if self.sums_in_smem(config) else config.stages

    def partials(self, config: KernelConfig, problem: Problem, n_padded: int, order: Hashable) -> int:
        """Such tiles keep the sums of several CTAs in memory, each CTA its own."""
        is_nested = isinstance(order, Order) and min(order.split_k, order.warpgroups) > 1
        return problem.sm_count * config.block_m * config.block_n if is_nested and self.sums_in_smem(config) else 0

    def loops(self, config: KernelConfig) -> bool:
        """They do where tiles are large, if K is not shared."""
        return config.block_m >= 128 and config.block_m * config.block_n > 128 * 128

    def stages_y(self, config: KernelConfig) -> bool:
        """Whether there is room beside the pipeline for a staged store of y, if K is not shared."""
        is_large = config.block_m >= 96 or config.block_m * config.block_n >= 128 * 128
        return self.warpgroups_k(config) == 1 and is_large

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        return {
            "kTileM": config.block_m,
            "kWarpgroupsN": config.block_n // config.warp_n,
            "kWarpgroupsK": self.warpgroups_k(config),
            "kStages": config.stages,
            "kLeastGroup": config.least_group,
        }

    def defines(self, config: KernelConfig) -> tuple[str, ...]:
        # Reading all of CUTLASS' wgmma shapes takes a compiler four times as long as reading the usual ones.
        return ("CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",) if config.block_m == 48 else ()

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        return self.cta_smem_bytes(config, problem.format, problem.per_channel, problem.zeros)

    def cta_smem_bytes(self, config: KernelConfig, format: str, per_channel: bool, zeros: bool) -> int:
        """Dynamic shared memory of one CTA, bytes: struct Smem of kernels/gemm/sm90."""
        c = config
        pipeline_bytes = c.stages * self.stage_bytes(c, format, per_channel, zeros) + codebook_bytes(c, format)
        # At the end the accumulators of its warpgroups take the pipeline's place. Beside them are partials that other
        # CTAs send, or, in place of both, buffers of the staged store.
        reduction_tiles = c.block_n // 64 * (c.block_m // 8)
        warpgroups_k = self.warpgroups_k(c)
        accumulators_bytes = reduction_tiles * warpgroups_k * REDUCTION_TILE_BYTES
        if c.split_k > 1:  # of the tiles that it finishes it gets all other parts of K
            beside_bytes = (c.split_k - 1) * warpgroups_k * -(-reduction_tiles // c.split_k) * REDUCTION_TILE_BYTES
        else:
            beside_bytes = c.block_n // c.warp_n * 2 * 16 * (64 * 2 + 16) if self.stages_y(c) else 0
            beside_bytes += 4 * c.block_m * c.block_n if self.sums_in_smem(c) else 0
        return BARRIERS_BYTES + max(pipeline_bytes, accumulators_bytes) + beside_bytes

    def stage_bytes(self, config: KernelConfig, format: str, per_channel: bool, zeros: bool) -> int:
        """Shared memory of a stage: x, weights, and scales and zero points of the smallest groups."""
        c = config
        scale_rows = 0 if per_channel and not zeros else c.block_k // c.least_group * (2 if zeros else 1)
        return c.block_m * c.block_k * self.x_bytes + c.block_n * (c.block_k * FORMATS[format] // 8 + scale_rows * 2)

    def counted_work(self, counts: Sequence[Any], constants: Any, times: TileTimes, maximum: Any = max) -> Work:
        """counts: tiles, clusters that run at once, k-tiles of a CTA for each tile, split_k, bytes.

        In a wave that does not fill the GPU the SMs are quicker, by up to `idle` of their time.
        """
        tiles, clusters, k_tiles, split_k, total_bytes = counts
        k_tile_us, end_us = times
        waves = -(-tiles // clusters)
        missing = waves - tiles / clusters  # the part of the last wave that has no tile
        return (
            constants.fixed_us + cluster_us(constants, split_k) + waves * end_us,
            (waves - constants.idle * missing) * k_tiles * k_tile_us,
            total_bytes / (constants.tb_s * 1e6),
            constants.unhidden,
        )

    def launch(self, config: KernelConfig, problem: Problem, order: Hashable = None) -> GemmSm90Launch:
        k_tile_us, end_us = self.constants.kernels[measured(config, problem.format)]
        given = order if isinstance(order, Order) and self.takes_order else None
        parts = given.split_k * given.warpgroups // (config.split_k * self.warpgroups_k(config)) if given else 1
        if parts > 1:
            *factors, part_us = _FOLLOWS[config.block_m]
            k_tile_us *= factors[problem.bits > 4]
            end_us += (parts - 1) * part_us
        elif self.sums_in_smem(config):
            k_tile_us *= _FEWER_STAGES
        elif given and config.block_m <= 64 and not (problem.bits == 4 and problem.per_channel):
            is_wide = config.block_n > 64
            k_tile_us *= _SCALED[problem.bits][is_wide + (is_wide and config.block_m == 64)]
        return GemmSm90Launch(self, config, problem, TileTimes(k_tile_us, end_us))


def _warpgroup_k(tokens: int) -> int:
    """k of one warpgroup in a block."""
    return 128 if tokens <= 128 else 64
