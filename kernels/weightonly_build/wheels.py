"""The two wheels, both py3-none-manylinux: each serves every Python.

weightonly          the package, the pybind11 module for each of PYTHONS (Python takes the one of its name), and what
                    else of compiled code needs no GPU
weightonly-kernels  the kernels library, which puts itself into weightonly/lib

A wheel is a function of the sources and of the compilers: files in order, one date (SOURCE_DATE_EPOCH), no path.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

from . import library, target
from .library import ROOT

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
ARCHS = "75,80,86,89,90a,100,120+PTX"
"""What the wheel is built for, where WEIGHTONLY_ARCHS says nothing."""

_DATE = 1767225600  # 2026-01-01, where SOURCE_DATE_EPOCH says nothing
Files = dict[str, bytes]
"""Name in a wheel -> contents."""


def build(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Builds the kernels and a module for each Python, and writes both wheels to dist/.

    Raises RuntimeError when nvcc, a Python of PYTHONS or a tool is missing, subprocess.CalledProcessError when
    something does not compile.
    """
    interpreters = find_pythons(env)
    if (nvcc := target.find_nvcc(env)) is None:
        raise RuntimeError("nvcc was not found (CUDACXX, CUDA_HOME, PATH, /usr/local/cuda)")
    archs = target.requested_archs(nvcc, [], {"WEIGHTONLY_ARCHS": env.get("WEIGHTONLY_ARCHS") or ARCHS})
    library.build_kernels(target.Decision(nvcc, "the wheel weightonly-kernels"), archs)
    modules = [library.build_binding(python) for python in interpreters]
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    wheels = [_write_package(dist, modules), _write_kernels(dist)]
    for wheel in wheels:
        print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.2f} MB")
    return wheels


def find_pythons(env: Mapping[str, str] = os.environ) -> list[Path]:
    """WEIGHTONLY_PYTHONS, interpreters with spaces between them; unset: python3.10 to python3.14 on PATH.

    Raises RuntimeError for one that is not there.
    """
    asked = (env.get("WEIGHTONLY_PYTHONS") or " ".join(f"python{version}" for version in PYTHONS)).split()
    found = {name: shutil.which(name, path=env.get("PATH")) for name in asked}
    if missing := [name for name, path in found.items() if path is None]:
        raise RuntimeError(
            f"{', '.join(missing)} not found: the wheel has a module for each Python; "
            "WEIGHTONLY_PYTHONS='python3.12 ...' names the interpreters (each with its headers) that you want it for"
        )
    return [Path(path) for path in found.values() if path is not None]


def _write_package(dist: Path, modules: list[Path]) -> Path:
    """What `pip wheel` makes without CUDA, and the modules."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", folder]
        env = {**os.environ, "WEIGHTONLY_CUDA": "off"}
        subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], env=env, check=True)
        (pure,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(pure) as wheel:
            files = {name: wheel.read(name) for name in wheel.namelist()}
    for module in modules:
        files[f"weightonly/{module.name}"] = module.read_bytes()
    version, number = library.project_version()
    record = {"version": version, "build": number, "cuda": False}
    record["reason"] = "the wheel weightonly-kernels is not installed"
    files["weightonly/_build.json"] = _json(record)
    (info,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
    return write(dist, info.removesuffix(".dist-info"), files)


def _write_kernels(dist: Path) -> Path:
    """The library and the record of it, which says nothing of when and where it was built."""
    record = json.loads(library.KERNELS_RECORD.read_text())
    del record["build_seconds"]
    cuda = "".join(record["nvcc"].split(".")[:2])
    name = f"weightonly_kernels-{record['version']}+cu{cuda}"
    metadata = f"""\
Metadata-Version: 2.4
Name: weightonly-kernels
Version: {record["version"]}+cu{cuda}
Summary: The CUDA kernels of weightonly for {", ".join(record["archs"])}, built with CUDA {record["nvcc"]}
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.10
Requires-Dist: weightonly=={record["version"]}
"""
    files = {
        f"weightonly/lib/{library.LIBRARY.name}": library.LIBRARY.read_bytes(),
        f"weightonly/lib/{library.KERNELS_RECORD.name}": _json(record),
        f"{name}.dist-info/METADATA": metadata.encode(),
        f"{name}.dist-info/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    return write(dist, name, files)


def write(dist: Path, name: str, files: Files) -> Path:
    """Writes a wheel for the oldest manylinux that its binaries allow, and BUILD of version.py in its name.

    name    distribution and version, as in "weightonly-0.1.0"
    files   all but WHEEL and RECORD of its dist-info
    """
    number = library.project_version()[1]
    plain = dist / f"{name}-py3-none-linux_x86_64.whl"
    _zip(plain, name, files, number, "py3-none-linux_x86_64")
    tag = f"py3-none-{manylinux(plain)}"
    plain.unlink()
    wheel = dist / "-".join([name, *([str(number)] if number else []), tag + ".whl"])
    _zip(wheel, name, files, number, tag)
    return wheel


def manylinux(wheel: Path) -> str:
    """The platform tag that auditwheel finds for a wheel, such as "manylinux_2_34_x86_64".

    Raises RuntimeError for a wheel that runs on this machine's Linux alone.
    """
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r'following platform tag:\s+"(manylinux_\w+)"', done.stdout)
    if found is None:
        raise RuntimeError(f"auditwheel finds no manylinux tag for {wheel.name}: {done.stdout}{done.stderr}")
    return found[1]


def _zip(path: Path, name: str, files: Files, number: int, tag: str) -> None:
    info = f"{name}.dist-info"
    build = f"Build: {number}\n" if number else ""
    wheel = f"Wheel-Version: 1.0\nGenerator: weightonly_build\nRoot-Is-Purelib: false\n{build}Tag: {tag}\n"
    files = {**files, f"{info}/WHEEL": wheel.encode()}
    files.pop(f"{info}/RECORD", None)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for file, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow((file, f"sha256={digest}", len(content)))
    rows.writerow((f"{info}/RECORD", "", ""))
    # dist-info comes last, as wheels have it.
    ordered = sorted(files.items(), key=lambda file: (file[0].startswith(info), file[0]))
    date = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or _DATE))[:6]
    with zipfile.ZipFile(path, "w") as wheel_file:
        for file, content in [*ordered, (f"{info}/RECORD", text.getvalue().encode())]:
            entry = zipfile.ZipInfo(file, date)
            entry.external_attr = (0o100755 if file.endswith(".so") else 0o100644) << 16
            wheel_file.writestr(entry, content, zipfile.ZIP_DEFLATED, 9)


def _json(record: dict[str, object]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()
