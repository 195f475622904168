"""The compiled kernels: whether they are there, which run on a device, and a kernel's number by its name."""

from __future__ import annotations

import functools
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from . import build_info
from .build_info import BuildInfo
from .device import device_arch
from .heuristics.arch import PTX, target_number
from .heuristics.configs import (
    CONFIGS,
    FP8_CONFIGS,
    GROUPED_CONFIGS,
    GROUPED_FP8_CONFIGS,
    KernelConfig,
    TypeConfig,
    kernel_types,
)
from .version import VERSION


def check_version(kernels: BuildInfo) -> None:
    """Raises ImportError unless the library in lib/ is of this version of the package."""
    if kernels.version not in (VERSION, ""):  # "": nothing describes it; _C compares the interfaces
        raise ImportError(
            f"weightonly {VERSION} has the kernels of version {kernels.version}: pip install "
            f"weightonly-kernels=={VERSION}, or build them again (`make kernels binding` in a checkout)"
        )


# A _C.py elsewhere on __path__ is not ours.
_HAS_MODULE = PathFinder.find_spec(f"{__package__}._C", [str(Path(__file__).parent)]) is not None
if _HAS_MODULE and build_info.LIBRARY.is_file():
    check_version(build_info.read())
    from . import _C
else:  # everything works on CPU tensors
    _C = None  # type: ignore[assignment]

MAX_K = 1 << 20
"""Padded K that the kernels' group arithmetic holds (cutlass_ext/gemm_params.h)."""

MAX_M = (1 << 31) - 4096
"""Rows that the kernels count in 32 bits, with room for a tile more."""

MAX_N = (1 << 30) - 64
"""Columns: they step over 16-bit scales of these in 32-bit numbers of bytes."""

