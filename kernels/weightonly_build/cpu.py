"""Builds weightonly/lib/libweightonly_cpu.so with the C++ compiler of this machine, in seconds; no CUDA, no PyTorch."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

VARIABLE = "WEIGHTONLY_CPU_FLAGS"
"""Options of the compiler and the linker after those below, as .ci/run has them: "-fsanitize=address,undefined"."""

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kernels" / "cpu"
_ACTIVATIONS = ROOT / "cutlass_ext" / "epilogue" / "activation.h"  # their numbers
LIBRARY = ROOT / "weightonly" / "lib" / "libweightonly_cpu.so"

_FOLDER = ROOT / "build" / "cpu"
_BUILT_WITH = _FOLDER / "flags"
"""The value of VARIABLE that LIBRARY was built with."""

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off")
_AVX512 = ("-march=skylake-avx512", "-mprefer-vector-width=512")
_VARIANTS: dict[str, tuple[str, ...]] = {
    "generic": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16"),
}
"""Variant -> what the compiler may use; the library chooses at run time."""


def find_compiler() -> list[str] | None:
    """The command in CXX, else c++ or g++; None where there is none."""
    if named := os.environ.get("CXX"):
        command = shlex.split(named)
        return command if shutil.which(command[0]) else None
    return next(([name] for name in ("c++", "g++") if shutil.which(name)), None)


def build() -> bool:
    """Builds the library unless it is newer than its sources, and of the same flags. Returns whether it is there.

    Without a compiler, or with one that cannot compile it, says so and leaves PyTorch to compute on CPUs.
    """
    inputs = [Path(__file__), _ACTIVATIONS, *SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]
    flags = os.environ.get(VARIABLE, "")
    built_with = _BUILT_WITH.read_text(encoding="utf-8") if _BUILT_WITH.is_file() else ""
    newest = max(path.stat().st_mtime for path in inputs)
    if LIBRARY.is_file() and LIBRARY.stat().st_mtime > newest and built_with == flags:
        return True
    LIBRARY.unlink(missing_ok=True)
    compiler = find_compiler()
    if compiler is None:
        print("weightonly: no C++ compiler (c++, or CXX): PyTorch computes on CPUs")
        return False
    print(f"weightonly: compiling {LIBRARY.name}", flush=True)
    try:
        _compile(compiler, shlex.split(flags))
    except subprocess.CalledProcessError as error:
        print(f"weightonly: {shlex.join(error.cmd)} failed: PyTorch computes on CPUs")
        return False
    _BUILT_WITH.write_text(flags, encoding="utf-8")
    return True


def _compile(compiler: list[str], more: list[str]) -> None:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    variants = _VARIANTS if platform.machine() == "x86_64" else {"generic": ()}
    commands = [
        [*compiler, *_FLAGS, *more, "-c", f"{SOURCES / name}.cpp", "-o", f"{_FOLDER / name}.o"]
        for name in ("api", "threads")
    ]
    for name, flags in variants.items():
        variant = [f"-DWEIGHTONLY_VARIANT={name}", *flags]
        source, made = f"{SOURCES / 'variant.cpp'}", f"{_FOLDER / name}.o"
        commands.append([*compiler, *_FLAGS, *variant, *more, "-c", source, "-o", made])
    running = [(command, subprocess.Popen(command)) for command in commands]
    failed = [command for command, process in running if process.wait() != 0]
    if failed:
        raise subprocess.CalledProcessError(1, failed[0])
    objects = [command[-1] for command in commands]
    linked = _FOLDER / LIBRARY.name
    options = [*more, "-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"]
    subprocess.run([*compiler, *options, *objects, "-ldl", "-o", str(linked)], check=True)
    os.replace(linked, LIBRARY)  # a process that has loaded the one before keeps it
