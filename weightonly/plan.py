"""The plan for one weight and one shape of x: which configuration computes it, and what is wrong where none can."""

from __future__ import annotations

import torch

from .dense_plan import DensePlan
from .heuristics import KernelConfig, Problem, select
from .heuristics.configs import FAMILIES, TypeConfig
from .heuristics.cost import first_columns, launches, machine
from .heuristics.legal import leaves_a_rest, parts_of_k, smem_bytes, splits_evenly
from .heuristics.problem import layouts_of
from .heuristics.slices import longest_k
from .kernel_plan import KernelPlan, Plan
from .kernels import HOW_TO_BUILD, MAX_K, built_archs, cuda_built, device_arch, is_compiled, runs_on, sm_count
from .layout import TILED
from .packed import PackedWeight
from .tuned import Table, table_of

DTYPE_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}


def make_plan(
    x: torch.Tensor,
    qweight: PackedWeight,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    activation: str | None,
    config: KernelConfig | None,
) -> Plan:
    """The plan for arguments that were checked, on a GPU. config: None for the preferred one."""
    if config is not None and not isinstance(config, KernelConfig):
        raise TypeError(f"config: expected a KernelConfig of weightonly.kernels(), got {type(config).__name__}")
    if x.numel() == 0:
        return Plan(x, qweight)
    device, w = x.get_device(), qweight
    arch = device_arch(device)
    check_kernels(arch)
    m, has_zeros = x.numel() // w.k, zeros is not None
    problem = Problem(m, w.n, w.k, w.format, group_size, arch, sm_count(device), w.layout, has_zeros)
    types = TypeConfig(DTYPE_NAMES[x.dtype], problem.format, scale_mode(problem.group_size, has_zeros))
    config = choose(problem, types, config, table_of(device) if config is None else None)
    if config.is_dense:
        return DensePlan(x, qweight, config, activation)
    columns = launches(config, problem)[0][1].n
    return KernelPlan(x, qweight, scales, zeros, bias, group_size, types, config, activation, columns)


def scale_mode(group_size: int, has_zeros: bool) -> str:
    if has_zeros:
        return "group_zeros"
    return "channel" if group_size == -1 else "group"


def check_kernels(arch: int, name: str = "x") -> None:
    """Raises RuntimeError naming a tensor unless this installation has kernels and can have them for its GPU."""
    if arch < 70:
        raise RuntimeError(f"{name}: is on a GPU of compute capability {arch / 10}; the kernels of weightonly need 7.0")
    if not cuda_built():
        raise RuntimeError(
            f"{name}: is a CUDA tensor, but this installation of weightonly was built without kernels; "
            f"build them: {HOW_TO_BUILD.format(archs=arch)}"
        )


def preferred(problem: Problem, dtype: str, table: Table | None) -> KernelConfig:
    """What `gemm` runs unless it is told otherwise: what the tuned table says, else what the cost model picks."""
    found = None if table is None else table.config(problem, dtype)
    return modelled(problem) if found is None else found


def modelled(problem: Problem) -> KernelConfig:
    """What the cost model picks."""
    p = problem
    return select(p.m, p.n, p.k, p.format, p.group_size, p.arch, p.sm_count, p.layout, p.zeros)


def choose(
    problem: Problem, types: TypeConfig, config: KernelConfig | None, table: Table | None = None
) -> KernelConfig:
    """The configuration to run: the given one if it can, else the preferred one; errors say what is wrong."""
    if problem.k_padded > MAX_K:
        raise ValueError(f"qweight: expected K of at most {MAX_K} on a GPU, got {problem.k}")
    gpu = f"a GPU of compute capability {problem.arch / 10}"
    if types.dtype == "bf16" and problem.arch < 80:
        raise TypeError(f"x: expected dtype torch.float16 on {gpu} (bf16 needs 8.0), got torch.bfloat16")
    if config is None:
        p = problem
        if p.layout not in layouts_of(p.arch):
            read = " or ".join(repr(layout) for layout in layouts_of(p.arch))
            cure = "dequantize it" if p.format == "code4" else f"call preprocess(q, bits, arch='sm{p.arch}')"
            raise ValueError(f"qweight: packed in layout {p.layout!r}, but {gpu} reads {read}; {cure}")
        config = preferred(problem, types.dtype, table)
    else:
        check_config(config, problem, types)
    for part, _ in launches(config, problem):
        if not runs_on(part, problem.arch) or not is_compiled(part, types):
            raise RuntimeError(
                f"no kernel {part.kernel}_{types.name} for {gpu}: built for {', '.join(built_archs())}; "
                f"rebuild: {HOW_TO_BUILD.format(archs=problem.arch)}"
            )
    return config


def check_config(config: KernelConfig, problem: Problem, types: TypeConfig) -> None:
    """Raises ValueError unless the configuration computes this problem; it says what is wrong."""
    if config.rest is not None:
        if not leaves_a_rest(config, problem):
            raise ValueError(
                f"config: {config} is two launches, expected of gemm_sm90 and each with columns: the first those of "
                f"its full waves of CTAs, {first_columns(config, problem)} of {problem.n} for M = {problem.m}"
            )
        for part, its_problem in launches(config, problem):
            check_config(part, its_problem, types)
        return
    if config.layout != problem.layout:
        packed = f"but qweight is packed as {problem.layout!r}"
        raise ValueError(f"config: {config} reads layout {config.layout!r}, {packed}")
    if problem.format not in config.formats:
        formats = ", ".join(config.formats)
        raise ValueError(f"config: {config} reads {formats}, but qweight is {problem.format}")
    if problem.m > config.max_m:
        raise ValueError(f"config: {config} computes at most {config.max_m} rows, but x has {problem.m}")
    if types.dtype not in FAMILIES[config.family].dtypes:
        raise ValueError(f"config: {config} computes fp16 alone, but x is bf16")
    if problem.arch < config.min_arch:
        raise ValueError(
            f"config: {config} needs compute capability {config.min_arch / 10}, but the GPU has {problem.arch / 10}"
        )
    if config.layout == TILED and problem.arch != config.min_arch:
        raise ValueError(
            f"config: {config} runs on compute capability {config.min_arch / 10} alone, "
            f"but the GPU has {problem.arch / 10}"
        )
    if not 1 <= config.split_k <= config.max_split_k:
        raise ValueError(f"config: expected split_k of 1 to {config.max_split_k}, got {config.split_k}")
    if config.is_dense and problem.k > longest_k():
        raise ValueError(f"config: {config} computes K of at most {longest_k()}, but qweight has {problem.k}")
    needed_bytes, limit_bytes = smem_bytes(config, problem), machine(problem.arch).smem_bytes
    if needed_bytes > limit_bytes:
        raise ValueError(
            f"config: {config} needs {needed_bytes} bytes of shared memory for {problem.format}, "
            f"but the GPU has {limit_bytes}"
        )
    units = parts_of_k(config, problem)
    if not splits_evenly(units, config.split_k):
        raise ValueError(
            f"config: split_k of {config.split_k} leaves a part of K without work: K = {problem.k} "
            f"is {units} units of {config.kernel}"
        )
