"""The build without pip, into weightonly/ of this checkout:

    PYTHONPATH=kernels python -m weightonly_build COMMAND

auto             what WEIGHTONLY_CUDA and WEIGHTONLY_ARCHS ask for
kernels          the kernels library, whatever this machine holds (nvcc is needed)
cpu              the CPU's library, which needs no CUDA; WEIGHTONLY_CPU_FLAGS are more options of the compiler
binding          the pybind11 module for this Python, against the library built earlier
wheels           both wheels, for every Python, in dist/
requirements     the options of pip install for what `auto` needs at build time, if anything: hashes of it all
compare OLD NEW  the machine code of two libraries (.so), objects (.o) or folders of objects, kernel by kernel;
                 exit status 1 unless all kernels are equal
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from . import compare, cpu, library, target, wheels


def _compare(old: str, new: str) -> int:
    equal, text = compare.compare(Path(old), Path(new))
    print(text)
    return 0 if equal else 1


def _requirements() -> None:
    if library.build_requirements(target.decide_here()):
        print("--require-hashes", "--only-binary=:all:", "-r", library.REQUIREMENTS)


# Command -> its arguments' names, and what it calls with them.
COMMANDS: dict[str, tuple[tuple[str, ...], Callable[..., object]]] = {
    "auto": ((), lambda: library.build_in_tree(target.decide_here())),
    "kernels": ((), library.build_kernels_only),
    "cpu": ((), lambda: 0 if cpu.build() else 1),
    "binding": ((), library.build_binding),
    "wheels": ((), wheels.build),
    "requirements": ((), _requirements),
    "compare": (("OLD", "NEW"), _compare),
}

command, *arguments = sys.argv[1:] or [""]
if command not in COMMANDS or len(arguments) != len(COMMANDS[command][0]):
    sys.exit(__doc__)
try:
    status = COMMANDS[command][1](*arguments)
except (ValueError, RuntimeError, FileNotFoundError, subprocess.CalledProcessError) as error:
    sys.exit(f"error: {error}")
sys.exit(status if isinstance(status, int) else 0)
