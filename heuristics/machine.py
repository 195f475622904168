"""What the cost model knows of GPUs. Rates are of one SM, relative to the H200; its constants are in h200.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass

KB = 1024

HOPPER_SMEM_BYTES = 227 * KB
"""Shared memory of one CTA on sm90 (kMaxSmemBytesSm90 of kernels/gemm/launch.h)."""


@dataclass(frozen=True)
class Machine:
    """An architecture.

    smem_bytes     shared memory of one CTA
    sm_smem_bytes  of one SM
    speed          clock times mma.sync operations per clock, relative; estimates, nothing but the H200 was measured
    cublas_speed   what cuBLAS makes of it, relative; likewise estimates (datasheets)
    tb_s           memory bandwidth of a typical board, TB/s (datasheets; the H200's is measured, reads alone)
    """

    smem_bytes: int
    sm_smem_bytes: int
    speed: float
    cublas_speed: float
    tb_s: float


MACHINES: dict[int, Machine] = {
    70: Machine(96 * KB, 96 * KB, 0.25, 0.2, 0.9),
    75: Machine(64 * KB, 64 * KB, 0.25, 0.17, 0.32),
    80: Machine(163 * KB, 164 * KB, 0.57, 0.38, 1.9),
    86: Machine(99 * KB, 100 * KB, 0.35, 0.23, 0.6),
    87: Machine(163 * KB, 164 * KB, 0.25, 0.17, 0.2),
    89: Machine(99 * KB, 100 * KB, 0.5, 0.34, 0.86),
    90: Machine(HOPPER_SMEM_BYTES, 228 * KB, 1.0, 1.0, 4.47),
    100: Machine(227 * KB, 228 * KB, 1.0, 2.0, 7.5),
    120: Machine(99 * KB, 100 * KB, 0.6, 0.41, 1.7),
}


@functools.cache
def machine(arch: int) -> Machine:
    """The description of an architecture; one that is not in the table is taken for the nearest one below it."""
    return MACHINES[max(a for a in MACHINES if a <= arch)]


_CLUSTER_SMS = {1: 132, 2: 132, 3: 117, 4: 120, 5: 110, 6: 102, 7: 105, 8: 120}
"""CTAs of a cluster -> SMs that clusters of so many fill on an H200, of its 132 (cudaOccupancyMaxActiveClusters)."""

MAX_CLUSTER = 8
"""CTAs of a cluster, which share K and sum in each other's shared memory: the portable limit of CUDA."""


@functools.cache
def resident_clusters(sm_count: int, ctas: int) -> int:
    """Clusters of so many CTAs, one CTA on an SM, that run at once; at least 1: where none fits the launch says so.

    A cluster lies in one GPC, and rarely divides its SMs. Other GPUs are taken for an H200 with more or fewer GPCs.
    """
    return max(1, sm_count * _CLUSTER_SMS[ctas] // 132 // ctas)
