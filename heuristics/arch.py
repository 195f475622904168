"""GPU architectures by their compute capability: the ones that the library knows, and every way to write one."""

from __future__ import annotations

import re

ARCHS: tuple[int, ...] = (70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121)
"""Compute capabilities as integers: 10 * major + minor."""

Arch = int | str | tuple[int, int]
"""An architecture as callers write it; see `parse_arch`."""

PTX = "+PTX"
"""At the end of a target of a build: it is also kept as PTX, which the drivers of later GPUs compile."""

_TEXT = re.compile(r"(?:sm_?)?(\d+)[af]?", re.IGNORECASE)


def parse_arch(arch: Arch) -> int:
    """The compute capability as an integer: 90 for 90, "90", "sm90", "sm_90", "90a" and (9, 0).

    A suffix "a" or "f" names the same GPU and is dropped. Raises ValueError for anything that is not one of ARCHS.
    """
    if type(arch) is int and arch in ARCHS:
        return arch
    number = None
    if isinstance(arch, str) and (match := _TEXT.fullmatch(arch)):
        number = int(match[1])
    elif isinstance(arch, tuple) and len(arch) == 2 and all(type(part) is int for part in arch) and 0 <= arch[1] <= 9:
        number = 10 * arch[0] + arch[1]
    if number not in ARCHS:
        raise ValueError(f"arch: expected one of {', '.join(f'sm{a}' for a in ARCHS)}, got {arch!r}")
    return number


def target_number(target: str) -> int:
    """The compute capability of a target of a build: 90 for "90a", 120 for "120+PTX"."""
    return int(target.removesuffix(PTX).rstrip("af"))
