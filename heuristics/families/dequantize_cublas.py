"""dequantize_cublas: slices of the weight are dequantized (kernels/convert/dequantize.cu), cuBLAS multiplies by them.

Two kernels for each slice, without waves: cuBLAS is taken to choose tiles, or a split of K, that keep as many SMs busy
as there are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any, ClassVar, NamedTuple

from ..constants import UnfusedConstants
from ..cost import Work, column_bytes
from ..h200 import UNFUSED
from ..machine import machine
from ..problem import Problem
from ..slices import longest_k, slice_columns
from .base import Family, KernelConfig, Launch

MIN_M = 256
"""Rows of x from which `select` considers it: with fewer, reading the packed weight is quicker."""

_MIN_M_OF_16 = 65
"""The same for groups of 16: from here on their fused tiles convert each weight more than once."""

_FORMATS = ("int4", "int8", "code4")  # of kernels/convert/dequantize.cu

_MOST_PARTS = 8  # of K, that cuBLAS is taken to compute at once where tiles are few


class Counts(NamedTuple):
    """What a product is in slices of 16-bit weights. Each may be an array, of many products.

    weight_mb   packed and in 16 bits, 10**6 bytes
    product_mb  what cuBLAS reads and writes
    sm_tflops   10**12 operations of the busiest SM, counted in whole tiles
    """

    slices: Any
    weight_mb: Any
    product_mb: Any
    sm_tflops: Any
    y_mb: Any


def unfused_work(counts: Counts, arch: int, constants: UnfusedConstants) -> Work:
    """The work of a product, or of many."""
    gpu = machine(arch)
    apart_us = (counts.weight_mb / constants.dequantize_bandwidth + counts.y_mb * constants.unhidden_y) / gpu.tb_s
    return (
        counts.slices * constants.slice_us + apart_us,
        counts.sm_tflops * 1e6 / (constants.sm_tflop_s * gpu.cublas_speed),
        counts.product_mb / gpu.tb_s,
        0.0,
    )


class UnfusedLaunch(Launch):
    __slots__ = ("_arch", "_family", "_sm_count")

    def __init__(self, family: DequantizeCublas, config: KernelConfig, problem: Problem) -> None:
        super().__init__(config)
        self._family, self._arch, self._sm_count = family, problem.arch, problem.sm_count

    def work(self, m: int, n: int, k: int, tiles: int, total_bytes: float) -> Work:
        if k > longest_k():
            return math.inf, 0.0, 0.0, 0.0  # no slice fits
        weight_bytes = total_bytes - 2 * m * (k + n)
        return unfused_work(
            self._family.counts_of(self.config, m, n, k, self._sm_count, weight_bytes), self._arch, UNFUSED
        )


class DequantizeCublas(Family):
    unfused = True
    least_m: ClassVar[int | None]  # `min_m`, but for groups of 16

    def configs(self) -> Iterable[KernelConfig]:
        config = KernelConfig(self.name, 128, 128, 64, 128, 128, 1, 1, _FORMATS)
        yield config
        yield config.for_groups_of_16()

    def min_m(self, config: KernelConfig) -> int | None:
        return _MIN_M_OF_16 if config.groups_of_16 else self.least_m

    def kernel_name(self, config: KernelConfig) -> str:
        return self.name

    def max_split_k(self, config: KernelConfig) -> int:
        return 1

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        return 0  # that anyone must ask for

    def why_not_sizes(self, config: KernelConfig, problem: Problem) -> str | None:
        if problem.k <= longest_k():
            return super().why_not_sizes(config, problem)
        return f"{config} computes K of at most {longest_k()}, but qweight has {problem.k}"

    def counts(self, config: KernelConfig, problem: Problem) -> Counts:
        p = problem
        return self.counts_of(config, p.m, p.n, p.k, p.sm_count, p.n * column_bytes(p))

    def counts_of(self, config: KernelConfig, m: int, n: int, k: int, sm_count: int, weight_bytes: float) -> Counts:
        """weight_bytes: packed, with scales and zeros."""
        columns = slice_columns(n, k)
        slices = -(-n // columns)
        row_tiles = -(-m // config.block_m)
        busy_sms = min(sm_count, _MOST_PARTS * row_tiles * -(-columns // config.block_n))
        flops = self.tiles(config, m, n) * 2 * config.block_m * config.block_n * k
        return Counts(
            slices,
            (weight_bytes + 2 * k * n) / 1e6,
            (2 * k * n + slices * 2 * m * k + 2 * m * n) / 1e6,
            flops / busy_sms / 1e12,
            2 * m * n / 1e6,
        )

    def is_calibrated(self, config: KernelConfig, format: str) -> bool:
        return True

    def launch(self, config: KernelConfig, problem: Problem, order: Hashable = None) -> UnfusedLaunch:
        return UnfusedLaunch(self, config, problem)


class DequantizeCublasSm75(DequantizeCublas):
    name = "dequantize_cublas_sm75"
    layout = "interleaved"
    first_arch = 75
    least_m = MIN_M


class DequantizeCublasSm90(DequantizeCublas):
    """For what no kernel of Hopper can compute, and for many rows of x and groups of 16.

    Kernels of other groups were quicker in 787 of 788 measured problems, and their accumulators are fp32, whatever
    PyTorch allows cuBLAS.
    """

    name = "dequantize_cublas_sm90"
    layout = "tiled"
    first_arch = last_arch = 90
    least_m = None