FLOAT_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""dtype -> enum FloatType of kernels/convert/conversions.h."""

HOW_TO_BUILD = "WEIGHTONLY_CUDA=on WEIGHTONLY_ARCHS={archs} pip install ."

NO_MODULE = "there is no compiled module for this Python (`make binding` in a checkout makes it)"


def cuda_built() -> bool:
    """Whether this installation has compiled kernels.

    Examples:
        >>> device = "cuda" if wo.cuda_built() and torch.cuda.is_available() else "cpu"
    """
    return _C is not None


def check_kernels(arch: int, name: str = "x") -> None:
    """Raises RuntimeError naming a tensor unless this installation has kernels and can have them for its GPU."""
    if arch < 70:
        raise RuntimeError(f"{name}: is on a GPU of compute capability {arch / 10}; the kernels of weightonly need 7.0")
    if not cuda_built():
        if build_info.LIBRARY.is_file() and not _HAS_MODULE:
            raise RuntimeError(f"{name}: is a CUDA tensor, but the kernels cannot be used: {NO_MODULE}")
        raise RuntimeError(
            f"{name}: is a CUDA tensor, but this installation of weightonly is without kernels; install the wheel "
            f"weightonly-kernels {VERSION}, or build them: {HOW_TO_BUILD.format(archs=arch)}"
        )


@functools.cache
def kernel_numbers() -> dict[str, int]:
    """Name of each compiled kernel, types included -> its number in the library."""
    return {} if _C is None else {name: number for number, name in enumerate(_C.kernel_names())}


@functools.cache
def grouped_kernel_numbers() -> dict[str, int]:
    """The same of grouped kernels, which have numbers of their own."""
    return {} if _C is None else {name: number for number, name in enumerate(_C.grouped_kernel_names())}


@functools.cache
def built_archs() -> tuple[str, ...]:
    """Architectures of the build, e.g. ("80", "90a")."""
    return () if _C is None else tuple(_C.archs().split(","))


def arch_runs_on(built: str, device: int) -> bool:
    """Whether code built for an architecture runs on a device of compute capability `device`.

    Machine code runs on its own major version from its own minor on; code of an "a" target on that one alone. PTX runs
    on every later GPU: of compute_75, as which 70 and 75 are kept, and of targets with "+PTX".
    """
    number = target_number(built)
    if number <= 75:
        return device >= 75
    if built.endswith(PTX):
        return device >= number
    if built.endswith("a"):
        return device == number
    return device // 10 == number // 10 and device >= number


def runs_on(config: KernelConfig, device: int) -> bool:
    """Whether some architecture of the build has this configuration in a form that the device runs."""
    return any(config.rules.compiled_for(a) and arch_runs_on(a, device) for a in built_archs())


def dequantizes_on(device: int) -> bool:
    """Whether some architecture of the build has the kernel that dequantizes in a form that the device runs."""
    return any(arch_runs_on(a, device) for a in built_archs())


@functools.cache
def dequantizes_groups_of_16() -> bool:
    """Whether the build has that kernel for groups of 16."""
    return _C is not None and _C.dequantizes_groups_of_16()


@functools.cache
def dequantizes_fp8() -> bool:
    """Whether the build has that kernel for floats of 8 bits."""
    return _C is not None and _C.dequantizes_fp8()


def is_compiled(config: KernelConfig, types: TypeConfig | None = None) -> bool:
    """Whether the build has a configuration, for these types or for any."""
    if config.unfused:
        has_groups = not config.groups_of_16 or dequantizes_groups_of_16()
        has_floats = not config.has_floats or dequantizes_fp8()
        return has_groups and has_floats and any(config.rules.compiled_for(a) for a in built_archs())
    numbers = grouped_kernel_numbers() if config.rules.grouped else kernel_numbers()
    return any(f"{config.kernel}_{t.name}" in numbers for t in ([types] if types else kernel_types(config)))


def kernels(device: int | None = None) -> list[KernelConfig]:
    """Every compiled configuration that runs on a CUDA device.

    Each has split_k = 1 and says by `layout`, `formats` and `max_m` what it computes; `config.with_split_k(s)` is the
    same kernel with K in s parts. `gemm(..., config=c)` runs one.

    Args:
        device: a CUDA device; None: the current one, or, without a GPU, all.

    Returns:
        The configurations, those last that dequantize and leave the product to cuBLAS; none where the library was built
        without CUDA.

    Examples:
        >>> for_decoding = [config for config in wo.kernels() if config.max_m <= 16]
    """
    return _here(CONFIGS, device)


def fp8_kernels(device: int | None = None) -> list[KernelConfig]:
    """The same for `gemm(..., x_scales=..., config=c)`: kernels that take x in float8_e4m3fn.

    Args:
        device: a CUDA device; None: the current one, or, without a GPU, all.

    Examples:
        >>> {config.layout for config in wo.fp8_kernels()} <= {"tiled_fp8"}
        True
    """
    return _here(FP8_CONFIGS, device)


def grouped_kernels(device: int | None = None) -> list[KernelConfig]:
    """The same for `grouped_gemm(..., config=c)`: kernels that compute the rows of all experts in one launch.

    Args:
        device: a CUDA device; None: the current one, or, without a GPU, all.

    Examples:
        >>> names = [config.name for config in wo.grouped_kernels()]
    """
    return _here(GROUPED_CONFIGS, device)


def grouped_fp8_kernels(device: int | None = None) -> list[KernelConfig]:
    """The same for `grouped_gemm(..., x_scales=..., config=c)`.

    Args:
        device: a CUDA device; None: the current one, or, without a GPU, all.

    Examples:
        >>> names = [config.name for config in wo.grouped_fp8_kernels()]
    """
    return _here(GROUPED_FP8_CONFIGS, device)


def _here(configs: tuple[KernelConfig, ...], device: int | None) -> list[KernelConfig]:
    """The compiled ones that run on the device."""
    compiled = [c for c in configs if is_compiled(c)]
    if not torch.cuda.is_available():
        return compiled
    arch = device_arch(torch.cuda.current_device() if device is None else device)
    return [c for c in compiled if runs_on(c, arch)]
