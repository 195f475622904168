"""What the environment asks for, and what this installation computes on the GPU at hand."""

from __future__ import annotations

import os

import torch

from ..args import CPU_DTYPES
from ..device import device_arch, sm_count
from ..heuristics import Problem
from ..heuristics.configs import TypeConfig
from ..heuristics.legal import check_kernel_group_size
from ..plan.choose import DTYPE_NAMES, choose, scale_mode

VARIABLE = "WEIGHTONLY_VLLM_EXPERTS"
"""Names the environment variable that turns our experts on."""

_TOKENS = (1, 64, 4096)
"""Rows of x that are tried: kernels of decode, of small batches, and of prompts."""


def experts_wanted() -> bool:
    """Whether the environment asks for our experts. Raises ValueError for a value other than on and off."""
    value = os.environ.get(VARIABLE, "off")
    if value not in ("on", "off"):
        raise ValueError(f"{VARIABLE}: expected on or off, got {value!r}")
    return value == "on"


def why_not(k: int, n: int, format: str, group_size: int, has_zeros: bool, dtype: torch.dtype) -> str | None:
    """Why `gemm` cannot compute x [M, K] @ w [K, N] on the current device; None: it can.

    group_size: rows of K that share a scale, -1: all. dtype: of x.
    """
    try:
        check_kernel_group_size(group_size, k)
        if not torch.cuda.is_available():
            return None if dtype in CPU_DTYPES else f"x: expected 16 or 32 bits, got {dtype}"
        if dtype not in DTYPE_NAMES:
            return f"x: expected float16 or bfloat16, got {dtype}"
        device = torch.cuda.current_device()
        group_size = -1 if group_size == k else group_size
        for m in _TOKENS:
            problem = Problem(m, n, k, format, group_size, device_arch(device), sm_count(device), zeros=has_zeros)
            types = TypeConfig(DTYPE_NAMES[dtype], problem.format, scale_mode(problem.group_size, has_zeros))
            choose(problem, types, None)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return None
