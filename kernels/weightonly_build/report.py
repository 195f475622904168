"""What a build of the kernels tells about itself: ptxas' resource lines and ninja's times."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

_TARGET = re.compile(r"ptxas info\s*: Compiling entry function '(?P<entry>[^']+)' for 'sm_(?P<arch>\w+)'")
_FUNCTION = re.compile(r"ptxas info\s*: Function properties for (?P<name>\S+)")
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized .* in the function '(?P<name>[^']+)'")
_SPILL = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")


@dataclass(frozen=True)
class Function:
    """A function of the device code as `ptxas -v` describes it: a kernel, or one that was not inlined."""

    name: str  # mangled
    arch: str  # "80", "90a"
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


@dataclass(frozen=True)
class Unit:
    """One compiled .cu file: its name, the seconds its last compile took, and the functions in it.

    serialized  (mangled) names of functions in which ptxas made each wgmma wait for the one before
    """

    name: str
    seconds: float
    functions: tuple[Function, ...]
    serialized: tuple[str, ...] = ()


def parse_ptxas(log: str) -> list[Function]:
    """The functions in the output of `nvcc -Xptxas -v`, in order, once per target.

    ptxas writes a block per kernel: its name and target, `Function properties for` it, the spill bytes. The
    blocks of functions that were not inlined follow those of the same target, without naming it.
    """
    functions: list[Function] = []
    arch, name = "", ""
    for line in log.splitlines():
        if found := _TARGET.search(line):
            arch = found["arch"]
        elif found := _FUNCTION.search(line):
            name = found["name"]
        elif name and (found := _SPILL.search(line)):
            functions.append(Function(name, arch, int(found["stores"]), int(found["loads"])))
            name = ""
    return functions


def parse_ninja_log(log: str) -> dict[str, float]:
    """Seconds of the last build of each output in a `.ninja_log` (start ms, end ms, mtime, output, hash)."""
    seconds: dict[str, float] = {}
    for line in log.splitlines():
        fields = line.split("\t")
        if not line.startswith("#") and len(fields) == 5:
            seconds[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
    return seconds


def read_units(build_dir: Path) -> list[Unit]:
    """The CUDA units of a finished build, with what their last compile reported, whenever that was."""
    commands = json.loads((build_dir / "compile_commands.json").read_text())
    seconds = parse_ninja_log((build_dir / ".ninja_log").read_text())
    units = []
    for command in commands:
        source, arguments = Path(command["file"]), shlex.split(command["command"])
        output = arguments[arguments.index("-o") + 1]
        if source.suffix != ".cu":
            continue
        log = (build_dir / f"{output}.log").read_text(errors="replace")
        serialized = tuple(found["name"] for found in _SERIALIZED.finditer(log))
        units.append(Unit(source.stem, seconds.get(output, 0.0), tuple(parse_ptxas(log)), serialized))
    return units


def spills(units: list[Unit]) -> list[dict[str, object]]:
    """The spilling functions as plain records, for kernels.json; `unit` is the kernel's generated file."""
    return [{"unit": unit.name, **asdict(function)} for unit in units for function in unit.functions if function.spills]


def report(units: list[Unit], archs: list[str], kernel_count: int, wall_s: float, slowest: int = 10) -> str:
    """The text printed at the end of a build: targets, count, times, every kernel that spills or whose wgmma wait."""
    total_s = sum(unit.seconds for unit in units)
    lines = [
        f"weightonly: {kernel_count} kernels for {', '.join(archs)} from {len(units)} units; "
        f"this build took {wall_s:.0f} s (units: {total_s:.0f} s in all when last compiled)",
        f"slowest units (the {min(slowest, len(units))} of {len(units)}):",
    ]
    for unit in sorted(units, key=lambda unit: -unit.seconds)[:slowest]:
        lines.append(f"  {unit.seconds:7.1f} s  {unit.name}")
    spilling = [(unit, function) for unit in units for function in unit.functions if function.spills]
    count = f"{len(spilling)}, and there should be none" if spilling else "none"
    lines.append(f"register spills: {count}")
    for unit, function in spilling:
        lines.append(
            f"  {unit.name} sm_{function.arch}: {function.spill_store_bytes} bytes stored, "
            f"{function.spill_load_bytes} bytes loaded ({function.name[:120]})"
        )
    lines += [f"wgmma serialized: {unit.name} ({name[:120]})" for unit in units for name in unit.serialized]
    return "\n".join(lines)
