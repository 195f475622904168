"""CUTLASS' headers, pinned; without the Python packages that its package on PyPI asks for."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

VERSION = "4.2.0"
PACKAGE = "nvidia-cutlass==4.2.0.0"


def find_headers(build_dir: Path, env: Mapping[str, str] = os.environ) -> Path:
    """The folder with CUTLASS' headers, of the pinned version.

    WEIGHTONLY_CUTLASS_DIR (a CUTLASS checkout or its include folder), else the copy in `build_dir`, else an
    installed `cutlass_library`; else the package is downloaded into `build_dir` and unpacked.
    Raises RuntimeError when the headers are missing or of another version.
    """
    if given := env.get("WEIGHTONLY_CUTLASS_DIR"):
        include = next((p for p in (Path(given), Path(given) / "include") if (p / "cutlass").is_dir()), None)
        if include is None:
            raise RuntimeError(f"WEIGHTONLY_CUTLASS_DIR: expected a folder with cutlass/ in it, got {given!r}")
        _check(include)
        return include
    copy = build_dir / f"cutlass-{VERSION}" / "include"
    spec = importlib.util.find_spec("cutlass_library")
    installed = spec.submodule_search_locations if spec else None
    for include in (copy, *(Path(location) / "source" / "include" for location in installed or ())):
        if header_version(include) == VERSION:
            return include
    _download(build_dir / "downloads", copy)
    _check(copy)
    return copy


def header_version(include: Path) -> str | None:
    """The version in cutlass/version.h, e.g. "4.2.0"; None where there is no such file."""
    header = include / "cutlass" / "version.h"
    if not header.is_file():
        return None
    numbers = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH) (\d+)", header.read_text()))
    return ".".join(numbers.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))


def _check(include: Path) -> None:
    if (version := header_version(include)) != VERSION:
        raise RuntimeError(f"CUTLASS headers in {include}: expected version {VERSION}, got {version}")


def _download(downloads: Path, include: Path) -> None:
    # -I: pip's isolated build environment hides pip itself through PYTHONPATH.
    pip = [sys.executable, "-I", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    try:
        subprocess.run([*pip, "--dest", downloads, PACKAGE], check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"CUTLASS headers: `pip download {PACKAGE}` failed; "
            f"WEIGHTONLY_CUTLASS_DIR can name a folder that holds CUTLASS {VERSION}"
        ) from error
    prefix = "cutlass_library/source/include/"
    unpacked = include.with_suffix(".partial")
    shutil.rmtree(unpacked, ignore_errors=True)
    with zipfile.ZipFile(next(downloads.glob(f"{PACKAGE.replace('-', '_').replace('==', '-')}-*.whl"))) as wheel:
        wheel.extractall(unpacked, [name for name in wheel.namelist() if name.startswith(prefix)])
    shutil.rmtree(include, ignore_errors=True)
    (unpacked / prefix).rename(include)
    shutil.rmtree(unpacked)
