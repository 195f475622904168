"""The question that the heuristic answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .arch import parse_arch


class WeightFormat(NamedTuple):
    """A weight format.

    bits         of a weight
    is_code      whether weights are codes of numbers, in a codebook or as floats: there are no zero points
    group_size   rows that share a scale, where the format says so
    measured_as  the format whose kernels lend theirs their constants, as its bytes are as many: they are not measured.
                 Else their own
    """

    bits: int
    is_code: bool = False
    group_size: int | None = None
    measured_as: str | None = None


_FORMATS = {
    "int4": WeightFormat(4),
    "int8": WeightFormat(8),
    "nf4": WeightFormat(4, is_code=True),
    "fp4": WeightFormat(4, is_code=True),
    "mxfp4": WeightFormat(4, is_code=True, group_size=32),
    "nvfp4": WeightFormat(4, is_code=True, group_size=16),
    "code4": WeightFormat(4, is_code=True),
    "fp8": WeightFormat(8, is_code=True, measured_as="int8"),
}

FORMATS: dict[str, int] = {name: format.bits for name, format in _FORMATS.items()}
"""Weight formats and their bits."""

CODE_FORMATS: tuple[str, ...] = tuple(name for name, format in _FORMATS.items() if format.is_code)
"""Formats of codes."""

MEASURED_AS: dict[str, str] = {name: format.measured_as or name for name, format in _FORMATS.items()}
"""Format -> the one whose kernels lend their constants."""

FLOAT_FORMATS: tuple[str, ...] = tuple(name for name, format in _FORMATS.items() if format.measured_as)
"""Formats of codes that are floats. Their kernels are those of the format that lends its constants, with another
converter, in units of their own."""

CODEBOOK_FORMATS: tuple[str, ...] = tuple(name for name in CODE_FORMATS if name not in FLOAT_FORMATS)
"""The others. A kernel is given the codebook: all of them are "code4" to it."""

INTEGER_FORMATS: tuple[str, ...] = tuple(name for name in FORMATS if name not in CODE_FORMATS)

KERNEL_FORMATS: tuple[str, ...] = (*INTEGER_FORMATS, "code4")
"""Formats as kernels have them, without those of floats."""

FORMATS_BY_BITS: tuple[tuple[str, ...], ...] = tuple(
    tuple(name for name in KERNEL_FORMATS if FORMATS[name] == bits) for bits in sorted({*FORMATS.values()})
)
"""KERNEL_FORMATS, formats of one width together."""

FORMAT_GROUPS: dict[str, int] = {name: format.group_size for name, format in _FORMATS.items() if format.group_size}
"""Format -> rows that share a scale, where the format says so."""

K_ALIGNMENT = 64
"""Rows: `preprocess` pads K to a multiple of this, a k_block of the layout."""


LAYOUTS: tuple[str, ...] = ("row_major", "interleaved", "tiled")

FP8_LAYOUT = "tiled_fp8"
"""The layout of kernels that take x in E4M3. Those of LAYOUTS take x in 16 bits."""

FP8_FORMATS: tuple[str, ...] = ("int4", "mxfp4")
"""Formats in FP8_LAYOUT, without zeros: their weights are exact in E4M3."""

CODE_LAYOUTS: tuple[str, ...] = ("interleaved", "tiled")
"""Layouts that codes are packed in."""


def layouts_of(arch: int) -> tuple[str, ...]:
    """The weight layouts that the kernels of an architecture read, its own (what `preprocess` makes) first.

    sm70 and sm72 have no ldmatrix: their kernels read the weight row by row and dequantize it after the global load.
    sm90 has wgmma, with operand A in registers: the weight becomes A, in the order of its fragments. sm90 still
    runs the kernels of sm80, for weights that were packed for those.
    """
    if arch == 90:
        return ("tiled", "interleaved")
    return ("interleaved",) if arch >= 75 else ("row_major",)


def is_read(layout: str, arch: int) -> bool:
    """Whether the kernels of an architecture read a layout, for x in 16 bits or, FP8_LAYOUT, in 8."""
    return layout in layouts_of(arch) or (layout == FP8_LAYOUT and arch == 90)


@dataclass(frozen=True, slots=True)
class Problem:
    """One matrix product `y [m, n] = x [m, k] @ w [k, n]` on one kind of GPU.

    Args:
        m: rows of x.
        n: columns of w.
        k: rows of w.
        format: one of FORMATS; but in FP8_LAYOUT CODEBOOK_FORMATS become "code4".
        group_size: rows of w that share a scale; -1: per channel.
        arch: one of arch.ARCHS, in any spelling that `parse_arch` knows; it is kept as an integer.
        sm_count: multiprocessors of the GPU.
        layout: of the packed weight; "": the architecture's own.
        zeros: whether there are zero points.
        invariant: whether the bits of a row must not depend on m (`wo.set_batch_invariant`).

    Raises:
        ValueError: naming the field, a size below 1, an unknown format, arch or layout, a group size that K is no
            multiple of, that `gemm` takes nowhere or that is not the format's, and codes in a layout that has none or
            with zeros.
        TypeError: a size that is no int.

    Examples:
        >>> Problem(16, 6144, 4096, "int4", 128, "sm90", 132).layout
        'tiled'
    """

    m: int
    n: int
    k: int
    format: str
    group_size: int
    arch: int
    sm_count: int
    layout: str = ""
    zeros: bool = False
    invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "sm_count", "group_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < 1 and name != "group_size":
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not isinstance(self.format, str) or self.format not in FORMATS:
            raise ValueError(f"format must be one of {sorted(FORMATS)}, got {self.format!r}")
        object.__setattr__(self, "arch", parse_arch(self.arch))
        is_code = self.format in CODE_FORMATS
        if not self.layout:
            object.__setattr__(self, "layout", layouts_of(self.arch)[0])
        elif self.layout not in (*LAYOUTS, FP8_LAYOUT):
            raise ValueError(f"layout must be one of {', '.join((*LAYOUTS, FP8_LAYOUT))}, got {self.layout!r}")
        if self.layout == FP8_LAYOUT and (self.format not in FP8_FORMATS or self.zeros):
            got = f"{self.format} with zeros" if self.zeros else self.format
            expected = " or ".join(FP8_FORMATS)
            raise ValueError(f"format must be {expected} without zeros in layout {FP8_LAYOUT!r}, got {got}")
        if is_code:
            if self.layout not in (*CODE_LAYOUTS, FP8_LAYOUT):
                expected = " or ".join(map(repr, CODE_LAYOUTS))
                raise ValueError(f"layout must be {expected} for {self.format}, got {self.layout!r}")
            if self.zeros:
                raise ValueError(f"zeros must be False for {self.format}, got True")
            check_format_groups(self.format, self.group_size, self.k)
            if self.layout == FP8_LAYOUT:
                object.__setattr__(self, "group_size", FORMAT_GROUPS[self.format])
            elif self.format in CODEBOOK_FORMATS:
                object.__setattr__(self, "format", "code4")
        if self.format == "code4" and self.group_size in (-1, self.k, self.k_padded):
            object.__setattr__(self, "group_size", self.k_padded)  # one group: codes have no kernels per channel
        else:
            check_group_size(self.group_size, self.k)

    @property
    def bits(self) -> int:
        return FORMATS[self.format]

    @property
    def x_bytes(self) -> int:
        """Of an element of x: the layout says it."""
        return 1 if self.layout == FP8_LAYOUT else 2

    @property
    def per_channel(self) -> bool:
        return self.format not in CODEBOOK_FORMATS and self.group_size in (-1, self.k)

    @property
    def k_padded(self) -> int:
        return padded_k(self.k)

    @property
    def group_step(self) -> int:
        """The largest of 128, 64, 32 and 16 that divides its groups; all rows are one group per channel."""
        size = self.k_padded if self.per_channel else self.group_size
        return next(step for step in (128, 64, 32, 16) if size % step == 0)


def padded_k(k: int) -> int:
    """Rows of a weight, with the rows that `preprocess` adds."""
    return -(-k // K_ALIGNMENT) * K_ALIGNMENT


def check_group_size(group_size: int, k: int) -> None:
    """Raises ValueError unless `gemm` takes it: per channel, 16, 32, or a multiple of 64; dividing K."""
    if group_size in (-1, k):
        return
    if group_size not in (16, 32) and (group_size < 64 or group_size % 64 != 0):
        raise ValueError(f"group_size must be -1 (per channel), 16, 32, a multiple of 64, or K = {k}; got {group_size}")
    if k % group_size != 0:
        raise ValueError(f"group_size must divide K = {k}, got {group_size}")


def check_format_groups(format: str, group_size: int, k: int) -> None:
    """Raises ValueError for a format with a group size of its own, unless it is this one; -1: all of K."""
    expected = FORMAT_GROUPS.get(format)
    if expected is not None and (k if group_size == -1 else group_size) != expected:
        raise ValueError(f"group_size must be {expected} for {format}, got {group_size}")
