"""The text of heuristics/h200.py."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from weightonly.heuristics.constants import (
    DecodeSm90Constants,
    GemmSm90Constants,
    GroupedConstants,
    UnfusedConstants,
    WaveConstants,
)

_HEAD = '''"""Constants of the cost model, of an H200; constants.py says what each is.

Written by `python -m tools.fit`.
"""

from __future__ import annotations

from .constants import (
    DecodeSm90Constants,
    GemmSm90Constants,
    GroupedConstants,
    GroupedTimes,
    TileTimes,
    UnfusedConstants,
    WaveConstants,
    WaveTimes,
)
'''


class Constants(NamedTuple):
    """All of h200.py: each field is written as the constant of its name in capitals."""

    waves: WaveConstants
    decode_sm90: DecodeSm90Constants
    gemm_sm90: GemmSm90Constants
    gemm_sm90_fp8: GemmSm90Constants
    gemm_sm90_fp8_mx: GemmSm90Constants
    unfused: UnfusedConstants
    grouped: GroupedConstants


def source(constants: Constants) -> str:
    lines = [_HEAD]
    for name, value in constants._asdict().items():
        lines.append(f"{name.upper()} = {type(value).__name__}(")
        for field in fields(value):
            held = getattr(value, field.name)
            if field.name != "kernels":
                lines.append(f"    {field.name}={held!r},".replace("'", '"'))
                continue
            lines.append("    kernels={")
            for (kernel, format), times in held.items():
                numbers = ", ".join(map(repr, times))
                lines.append(f'        ("{kernel}", "{format}"): {type(times).__name__}({numbers}),')
            lines.append("    },")
        lines += [")", ""]
    return "\n".join(lines)


def write(out: Path, constants: Constants) -> None:
    out.write_text(source(constants))
