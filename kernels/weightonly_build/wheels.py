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
    package, kernels = package_files(modules), kernels_files()
    # The modules need the library: auditwheel looks at them with it.
    platforms = manylinux(package | kernels), manylinux(kernels)
    wheels = [write(dist, *each) for each in zip((package, kernels), platforms, strict=True)]
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


def package_files(modules: list[Path]) -> Files:
    """The wheel weightonly: what `pip wheel` makes without CUDA, and the modules."""
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
    return files | {"weightonly/_build.json": _json(record)}


def kernels_files() -> Files:
    """The wheel weightonly-kernels: the library and the record of it, which does not say how long it took."""
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
    return {
        f"weightonly/lib/{library.LIBRARY.name}": library.LIBRARY.read_bytes(),
        f"weightonly/lib/{library.KERNELS_RECORD.name}": _json(record),
        f"{name}.dist-info/METADATA": metadata.encode(),
        f"{name}.dist-info/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }


def write(dist: Path, files: Files, platform: str) -> Path:
    """Writes a wheel for every Python and one platform, with BUILD of version.py in its name.

    files   WHEEL and RECORD of its dist-info are made anew
    """
    (info,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
    number = library.project_version()[1]
    parts = [info.removesuffix(".dist-info"), *([str(number)] if number else []), "py3", "none", platform]
    build = f"Build: {number}\n" if number else ""
    about = (
        f"Wheel-Version: 1.0\nGenerator: weightonly_build\nRoot-Is-Purelib: false\n{build}Tag: py3-none-{platform}\n"
    )
    files = files | {f"{info}/WHEEL": about.encode()}
    files.pop(f"{info}/RECORD", None)
    # dist-info comes last, as wheels have it.
    ordered = sorted(files.items(), key=lambda file: (file[0].startswith(info), file[0]))
    files = dict(ordered) | {f"{info}/RECORD": _record(files, f"{info}/RECORD")}
    wheel = dist / f"{'-'.join(parts)}.whl"
    date = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or _DATE))[:6]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, date)
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED, 9)
    return wheel


def manylinux(files: Files) -> str:
    """The platform that auditwheel finds for the binaries among the files, such as "manylinux_2_34_x86_64".

    Raises RuntimeError for those that need a library of this machine.
    """
    info = {"binaries-0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: binaries\nVersion: 0\n"}
    binaries = {name: content for name, content in files.items() if name.endswith(".so")}
    with tempfile.TemporaryDirectory() as folder:
        wheel = write(Path(folder), binaries | info, "linux_x86_64")
        command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r'following\s+platform\s+tag:\s+"(manylinux_\w+)"', done.stdout)
    if found is None:
        raise RuntimeError(f"auditwheel finds no manylinux for {', '.join(binaries)}: {done.stdout}{done.stderr}")
    return found[1]


def _record(files: Files, itself: str) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(content)))
    rows.writerow((itself, "", ""))
    return text.getvalue().encode()


def _json(record: dict[str, object]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()
