"""What the environment asks for, and what this installation computes on the GPU at hand."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch.compiler import is_compiling

from ..activation_dtype import check_fp8_format, check_fp8_groups
from ..args import CPU_DTYPES
from ..device import device_arch, sm_count
from ..heuristics import Problem
from ..heuristics.configs import TypeConfig
from ..heuristics.grouped import select_grouped
from ..heuristics.legal import check_kernel_group_size
from ..heuristics.problem import check_format_groups
from ..invariance import batch_invariant
from ..kernels import is_compiled, runs_on
from ..packed import PackedWeight
from ..packing import layout_for_arch
from ..plan.choose import DTYPE_NAMES, choose, types_of
from ..weight import LooseWeight, QuantizedWeight

VARIABLE = "WEIGHTONLY_VLLM_EXPERTS"
"""Names the environment variable that turns our experts on, all of them, or off. Not set: those of one launch."""

_TOKENS = (1, 64, 4096)
"""Rows of x that are tried: kernels of decode, of small batches, and of prompts."""


def experts_wanted() -> bool:
    """Whether the environment leaves experts to us. Raises ValueError for a value other than on and off."""
    value = os.environ.get(VARIABLE, "on")
    if value not in ("on", "off"):
        raise ValueError(f"{VARIABLE}: expected on or off, got {value!r}")
    return value == "on"


def is_asked_for() -> bool:
    """Whether experts are asked for that are one `gemm` each, for which the host waits."""
    return os.environ.get(VARIABLE) == "on"


class Held:
    """The weight in the parameters of one layer as one operand, made again where a reload brought other tensors."""

    def __init__(self, k: int, n: int, format: str, layout: str) -> None:
        self._fields = (k, n, format, layout)
        self._made: tuple[tuple[int, ...], QuantizedWeight] | None = None

    def operand(
        self, data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, perm: torch.Tensor | None
    ) -> QuantizedWeight:
        tensors = tuple(None if t is None else t.data for t in (scales, zeros, perm))
        if is_compiling():
            return LooseWeight(PackedWeight(data.data, *self._fields), *tensors)  # type: ignore[arg-type]
        places = (data.data_ptr(), *(0 if t is None else t.data_ptr() for t in tensors))
        if self._made is None or self._made[0] != places:
            self._made = places, QuantizedWeight(PackedWeight(data.data, *self._fields), *tensors)  # type: ignore[arg-type]
        return self._made[1]


def multiplies_fp4() -> bool:
    """Whether the GPU multiplies 4-bit floats itself: Blackwell. What vLLM quantizes x for is left to it there."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return capability is not None and int(capability.major) >= 10


def finite_scales(scales: torch.Tensor) -> torch.Tensor:
    """`scales`. Raises ValueError for infinite ones and NaN."""
    if not bool(scales.isfinite().all()):
        raise ValueError("scales: expected finite numbers, got NaN or infinity")
    return scales


def why_not(
    k: int,
    n: int,
    format: str,
    group_size: int,
    has_zeros: bool,
    dtype: torch.dtype,
    activations: str | None = None,
) -> str | None:
    """Why `gemm` cannot compute x [M, K] @ w [K, N] on the current device; None: it can.

    group_size: rows of K that share a scale, -1: all. dtype: of x. activations: "fp8": x is rounded to E4M3.
    """
    try:
        check_kernel_group_size(group_size, k)
        check_format_groups(format, group_size, k)
        if activations is not None:
            check_fp8_format(format, not has_zeros)
            check_fp8_groups(k if group_size == -1 else group_size, k)
        if not torch.cuda.is_available():
            return None if dtype in CPU_DTYPES else f"x: expected 16 or 32 bits, got {dtype}"
        if dtype not in DTYPE_NAMES:
            return f"x: expected float16 or bfloat16, got {dtype}"
        for problem, types in _problems(k, n, format, group_size, has_zeros, dtype, activations=activations):
            choose(problem, types, None)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return None


def why_many_launches(
    k: int,
    n: int,
    format: str,
    group_size: int,
    has_zeros: bool,
    dtype: torch.dtype,
    experts: int,
    top_k: int,
    activations: str | None = None,
) -> str | None:
    """Why the product of `experts` weights, which `gemm` computes, is more than one launch; None: it is not."""
    if not torch.cuda.is_available():
        return None
    for problem, types in _problems(k, n, format, group_size, has_zeros, dtype, top_k, activations):
        config = select_grouped(problem, experts)
        if config is None or not runs_on(config, problem.arch) or not is_compiled(config, types):
            return f"no kernel has all experts in one launch; {VARIABLE}=on takes them, without CUDA graphs"
    return None


def _problems(
    k: int,
    n: int,
    format: str,
    group_size: int,
    has_zeros: bool,
    dtype: torch.dtype,
    top_k: int = 1,
    activations: str | None = None,
) -> Iterator[tuple[Problem, TypeConfig]]:
    """What the current device computes for few and many tokens, each of which goes to top_k weights."""
    device = torch.cuda.current_device()
    arch, sms = device_arch(device), sm_count(device)
    layout = layout_for_arch(arch, activations)
    group_size, invariant = -1 if group_size == k else group_size, batch_invariant()
    for m in _TOKENS:
        problem = Problem(m * top_k, n, k, format, group_size, arch, sms, layout, has_zeros, invariant)
        yield problem, types_of(problem, dtype)
