"""decode_sm90: up to 8 tokens on Hopper, bound by the stream of weights (kernels/gemm/sm90_decode/).

The n-tiles of a cluster, one after another, are cut along K into split_k work units of equally many k-tiles, one for
each CTA. So there is no last wave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..constants import DecodeSm90Constants, TileTimes
from ..cost import Work, problem_bytes
from ..h200 import DECODE_SM90
from ..machine import MAX_CLUSTER, machine, resident_clusters
from ..problem import Problem, padded_k
from .base import Bounds, Kernel, KernelConfig, Split, leaves_none
from .clusters import PANEL_COLUMNS, ClusterFamily, cluster_us, codebook_bytes

_K_TILE_BYTES = 1024
"""Weights of a k-tile of 16 columns: 128 k of int4, 64 of int8."""


def _stream_us(constants: DecodeSm90Constants) -> float:
    """One SM's time to read a k-tile."""
    return _K_TILE_BYTES / (constants.sm_kb_us * 1e3)


_STREAM_US = _stream_us(DECODE_SM90)


WorkUnit = tuple[int, int, int, int, int]
"""What falls to one CTA:

    k_tiles    of all its n-tiles together
    ends       n-tiles, whole or shared, that it has a part of, one after another
    rounds     k-tiles of the busiest of its warps along K
    x_k_tiles  k-tiles of x that it copies
    ctas       that have a work unit
"""


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
    return k_tiles, ends_of(k_tiles, of_n_tile, cluster_n_tiles), rounds, x_k_tiles, ctas


def decode_sm90_work(
    launch_us: Any,
    ends: Any,
    products: Any,
    streamed: Any,
    x_bytes: Any,
    m: Any,
    total_bytes: Any,
    constants: DecodeSm90Constants,
    times: TileTimes,
    maximum: Callable[[Any, Any], Any] = max,
) -> Work:
    """The work of a launch, or of many: numbers or arrays.

    launch_us  of a launch of such clusters
    ends       of a work unit
    products   k-tiles of 16 columns that it multiplies, as if all warps along K had as many as the busiest
    streamed   those that it reads
    x_bytes    an SM's share of what all of them copy
    """
    k_tile_us, end_us = times
    stream_us = streamed * _stream_us(constants)
    return (
        launch_us + ends * (end_us + m * constants.token_us),
        x_bytes / (constants.x_kb_us * 1e3) + maximum(stream_us, products * k_tile_us),
        total_bytes / (constants.tb_s * 1e6),
        constants.unhidden,
    )


