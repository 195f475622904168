"""activations="fp8": what a layer does with x before it multiplies, and which weights it can have then."""

from __future__ import annotations

from .heuristics.legal import check_kernel_group_size
from .heuristics.problem import FP8_FORMATS, FP8_LAYOUT
from .layout import CPU

FP8 = "fp8"
"""x becomes E4M3, each row with a scale of its own (`quantize_activations`)."""

WHOLE = "16bit"
"""Where a caller says for some layers, or of a folder, that x stays as it is; a layer then has None."""

LAYOUTS = (FP8_LAYOUT, CPU)
"""Of weights that x in E4M3 meets: of GPUs, of CPUs."""

_ARCH = 90
"""Its groups are those that are taken anywhere, so that a layer of a CPU can be repacked."""


def activations_of(value: object) -> str | None:
    """ "fp8", or None for None and "16bit". Raises ValueError for anything else."""
    if value not in (None, WHOLE, FP8):
        raise ValueError(f"activations: expected None, {WHOLE!r} or {FP8!r}, got {value!r}")
    return FP8 if value == FP8 else None


def check_fp8_format(format: str, symmetric: bool) -> None:
    """Raises ValueError for weights that x in E4M3 does not meet on any GPU."""
    if format not in FP8_FORMATS or not symmetric:
        got = format if symmetric else f"{format} with zero points"
        known = " and ".join(FP8_FORMATS)
        raise ValueError(f"activations: expected None for {got}, got {FP8!r}, which is for symmetric {known} alone")


def check_fp8_groups(rows: int, k: int) -> None:
    """Raises ValueError for groups of `rows` that kernels do not take beside x in E4M3."""
    try:
        check_kernel_group_size(rows, k, _ARCH, FP8_LAYOUT)
    except ValueError as error:
        raise ValueError(f"activations {FP8!r}: {error}") from error


def check_layer_layout(name: str, layout: str, activations: str | None) -> None:
    """Raises ValueError unless a layer with these activations computes a weight in this layout somewhere.

    name: of the argument that has the layout.
    """
    if activations is None and layout == FP8_LAYOUT:
        raise ValueError(
            f"{name}: expected a layout for x in 16 bits, got {layout!r}; make the layer with activations={FP8!r}"
        )
    if activations is not None and layout not in LAYOUTS:
        expected = " or ".join(map(repr, LAYOUTS))
        raise ValueError(
            f"{name}: expected layout {expected} for activations={FP8!r}, got {layout!r}; repack it, or make the layer "
            "without activations"
        )
