"""libweightonly_cpu.so by ctypes, and which backend runs here. One build serves every Python and every PyTorch."""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "WEIGHTONLY_CPU"
LEVELS = ("generic", "avx2", "avx512", "amx")
"""enum Level of kernels/cpu/params.h."""

TYPES = {"fp16": 0, "bf16": 1, "fp32": 2}
"""enum FloatType of kernels/cpu/params.h."""

REFUSED = 2
"""What wo_cpu_gemm returns for parameters that it does not take (kernels/cpu/api.h)."""

_PATH = Path(__file__).parents[1] / "lib" / "libweightonly_cpu.so"
_ABI_VERSION = 4

_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Params(ctypes.Structure):
    """struct GemmParams of kernels/cpu/params.h, which says what each field is."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "weight", "scales", "zeros", "bias", "y", "codebook", "block_order")),
        *((name, _int64) for name in ("ldx", "ld_scales", "ld_zeros", "ldy")),
        *((name, _int64) for name in ("block_stride_k", "block_stride_n", "segment_stride")),
        *((name, _int64) for name in ("m", "n", "k", "k_padded", "group_size", "groups")),
        *((name, _int32) for name in ("segments", "segment_bytes", "type", "format", "activation")),
        *((name, _int32) for name in ("threads", "level", "invariant")),
    )


@dataclass(frozen=True)
class Backend:
    """What computes on this CPU."""

    library: Any
    """The loaded library; None: PyTorch computes."""

    level: int
    """Of LEVELS: the instructions that the library uses; -1 without it."""

    reason: str
    """Why it is this backend."""

    @property
    def name(self) -> str:
        return "pytorch" if self.library is None else f"native ({LEVELS[self.level]})"


@functools.cache
def backend() -> Backend:
    """The backend of this process, decided on the first call. Raises ValueError for another WEIGHTONLY_CPU."""
    return choose(os.environ.get(VARIABLE) or "auto", _PATH)


def choose(wanted: str, path: Path) -> Backend:
    """The backend for WEIGHTONLY_CPU=`wanted` with the library at `path`, if it is there.

    Raises ValueError for an unknown one, RuntimeError for instructions that this CPU lacks and for a missing library.
    """
    if wanted not in ("auto", "pytorch", *LEVELS):
        raise ValueError(f"{VARIABLE}: expected auto, pytorch, {', '.join(LEVELS)}, got {wanted!r}")
    setting = f"{VARIABLE}={wanted}"
    if wanted == "pytorch":
        return Backend(None, -1, setting)
    library, problem = _load(path)
    if library is None:
        if wanted != "auto":
            raise RuntimeError(f"{setting}: {problem}")
        return Backend(None, -1, problem)
    highest: int = library.wo_cpu_level()
    level = highest if wanted == "auto" else LEVELS.index(wanted)
    if level > highest:
        raise RuntimeError(f"{setting}: expected at most {LEVELS[highest]}, which this CPU has")
    return Backend(library, level, "the most that this CPU has" if wanted == "auto" else setting)


def _load(path: Path) -> tuple[Any, str]:
    """The library, or None and why there is none."""
    if not path.is_file():
        return None, "the native kernels were not built: a C++ compiler (c++, or CXX) builds them with the package"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the native kernels cannot be loaded: {error}"
    try:
        fits = library.wo_cpu_abi_version() == _ABI_VERSION and library.wo_cpu_params_bytes() == ctypes.sizeof(Params)
    except AttributeError:
        fits = False
    if not fits:
        return None, f"{path.name} is of another version of weightonly: install again"
    library.wo_cpu_gemm.argtypes = library.wo_cpu_kernel.argtypes = [ctypes.POINTER(Params)]
    library.wo_cpu_error.restype = ctypes.c_char_p
    return library, ""
