"""`python -m weightonly ...` imports nothing from the current folder, which may be a stranger's checkpoint.

Python puts that folder first on sys.path, so that a `tqdm.py` in it would be imported for tqdm. The folder stays where
this package itself comes from it (a checkout). `import weightonly` in a program changes nothing.

This module is imported before any other, and itself imports only what Python has imported already.
"""

import os
import sys


def asked_module() -> str:
    """What `python -m` was given; "" where it was not called so, or has found its module already."""
    if sys.argv[:1] != ["-m"]:  # as long as the module is looked for
        return ""
    for option, value in zip(sys.orig_argv[1:], [*sys.orig_argv[2:], ""], strict=True):
        if option.startswith("-m"):
            return option[2:] or value
    return ""


def _forget_current_folder() -> None:
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    here = os.getcwd()
    is_first = bool(sys.path) and not getattr(sys.flags, "safe_path", False) and os.path.abspath(sys.path[0]) == here
    if asked_module().partition(".")[0] == "weightonly" and is_first and here != home:
        del sys.path[0]


_forget_current_folder()
