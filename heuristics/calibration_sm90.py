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


# Constants: fitted to 26383 times of 281 problems, then moved so that choices cost least.

DECODE_SM90 = DecodeCost(
    fixed_us=3.143,
    cluster_us=0.5346,
    cta_us=0.0418,
    tb_s=4.559,
    unhidden=0.06128,
    sm_kb_us=57.26,
    x_kb_us=60.1,
    kernels={
        ("decode_sm90_8x32x2048_w8x32_s2", "int4"): KernelTimes(0.0235, 0.3032),
        ("decode_sm90_8x64x1024_w8x64_s2", "int4"): KernelTimes(0.02065, 0.283),
        ("decode_sm90_8x32x1024_w8x32_s2", "int8"): KernelTimes(0.0205, 0.2108),
        ("decode_sm90_8x64x512_w8x64_s2", "int8"): KernelTimes(0.01578, 0.2118),
    },
)

GEMM_SM90 = GemmSm90Cost(
    fixed_us=1.0,
    cluster_us=0.4202,
    cta_us=0.1114,
    tb_s=4.23,
    unhidden=0.002001,
    idle=0.2696,
    kernels={
        ("gemm_sm90_8x64x512_w8x64_s4", "code4"): KernelTimes(0.6203, 2.656),
        ("gemm_sm90_8x128x256_w8x64_s6", "code4"): KernelTimes(0.6057, 3.139),
        ("gemm_sm90_8x256x128_w8x64_s7", "code4"): KernelTimes(0.5851, 3.068),
        ("gemm_sm90_16x64x512_w16x64_s4", "int4"): KernelTimes(0.5309, 3.46),
        ("gemm_sm90_16x64x512_w16x64_s4", "code4"): KernelTimes(0.5975, 3.473),
        ("gemm_sm90_16x64x512_w16x64_s3", "int8"): KernelTimes(0.7729, 2.383),
        ("gemm_sm90_16x128x256_w16x64_s6", "int4"): KernelTimes(0.5148, 3.435),
        ("gemm_sm90_16x128x256_w16x64_s5", "code4"): KernelTimes(0.6202, 3.334),
        ("gemm_sm90_16x128x256_w16x64_s4", "int8"): KernelTimes(0.6246, 2.463),
        ("gemm_sm90_16x192x128_w16x64_s9", "int4"): KernelTimes(0.4186, 2.937),
        ("gemm_sm90_16x192x128_w16x64_s8", "code4"): KernelTimes(0.5063, 2.717),
        ("gemm_sm90_16x192x128_w16x64_s6", "int8"): KernelTimes(0.4186, 2.594),
        ("gemm_sm90_16x256x128_w16x64_s7", "int4"): KernelTimes(0.525, 3.372),
        ("gemm_sm90_16x256x128_w16x64_s6", "code4"): KernelTimes(0.6061, 3.334),
        ("gemm_sm90_16x256x128_w16x64_s5", "int8"): KernelTimes(0.5514, 2.712),
        ("gemm_sm90_32x64x512_w32x64_s3", "int4"): KernelTimes(0.652, 3.298),
        ("gemm_sm90_32x64x512_w32x64_s2", "code4"): KernelTimes(1.29, 2.308),
        ("gemm_sm90_32x64x512_w32x64_s2", "int8"): KernelTimes(1.355, 2.147),
        ("gemm_sm90_32x128x256_w32x64_s4", "int4"): KernelTimes(0.5977, 3.523),
        ("gemm_sm90_32x128x256_w32x64_s3", "code4"): KernelTimes(0.6861, 3.486),
        ("gemm_sm90_32x128x256_w32x64_s3", "int8"): KernelTimes(0.752, 3.109),
        ("gemm_sm90_32x192x128_w32x64_s6", "int4"): KernelTimes(0.4552, 3.123),
        ("gemm_sm90_32x192x128_w32x64_s6", "code4"): KernelTimes(0.5389, 3.166),
        ("gemm_sm90_32x192x128_w32x64_s5", "int8"): KernelTimes(0.4484, 2.911),
        ("gemm_sm90_32x256x128_w32x64_s6", "int4"): KernelTimes(0.5852, 3.657),
        ("gemm_sm90_32x256x128_w32x64_s4", "code4"): KernelTimes(0.6644, 3.621),
        ("gemm_sm90_32x256x128_w32x64_s4", "int8"): KernelTimes(0.6022, 3.176),
        ("gemm_sm90_48x128x256_w48x64_s4", "int4"): KernelTimes(0.7658, 3.847),
        ("gemm_sm90_48x128x256_w48x64_s3", "code4"): KernelTimes(0.8422, 3.861),
        ("gemm_sm90_48x128x256_w48x64_s2", "int8"): KernelTimes(1.402, 2.301),
        ("gemm_sm90_48x192x128_w48x64_s6", "int4"): KernelTimes(0.5781, 3.315),
        ("gemm_sm90_48x192x128_w48x64_s5", "code4"): KernelTimes(0.6542, 3.58),
        ("gemm_sm90_48x192x128_w48x64_s4", "int8"): KernelTimes(0.5259, 3.243),
        ("gemm_sm90_48x256x128_w48x64_s5", "int4"): KernelTimes(0.754, 3.934),
        ("gemm_sm90_48x256x128_w48x64_s4", "code4"): KernelTimes(0.8397, 4.098),
        ("gemm_sm90_48x256x128_w48x64_s3", "int8"): KernelTimes(0.753, 3.831),
        ("gemm_sm90_64x128x256_w64x64_s3", "int4"): KernelTimes(0.9135, 3.797),
        ("gemm_sm90_64x128x256_w64x64_s2", "int8"): KernelTimes(1.405, 3.101),
        ("gemm_sm90_64x192x128_w64x64_s4", "int4"): KernelTimes(0.6638, 3.416),
        ("gemm_sm90_64x192x128_w64x64_s4", "code4"): KernelTimes(0.7231, 3.884),
        ("gemm_sm90_64x192x128_w64x64_s3", "int8"): KernelTimes(0.6446, 4.11),
        ("gemm_sm90_64x256x128_w64x64_s4", "int4"): KernelTimes(0.8485, 4.164),
        ("gemm_sm90_64x256x128_w64x64_s3", "code4"): KernelTimes(0.9284, 4.474),
        ("gemm_sm90_64x256x128_w64x64_s3", "int8"): KernelTimes(0.8137, 4.201),
        ("gemm_sm90_96x128x128_w96x64_s5", "int4"): KernelTimes(0.5809, 3.403),
        ("gemm_sm90_96x128x128_w96x64_s4", "code4"): KernelTimes(0.6384, 3.582),
        ("gemm_sm90_96x128x128_w96x64_s4", "int8"): KernelTimes(0.534, 3.001),
        ("gemm_sm90_96x192x128_w96x64_s5", "int4"): KernelTimes(0.8368, 3.087),
        ("gemm_sm90_96x192x128_w96x64_s5", "code4"): KernelTimes(0.8945, 4.868),
        ("gemm_sm90_96x192x128_w96x64_s4", "int8"): KernelTimes(0.8365, 1.581),
        ("gemm_sm90_96x256x128_w96x64_s5", "int4"): KernelTimes(1.105, 3.445),
        ("gemm_sm90_96x256x128_w96x64_s4", "code4"): KernelTimes(1.228, 1.326),
        ("gemm_sm90_96x256x128_w96x64_s3", "int8"): KernelTimes(1.137, 0.5979),
        ("gemm_sm90_128x128x128_w128x64_s3", "int4"): KernelTimes(0.6983, 3.68),
        ("gemm_sm90_128x128x128_w128x64_s3", "code4"): KernelTimes(0.7626, 4.525),
        ("gemm_sm90_128x128x128_w128x64_s3", "int8"): KernelTimes(0.7405, 3.332),
        ("gemm_sm90_128x192x128_w128x64_s4", "int4"): KernelTimes(1.033, 0.7252),
        ("gemm_sm90_128x192x128_w128x64_s3", "code4"): KernelTimes(1.231, 0.757),
        ("gemm_sm90_128x192x128_w128x64_s3", "int8"): KernelTimes(1.084, 1.048),
        ("gemm_sm90_192x128x64_w192x64_s7", "int4"): KernelTimes(0.5107, 0.6993),
        ("gemm_sm90_192x128x64_w192x64_s6", "code4"): KernelTimes(0.5705, 0.4753),
        ("gemm_sm90_192x128x64_w192x64_s6", "int8"): KernelTimes(0.5733, 0.6467),
        ("gemm_sm90_256x128x64_w256x64_s5", "int4"): KernelTimes(0.6695, 0.4031),
        ("gemm_sm90_256x128x64_w256x64_s5", "code4"): KernelTimes(0.7204, 0.4051),
        ("gemm_sm90_256x128x64_w256x64_s5", "int8"): KernelTimes(0.7186, 0.654),
    },
)
