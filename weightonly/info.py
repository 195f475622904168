"""What this installation is made of: versions, the build, the GPUs, and which of its kernels run here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import __version__, build_info
from .build_info import BuildInfo
from .cpu import library, table
from .device import device_arch, driver_cuda, sm_count
from .heuristics import KernelConfig
from .heuristics.configs import CONFIGS
from .kernels import HOW_TO_BUILD, NO_MODULE, cuda_built, is_compiled, runs_on


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: int  # compute capability as an integer: 90
    sm_count: int


def print_info() -> None:
    """All of it."""
    build = build_info.read()
    print(f"weightonly {__version__}, torch {torch.__version__}")
    print(describe_build(build, loaded=cuda_built()))
    if (problem := driver_problem(build, driver_cuda())) is not None:
        print(problem)
    print(describe_cpu(library.backend()), table.describe(library.backend()), sep="\n")
    print(describe_gpus([c for c in CONFIGS if is_compiled(c)], visible_gpus()))


def describe_version(build: BuildInfo) -> str:
    """The library and its build in one line."""
    if not build.cuda:
        return f"weightonly {__version__} without CUDA kernels ({build.reason})"
    made_with = f"nvcc {build.nvcc}, CUTLASS {build.cutlass}"
    return f"weightonly {__version__} with {build.kernels} kernels for {', '.join(build.archs)} ({made_with})"


def describe_build(build: BuildInfo, loaded: bool) -> str:
    """The build in a few lines; `loaded`: whether this Python has the compiled module that calls them."""
    if not build.cuda:
        lines = [f"build: no CUDA kernels ({build.reason})"]
    else:
        lines = [
            f"build: {build.kernels} kernels for {', '.join(build.archs)} ({build.reason})",
            f"  nvcc {build.nvcc}, CUTLASS {build.cutlass}",
            f"  register spills: {len(build.spills) or 'none'}",
        ]
        lines += [
            f"    {spill.unit} sm_{spill.arch}: {spill.spill_store_bytes} bytes stored, "
            f"{spill.spill_load_bytes} bytes loaded"
            for spill in build.spills
        ]
    if build.cuda and not loaded:
        lines.append(f"  they cannot be used: {NO_MODULE}")
    return "\n".join(lines)


def driver_problem(build: BuildInfo, driver: tuple[int, int] | None) -> str | None:
    """Why a driver that supports this CUDA cannot run the kernels of the build; None: it can, or it is not known."""
    if not build.cuda or driver is None or driver[0] >= int(build.nvcc.partition(".")[0] or 0):
        return None
    return (
        f"driver: supports CUDA {driver[0]}.{driver[1]}, too old for these kernels (CUDA {build.nvcc}); update it, or "
        f"take kernels that CUDA {driver[0]} built"
    )


def describe_cpu(backend: library.Backend) -> str:
    """What computes on CPU tensors, and why, in a line."""
    threads = (
        "" if backend.library is None or backend.library.wo_cpu_has_threads() else "; one thread: no OpenMP runtime"
    )
    return f"CPU: {backend.name}, {torch.get_num_threads()} threads of torch ({backend.reason}){threads}"


def describe_gpus(compiled: Sequence[KernelConfig], gpus: Sequence[Gpu]) -> str:
    """Each GPU and the configurations that run on it, a line per configuration."""
    if not gpus:
        return "GPU: none is visible; CPU tensors work"
    lines: list[str] = []
    for index, gpu in enumerate(gpus):
        running = [config for config in compiled if runs_on(config, gpu.arch)]
        lines.append(f"GPU {index}: {gpu.name}, compute capability {gpu.arch / 10}, {gpu.sm_count} SMs")
        lines.append(f"  {len(running)} of {len(compiled)} compiled configurations run on it")
        lines += [f"    {config.kernel} ({', '.join(config.formats)})" for config in running]
        if not running:
            lines.append(f"  build for it: {HOW_TO_BUILD.format(archs=gpu.arch)}")
    return "\n".join(lines)


def visible_gpus() -> list[Gpu]:
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [Gpu(torch.cuda.get_device_name(i), device_arch(i), sm_count(i)) for i in devices]
