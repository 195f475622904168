"""Constants of the cost model, by fit.py: fitted to H200 times, then moved so that choices cost least."""

from __future__ import annotations

from typing import NamedTuple


class KernelCost(NamedTuple):
    """One kernel for one format: registers of a thread, and the three times of cost.py."""

    registers: int
    unit_us: float
    latency_us: float
    fixed_us: float


LAUNCH_US = 2.500
REDUCE_LAUNCH_US = 2.041
REDUCE_TB_S = 5.895

KERNELS: dict[tuple[str, str], KernelCost] = {
    ("gemm_sm80_128x128x64_w128x32_s2", "int4"): KernelCost(255, 0.7121, 1.039, 0.655),
    ("gemm_sm80_128x128x64_w128x32_s2", "int8"): KernelCost(255, 0.6444, 0.9899, 0.3832),
    ("gemm_sm80_128x128x64_w128x32_s3", "int4"): KernelCost(255, 0.7015, 0.7441, 0.01),
    ("gemm_sm80_128x128x64_w128x32_s3", "int8"): KernelCost(255, 0.5823, 0.6077, 0.01),
    ("gemm_sm80_128x128x64_w128x32_s4", "int4"): KernelCost(255, 0.6721, 0.7438, 0.01),
    ("gemm_sm80_128x128x64_w128x32_s4", "int8"): KernelCost(255, 0.634, 0.611, 0.01),
    ("gemm_sm80_16x128x64_w16x32_s2", "int4"): KernelCost(96, 0.2023, 0.7476, 0.01),
    ("gemm_sm80_16x128x64_w16x32_s2", "int8"): KernelCost(112, 0.1817, 0.735, 1.93),
    ("gemm_sm80_16x128x64_w16x32_s3", "int4"): KernelCost(96, 0.1926, 0.4247, 0.01),
    ("gemm_sm80_16x128x64_w16x32_s3", "int8"): KernelCost(117, 0.1462, 0.4954, 0.01),
    ("gemm_sm80_16x128x64_w16x32_s4", "int4"): KernelCost(96, 0.1915, 0.238, 0.07527),
    ("gemm_sm80_16x128x64_w16x32_s4", "int8"): KernelCost(117, 0.1435, 0.4633, 0.9222),
    ("gemm_sm80_16x64x64_w16x32_s4", "int4"): KernelCost(96, 0.08323, 0.3037, 0.4539),
    ("gemm_sm80_16x64x64_w16x32_s4", "int8"): KernelCost(117, 0.07537, 0.3466, 0.9999),
    ("gemm_sm80_32x128x64_w32x32_s2", "int4"): KernelCost(122, 0.2604, 0.836, 0.01),
    ("gemm_sm80_32x128x64_w32x32_s2", "int8"): KernelCost(128, 0.244, 0.8667, 1.251),
    ("gemm_sm80_32x128x64_w32x32_s3", "int4"): KernelCost(119, 0.2478, 0.3831, 0.01),
    ("gemm_sm80_32x128x64_w32x32_s3", "int8"): KernelCost(128, 0.2418, 0.401, 0.7665),
    ("gemm_sm80_32x128x64_w32x32_s4", "int4"): KernelCost(122, 0.247, 0.2939, 0.01),
    ("gemm_sm80_32x128x64_w32x32_s4", "int8"): KernelCost(128, 0.2317, 0.3023, 0.9091),
    ("gemm_sm80_64x128x64_w64x32_s2", "int4"): KernelCost(163, 0.3953, 0.9263, 0.01),
    ("gemm_sm80_64x128x64_w64x32_s2", "int8"): KernelCost(166, 0.3694, 0.9007, 0.5495),
    ("gemm_sm80_64x128x64_w64x32_s3", "int4"): KernelCost(163, 0.3825, 0.4399, 0.01),
    ("gemm_sm80_64x128x64_w64x32_s3", "int8"): KernelCost(166, 0.3476, 0.447, 0.01),
    ("gemm_sm80_64x128x64_w64x32_s4", "int4"): KernelCost(163, 0.3663, 0.4107, 0.01),
    ("gemm_sm80_64x128x64_w64x32_s4", "int8"): KernelCost(165, 0.3233, 0.3885, 0.01),
    ("gemm_sm80_64x256x64_w64x32_s3", "int4"): KernelCost(163, 0.1, 0.8227, 0.5731),
    ("gemm_sm80_64x256x64_w64x32_s3", "int8"): KernelCost(166, 0.3952, 0.6921, 0.732),
    ("gemv_1x16x1024", "int4"): KernelCost(69, 0.2746, 0.7375, 0.01),
    ("gemv_1x16x2048", "int4"): KernelCost(64, 0.5459, 1.329, 0.01),
    ("gemv_1x16x4096", "int4"): KernelCost(64, 1.146, 2.177, 0.05252),
    ("gemv_1x8x1024", "int8"): KernelCost(71, 0.2346, 0.08603, 0.01),
    ("gemv_1x8x2048", "int8"): KernelCost(64, 0.1, 1.874, 0.01),
    ("gemv_1x8x4096", "int8"): KernelCost(64, 0.9193, 0.4361, 0.2733),
    ("gemv_2x16x1024", "int4"): KernelCost(93, 0.4149, 0.3521, 0.01),
    ("gemv_2x16x2048", "int4"): KernelCost(80, 0.7951, 1.069, 0.01),
    ("gemv_2x8x1024", "int8"): KernelCost(80, 0.2495, 1.296, 0.3379),
    ("gemv_2x8x2048", "int8"): KernelCost(80, 0.5004, 1.353, 0.4787),
    ("gemv_4x16x2048", "int4"): KernelCost(128, 1.398, 1.913, 0.07511),
    ("gemv_4x8x2048", "int8"): KernelCost(128, 0.9183, 1.026, 0.6194),
    ("gemv_8x16x2048", "int4"): KernelCost(254, 2.902, 1, 0.7071),
    ("gemv_8x8x2048", "int8"): KernelCost(252, 0.02, 1.856, 1.692),
}
