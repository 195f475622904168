"""How the installed package was built: lib/kernels.json describes the kernels, _build.json says why there are none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent
LIBRARY = _PACKAGE / "lib" / "libweightonly_kernels.so"
"""The kernels. The wheel weightonly-kernels puts it there, or a build from source."""


@dataclass(frozen=True)
class Spill:
    """A device function that spills registers to memory. There should be none."""

    unit: str  # the generated source file, named after its kernel
    name: str  # the mangled name of the function
    arch: str  # "80", "90a"
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class BuildInfo:
    """The build of this package. The fields after `reason` describe the CUDA kernels and are empty without them."""

    version: str  # of the library; "": it was never built
    cuda: bool  # whether the CUDA kernels were built
    reason: str  # why they were or were not
    archs: tuple[str, ...] = ()  # targets, e.g. ("80", "90a")
    nvcc: str = ""  # e.g. "13.0.88"
    cutlass: str = ""  # e.g. "4.2.0"
    kernels: int = 0  # compiled configurations
    spills: tuple[Spill, ...] = ()
    build: int = 0  # of the wheels of this version
    build_seconds: float = 0.0  # of the last build, which compiled only what had changed


def read(path: Path | None = None) -> BuildInfo:
    """The metadata of the installed build. A source tree that was never built has a BuildInfo without CUDA.

    path    of the file; None: of the kernels' file if they are here, else of the one that says why not
    Raises ValueError, naming the file, for a file that is not what a build writes.
    """
    if path is None:
        path = LIBRARY.with_name("kernels.json") if LIBRARY.is_file() else _PACKAGE / "_build.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return BuildInfo(version="", cuda=False, reason=f"never built: there is no {path.name}")
    try:
        record: dict[str, Any] = json.loads(text)
        record["archs"] = tuple(record.get("archs", ()))
        record["spills"] = tuple(Spill(**spill) for spill in record.get("spills", ()))
        return BuildInfo(**record)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected the metadata of a build, got {text[:60]!r}; install again") from error
