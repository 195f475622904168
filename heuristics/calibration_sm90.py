"""Constants of the cost model of the Hopper kernels (cost.py), us on an H200.

What follows the classes is written by `python -m weightonly.heuristics.fit` (fit_sm90.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class KernelTimes(NamedTuple):
    """One kernel for one format.

    unit_us  decode_sm90: one SM multiplies a piece (128 k of int4, 64 of int8) by 16 columns
             gemm_sm90: one SM multiplies 128 k of a tile, while all SMs are busy
    end_us   the end of a unit of columns, or of a tile: the last sums, the stores; gemm_sm90: filling the pipeline, too
    """

    unit_us: float
    end_us: float


@dataclass(frozen=True)
class DecodeCost:
    """decode_sm90.

    fixed_us    launch, the first pieces on their way
    cluster_us  beyond it where two CTAs of a cluster share K
    cta_us      beyond that for each further CTA of the cluster
    tb_s        weights, scales, x and y, streamed by all SMs
    unhidden    part of the shorter of memory's and the SM's time that is not hidden behind the longer
    sm_kb_us    the most that one SM takes of the stream of weights, KB/us (10**3 bytes)
    x_kb_us     x on its way into the shared memory of one SM, KB/us
    kernels     (kernel, format) -> its times; those of a kernel for more tokens are no shorter than those of the same
                shape for fewer, so that `select` looks at the latter alone where both compute a problem
    """

    fixed_us: float
    cluster_us: float
    cta_us: float
    tb_s: float
    unhidden: float
    sm_kb_us: float
    x_kb_us: float
    kernels: dict[tuple[str, str], KernelTimes]


@dataclass(frozen=True)
class GemmSm90Cost:
    """gemm_sm90.

    fixed_us ... unhidden  as in DecodeCost
    idle                   part of an SM's time that is saved when all others are idle
    kernels                (kernel, format) -> its times
    """

    fixed_us: float
    cluster_us: float
    cta_us: float
    tb_s: float
    unhidden: float
    idle: float
    kernels: dict[tuple[str, str], KernelTimes]


# Constants: fitted to 6880 times of 123 problems, then moved so that choices cost least.

DECODE_SM90 = DecodeCost(
    fixed_us=2.921,
    cluster_us=0.8571,
    cta_us=0.08523,
    tb_s=4.58,
    unhidden=0.05868,
    sm_kb_us=64.22,
    x_kb_us=50.68,
    kernels={
        ("decode_sm90_8x32x2048_w8x32_s2", "int4"): KernelTimes(0.02497, 1.068),
        ("decode_sm90_8x64x1024_w8x32_s2", "int4"): KernelTimes(0.02423, 1.128),
        ("decode_sm90_8x64x1024_w8x64_s2", "int4"): KernelTimes(0.02506, 1.023),
        ("decode_sm90_16x64x1024_w16x32_s2", "int4"): KernelTimes(0.02887, 1.378),
        ("decode_sm90_16x64x1024_w16x64_s2", "int4"): KernelTimes(0.02994, 1.31),
        ("decode_sm90_8x32x1024_w8x32_s2", "int8"): KernelTimes(0.02041, 0.5949),
        ("decode_sm90_8x64x512_w8x32_s2", "int8"): KernelTimes(0.01594, 1.2),
        ("decode_sm90_8x64x512_w8x64_s2", "int8"): KernelTimes(0.01604, 1.068),
        ("decode_sm90_16x64x512_w16x32_s2", "int8"): KernelTimes(0.01907, 1.574),
        ("decode_sm90_16x64x512_w16x64_s2", "int8"): KernelTimes(0.0164, 1.365),
    },
)

GEMM_SM90 = GemmSm90Cost(
    fixed_us=1.0,
    cluster_us=0.8756,
    cta_us=0.005,
    tb_s=4.01,
    unhidden=0.02967,
    idle=0.1315,
    kernels={
        ("gemm_sm90_32x128x128_w32x64_s6", "int4"): KernelTimes(0.4336, 2.373),
        ("gemm_sm90_32x128x128_w32x64_s6", "int8"): KernelTimes(0.3728, 2.921),
        ("gemm_sm90_32x192x128_w32x64_s6", "int4"): KernelTimes(0.5797, 2.486),
        ("gemm_sm90_32x192x128_w32x64_s6", "int8"): KernelTimes(0.5109, 2.811),
        ("gemm_sm90_32x256x128_w32x64_s6", "int4"): KernelTimes(0.7617, 2.757),
        ("gemm_sm90_64x128x128_w64x64_s4", "int4"): KernelTimes(0.5521, 3.208),
        ("gemm_sm90_64x128x128_w64x64_s4", "int8"): KernelTimes(0.5208, 3.927),
        ("gemm_sm90_64x192x128_w64x64_s8", "int4"): KernelTimes(0.8134, 3.756),
        ("gemm_sm90_64x192x128_w64x64_s8", "int8"): KernelTimes(0.6838, 4.586),
        ("gemm_sm90_64x256x128_w64x64_s8", "int4"): KernelTimes(1.047, 4.468),
        ("gemm_sm90_64x256x128_w64x64_s8", "int8"): KernelTimes(0.822, 5.377),
        ("gemm_sm90_128x128x128_w128x64_s5", "int4"): KernelTimes(0.7856, 5.393),
        ("gemm_sm90_128x128x128_w128x64_s5", "int8"): KernelTimes(0.704, 6.374),
        ("gemm_sm90_256x128x128_w256x64_s5", "int4"): KernelTimes(1.371, 7.344),
        ("gemm_sm90_256x128x128_w256x64_s5", "int8"): KernelTimes(1.346, 8.992),
    },
)
