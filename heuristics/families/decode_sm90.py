"""decode_sm90: up to 8 tokens on Hopper, bound by the stream of weights (kernels/gemm/sm90_decode/).

The n-tiles of a cluster, one after another, are cut along K into split_k work units of equally many k-tiles, one for
each CTA. So there is no last wave.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from ..constants import TileTimes
from ..cost import Work
from ..h200 import DECODE_SM90
from ..machine import MAX_CLUSTER, resident_clusters
from ..problem import FORMATS, FORMATS_BY_BITS, Problem, padded_k
from .base import KernelConfig
from .clusters import PANEL_COLUMNS, ClusterFamily, ClusterLaunch, cluster_us, codebook_bytes

K_TILE_BYTES = 1024
"""Weights of a k-tile of 16 columns: 128 k of int4, 64 of int8."""


def k_of_tile(format: str) -> int:
    """k of a k-tile."""
    return K_TILE_BYTES * 8 // (16 * FORMATS[format])


class WorkUnit(NamedTuple):
    """What falls to one CTA.

    k_tiles    of all its n-tiles together
    ends       n-tiles, whole or shared, that it has a part of, one after another
    rounds     k-tiles of the busiest of its warps along K
    x_k_tiles  k-tiles of x that it copies
    ctas       that have a work unit
    """

    k_tiles: int
    ends: int
    rounds: int
    x_k_tiles: int
    ctas: int


def ends_of(k_tiles: int, of_n_tile: int, n_tiles: int) -> int:
    """n-tiles that a CTA has a part of, where a cluster's n_tiles of `of_n_tile` k-tiles are cut into work units."""
    if k_tiles < of_n_tile:
        return 1 if n_tiles == 1 or of_n_tile % k_tiles == 0 else 2  # an n-tile ends within a work unit
    return -(-k_tiles // of_n_tile)


def work_unit(n: int, block_n: int, clusters: int, split_k: int, of_n_tile: int, warps_k: int) -> WorkUnit:
    """What falls to one CTA. clusters: that run at once; of_n_tile: k-tiles of an n-tile."""
    n_tiles = -(-(-(-n // PANEL_COLUMNS) * PANEL_COLUMNS) // block_n)
    cluster_n_tiles = -(-n_tiles // clusters)
    k_tiles = -(-(cluster_n_tiles * of_n_tile) // split_k)
    rounds = -(-k_tiles * -(-of_n_tile // warps_k) // of_n_tile)
    x_k_tiles = k_tiles if k_tiles < of_n_tile else of_n_tile
    ctas = -(-n_tiles // cluster_n_tiles) * split_k
    return WorkUnit(k_tiles, ends_of(k_tiles, of_n_tile, cluster_n_tiles), rounds, x_k_tiles, ctas)


class DecodeSm90Launch(ClusterLaunch):
    __slots__ = ("_clusters", "_rows", "_streamed", "_warps_k", "_x_bytes")

    def __init__(self, family: DecodeSm90, config: KernelConfig, problem: Problem) -> None:
        super().__init__(family, config, problem)
        rows, streamed = config.block_n // 16, family.streamed(config, problem)
        self._rows, self._streamed, self._warps_k = rows, rows * streamed, family.warps_k(config)
        self._clusters = resident_clusters(problem.sm_count, config.split_k)
        self._x_bytes = config.k_tile * 2 / problem.sm_count
        stream_us = streamed * K_TILE_BYTES / (DECODE_SM90.sm_kb_us * 1e3)
        self.k_us = rows * max(stream_us, self._times.k_tile_us) / (config.k_tile * problem.sm_count)

    def counts(self, m: int, n: int, k: int, tiles: int, total_bytes: float) -> tuple[float, ...]:
        c = self.config
        of_n_tile = -(-padded_k(k) // c.k_tile)
        unit = work_unit(n, c.block_n, self._clusters, c.split_k, of_n_tile, self._warps_k)
        products, streamed = unit.rounds * self._rows * self._warps_k, unit.k_tiles * self._streamed
        x_bytes = m * unit.x_k_tiles * unit.ctas * self._x_bytes
        return unit.ends, products, streamed, x_bytes, m, c.split_k, total_bytes


class DecodeSm90(ClusterFamily):
    name = "decode_sm90"
    constants = DECODE_SM90
    smem_grows = True  # x stays in it
    header = "sm90_decode/arguments.h"

    def configs(self) -> Iterable[KernelConfig]:
        # More warps along K hide more latency, more columns an n-tile read x less often; 48 columns fit N = 6144.
        for formats in FORMATS_BY_BITS:
            for columns, warps_k in ((32, 16), (48, 8), (64, 8)):
                block_k = warps_k * k_of_tile(formats[0])
                config = KernelConfig(self.name, 8, columns, block_k, 8, columns, 2, 1, formats)
                yield config
                yield config.for_groups_of_16()

    def k_tile(self, config: KernelConfig) -> int:
        return k_of_tile(config.formats[0])

    def max_m(self, config: KernelConfig) -> int:
        return config.block_m  # all accumulators are in registers

    def max_split_k(self, config: KernelConfig) -> int:
        return MAX_CLUSTER

    def warps_k(self, config: KernelConfig) -> int:
        return config.block_k // config.k_tile

    def bits_class(self, config: KernelConfig, problem: Problem) -> Hashable | None:
        """None: with more than one row each cluster starts at a k-tile of its own, with one row at the first."""
        return None

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        return {
            "kRowTiles": config.warp_n // 16,
            "kWarpsK": self.warps_k(config),
            "kStages": config.stages,
            "kLeastGroup": config.least_group,
        }

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Dynamic shared memory of one CTA, bytes: smem_bytes in kernels/gemm/sm90_decode/traits.h.

        A token has x, and fp32 accumulators: two buffers for the warps, and what other CTAs send.
        """
        c, p, warps_k = config, problem, self.warps_k(config)
        clusters = resident_clusters(p.sm_count, c.split_k)
        unit = work_unit(p.n, c.block_n, clusters, c.split_k, -(-p.k_padded // c.k_tile), warps_k)
        token_bytes = (2 * warps_k + c.split_k - 1) * c.block_n * 4 + 16 + unit.x_k_tiles * c.k_tile * 2
        return 128 + codebook_bytes(c, p.format) + self._pipeline_bytes(c, p) + p.m * token_bytes

    def _pipeline_bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Weights in flight, with their scales (not per channel) and zero points."""
        groups = max(1, config.k_tile // problem.group_step)  # of a k-tile, as the kernel counts them
        panels = 1 if PANEL_COLUMNS % config.block_n == 0 else 2  # that an n-tile may lie in
        scale_rows = groups * panels * (2 if problem.zeros else 0 if problem.per_channel else 1)
        return config.stages * self.warps_k(config) * (config.warp_n // 16 * K_TILE_BYTES + scale_rows * 64 * 2)

    def streamed(self, config: KernelConfig, problem: Problem) -> float:
        """Bytes that it reads for each byte of weights. The constants of all other groups have their scales in them."""
        if not config.groups_of_16:
            return 1.0
        return 1.0 + config.k_tile // 16 * 16 * 2 * (2 if problem.zeros else 1) / K_TILE_BYTES

    def counted_work(self, counts: Sequence[Any], constants: Any, times: TileTimes, maximum: Any = max) -> Work:
        """counts: ends of a work unit; k-tiles of 16 columns that it multiplies, as if all warps along K had as many as
        the busiest; those that it reads; an SM's share of the bytes of x that all copy; m, split_k, bytes.
        """
        ends, products, streamed, x_bytes, m, split_k, total_bytes = counts
        k_tile_us, end_us = times
        stream_us = streamed * (K_TILE_BYTES / (constants.sm_kb_us * 1e3))
        return (
            constants.fixed_us + cluster_us(constants, split_k) + ends * (end_us + m * constants.token_us),
            x_bytes / (constants.x_kb_us * 1e3) + maximum(stream_us, products * k_tile_us),
            total_bytes / (constants.tb_s * 1e6),
            constants.unhidden,
        )

    def launch(self, config: KernelConfig, problem: Problem, order: Hashable = None) -> DecodeSm90Launch:
        return DecodeSm90Launch(self, config, problem)
