"""What runs where: which kernel computes M rows of x, asked of the library that chooses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..heuristics.problem import FORMAT_GROUPS
from .library import LEVELS, TYPES, Backend, Params

_KERNELS = ("few", "many", "tiles")
"""enum Kernel of kernels/cpu/params.h: few_rows.h, many_rows.h, matrix_tiles.h."""

_ROWS = 64
"""Numbers of rows to ask for: no kernel begins beyond."""

_K = 64
_GROUPS = (16, 32, _K)  # all rows share a scale in the last one


@dataclass(frozen=True)
class Row:
    """The kernels of one level for some formats."""

    level: str
    weights: str
    """Such as "every format", "groups of 16 (nvfp4)"."""

    kernels: dict[str, str]
    """Dtype of x -> kernel and M, such as "few 1-12, many 13+"."""


def rows(library: Any, levels: Sequence[str] = LEVELS) -> list[Row]:
    """The table of these levels, the last one first. library: as `Backend` has it; it was compiled for the levels."""
    return [row for level in reversed(levels) for row in _rows_of(library, level)]


def kernel_of(library: Any, level: int, dtype: str, m: int, k: int, group_size: int, invariant: bool = False) -> str:
    """What computes m rows of x: "few", "many" or "tiles". dtype: of x, one of TYPES; group_size: in rows; invariant:
    in the batch-invariant mode."""
    shape = {"m": m, "k": k, "group_size": group_size, "groups": k // group_size}
    params = Params(level=level, type=TYPES[dtype], invariant=invariant, **shape)
    return _KERNELS[library.wo_cpu_kernel(params)]


def describe(backend: Backend) -> str:
    """The table of the levels that this CPU has, a line each; a star where `backend` computes."""
    if backend.library is None:
        return "  every format, dtype and M: the equation in PyTorch (weightonly/reference.py)"
    table = rows(backend.library, LEVELS[: backend.library.wo_cpu_level() + 1])
    lines = [("", "weights", *(f"x {dtype}" for dtype in TYPES))]
    for row in table:
        star = "* " if row.level == LEVELS[backend.level] else "  "
        lines.append((star + row.level, row.weights, *(row.kernels[dtype] for dtype in TYPES)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    note = "  kernels (kernels/cpu) by M, the rows of x; * runs here, WEIGHTONLY_CPU chooses another:"
    cells = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([note, *(f"  {line}".rstrip() for line in cells)])


def _rows_of(library: Any, level: str) -> list[Row]:
    found: dict[tuple[str, ...], list[int]] = {}  # kernels of each dtype -> sizes of groups
    for group_size in _GROUPS:
        kernels = tuple(_kernels(library, level, dtype, group_size) for dtype in TYPES)
        found.setdefault(kernels, []).append(group_size)
    if len(found) == 1:
        return [Row(level, "every format", dict(zip(TYPES, next(iter(found)), strict=True)))]
    return [Row(level, _weights(sizes), dict(zip(TYPES, kernels, strict=True))) for kernels, sizes in found.items()]


def _weights(sizes: Sequence[int]) -> str:
    """The group sizes, and the formats that have these alone."""
    groups = f"groups of {sizes[0]}" if len(sizes) == 1 else f"groups of {sizes[0]} and more"
    alone = [format for format, own in FORMAT_GROUPS.items() if list(sizes) == [own]]
    return f"{groups} ({', '.join(alone)})" if alone else groups


def _kernels(library: Any, level: str, dtype: str, group_size: int) -> str:
    """Such as "few 1-12, many 13+"."""
    params = Params(level=LEVELS.index(level), type=TYPES[dtype], k=_K, group_size=group_size, groups=_K // group_size)
    begins: dict[str, int] = {}
    for params.m in range(1, _ROWS + 1):
        begins.setdefault(_KERNELS[library.wo_cpu_kernel(params)], params.m)
    ends = [*(begin - 1 for begin in begins.values())][1:]
    parts = []
    for (name, begin), end in zip(begins.items(), [*ends, None], strict=True):
        parts.append(f"{name} {begin}" + ("+" if end is None else f"-{end}" if end > begin else ""))
    return ", ".join(parts)
