"""The build without pip, into weightonly/ of this checkout:

    PYTHONPATH=kernels python -m weightonly_build COMMAND

auto           what WEIGHTONLY_CUDA and WEIGHTONLY_ARCHS ask for
kernels        the kernels library, whatever this machine holds (nvcc is needed)
binding        the pybind11 module for this Python, against the library built earlier
requirements   the packages that `auto` needs at build time, one per line
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from . import library, target

COMMANDS: dict[str, Callable[[], object]] = {
    "auto": lambda: library.build_in_tree(target.decide_here()),
    "kernels": library.build_kernels_only,
    "binding": library.build_binding,
    "requirements": lambda: print("\n".join(library.build_requirements(target.decide_here()))),
}

if len(sys.argv) != 2 or sys.argv[1] not in COMMANDS:
    sys.exit(__doc__)
try:
    COMMANDS[sys.argv[1]]()
except (ValueError, RuntimeError, subprocess.CalledProcessError) as error:
    sys.exit(f"error: {error}")
