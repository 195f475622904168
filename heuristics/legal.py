"""Which configurations compute a problem: the definition that the search, the tests and the benchmark share."""

from __future__ import annotations

from .arch import Arch, parse_arch
from .configs import CONFIGS, FP8_CONFIGS, KernelConfig
from .launches import first_columns, has_tail, launches
from .problem import FLOAT_FORMATS, Problem, check_group_size


def why_not(config: KernelConfig, problem: Problem, dtype: str | None = None) -> str | None:
    """Why a configuration cannot compute a problem; None if it can. dtype of x: "f16" or "bf16"."""
    if config.tail is None:
        return config.rules.why_not(config, problem, dtype)
    if not has_tail(config, problem):
        columns = first_columns(config, problem)
        return (
            f"{config} is two launches, expected of one family that has tail launches, and each with columns: the "
            f"first those of its full waves of CTAs, {columns} of {problem.n} for M = {problem.m}"
        )
    reasons = (why_not(part, its_problem, dtype) for part, its_problem in launches(config, problem))
    return next((reason for reason in reasons if reason is not None), None)


def legal(config: KernelConfig, problem: Problem) -> bool:
    """Whether a configuration computes a problem, and is of its architecture.

    Each architecture has one GEMM family, the newest that it can run. Older ones may run on it, if they are asked for.

    Args:
        config: a configuration.
        problem: a product.

    Examples:
        >>> problem = Problem(16, 6144, 4096, "int4", 128, 90, 132)
        >>> all(legal(config, problem) for config in candidates(problem))
        True
    """
    return problem.arch <= config.rules.last_arch and why_not(config, problem) is None


def candidates(problem: Problem) -> list[KernelConfig]:
    """Every legal configuration of one launch, with every legal split_k; of two: see `select.likely_pairs`.

    Args:
        problem: a product.

    Examples:
        >>> {config.layout for config in candidates(Problem(16, 6144, 4096, "int4", 128, 90, 132))}
        {'tiled'}
    """
    return [c for c in ever_legal(problem) if c.rules.why_not_sizes(c, problem) is None]


def ever_legal(problem: Problem) -> list[KernelConfig]:
    """Configurations that are legal for some M, N and K, with the problem's GPU, format, layout and kind of scales."""
    configs = (*CONFIGS, *FP8_CONFIGS)
    of_layout = (config for config in configs if config.layout == problem.layout and problem.format in config.formats)
    of_arch = (c for c in of_layout if c.is_verified and c.rules.first_arch <= problem.arch <= c.rules.last_arch)
    return [c for config in of_arch for c in config.splits if c.rules.why_unsupported(c, problem) is None]


def considered(problem: Problem) -> list[KernelConfig]:
    """What `select` considers of `ever_legal`: calibrated, and not only where nothing else computes a problem."""
    return [
        c
        for c in ever_legal(problem)
        if c.split_k in c.rules.splits(c) and c.rules.min_m(c) is not None and c.rules.is_calibrated(c, problem.format)
    ]


def computes_groups_of_16(arch: int | None = None, layout: str | None = None) -> bool:
    """Whether a GPU, of `arch` or of any, computes groups of 16 for every M: by what dequantizes them for cuBLAS.

    layout: of the weight; None: of any that its kernels read.
    """
    return any(
        c.unfused and c.groups_of_16 and c.is_verified
        for c in CONFIGS
        if layout in (None, c.layout) and (arch is None or c.rules.first_arch <= arch <= c.rules.last_arch)
    )


def has_kernels(format: str, group_size: int, arch: int, layout: str) -> bool:
    """Whether kernels that a GPU has run compute a format, for every M, on `arch`; else slices are dequantized.

    group_size: rows that share a scale; -1: per channel. layout: of the weight.
    """
    return format not in FLOAT_FORMATS or (
        (group_size == -1 or group_size % 32 == 0)
        and any(
            c.unfused and format in c.formats and c.is_verified and c.layout == layout
            for c in CONFIGS
            if c.rules.first_arch <= arch <= c.rules.last_arch
        )
    )


def check_kernel_group_size(group_size: int, k: int, arch: Arch | None = None, layout: str | None = None) -> None:
    """Raises ValueError unless a GPU, of `arch` or of any, takes it: what a CPU takes, and 16 if its kernels do.

    layout: as `computes_groups_of_16` has it.
    """
    check_group_size(group_size, k)
    number = None if arch is None else parse_arch(arch)
    if group_size == 16 != k and not computes_groups_of_16(number, layout):
        gpu, others = "a GPU", "CPU alone computes"
        if computes_groups_of_16():
            gpu, others = f"sm{number}" + (f" in layout {layout!r}" if layout else ""), "CPU and other GPUs compute"
        raise ValueError(
            f"group_size must be -1 (per channel), 32, a multiple of 64, or K = {k} on {gpu}; got 16, which the "
            f"{others}"
        )
