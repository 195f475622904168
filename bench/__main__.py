"""Time `gemm` beside others (`sweep`, `report`), the linears of a model one after another (`chain`), whole models
(`model`), their linears on several GPUs (`parallel`), mixtures of experts (`experts`), what a call costs the host
(`host`) and the conversions of whole weights (`conversions`); compare the heuristic's choice with the best
configuration (`regret`), or replace it by what is measured to be the quickest on this GPU (`tune`); try random calls
(`fuzz`)."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence

from .commands import COMMANDS
from .devices import NoGpu, require_gpu


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. 0; 1 for a `report --compare` with regressions and a `model` with rows that failed; 2 with
    one line for what it refuses."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "sweep")
    options = _parser().parse_args(arguments)
    options.command_line = shlex.join(["python", "-m", "weightonly.bench", *arguments])
    command = COMMANDS[options.command]
    try:
        _check_device(options, command.needs_gpu(options))
        for module in getattr(options, "plugin", ()):
            importlib.import_module(module)
        return command.run(options)
    except (ValueError, OSError, ImportError, NoGpu) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m weightonly.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_options(commands.add_parser(name, help=command.HELP, description=command.HELP))
    return parser


def _check_device(options: argparse.Namespace, needs_gpu: bool) -> None:
    """Raises NoGpu where a command is for GPUs, or asked to run on one, and there is none."""
    device = getattr(options, "device", None)
    if needs_gpu or (device is not None and device.startswith("cuda")):
        require_gpu(options.command, device)


if __name__ == "__main__":
    sys.exit(main())
