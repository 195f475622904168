"""Constants of the cost model, measured on an H200. Written by fit.py; see cost.py for what they mean."""

from __future__ import annotations

from typing import NamedTuple


class KernelCost(NamedTuple):
    """One kernel for one format: registers of a thread, and the three times of cost.py."""

    registers: int
    unit_us: float
    latency_us: float
    fixed_us: float


LAUNCH_US = 3.899
REDUCE_LAUNCH_US = 0.390
REDUCE_TB_S = 6.251

KERNELS: dict[tuple[str, str], KernelCost] = {
    ("gemm_sm80_128x128x64_w128x32_s2", "int4"): KernelCost(250, 0.7328, 1.002, 0.6129),
    ("gemm_sm80_128x128x64_w128x32_s2", "int8"): KernelCost(254, 0.6716, 1.048, 1.008),
    ("gemm_sm80_128x128x64_w128x32_s3", "int4"): KernelCost(250, 0.7284, 0.8181, 0.01),
    ("gemm_sm80_128x128x64_w128x32_s3", "int8"): KernelCost(254, 0.5777, 0.6774, 0.05957),
    ("gemm_sm80_128x128x64_w128x32_s4", "int4"): KernelCost(250, 0.7204, 0.8074, 0.1949),
    ("gemm_sm80_128x128x64_w128x32_s4", "int8"): KernelCost(254, 0.6629, 0.6788, 0.01),
    ("gemm_sm80_16x128x64_w16x32_s2", "int4"): KernelCost(93, 0.2247, 0.8174, 0.01),
    ("gemm_sm80_16x128x64_w16x32_s2", "int8"): KernelCost(120, 0.02, 0.8627, 1.484),
    ("gemm_sm80_16x128x64_w16x32_s3", "int4"): KernelCost(95, 0.2029, 0.4392, 0.06931),
    ("gemm_sm80_16x128x64_w16x32_s3", "int8"): KernelCost(120, 0.1611, 0.5193, 0.04704),
    ("gemm_sm80_16x128x64_w16x32_s4", "int4"): KernelCost(95, 0.1873, 0.2364, 0.249),
    ("gemm_sm80_16x128x64_w16x32_s4", "int8"): KernelCost(120, 0.1569, 0.4681, 0.773),
    ("gemm_sm80_16x64x64_w16x32_s4", "int4"): KernelCost(86, 0.102, 0.2514, 0.697),
    ("gemm_sm80_16x64x64_w16x32_s4", "int8"): KernelCost(122, 0.07547, 0.3939, 1.16),
    ("gemm_sm80_32x128x64_w32x32_s2", "int4"): KernelCost(115, 0.2617, 0.8741, 0.1208),
    ("gemm_sm80_32x128x64_w32x32_s2", "int8"): KernelCost(128, 0.2364, 0.891, 1.502),
    ("gemm_sm80_32x128x64_w32x32_s3", "int4"): KernelCost(118, 0.2543, 0.3948, 0.01),
    ("gemm_sm80_32x128x64_w32x32_s3", "int8"): KernelCost(128, 0.2252, 0.4957, 0.9875),
    ("gemm_sm80_32x128x64_w32x32_s4", "int4"): KernelCost(118, 0.2504, 0.3108, 0.03656),
    ("gemm_sm80_32x128x64_w32x32_s4", "int8"): KernelCost(128, 0.2315, 0.3083, 1.125),
    ("gemm_sm80_64x128x64_w64x32_s2", "int4"): KernelCost(159, 0.4046, 0.911, 0.01),
    ("gemm_sm80_64x128x64_w64x32_s2", "int8"): KernelCost(167, 0.3664, 0.9387, 0.9913),
    ("gemm_sm80_64x128x64_w64x32_s3", "int4"): KernelCost(159, 0.4004, 0.4779, 0.01002),
    ("gemm_sm80_64x128x64_w64x32_s3", "int8"): KernelCost(167, 0.3584, 0.4748, 0.01),
    ("gemm_sm80_64x128x64_w64x32_s4", "int4"): KernelCost(159, 0.3999, 0.4775, 0.01),
    ("gemm_sm80_64x128x64_w64x32_s4", "int8"): KernelCost(167, 0.3138, 0.4179, 0.009997),
    ("gemm_sm80_64x256x64_w64x32_s3", "int4"): KernelCost(155, 0.7707, 0.6413, 0.8721),
    ("gemm_sm80_64x256x64_w64x32_s3", "int8"): KernelCost(168, 0.7018, 0.6404, 1.084),
    ("gemv_1x16x1024", "int4"): KernelCost(69, 0.2799, 0.2958, 0.01),
    ("gemv_1x16x2048", "int4"): KernelCost(64, 0.5298, 0.8908, 0.0945),
    ("gemv_1x16x4096", "int4"): KernelCost(64, 1.072, 1.243, 0.1415),
    ("gemv_1x8x1024", "int8"): KernelCost(71, 0.2328, 0.1458, 0.2136),
    ("gemv_1x8x2048", "int8"): KernelCost(64, 0.09922, 1.671, 0.009983),
    ("gemv_1x8x4096", "int8"): KernelCost(64, 0.9159, 0.7503, 0.3405),
    ("gemv_2x16x1024", "int4"): KernelCost(93, 0.4109, 0.3516, 0.01),
    ("gemv_2x16x2048", "int4"): KernelCost(80, 0.783, 1.061, 0.1246),
    ("gemv_2x8x1024", "int8"): KernelCost(80, 0.2533, 1.15, 0.358),
    ("gemv_2x8x2048", "int8"): KernelCost(80, 0.5208, 0.9019, 0.4739),
    ("gemv_4x16x2048", "int4"): KernelCost(128, 1.323, 1.34, 0.2473),
    ("gemv_4x8x2048", "int8"): KernelCost(128, 0.02, 1.789, 0.6272),
    ("gemv_8x16x2048", "int4"): KernelCost(254, 2.618, 1, 0.9031),
    ("gemv_8x8x2048", "int8"): KernelCost(252, 0.1, 0.5, 1),
}
