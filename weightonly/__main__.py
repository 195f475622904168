"""`weightonly`, or `python -m weightonly`: what this installation is made of, and checkpoints.

info                             versions, the build, and which of its kernels run here
inspect MODEL                    what a quantized checkpoint contains
quantize MODEL OUT --format F    a dense model, quantized and packed
convert IN OUT --arch sm90       a quantized checkpoint, packed for a GPU, or for CPUs
export IN OUT --to gptq          the same, written for others: compressed-tensors, gptq, awq
explain MODEL                    which kernels its layers run, for each number of rows, and why
run MODEL --prompt TEXT          loads one into transformers and writes text

MODEL and IN are folders, or models of the Hugging Face Hub: OWNER/NAME, which is downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from . import build_info
from .commands import COMMANDS
from .console import guarded
from .extras import describe_missing
from .info import describe_version
from .shown import shown


class _Version(argparse.Action):
    """Prints when it is met, so that `_build.json` is read for this alone."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(describe_version(build_info.read()))
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. 0; 1 with one line for what it refuses; 130 for Ctrl-C, 141 where nobody reads the output.

    WEIGHTONLY_TRACEBACK=1 shows where an error comes from.
    """
    return guarded(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(arguments)
        options.act(options)
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("WEIGHTONLY_TRACEBACK"):
            print(shown(traceback.format_exc(), keep="\n"), end="", file=sys.stderr)
        print(shown(f"error: {_message(error)}", keep="\n"), file=sys.stderr)
        return 1
    return 0


def _message(error: Exception) -> str:
    if isinstance(error, ImportError):
        return describe_missing(error)
    if isinstance(error, ValueError | OSError | RuntimeError):
        return str(error)
    # Such as those of transformers for a strange config: their text alone says little.
    return f"{type(error).__name__}: {error} (WEIGHTONLY_TRACEBACK=1 shows where)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_program(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=_Version, help="the library and its build, in a line")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in COMMANDS:
        add(commands)
    return parser


def _program() -> str:
    """How this was called: by its script or by its module."""
    return "weightonly" if os.path.basename(sys.argv[0]) == "weightonly" else "python -m weightonly"


if __name__ == "__main__":
    sys.exit(main())
