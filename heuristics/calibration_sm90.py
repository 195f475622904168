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
    token_us    the end of a unit of columns, beyond end_us, for each token
    kernels     (kernel, format) -> its times
    """

    fixed_us: float
    cluster_us: float
    cta_us: float
    tb_s: float
    unhidden: float
    sm_kb_us: float
    x_kb_us: float
    token_us: float
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


# Constants: fitted to the times of 437 problems, then moved so that choices cost least. Those of decode_sm90 and of
# tiles of up to 32 tokens were searched once more, with 251 problems of other shapes, for choices and for the
# differences of near times within a problem (bench/NOTES.md); larger tiles stand as they were.

DECODE_SM90 = DecodeCost(
    fixed_us=2.702,
    cluster_us=0.3798,
    cta_us=0.03114,
    tb_s=5.391,
    unhidden=0.3327,
    sm_kb_us=79.41,
    x_kb_us=37.35,
    token_us=0.03502,
    kernels={
        ("decode_sm90_8x32x2048_w8x32_s2", "int4"): KernelTimes(0.01984, 0.2542),
        ("decode_sm90_8x32x2048_w8x32_s2", "code4"): KernelTimes(0.02628, 0.08856),
        ("decode_sm90_8x48x1024_w8x48_s2", "int4"): KernelTimes(0.02102, 0.3063),
        ("decode_sm90_8x48x1024_w8x48_s2", "code4"): KernelTimes(0.02426, 0.323),
        ("decode_sm90_8x64x1024_w8x64_s2", "int4"): KernelTimes(0.01901, 0.3278),
        ("decode_sm90_8x64x1024_w8x64_s2", "code4"): KernelTimes(0.02351, 0.2754),
        ("decode_sm90_8x32x1024_w8x32_s2", "int8"): KernelTimes(0.01204, 0.4242),
        ("decode_sm90_8x48x512_w8x48_s2", "int8"): KernelTimes(0.00888, 0.4545),
        ("decode_sm90_8x64x512_w8x64_s2", "int8"): KernelTimes(0.007913, 0.4465),
    },
)

GEMM_SM90 = GemmSm90Cost(
    fixed_us=1.0,
    cluster_us=0.5167,
    cta_us=0.103,
    tb_s=4.189,
    unhidden=0.003021,
    idle=0.2627,
    kernels={
        ("gemm_sm90_8x64x256_w8x64_s6", "int4"): KernelTimes(0.2884, 2.141),
        ("gemm_sm90_8x64x512_w8x64_s5", "int4"): KernelTimes(0.4812, 2.493),
        ("gemm_sm90_8x64x512_w8x64_s4", "code4"): KernelTimes(0.5944, 2.887),
        ("gemm_sm90_8x128x256_w8x64_s6", "int4"): KernelTimes(0.5052, 2.499),
        ("gemm_sm90_8x128x256_w8x64_s6", "code4"): KernelTimes(0.5487, 2.887),
        ("gemm_sm90_8x192x128_w8x64_s8", "int4"): KernelTimes(0.3886, 2.12),
        ("gemm_sm90_8x256x128_w8x64_s7", "int4"): KernelTimes(0.5114, 2.309),
        ("gemm_sm90_8x256x128_w8x64_s7", "code4"): KernelTimes(0.5618, 2.742),
        ("gemm_sm90_16x64x256_w16x64_s6", "int4"): KernelTimes(0.3004, 2.193),
        ("gemm_sm90_16x64x256_w16x64_s8", "int8"): KernelTimes(0.3845, 2.084),
        ("gemm_sm90_16x64x512_w16x64_s5", "int4"): KernelTimes(0.5317, 2.675),
        ("gemm_sm90_16x64x512_w16x64_s4", "code4"): KernelTimes(0.6146, 2.98),
        ("gemm_sm90_16x64x512_w16x64_s4", "int8"): KernelTimes(0.8078, 2.357),
        ("gemm_sm90_16x128x256_w16x64_s6", "int4"): KernelTimes(0.5305, 2.666),
        ("gemm_sm90_16x128x256_w16x64_s5", "code4"): KernelTimes(0.5912, 2.977),
        ("gemm_sm90_16x128x256_w16x64_s4", "int8"): KernelTimes(0.7795, 2.264),
        ("gemm_sm90_16x192x128_w16x64_s9", "int4"): KernelTimes(0.4377, 2.099),
        ("gemm_sm90_16x192x128_w16x64_s8", "code4"): KernelTimes(0.4945, 2.61),
        ("gemm_sm90_16x192x128_w16x64_s6", "int8"): KernelTimes(0.5467, 2.288),
        ("gemm_sm90_16x256x128_w16x64_s7", "int4"): KernelTimes(0.5475, 2.401),
        ("gemm_sm90_16x256x128_w16x64_s6", "code4"): KernelTimes(0.6108, 2.778),
        ("gemm_sm90_16x256x128_w16x64_s5", "int8"): KernelTimes(0.5553, 2.74),
        ("gemm_sm90_32x64x256_w32x64_s6", "int4"): KernelTimes(0.3325, 2.394),
        ("gemm_sm90_32x64x256_w32x64_s6", "code4"): KernelTimes(0.3659, 3.105),
        ("gemm_sm90_32x64x256_w32x64_s6", "int8"): KernelTimes(0.3885, 2.224),
        ("gemm_sm90_32x128x256_w32x64_s4", "int4"): KernelTimes(0.6227, 2.931),
        ("gemm_sm90_32x128x256_w32x64_s4", "int8"): KernelTimes(0.7486, 2.786),
        ("gemm_sm90_32x128x256_w32x64_s3", "code4"): KernelTimes(0.7082, 3.064),
        ("gemm_sm90_32x192x128_w32x64_s6", "int4"): KernelTimes(0.4941, 2.36),
        ("gemm_sm90_32x192x128_w32x64_s6", "code4"): KernelTimes(0.5393, 2.86),
        ("gemm_sm90_32x192x128_w32x64_s5", "int8"): KernelTimes(0.556, 2.419),
        ("gemm_sm90_32x256x128_w32x64_s6", "int4"): KernelTimes(0.6073, 2.992),
        ("gemm_sm90_32x256x128_w32x64_s4", "code4"): KernelTimes(0.6162, 3.164),
        ("gemm_sm90_32x256x128_w32x64_s4", "int8"): KernelTimes(0.598, 2.869),
        ("gemm_sm90_48x64x256_w48x64_s5", "int4"): KernelTimes(0.3808, 2.608),
        ("gemm_sm90_48x64x256_w48x64_s5", "code4"): KernelTimes(0.4639, 3.009),
        ("gemm_sm90_48x64x256_w48x64_s5", "int8"): KernelTimes(0.4246, 2.435),
        ("gemm_sm90_48x128x128_w48x64_s7", "int4"): KernelTimes(0.3716, 2.686),
        ("gemm_sm90_48x192x128_w48x64_s6", "int4"): KernelTimes(0.5144, 2.865),
        ("gemm_sm90_48x192x128_w48x64_s5", "code4"): KernelTimes(0.6498, 3.515),
        ("gemm_sm90_48x192x128_w48x64_s4", "int8"): KernelTimes(0.5515, 3.153),
        ("gemm_sm90_48x256x128_w48x64_s5", "int4"): KernelTimes(0.7384, 4.001),
        ("gemm_sm90_48x256x128_w48x64_s4", "code4"): KernelTimes(0.8414, 3.957),
        ("gemm_sm90_48x256x128_w48x64_s3", "int8"): KernelTimes(0.7275, 3.935),
        ("gemm_sm90_64x64x256_w64x64_s5", "int4"): KernelTimes(0.4604, 2.756),
        ("gemm_sm90_64x64x256_w64x64_s4", "code4"): KernelTimes(0.5304, 3.109),
        ("gemm_sm90_64x64x256_w64x64_s4", "int8"): KernelTimes(0.4701, 2.676),
        ("gemm_sm90_64x128x128_w64x64_s6", "int4"): KernelTimes(0.434, 3.0),
        ("gemm_sm90_64x128x128_w64x64_s6", "int8"): KernelTimes(0.4426, 2.998),
        ("gemm_sm90_64x128x256_w64x64_s3", "code4"): KernelTimes(0.9326, 3.559),
        ("gemm_sm90_64x192x128_w64x64_s4", "int4"): KernelTimes(0.6121, 3.54),
        ("gemm_sm90_64x192x128_w64x64_s4", "code4"): KernelTimes(0.7136, 3.856),
        ("gemm_sm90_64x192x128_w64x64_s3", "int8"): KernelTimes(0.6324, 4.039),
        ("gemm_sm90_64x256x128_w64x64_s4", "int4"): KernelTimes(0.8177, 4.202),
        ("gemm_sm90_64x256x128_w64x64_s3", "code4"): KernelTimes(0.9239, 4.271),
        ("gemm_sm90_64x256x128_w64x64_s3", "int8"): KernelTimes(0.7731, 4.498),
        ("gemm_sm90_96x64x256_w96x64_s3", "int4"): KernelTimes(0.6095, 3.069),
        ("gemm_sm90_96x128x128_w96x64_s5", "int4"): KernelTimes(0.5578, 3.017),
        ("gemm_sm90_96x128x128_w96x64_s4", "code4"): KernelTimes(0.6105, 3.478),
        ("gemm_sm90_96x128x128_w96x64_s4", "int8"): KernelTimes(0.5184, 2.949),
        ("gemm_sm90_96x192x128_w96x64_s4", "int4"): KernelTimes(0.7647, 3.878),
        ("gemm_sm90_96x192x128_w96x64_s4", "int8"): KernelTimes(0.8158, 1.484),
        ("gemm_sm90_96x192x128_w96x64_s3", "code4"): KernelTimes(0.8401, 3.72),
        ("gemm_sm90_96x192x128_w96x64_s3", "int8"): KernelTimes(0.8103, 3.595),
        ("gemm_sm90_96x256x128_w96x64_s4", "int4"): KernelTimes(1.093, 4.327),
        ("gemm_sm90_96x256x128_w96x64_s3", "code4"): KernelTimes(1.178, 4.729),
        ("gemm_sm90_96x256x128_w96x64_s3", "int8"): KernelTimes(1.018, 4.393),
        ("gemm_sm90_128x128x128_w128x64_s3", "int4"): KernelTimes(0.7078, 4.048),
        ("gemm_sm90_128x128x128_w128x64_s3", "code4"): KernelTimes(0.7758, 3.781),
        ("gemm_sm90_128x128x128_w128x64_s3", "int8"): KernelTimes(0.6926, 3.199),
        ("gemm_sm90_128x192x128_w128x64_s3", "int4"): KernelTimes(1.02, 4.143),
        ("gemm_sm90_128x192x128_w128x64_s3", "code4"): KernelTimes(1.153, 3.404),
        ("gemm_sm90_128x192x128_w128x64_s3", "int8"): KernelTimes(1.063, 2.882),
        ("gemm_sm90_192x128x64_w192x64_s5", "int4"): KernelTimes(0.5068, 4.225),
        ("gemm_sm90_192x128x64_w192x64_s5", "code4"): KernelTimes(0.5437, 3.076),
        ("gemm_sm90_192x128x64_w192x64_s5", "int8"): KernelTimes(0.5132, 2.67),
        ("gemm_sm90_256x128x64_w256x64_s5", "int4"): KernelTimes(0.6942, 0.3822),
        ("gemm_sm90_256x128x64_w256x64_s5", "code4"): KernelTimes(0.7222, 0.2682),
        ("gemm_sm90_256x128x64_w256x64_s5", "int8"): KernelTimes(0.6942, 0.3305),
    },
)
