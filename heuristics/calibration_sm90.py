"""Constants of the cost model of the Hopper kernels (cost.py), us on an H200.

What follows the classes is written by `python -m weightonly.heuristics.fit` (fit_sm90.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class KernelTimes(NamedTuple):
    """One kernel for one format.

    unit_us  decode_sm90: one SM multiplies a piece (128 k of int4, 64 of int8) by 16 columns
             gemm_sm90: one SM multiplies block_k of a tile, while all SMs are busy
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
    kernels     (kernel, format) -> its times
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


# Constants: fitted to 13515 times of 236 problems, then moved so that choices cost least.

DECODE_SM90 = DecodeCost(
    fixed_us=2.666,
    cluster_us=0.7777,
    cta_us=0.1444,
    tb_s=4.597,
    unhidden=0.05619,
    sm_kb_us=56.83,
    x_kb_us=50.89,
    kernels={
        ("decode_sm90_8x32x2048_w8x32_s2", "int4"): KernelTimes(0.02291, 1.049),
        ("decode_sm90_8x32x2048_w8x32_s2", "code4"): KernelTimes(0.03676, 1.242),
        ("decode_sm90_8x64x1024_w8x64_s2", "int4"): KernelTimes(0.02225, 1.009),
        ("decode_sm90_8x64x1024_w8x64_s2", "code4"): KernelTimes(0.03658, 1.048),
        ("decode_sm90_8x32x1024_w8x32_s2", "int8"): KernelTimes(0.02145, 0.843),
        ("decode_sm90_8x64x512_w8x64_s2", "int8"): KernelTimes(0.01666, 0.967),
    },
)

GEMM_SM90 = GemmSm90Cost(
    fixed_us=1.0,
    cluster_us=0.7296,
    cta_us=0.005,
    tb_s=4.366,
    unhidden=0.07415,
    idle=0.1833,
    kernels={
        ("gemm_sm90_16x64x512_w16x64_s4", "int4"): KernelTimes(0.6334, 3.316),
        ("gemm_sm90_16x64x512_w16x64_s4", "code4"): KernelTimes(0.6937, 2.944),
        ("gemm_sm90_16x64x512_w16x64_s3", "int8"): KernelTimes(0.7947, 2.697),
        ("gemm_sm90_16x256x128_w16x64_s7", "int4"): KernelTimes(0.6316, 3.212),
        ("gemm_sm90_16x256x128_w16x64_s7", "code4"): KernelTimes(0.6988, 3.22),
        ("gemm_sm90_16x256x128_w16x64_s5", "int8"): KernelTimes(0.5166, 3.124),
        ("gemm_sm90_32x64x512_w32x64_s3", "int4"): KernelTimes(0.8188, 3.852),
        ("gemm_sm90_32x64x512_w32x64_s3", "code4"): KernelTimes(0.8468, 3.97),
        ("gemm_sm90_32x64x512_w32x64_s2", "int8"): KernelTimes(1.467, 2.706),
        ("gemm_sm90_32x128x256_w32x64_s4", "int4"): KernelTimes(0.7147, 3.611),
        ("gemm_sm90_32x128x256_w32x64_s4", "code4"): KernelTimes(0.7983, 3.527),
        ("gemm_sm90_32x128x256_w32x64_s3", "int8"): KernelTimes(0.756, 3.729),
        ("gemm_sm90_32x192x128_w32x64_s6", "int4"): KernelTimes(0.5074, 3.342),
        ("gemm_sm90_32x192x128_w32x64_s6", "code4"): KernelTimes(0.6174, 3.327),
        ("gemm_sm90_32x192x128_w32x64_s5", "int8"): KernelTimes(0.4419, 3.64),
        ("gemm_sm90_32x256x128_w32x64_s6", "int4"): KernelTimes(0.6801, 3.81),
        ("gemm_sm90_32x256x128_w32x64_s6", "code4"): KernelTimes(0.765, 3.902),
        ("gemm_sm90_32x256x128_w32x64_s4", "int8"): KernelTimes(0.6044, 3.714),
        ("gemm_sm90_64x128x256_w64x64_s3", "int4"): KernelTimes(0.9673, 4.821),
        ("gemm_sm90_64x128x256_w64x64_s2", "int8"): KernelTimes(1.535, 3.748),
        ("gemm_sm90_64x192x128_w64x64_s4", "int4"): KernelTimes(0.6486, 4.544),
        ("gemm_sm90_64x192x128_w64x64_s4", "code4"): KernelTimes(0.7198, 4.865),
        ("gemm_sm90_64x192x128_w64x64_s3", "int8"): KernelTimes(0.6636, 5.083),
        ("gemm_sm90_64x256x128_w64x64_s4", "int4"): KernelTimes(0.8524, 5.456),
        ("gemm_sm90_64x256x128_w64x64_s3", "code4"): KernelTimes(0.9209, 5.731),
        ("gemm_sm90_64x256x128_w64x64_s3", "int8"): KernelTimes(0.7932, 6.063),
        ("gemm_sm90_128x128x128_w128x64_s3", "int4"): KernelTimes(0.7077, 6.119),
        ("gemm_sm90_128x128x128_w128x64_s3", "code4"): KernelTimes(0.723, 7.014),
        ("gemm_sm90_128x128x128_w128x64_s3", "int8"): KernelTimes(0.6438, 6.984),
        ("gemm_sm90_256x128x64_w256x64_s5", "int4"): KernelTimes(0.6691, 3.199),
        ("gemm_sm90_256x128x64_w256x64_s5", "int8"): KernelTimes(0.6421, 4.42),
    },
)
