"""Which configurations compute a problem: the definition that the search, the tests and the benchmark share."""

from __future__ import annotations

from .configs import CONFIGS, KernelConfig
from .cost import cluster_slots, first_columns, launches, machine
from .problem import Problem, layouts_of
from .slices import longest_k

CLUSTERS = (1, 2, 3, 4, 5, 6, 8)
"""CTAs of a cluster that `select` looks at: as many clusters of 8 run at once as of 7."""


DENSE_MIN_M = 256
"""Rows of x from which `select` looks at dequantizing for cuBLAS: with fewer, reading the packed weight is quicker."""


def is_worth_dequantizing(problem: Problem) -> bool:
    """Whether `select` compares dequantizing for cuBLAS with the kernels that read packed weights.

    Not for Hopper's layout: its own kernels were quicker in 787 of 788 measured problems (bench/NOTES.md). Their sums
    are fp32, too, whatever PyTorch allows cuBLAS. What none of them can run is dequantized all the same.
    """
    return problem.m >= DENSE_MIN_M and problem.layout != "tiled"


def parts_of_k(config: KernelConfig, problem: Problem) -> int:
    """Units along K that split-K can hand out, of `config.piece_k`."""
    return -(-problem.k_padded // config.piece_k)


def smem_bytes(config: KernelConfig, problem: Problem) -> int:
    """Dynamic shared memory of one CTA, bytes."""
    if config.family == "decode_sm90":
        group_size = -1 if problem.per_channel else problem.group_size
        clusters = cluster_slots(problem.sm_count, config.split_k)
        return config.decode_smem_bytes(
            problem.format, problem.m, problem.n, problem.k_padded, group_size, problem.zeros, clusters
        )
    if config.family == "gemm_sm90":
        return config.gemm_sm90_smem_bytes(problem.format, problem.per_channel, problem.zeros)
    return config.smem_bytes(problem.format)


def runs_on(config: KernelConfig, arch: int, layout: str) -> bool:
    """Whether this architecture chooses among a family for weights in this layout.

    Tiled weights have families of their own. For the others each architecture has one GEMM family, the newest it can
    run; the GEMV and dequantizing for cuBLAS need only the interleaved layout.
    """
    if config.layout != layout or layout not in layouts_of(arch):
        return False
    if config.family in ("gemm_sm75", "gemm_sm80"):
        return (config.family == "gemm_sm80") == (arch >= 80)
    return True


def splits_evenly(parts: int, split_k: int) -> bool:
    """Whether none of split_k equal shares of `parts`, rounded up, is empty."""
    return (split_k - 1) * -(-parts // split_k) < parts


def legal(config: KernelConfig, problem: Problem) -> bool:
    """Whether the configuration computes this problem on this architecture, in the layout of its weight."""
    if config.rest is not None:
        return leaves_a_rest(config, problem) and all(legal(c, p) for c, p in launches(config, problem))
    if problem.format not in config.formats or problem.m > config.max_m:
        return False
    if config.is_dense and problem.k > longest_k():
        return False
    if not runs_on(config, problem.arch, problem.layout) or not 1 <= config.split_k <= config.max_split_k:
        return False
    if not splits_evenly(parts_of_k(config, problem), config.split_k):
        return False
    return smem_bytes(config, problem) <= machine(problem.arch).smem_bytes


def worth_a_look(config: KernelConfig) -> bool:
    """Whether `select` looks at a configuration: not at two cp.async stages, and on short tiles not at three; on Hopper
    only at CLUSTERS.

    This keeps a new shape quick to decide, and is not free: of 110 measured cells an excluded kernel was the best in 6
    (two stages, M >= 512), by 1.6 to 6.1% in three of them. The excluded are compiled, legal, and open to `config=`.
    """
    if config.shares_cluster:
        return config.split_k in CLUSTERS
    return config.family != "gemm_sm80" or config.stages > (3 if config.block_m <= 32 else 2)


def leaves_a_rest(config: KernelConfig, problem: Problem) -> bool:
    """Whether a configuration with a `rest` is two launches of gemm_sm90, both with columns to compute."""
    rest = config.rest
    return (
        rest is not None
        and rest.rest is None
        and config.family == rest.family == "gemm_sm90"
        and problem.m <= config.max_m
        and 0 < first_columns(config, problem) < problem.n
    )


def candidates(problem: Problem) -> list[KernelConfig]:
    """Every legal configuration of one launch, with every legal split_k; of two: see select_tiled.two_launches."""
    split = (config.with_split_k(s) for config in CONFIGS for s in range(1, config.max_split_k + 1))
    return [config for config in split if legal(config, problem)]
