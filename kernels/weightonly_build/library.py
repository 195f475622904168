"""Builds the kernels library (CMake), the pybind11 module and the metadata into weightonly/."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from . import cpu, cutlass, report, target
from .target import Decision

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "weightonly"
LIBRARY = PACKAGE / "lib" / "libweightonly_kernels.so"
MODULE = PACKAGE / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
KERNELS_RECORD = LIBRARY.with_name("kernels.json")
"""Describes the library beside it."""
METADATA = PACKAGE / "_build.json"
"""Says why there is no library."""
BUILD = ROOT / "build"
CMAKE_BUILD = BUILD / "cmake"


REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def build_requirements(decision: Decision) -> list[str]:
    """Packages that the build needs beside setuptools: none without CUDA, else what this machine lacks."""
    if not decision.cuda:
        return []
    pins = re.findall(r"^(\w+)==\S+", REQUIREMENTS.read_text(), re.MULTILINE)
    lacking = {"pybind11", *(tool for tool in ("cmake", "ninja") if find_tool(tool) is None)}
    return [pin(name) for name in pins if name in lacking]


def pin(name: str) -> str:
    """ "cmake==4.4.4": the version of a package in requirements.txt."""
    found = re.search(rf"^{name}==\S+", REQUIREMENTS.read_text(), re.MULTILINE)
    assert found, name
    return found[0]


def find_tool(name: str) -> str | None:
    """A program on PATH or beside this Python (a virtual environment that is not activated)."""
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


def build_kernels(decision: Decision, archs: Sequence[str]) -> None:
    """Builds weightonly/lib/libweightonly_kernels.so, prints the report, and writes kernels.json beside it.

    Raises subprocess.CalledProcessError when a unit does not compile, RuntimeError when a tool is missing.
    """
    assert decision.nvcc is not None
    cmake, ninja = (_need_tool(name) for name in ("cmake", "ninja"))
    print(f"weightonly: building the CUDA kernels for {', '.join(archs)} ({decision.reason})", flush=True)
    started = time.monotonic()
    configure = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "CMAKE_CUDA_COMPILER": decision.nvcc,
        "WEIGHTONLY_ARCHS": ",".join(archs),
        "WEIGHTONLY_UNVERIFIED": "ON" if target.asks_for_unverified() else "OFF",
        "WEIGHTONLY_CUTLASS_INCLUDE": cutlass.find_headers(BUILD),
        "WEIGHTONLY_PYTHON": sys.executable,
    }
    options = [f"-D{name}={value}" for name, value in configure.items()]
    subprocess.run([cmake, "-S", ROOT, "-B", CMAKE_BUILD, "-G", "Ninja", *options], check=True)
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
    subprocess.run([cmake, "--build", CMAKE_BUILD, "--parallel", jobs], check=True)
    _link(BUILD / "compile_commands.json", CMAKE_BUILD / "compile_commands.json")
    wall_s = time.monotonic() - started

    kernels = kernel_names(LIBRARY)
    units = report.read_units(CMAKE_BUILD)
    print(report.report(units, list(archs), len(kernels), wall_s), flush=True)
    write_metadata(
        KERNELS_RECORD,
        decision,
        archs=list(archs),
        nvcc=target.nvcc_version(decision.nvcc),
        cutlass=cutlass.VERSION,
        kernels=len(kernels),
        spills=report.spills(units),
        build_seconds=round(wall_s, 1),
    )


def write_metadata(path: Path, decision: Decision, **built: object) -> None:
    """Writes what weightonly/build_info.py reads; `built` describes the kernels, empty for a CPU library."""
    version, number = project_version()
    record = {"version": version, "build": number, "cuda": decision.cuda, "reason": decision.reason, **built}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def kernel_names(library: Path) -> list[str]:
    """The kernels that a built library lists through its C interface; needs no GPU."""
    interface = ctypes.CDLL(str(library))
    interface.wo_kernel_count.restype = ctypes.c_int
    interface.wo_kernel_name.restype = ctypes.c_char_p
    interface.wo_kernel_name.argtypes = [ctypes.c_int]
    return [interface.wo_kernel_name(i).decode() for i in range(interface.wo_kernel_count())]


def build_binding(python: Path | None = None) -> Path:
    """Builds the pybind11 module for an interpreter (None: this one) in seconds; one newer than its sources is kept.

    Raises RuntimeError when the kernels library, pybind11 or the interpreter's headers are missing.
    """
    if not LIBRARY.is_file():
        raise RuntimeError(f"{LIBRARY.relative_to(ROOT)} is missing: build it with `make kernels`")
    if importlib.util.find_spec("pybind11") is None:
        raise RuntimeError(f"pybind11 is missing: {sys.executable} -m pip install {pin('pybind11')}")
    include = importlib.import_module("pybind11").get_include()
    program = "import sysconfig as s; print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'), sep='\\n')"
    asked = subprocess.run([python or sys.executable, "-c", program], check=True, capture_output=True, text=True)
    headers, suffix = asked.stdout.splitlines()
    if not Path(headers, "Python.h").is_file():
        raise RuntimeError(f"{python or sys.executable} has no headers: there is no {headers}/Python.h")
    module = PACKAGE / f"_C{suffix}"
    source = ROOT / "kernels" / "api" / "bindings.cpp"
    inputs = [source, Path(__file__), *ROOT.glob("kernels/**/*.h"), *ROOT.glob("cutlass_ext/**/*.h")]
    if module.is_file() and module.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return module
    compiler = [
        *shlex.split(os.environ.get("CXX", "c++")),
        "-O2",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
    ]
    includes = [f"-I{ROOT}", "-isystem", include, "-isystem", headers]
    linked = [f"-L{LIBRARY.parent}", "-lweightonly_kernels", "-Wl,-rpath,$ORIGIN/lib", "-Wl,--strip-all"]
    print(f"weightonly: compiling {module.name}", flush=True)
    subprocess.run([*compiler, *includes, source, "-o", module, *linked], check=True)
    return module


def project_version() -> tuple[str, int]:
    """VERSION and BUILD of weightonly/version.py, without importing the package (PyTorch is no build requirement)."""
    values = runpy.run_path(str(PACKAGE / "version.py"))
    return values["VERSION"], values["BUILD"]


def build_in_tree(decision: Decision) -> None:
    """Brings weightonly/ in line with the decision. Without CUDA, kernels built earlier stay in use."""
    cpu.build()
    if decision.nvcc is not None:
        build_kernels(decision, target.requested_archs(decision.nvcc, target.visible_gpus()))
        build_binding()
        return
    print(f"weightonly: no CUDA kernels are built ({decision.reason}); WEIGHTONLY_CUDA=on builds them")
    if LIBRARY.is_file():
        print(f"weightonly: {LIBRARY} was built earlier and stays in use; `make clean` removes it")
    else:
        write_metadata(METADATA, decision)


def build_kernels_only() -> None:
    """`build_kernels` whatever WEIGHTONLY_CUDA says, and for DEFAULT_ARCHS whatever GPU is here."""
    nvcc = target.find_nvcc()
    decision = target.decide("on", nvcc, [])
    assert nvcc is not None
    build_kernels(decision, target.requested_archs(nvcc, []))


def _need_tool(name: str) -> str:
    if (tool := find_tool(name)) is None:
        raise RuntimeError(f"{name} builds the CUDA kernels and was not found: pip install {name}")
    return tool


def _link(link: Path, target: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))
