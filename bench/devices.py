"""The device that is measured."""

from __future__ import annotations

import torch


class NoGpu(RuntimeError):
    """What was asked for needs a GPU, and there is none."""


def default_device(device: torch.device | str | None) -> torch.device:
    """`device`, or the current GPU where PyTorch sees one, else the CPU."""
    return torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")


def gpu_facts(device: torch.device) -> tuple[int, int]:
    """(arch, such as 90; number of SMs), as the heuristics take them."""
    facts = torch.cuda.get_device_properties(device)
    return facts.major * 10 + facts.minor, facts.multi_processor_count


def require_gpu(what: str, device: torch.device | str | None = None) -> torch.device:
    """`default_device`, where it is a GPU. Raises NoGpu elsewhere: `what` says something of GPUs alone."""
    where = default_device(device)
    if where.type != "cuda" or not torch.cuda.is_available():
        raise NoGpu(f"{what} needs a CUDA GPU: {_why_not(where)}")
    return where


def _why_not(device: torch.device) -> str:
    return f"got device {device}" if torch.cuda.is_available() else "none is visible here"
