"""What a command is, how it is run, and the options that commands share: one name, one meaning."""

from __future__ import annotations

import argparse
import importlib
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from weightonly.codebooks import CODEBOOKS
from weightonly.console import guarded
from weightonly.dense import default_group_size
from weightonly.extras import describe_missing
from weightonly.heuristics.problem import FLOAT_FORMATS

from .devices import NoGpu, require_gpu
from .providers import PROVIDERS
from .shapes import NAMED
from .weights import DTYPES

Parser = argparse.ArgumentParser
Options = argparse.Namespace


@dataclass
class Command:
    """A command: its options, what it does (the exit status is returned), and whether it needs a GPU. Options are
    stored by the names of the parameters that they are for."""

    help: str
    add_options: Callable[[Parser], None]
    run: Callable[[Options], int]
    needs_gpu: Callable[[Options], bool] = lambda options: True


def frame_command(
    help: str,
    add_options: Callable[[Parser], None],
    measure: Callable[..., pd.DataFrame],
    table: Callable[[pd.DataFrame], str],
) -> Command:
    """A command for GPUs that prints what it measures as a table, and has --csv for the rows."""

    def add_all(parser: Parser) -> None:
        add_options(parser)
        add_csv(parser)

    def run(options: Options) -> int:
        frame = measure(**keywords(options, measure))
        print(table(frame))
        write_csv(frame, options)
        return 0

    return Command(help, add_all, run)


def run_commands(
    commands: Mapping[str, Command], prog: str, description: str, default: str, argv: Sequence[str] | None
) -> int:
    """The command line of several commands; `default` is the one that needs no name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, default)
    parser = Parser(prog=prog, description=description)
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, command in commands.items():
        command.add_options(parsers.add_parser(name, help=command.help, description=command.help))

    def run() -> int:
        options = parser.parse_args(arguments)
        return _run(commands[options.command], options, options.command, prog, arguments)

    return guarded(run)


def run_command(command: Command, prog: str, argv: Sequence[str] | None = None) -> int:
    """The command line of a program that is one command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog=prog, description=command.help)
    command.add_options(parser)
    return guarded(lambda: _run(command, parser.parse_args(arguments), prog.rpartition(".")[2], prog, arguments))


def _run(command: Command, options: Options, name: str, prog: str, arguments: Sequence[str]) -> int:
    """The command's status; 2 with one line for what it refuses."""
    options.command_line = shlex.join([*prog.split(), *arguments])
    device = getattr(options, "device", None)
    try:
        if command.needs_gpu(options) or (device is not None and device.startswith("cuda")):
            require_gpu(name, device)
        for module in getattr(options, "plugin", ()):
            importlib.import_module(module)
        return command.run(options)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError, NoGpu) as error:
        message = describe_missing(error) if isinstance(error, ImportError) else error
        print(f"error: {message}", file=sys.stderr)
        return 2


def keywords(options: Options, takes: Callable[..., Any]) -> dict[str, Any]:
    """The options that a function has parameters for."""
    found = {name: getattr(options, name) for name in inspect.signature(takes).parameters if name in options}
    if "dtype" in found:
        found["dtype"] = DTYPES[found["dtype"]]
    if "group_size" in found and found["group_size"] is None:
        found["group_size"] = default_group_size(found.get("format") or "")
    return found


# --- options ---------------------------------------------------------------------------------------------------


def integers(text: str) -> list[int]:
    """ "1,16,256" as numbers."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers such as 1,16,256, got {text!r}") from None


def names(text: str) -> list[str]:
    """ "a,b" as a list."""
    return text.split(",")


def all_or_names(text: str) -> str | list[str]:
    return text if text == "all" else names(text)


def add_shapes(parser: Parser, default: str, help: str = "of w") -> None:
    known = ", ".join(NAMED)
    parser.add_argument("--shapes", default=default, help=f"{help}: {known} or KxN, by commas (default {default})")


def add_batch(parser: Parser, default: Sequence[int], what: str = "rows of x") -> None:
    listed = ",".join(map(str, default))
    parser.add_argument("--batch", type=integers, default=list(default), help=f"{what} (default {listed})")


def add_weights(parser: Parser, *, format: bool = True) -> None:
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    if format:
        parser.add_argument(
            "--format",
            choices=(*CODEBOOKS, *FLOAT_FORMATS),
            help="codes of a codebook instead of integers; fp8, with --bits 8: floats",
        )
    parser.add_argument(
        "--group-size", type=int, help="rows of w per scale; -1: all (default 128; nf4 and fp4 64, mxfp4 32, nvfp4 16)"
    )
    parser.add_argument("--zeros", dest="symmetric", action="store_false", help="quantize with zero points")


def add_run(parser: Parser, *, budget: bool = True, dtype: str = "fp16") -> None:
    """Where, with which type and for how long to measure."""
    parser.add_argument("--dtype", choices=tuple(DTYPES), default=dtype, help=f"of x (default {dtype}; fp32: CPU)")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU where there is one)")
    if budget:
        parser.add_argument(
            "--budget-ms", type=float, default=argparse.SUPPRESS, help="device time per measurement, in milliseconds"
        )
    parser.add_argument("--quiet", dest="progress", action="store_false", help="no progress bar")


def add_providers(parser: Parser, default: str, known: Iterable[str] = PROVIDERS) -> None:
    parser.add_argument(
        "--providers", type=all_or_names, default=default, help=f"all, or some of {','.join(known)} (default {default})"
    )
    parser.add_argument(
        "--plugin", metavar="MODULE", action="append", default=[], help="import it first: it registers more providers"
    )


def add_csv(parser: Parser) -> None:
    parser.add_argument("--csv", metavar="FILE", help="write every measured column")


def to_csv(frame: pd.DataFrame, path: str) -> None:
    """Write a table to a file: every column, times in us with three decimals.

    Args:
        frame: the table.
        path: of the file.

    Examples:
        >>> frame = wo.bench.sweep("512x768", 1, device="cpu", dtype=torch.float32, budget_ms=1, progress=False)
        >>> wo.bench.to_csv(frame, "sweep.csv")
    """
    frame.to_csv(path, index=False, float_format="%.3f")


def write_csv(frame: pd.DataFrame, options: Options) -> None:
    """Where --csv says."""
    if options.csv:
        to_csv(frame, options.csv)


def note_on_overlap() -> None:
    """Says on stderr that calls are timed apart."""
    print("calls are timed apart: overlap of launches is off (see chain)", file=sys.stderr)
