"""What the build of the installed package was made of: written by setup.py into `_build.json`, read here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parent / "_build.json"


@dataclass(frozen=True)
class Spill:
    """A function of the device code that spills registers to memory; there should be none."""

    unit: str  # the generated file, named after its kernel
    name: str  # the function, mangled
    arch: str  # "80", "90a"
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class BuildInfo:
    """The build of this package. Fields after `reason` describe the CUDA kernels; empty without them."""

    version: str  # of the library, "" when it was never built
    cuda: bool  # the CUDA kernels were built
    reason: str  # why they were, or were not
    archs: tuple[str, ...] = ()  # targets, e.g. ("80", "90a")
    nvcc: str = ""  # e.g. "13.0.88"
    cutlass: str = ""  # e.g. "4.2.0"
    kernels: int = 0  # compiled configurations
    spills: tuple[Spill, ...] = ()
    build_seconds: float = 0.0  # of the last build, which compiles only what changed


def read(path: Path = _PATH) -> BuildInfo:
    """The metadata of the installed build; of a source tree that was never built, a BuildInfo without CUDA.

    Raises ValueError, naming the file, when it is not what a build writes.
    """
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
