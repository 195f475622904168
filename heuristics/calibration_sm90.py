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


# Constants: fitted to 26205 times of 281 problems, then moved so that choices cost least.

DECODE_SM90 = DecodeCost(
    fixed_us=3.284,
    cluster_us=0.5291,
    cta_us=0.02371,
    tb_s=4.569,
    unhidden=0.06644,
    sm_kb_us=62.17,
    x_kb_us=50.64,
    kernels={
        ("decode_sm90_8x32x2048_w8x32_s2", "int4"): KernelTimes(0.02307, 0.3228),
        ("decode_sm90_8x64x1024_w8x64_s2", "int4"): KernelTimes(0.0207, 0.3109),
        ("decode_sm90_8x32x1024_w8x32_s2", "int8"): KernelTimes(0.01986, 0.2207),
        ("decode_sm90_8x64x512_w8x64_s2", "int8"): KernelTimes(0.01647, 0.2109),
    },
)

GEMM_SM90 = GemmSm90Cost(
    fixed_us=1.0,
    cluster_us=0.5452,
    cta_us=0.08962,
    tb_s=4.217,
    unhidden=0.002,
    idle=0.2694,
    kernels={
        ("gemm_sm90_8x64x512_w8x64_s4", "code4"): KernelTimes(0.5949, 2.824),
        ("gemm_sm90_8x128x256_w8x64_s6", "code4"): KernelTimes(0.5884, 3.096),
        ("gemm_sm90_8x256x128_w8x64_s7", "code4"): KernelTimes(0.5825, 3.168),
        ("gemm_sm90_16x64x512_w16x64_s4", "int4"): KernelTimes(0.5647, 3.149),
        ("gemm_sm90_16x64x512_w16x64_s4", "code4"): KernelTimes(0.6267, 3.331),
        ("gemm_sm90_16x64x512_w16x64_s3", "int8"): KernelTimes(0.7899, 2.684),
        ("gemm_sm90_16x128x256_w16x64_s6", "int4"): KernelTimes(0.5249, 3.506),
        ("gemm_sm90_16x128x256_w16x64_s5", "code4"): KernelTimes(0.6186, 3.232),
        ("gemm_sm90_16x128x256_w16x64_s4", "int8"): KernelTimes(0.6208, 2.911),
        ("gemm_sm90_16x192x128_w16x64_s9", "int4"): KernelTimes(0.4241, 3.254),
        ("gemm_sm90_16x192x128_w16x64_s8", "code4"): KernelTimes(0.5034, 2.895),
        ("gemm_sm90_16x192x128_w16x64_s6", "int8"): KernelTimes(0.4164, 3.138),
        ("gemm_sm90_16x256x128_w16x64_s7", "int4"): KernelTimes(0.5211, 3.493),
        ("gemm_sm90_16x256x128_w16x64_s6", "code4"): KernelTimes(0.6014, 3.38),
        ("gemm_sm90_16x256x128_w16x64_s5", "int8"): KernelTimes(0.5374, 3.175),
        ("gemm_sm90_32x64x512_w32x64_s3", "int4"): KernelTimes(0.6944, 3.509),
        ("gemm_sm90_32x64x512_w32x64_s2", "code4"): KernelTimes(1.247, 2.553),
        ("gemm_sm90_32x64x512_w32x64_s2", "int8"): KernelTimes(1.387, 2.465),
        ("gemm_sm90_32x128x256_w32x64_s4", "int4"): KernelTimes(0.607, 3.659),
        ("gemm_sm90_32x128x256_w32x64_s3", "code4"): KernelTimes(0.7024, 3.516),
        ("gemm_sm90_32x128x256_w32x64_s3", "int8"): KernelTimes(0.7912, 3.402),
        ("gemm_sm90_32x192x128_w32x64_s6", "int4"): KernelTimes(0.4548, 3.451),
        ("gemm_sm90_32x192x128_w32x64_s6", "code4"): KernelTimes(0.54, 3.228),
        ("gemm_sm90_32x192x128_w32x64_s5", "int8"): KernelTimes(0.4525, 3.401),
        ("gemm_sm90_32x256x128_w32x64_s6", "int4"): KernelTimes(0.5808, 3.894),
        ("gemm_sm90_32x256x128_w32x64_s4", "code4"): KernelTimes(0.6603, 3.598),
        ("gemm_sm90_32x256x128_w32x64_s4", "int8"): KernelTimes(0.6054, 3.669),
        ("gemm_sm90_48x128x256_w48x64_s4", "int4"): KernelTimes(0.7713, 3.995),
        ("gemm_sm90_48x128x256_w48x64_s3", "code4"): KernelTimes(0.8801, 3.849),
        ("gemm_sm90_48x128x256_w48x64_s2", "int8"): KernelTimes(1.367, 2.982),
        ("gemm_sm90_48x192x128_w48x64_s6", "int4"): KernelTimes(0.5863, 3.653),
        ("gemm_sm90_48x192x128_w48x64_s5", "code4"): KernelTimes(0.6869, 3.741),
        ("gemm_sm90_48x192x128_w48x64_s4", "int8"): KernelTimes(0.5396, 3.856),
        ("gemm_sm90_48x256x128_w48x64_s5", "int4"): KernelTimes(0.7505, 4.08),
        ("gemm_sm90_48x256x128_w48x64_s4", "code4"): KernelTimes(0.8571, 3.971),
        ("gemm_sm90_48x256x128_w48x64_s3", "int8"): KernelTimes(0.7499, 4.595),
        ("gemm_sm90_64x128x256_w64x64_s3", "int4"): KernelTimes(0.8863, 4.273),
        ("gemm_sm90_64x128x256_w64x64_s2", "int8"): KernelTimes(1.377, 3.957),
        ("gemm_sm90_64x192x128_w64x64_s4", "int4"): KernelTimes(0.6637, 3.763),
        ("gemm_sm90_64x192x128_w64x64_s4", "code4"): KernelTimes(0.7846, 3.893),
        ("gemm_sm90_64x192x128_w64x64_s3", "int8"): KernelTimes(0.6741, 4.431),
        ("gemm_sm90_64x256x128_w64x64_s4", "int4"): KernelTimes(0.8525, 4.375),
        ("gemm_sm90_64x256x128_w64x64_s3", "code4"): KernelTimes(0.9729, 4.334),
        ("gemm_sm90_64x256x128_w64x64_s3", "int8"): KernelTimes(0.8214, 4.971),
        ("gemm_sm90_96x128x128_w96x64_s5", "int4"): KernelTimes(0.5972, 4.13),
        ("gemm_sm90_96x128x128_w96x64_s4", "code4"): KernelTimes(0.689, 3.971),
        ("gemm_sm90_96x128x128_w96x64_s4", "int8"): KernelTimes(0.5424, 3.805),
        ("gemm_sm90_96x192x128_w96x64_s5", "int4"): KernelTimes(0.898, 1.796),
        ("gemm_sm90_96x192x128_w96x64_s5", "code4"): KernelTimes(0.9931, 1.225),
        ("gemm_sm90_96x192x128_w96x64_s4", "int8"): KernelTimes(0.8478, 1.474),
        ("gemm_sm90_96x256x128_w96x64_s5", "int4"): KernelTimes(1.175, 1.034),
        ("gemm_sm90_96x256x128_w96x64_s4", "code4"): KernelTimes(1.323, 0.6197),
        ("gemm_sm90_96x256x128_w96x64_s3", "int8"): KernelTimes(1.156, 0.7493),
        ("gemm_sm90_128x128x128_w128x64_s3", "int4"): KernelTimes(0.7172, 4.732),
        ("gemm_sm90_128x128x128_w128x64_s3", "code4"): KernelTimes(0.8186, 4.816),
        ("gemm_sm90_128x128x128_w128x64_s3", "int8"): KernelTimes(0.7089, 4.905),
        ("gemm_sm90_128x192x128_w128x64_s4", "int4"): KernelTimes(1.103, 1.695),
        ("gemm_sm90_128x192x128_w128x64_s3", "code4"): KernelTimes(1.226, 0.9201),
        ("gemm_sm90_128x192x128_w128x64_s3", "int8"): KernelTimes(1.111, 1.021),
        ("gemm_sm90_192x128x64_w192x64_s7", "int4"): KernelTimes(0.5631, 1.468),
        ("gemm_sm90_192x128x64_w192x64_s6", "code4"): KernelTimes(0.5989, 0.5553),
        ("gemm_sm90_192x128x64_w192x64_s6", "int8"): KernelTimes(0.5742, 0.611),
        ("gemm_sm90_256x128x64_w256x64_s5", "int4"): KernelTimes(0.7287, 2.172),
        ("gemm_sm90_256x128x64_w256x64_s5", "code4"): KernelTimes(0.7633, 2.149),
        ("gemm_sm90_256x128x64_w256x64_s5", "int8"): KernelTimes(0.7331, 0.6132),
    },
)