class DecodeSm90Kernel(Kernel):
    __slots__ = (
        "_k_tile",
        "_parts",
        "_products",
        "_smem_limit_bytes",
        "_stream_us",
        "_streamed",
        "_times",
        "_warps_k",
        "_x_bytes",
    )

    def __init__(self, family: DecodeSm90, configs: Sequence[KernelConfig], problem: Problem) -> None:
        config = self.config = configs[0]
        times = self._times = DECODE_SM90.kernels[config.measured.kernel, problem.format]
        rows, warps_k = config.block_n // 16, family.warps_k(config)
        self._k_tile, self._warps_k, self._products = config.k_tile, warps_k, rows * warps_k
        self._x_bytes = config.k_tile * 2 / problem.sm_count
        self._streamed = family.streamed(config, problem)
        self._stream_us = self._streamed * _STREAM_US
        self._smem_limit_bytes = machine(problem.arch).smem_bytes
        self._parts = [
            (
                resident_clusters(problem.sm_count, c.split_k),
                DECODE_SM90.fixed_us + cluster_us(DECODE_SM90, c.split_k),
                family.smem_parts(c, problem),
                c,
            )
            for c in configs
        ]
        self.bounds = Bounds(
            launch_us=self._parts[0][1],
            end_us=times.end_us,
            token_us=DECODE_SM90.token_us,
            copy_us=2 / (DECODE_SM90.x_kb_us * 1e3 * problem.sm_count),
            start_us=0.0,
            # No split_k reads less than an SM's share of the columns, nor multiplies less.
            k_us=rows * max(self._stream_us, times.k_tile_us) / (self._k_tile * problem.sm_count),
            last_us=(),
            byte_us=1 / (DECODE_SM90.tb_s * 1e6),
            unhidden=DECODE_SM90.unhidden,
        )

    def splits(self, k: int) -> tuple[Split, ...]:
        block_n, warps_k, times = self.config.block_n, self._warps_k, self._times
        k_tiles = -(-padded_k(k) // self._k_tile)
        rounds = -(-k_tiles // warps_k)
        n_tile_us = max(k_tiles * (block_n // 16) * self._stream_us, rounds * self._products * times.k_tile_us)
        found: list[Split] = []
        for clusters, launch_us, smem, config in self._parts:
            split_k = config.split_k
            if leaves_none(k_tiles, split_k):
                own = launch_us, smem, (block_n, clusters, split_k, k_tiles, warps_k)
                most_m = self._most_m(smem, k_tiles)
                wave_us = n_tile_us / split_k
                found.append(
                    (1, clusters, math.inf, most_m, launch_us, 0.0, 0.0, 1 / split_k, wave_us, 0.0, 0, own, config)
                )
        return tuple(found)

    def work(self, split: Split, m: int, n: int, tiles: int, total_bytes: float) -> Work:
        launch_us, _, unit = split[-2]
        k_tiles, ends, rounds, x_k_tiles, ctas = work_unit(n, *unit)
        x_bytes = m * x_k_tiles * ctas * self._x_bytes
        products, streamed = rounds * self._products, k_tiles * (self.config.block_n // 16) * self._streamed
        return decode_sm90_work(launch_us, ends, products, streamed, x_bytes, m, total_bytes, DECODE_SM90, self._times)

    def _most_m(self, smem: tuple[int, int, int], x_k_tiles: int) -> int:
        """Rows of x that fit, where a CTA has a part of one n-tile or more."""
        none, one = smem_bytes(smem, 0, x_k_tiles), smem_bytes(smem, 1, x_k_tiles)
        return (self._smem_limit_bytes - none) // (one - none)

    def fits(self, split: Split, m: int, n: int) -> bool:
        _, smem, unit = split[-2]
        _, _, _, x_k_tiles, _ = work_unit(n, *unit)
        return smem_bytes(smem, m, x_k_tiles) <= self._smem_limit_bytes


def smem_bytes(parts: tuple[int, int, int], m: int, x_k_tiles: int) -> int:
    """Dynamic shared memory of one CTA, bytes: smem_bytes in kernels/gemm/sm90_decode/traits.h."""
    cta_bytes, token_bytes, x_bytes = parts
    return cta_bytes + m * (token_bytes + x_k_tiles * x_bytes)


class DecodeSm90(ClusterFamily):
    name = "decode_sm90"
    constants = DECODE_SM90
    smem_grows = True  # x stays in it
    header = "sm90_decode/arguments.h"

    def configs(self) -> Iterable[KernelConfig]:
        # More warps along K hide more latency, more columns an n-tile read x less often; 48 columns fit N = 6144.
        for formats, k_tile in ((("int4", "code4"), 128), (("int8",), 64)):  # the same bytes
            for columns, warps_k in ((32, 16), (48, 8), (64, 8)):
                config = KernelConfig(self.name, 8, columns, k_tile * warps_k, 8, columns, 2, 1, formats)
                yield config
                yield config.for_groups_of_16()

    def k_tile(self, config: KernelConfig) -> int:
        return 64 if "int8" in config.formats else 128

    def max_m(self, config: KernelConfig) -> int:
        return config.block_m  # all accumulators are in registers

    def max_split_k(self, config: KernelConfig) -> int:
        return MAX_CLUSTER

    def warps_k(self, config: KernelConfig) -> int:
        return config.block_k // config.k_tile

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        return {
            "kRowTiles": config.warp_n // 16,
            "kWarpsK": self.warps_k(config),
            "kStages": config.stages,
            "kLeastGroup": config.least_group,
        }

    def unit(self, config: KernelConfig, k_padded: int, sm_count: int) -> tuple[int, int, int, int, int]:
        """The arguments of `work_unit` after n."""
        clusters = resident_clusters(sm_count, config.split_k)
        return config.block_n, clusters, config.split_k, -(-k_padded // config.k_tile), self.warps_k(config)

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        p = problem
        _, _, _, x_k_tiles, _ = work_unit(p.n, *self.unit(config, p.k_padded, p.sm_count))
        return smem_bytes(self.smem_parts(config, p), p.m, x_k_tiles)

    def smem_parts(self, config: KernelConfig, problem: Problem) -> tuple[int, int, int]:
        """Bytes of a CTA, of one of its tokens, and of one k-tile of a token's x. M and N of the problem do not count.

        A token has fp32 accumulators: two buffers of those of the warps, and those that other CTAs send.
        """
        cta_bytes = 128 + codebook_bytes(config, problem.format) + self._pipeline_bytes(config, problem)
        token_bytes = (2 * self.warps_k(config) + config.split_k - 1) * config.block_n * 4 + 16
        return cta_bytes, token_bytes, config.k_tile * 2

    def _pipeline_bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Weights in flight, with their scales (not per channel) and zero points."""
        groups = max(1, config.k_tile // problem.group_step)  # of a k-tile, as the kernel counts them
        panels = 1 if PANEL_COLUMNS % config.block_n == 0 else 2  # that an n-tile may lie in
        scale_rows = groups * panels * (2 if problem.zeros else 0 if problem.per_channel else 1)
        return config.stages * self.warps_k(config) * (config.warp_n // 16 * _K_TILE_BYTES + scale_rows * 64 * 2)

    def streamed(self, config: KernelConfig, problem: Problem) -> float:
        """Bytes that it reads for each byte of weights. The constants of all other groups have their scales in them."""
        if not config.groups_of_16:
            return 1.0
        return 1.0 + config.k_tile // 16 * 16 * 2 * (2 if problem.zeros else 1) / _K_TILE_BYTES

    def counts(self, config: KernelConfig, problem: Problem) -> tuple[float, ...]:
        p, rows = problem, config.block_n // 16
        k_tiles, ends, rounds, x_k_tiles, ctas = work_unit(p.n, *self.unit(config, p.k_padded, p.sm_count))
        x_bytes = p.m * x_k_tiles * ctas * config.k_tile * 2 / p.sm_count
        products = rounds * rows * self.warps_k(config)
        streamed = k_tiles * rows * self.streamed(config, p)
        return ends, products, streamed, x_bytes, p.m, config.split_k, problem_bytes(p)

    def counted_work(self, counts: Sequence[Any], constants: Any, times: TileTimes, maximum: Any = max) -> Work:
        ends, products, streamed, x_bytes, m, split_k, total_bytes = counts
        launch_us = constants.fixed_us + cluster_us(constants, split_k)
        return decode_sm90_work(launch_us, ends, products, streamed, x_bytes, m, total_bytes, constants, times, maximum)

    def kernel(self, configs: Sequence[KernelConfig], problem: Problem) -> DecodeSm90Kernel:
        return DecodeSm90Kernel(self, configs, problem)
