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


# Constants: fitted to 31950 times of 347 problems, then moved so that choices cost least.

DECODE_SM90 = DecodeCost(
    fixed_us=2.5,
    cluster_us=0.7229,
    cta_us=0.2535,
    tb_s=4.565,
    unhidden=0.05282,
    sm_kb_us=57.51,
    x_kb_us=48.96,
    kernels={
        ("decode_sm90_8x32x2048_w8x32_s2", "int4"): KernelTimes(0.02309, 1.01),
        ("decode_sm90_8x64x1024_w8x64_s2", "int4"): KernelTimes(0.02229, 1.008),
        ("decode_sm90_8x32x1024_w8x32_s2", "int8"): KernelTimes(0.02412, 0.8905),
        ("decode_sm90_8x64x512_w8x64_s2", "int8"): KernelTimes(0.01746, 0.9607),
    },
)

GEMM_SM90 = GemmSm90Cost(
    fixed_us=1.0,
    cluster_us=0.6711,
    cta_us=0.01356,
    tb_s=4.594,
    unhidden=0.05794,
    idle=0.2551,
    kernels={
        ("gemm_sm90_16x64x512_w16x64_s4", "int4"): KernelTimes(0.5356, 3.046),
        ("gemm_sm90_16x64x512_w16x64_s4", "code4"): KernelTimes(0.6168, 3.182),
        ("gemm_sm90_16x64x512_w16x64_s3", "int8"): KernelTimes(0.7666, 2.472),
        ("gemm_sm90_16x128x256_w16x64_s6", "int4"): KernelTimes(0.4956, 3.284),
        ("gemm_sm90_16x128x256_w16x64_s5", "code4"): KernelTimes(0.5793, 3.104),
        ("gemm_sm90_16x128x256_w16x64_s4", "int8"): KernelTimes(0.6022, 2.613),
        ("gemm_sm90_16x192x128_w16x64_s9", "int4"): KernelTimes(0.3991, 3.146),
        ("gemm_sm90_16x192x128_w16x64_s8", "code4"): KernelTimes(0.481, 2.831),
        ("gemm_sm90_16x192x128_w16x64_s6", "int8"): KernelTimes(0.3971, 2.914),
        ("gemm_sm90_16x256x128_w16x64_s7", "int4"): KernelTimes(0.4976, 3.465),
        ("gemm_sm90_16x256x128_w16x64_s6", "code4"): KernelTimes(0.5739, 3.378),
        ("gemm_sm90_16x256x128_w16x64_s5", "int8"): KernelTimes(0.5024, 2.984),
        ("gemm_sm90_32x64x512_w32x64_s3", "int4"): KernelTimes(0.6712, 3.635),
        ("gemm_sm90_32x64x512_w32x64_s2", "code4"): KernelTimes(1.273, 2.567),
        ("gemm_sm90_32x64x512_w32x64_s2", "int8"): KernelTimes(1.439, 2.543),
        ("gemm_sm90_32x128x256_w32x64_s4", "int4"): KernelTimes(0.5948, 3.57),
        ("gemm_sm90_32x128x256_w32x64_s3", "code4"): KernelTimes(0.6838, 3.502),
        ("gemm_sm90_32x128x256_w32x64_s3", "int8"): KernelTimes(0.6864, 4.003),
        ("gemm_sm90_32x192x128_w32x64_s6", "int4"): KernelTimes(0.4452, 3.313),
        ("gemm_sm90_32x192x128_w32x64_s6", "code4"): KernelTimes(0.5217, 3.195),
        ("gemm_sm90_32x192x128_w32x64_s5", "int8"): KernelTimes(0.4631, 3.346),
        ("gemm_sm90_32x256x128_w32x64_s6", "int4"): KernelTimes(0.5685, 3.818),
        ("gemm_sm90_32x256x128_w32x64_s4", "code4"): KernelTimes(0.6405, 3.651),
        ("gemm_sm90_32x256x128_w32x64_s4", "int8"): KernelTimes(0.59, 3.508),
        ("gemm_sm90_48x128x256_w48x64_s4", "int4"): KernelTimes(0.7628, 3.935),
        ("gemm_sm90_48x128x256_w48x64_s3", "code4"): KernelTimes(0.8555, 3.925),
        ("gemm_sm90_48x128x256_w48x64_s2", "int8"): KernelTimes(1.407, 2.859),
        ("gemm_sm90_48x192x128_w48x64_s6", "int4"): KernelTimes(0.5771, 3.609),
        ("gemm_sm90_48x192x128_w48x64_s5", "code4"): KernelTimes(0.6386, 3.71),
        ("gemm_sm90_48x192x128_w48x64_s4", "int8"): KernelTimes(0.5368, 3.974),
        ("gemm_sm90_48x256x128_w48x64_s5", "int4"): KernelTimes(0.7292, 4.166),
        ("gemm_sm90_48x256x128_w48x64_s4", "code4"): KernelTimes(0.8166, 4.046),
        ("gemm_sm90_48x256x128_w48x64_s3", "int8"): KernelTimes(0.728, 4.559),
        ("gemm_sm90_64x128x256_w64x64_s3", "int4"): KernelTimes(0.8827, 4.271),
        ("gemm_sm90_64x128x256_w64x64_s2", "int8"): KernelTimes(1.374, 4.035),
        ("gemm_sm90_64x192x128_w64x64_s4", "int4"): KernelTimes(0.6474, 3.902),
        ("gemm_sm90_64x192x128_w64x64_s4", "code4"): KernelTimes(0.7139, 4.048),
        ("gemm_sm90_64x192x128_w64x64_s3", "int8"): KernelTimes(0.6316, 4.855),
        ("gemm_sm90_64x256x128_w64x64_s4", "int4"): KernelTimes(0.8408, 4.503),
        ("gemm_sm90_64x256x128_w64x64_s3", "code4"): KernelTimes(0.9315, 4.572),
        ("gemm_sm90_64x256x128_w64x64_s3", "int8"): KernelTimes(0.7778, 5.271),
        ("gemm_sm90_96x128x128_w96x64_s5", "int4"): KernelTimes(0.5914, 4.325),
        ("gemm_sm90_96x128x128_w96x64_s4", "code4"): KernelTimes(0.6446, 4.637),
        ("gemm_sm90_96x128x128_w96x64_s4", "int8"): KernelTimes(0.552, 4.947),
        ("gemm_sm90_96x192x128_w96x64_s5", "int4"): KernelTimes(0.8805, 1.773),
        ("gemm_sm90_96x192x128_w96x64_s5", "code4"): KernelTimes(0.937, 3.085),
        ("gemm_sm90_96x192x128_w96x64_s4", "int8"): KernelTimes(0.7931, 3.558),
        ("gemm_sm90_96x256x128_w96x64_s5", "int4"): KernelTimes(1.158, 0.7057),
        ("gemm_sm90_96x256x128_w96x64_s4", "code4"): KernelTimes(1.282, 1.218),
        ("gemm_sm90_96x256x128_w96x64_s3", "int8"): KernelTimes(1.041, 5.713),
        ("gemm_sm90_128x128x128_w128x64_s3", "int4"): KernelTimes(0.7143, 5.007),
        ("gemm_sm90_128x128x128_w128x64_s3", "code4"): KernelTimes(0.7687, 5.611),
        ("gemm_sm90_128x128x128_w128x64_s3", "int8"): KernelTimes(0.654, 5.715),
        ("gemm_sm90_128x192x128_w128x64_s4", "int4"): KernelTimes(1.078, 1.762),
        ("gemm_sm90_128x192x128_w128x64_s4", "code4"): KernelTimes(1.176, 2.439),
        ("gemm_sm90_128x192x128_w128x64_s3", "int8"): KernelTimes(1.024, 3.907),
        ("gemm_sm90_192x128x64_w192x64_s7", "int4"): KernelTimes(0.5586, 1.511),
        ("gemm_sm90_192x128x64_w192x64_s6", "code4"): KernelTimes(0.5775, 1.98),
        ("gemm_sm90_192x128x64_w192x64_s6", "int8"): KernelTimes(0.5365, 3.99),
        ("gemm_sm90_256x128x64_w256x64_s5", "int4"): KernelTimes(0.7122, 2.069),
        ("gemm_sm90_256x128x64_w256x64_s5", "code4"): KernelTimes(0.7339, 2.807),
        ("gemm_sm90_256x128x64_w256x64_s5", "int8"): KernelTimes(0.6835, 3.561),
    },
)
