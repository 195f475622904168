"""THE list of kernel configurations: code generation, selection, tests and bench all read it from here."""

from __future__ import annotations

from dataclasses import dataclass

from .families import FAMILIES, KernelConfig
from .problem import CODE_LAYOUTS, FLOAT_FORMATS, INTEGER_FORMATS


def _configs(grouped: bool, x_bytes: int = 2) -> tuple[KernelConfig, ...]:
    families = (f for f in FAMILIES.values() if f.grouped == grouped and f.x_bytes == x_bytes)
    configs = [config for family in families for config in family.configs()]
    of_floats = (config for c in configs if c.layout in CODE_LAYOUTS for config in c.for_floats())
    return *configs, *of_floats


CONFIGS = _configs(grouped=False)

FP8_CONFIGS = _configs(grouped=False, x_bytes=1)
"""Configurations that take x in E4M3 with a scale for each row, and nothing else."""

FITTED_CONFIGS = tuple(c for c in (*CONFIGS, *FP8_CONFIGS) if c.is_verified and c == c.measured)
"""Configurations that measurements are fitted for. The others borrow constants: `KernelConfig.measured`."""

GROUPED_CONFIGS = _configs(grouped=True)
"""Configurations of grouped products, which compute nothing else."""

GROUPED_FP8_CONFIGS = _configs(grouped=True, x_bytes=1)
"""The same with x as FP8_CONFIGS have it."""


@dataclass(frozen=True)
class TypeConfig:
    """The types that a kernel is compiled for: activation dtype, weight format and how scales are applied."""

    dtype: str  # "f16" or "bf16"
    format: str
    scale_mode: str  # "channel", "group" or "group_zeros", as ScaleMode in cutlass_ext/fragment/scale_mode.h

    @property
    def name(self) -> str:
        return f"{self.dtype}_{self.format}_{self.scale_mode}"

    @property
    def reads_zeros(self) -> bool:
        """Whether the kernel reads zero points, or the codebook that is in their place."""
        return self.scale_mode == "group_zeros" or self.format == "code4"


TYPES: tuple[TypeConfig, ...] = tuple(
    TypeConfig(dtype, format, mode)
    for dtype in ("f16", "bf16")
    for format in INTEGER_FORMATS
    for mode in ("channel", "group", "group_zeros")
) + tuple(TypeConfig(dtype, format, "group") for format in ("code4", "mxfp4") for dtype in ("f16", "bf16"))
TYPES += tuple(
    TypeConfig(dtype, format, mode)
    for dtype in ("f16", "bf16")
    for format in FLOAT_FORMATS
    for mode in ("channel", "group")
)


def kernel_types(config: KernelConfig) -> list[TypeConfig]:
    """The types that a configuration computes, each with a kernel of its own unless `unfused`."""
    types = (t for t in TYPES if t.format in config.formats and t.dtype in config.rules.dtypes)
    modes = config.rules.scale_modes
    return [t for t in types if t.scale_mode in modes and not (config.groups_of_16 and t.scale_mode == "channel")]
