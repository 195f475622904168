"""Makes the plan of a call: which configuration computes it, and what is wrong where none can."""

from __future__ import annotations

import torch

from ..args import GemmArgs
from ..device import device_arch, sm_count
from ..fp8_args import Fp8Args
from ..heuristics import KernelConfig, Problem, select
from ..heuristics.configs import TypeConfig
from ..heuristics.invariant import class_of, computes_class
from ..heuristics.launches import launches
from ..heuristics.legal import has_kernels, why_not
from ..heuristics.problem import CODE_LAYOUTS, is_read, layouts_of
from ..heuristics.select import invariant_class
from ..kernels import HOW_TO_BUILD, MAX_K, MAX_M, MAX_N, built_archs, check_kernels, is_compiled, runs_on
from ..layout import CPU, TILE
from ..weight import QuantizedWeight
from .base import Plan
from .cpu import CpuPlan
from .fp8 import Fp8CpuPlan, Fp8KernelPlan, Fp8Plan
from .kernel import KernelPlan
from .tuned import Table, table_of
from .unfused import UnfusedPlan

DTYPE_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}


def make_plan(args: GemmArgs) -> Plan:
    """The plan of a call. Raises what `gemm` raises for everything but `out`."""
    args.check()
    is_fp8 = isinstance(args, Fp8Args)
    if args.x.device.type == "cpu":
        return Fp8CpuPlan(args) if is_fp8 else CpuPlan(args)
    config = args.config
    if config is not None and not isinstance(config, KernelConfig):
        raise TypeError(f"config: expected a KernelConfig of weightonly.kernels(), got {type(config).__name__}")
    if args.x.numel() == 0:
        return Fp8Plan(args) if is_fp8 else Plan(args)
    device = args.x.get_device()
    arch = device_arch(device)
    if args.weight.packed.layout == CPU:
        raise ValueError(f"qweight: packed for CPUs, but x is on {args.x.device}; repack(qweight, arch='sm{arch}')")
    w = args.weight
    if config is None and not has_kernels(w.format, w.group_size, arch, w.packed.layout):
        if args.invariant:
            raise ValueError(
                f"batch_invariant: expected a weight that kernels compute, got {w.format} in groups of {w.group_size} "
                f"in layout {w.packed.layout!r} on sm{arch}, which is dequantized for cuBLAS"
            )
        return UnfusedPlan(args, None)
    check_kernels(arch)
    problem = problem_of(args.m, args.weight, arch, sm_count(device), args.invariant)
    types = types_of(problem, args.dtype)
    config = choose(problem, types, config, table_of(device) if config is None and not is_fp8 else None)
    if is_fp8:
        return Fp8KernelPlan(args, problem, types, config)
    return UnfusedPlan(args, config) if config.unfused else KernelPlan(args, problem, types, config)


def problem_of(m: int, w: QuantizedWeight, arch: int, sms: int, invariant: bool = False) -> Problem:
    """The product of `m` rows with a weight, on a GPU of `sms` multiprocessors."""
    return Problem(m, w.n, w.k, w.format, w.group_size, arch, sms, w.packed.layout, w.zeros is not None, invariant)


def types_of(problem: Problem, dtype: torch.dtype) -> TypeConfig:
    """The types of the kernels that compute a problem. dtype: of y."""
    return TypeConfig(DTYPE_NAMES[dtype], problem.format, scale_mode(problem.group_size, problem.zeros))


def scale_mode(group_size: int, has_zeros: bool) -> str:
    """`TypeConfig.scale_mode`. group_size: rows of the weight, -1: per channel."""
    if has_zeros:
        return "group_zeros"
    return "channel" if group_size == -1 else "group"


def preferred(problem: Problem, dtype: str, table: Table | None) -> KernelConfig:
    """What `gemm` runs unless it is told otherwise: what the tuned table says, else what the cost model picks.

    dtype: of x, "f16" or "bf16".
    """
    found = None if table is None else table.config(problem, dtype)
    return select(problem) if found is None or not is_of_class(found, problem) else found


def is_of_class(config: KernelConfig, problem: Problem) -> bool:
    """Whether a configuration may compute a weight: in the batch-invariant mode those that compute its class alone."""
    return not problem.invariant or computes_class(config, problem, invariant_class(problem))


def choose(
    problem: Problem, types: TypeConfig, config: KernelConfig | None, table: Table | None = None
) -> KernelConfig:
    """The configuration to run: `config` if it is given, else the preferred one.

    Raises ValueError or TypeError where the GPU, or `config`, cannot compute this problem, RuntimeError where the build
    lacks a kernel.
    """
    gpu = f"a GPU of compute capability {problem.arch / 10}"
    check_sizes(problem)
    if types.dtype == "bf16" and problem.arch < 80:
        raise TypeError(f"x: expected dtype torch.float16 on {gpu} (bf16 needs 8.0), got torch.bfloat16")
    if config is None:
        check_layout(problem, gpu)
        config = preferred(problem, types.dtype, table)
    else:
        check_config(config, problem, types)
    for part, _ in launches(config, problem):
        check_compiled(part, types, problem.arch)
    return config


def check_compiled(config: KernelConfig, types: TypeConfig, arch: int) -> None:
    """Raises RuntimeError unless the build has a kernel in a form that the GPU runs."""
    if not runs_on(config, arch) or not is_compiled(config, types):
        raise RuntimeError(
            f"no kernel {config.kernel}_{types.name} for a GPU of compute capability {arch / 10}: "
            f"built for {', '.join(built_archs())}; rebuild: {HOW_TO_BUILD.format(archs=arch)}"
        )


def check_sizes(problem: Problem) -> None:
    """Raises ValueError for sizes beyond what kernels count with (kernels/api/checks.h refuses them, too)."""
    m, n, k = problem.m, problem.n, problem.k
    n_padded = -(-n // TILE) * TILE
    for name, sizes, got, limit in (
        ("x", "M", m, MAX_M),
        ("qweight", "N", n, MAX_N),
        ("qweight", "K", k, MAX_K),
        ("x", "M * N", m * n_padded, 1 << 40),
        ("qweight", "K * N", problem.k_padded * n_padded, 1 << 42),
    ):
        if got > limit:
            raise ValueError(f"{name}: expected {sizes} of at most {limit} on a GPU, got {got}")


def check_layout(problem: Problem, gpu: str) -> None:
    """Raises ValueError unless the kernels of the GPU, which `gpu` names in words, read the layout of the weight."""
    layouts = layouts_of(problem.arch)
    if not is_read(problem.layout, problem.arch):
        has_codes = any(layout in CODE_LAYOUTS for layout in layouts)
        cure = f"call repack(qweight, arch='sm{problem.arch}')"
        if problem.format == "code4" and not has_codes:
            cure = "dequantize it"
        raise ValueError(
            f"qweight: packed in layout {problem.layout!r}, but {gpu} reads {' or '.join(map(repr, layouts))}; {cure}"
        )


def check_config(config: KernelConfig, problem: Problem, types: TypeConfig) -> None:
    """Raises ValueError unless the configuration computes this problem; its family says why not."""
    if (reason := why_not(config, problem, types.dtype)) is not None:
        raise ValueError(f"config: {reason}")
    if not is_of_class(config, problem):
        raise ValueError(
            f"config: expected one of class {invariant_class(problem)} in the batch-invariant mode, which computes "
            f"this weight for every M, got {config} of {class_of(config, problem)}"
        )
