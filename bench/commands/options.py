"""Options that commands share: one name, one meaning."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from weightonly.codebooks import CODEBOOKS
from weightonly.heuristics.problem import FORMAT_GROUPS

from ..providers import PROVIDERS
from ..shapes import NAMED
from ..weights import DTYPES

_GROUP_SIZE = 128


def integers(text: str) -> list[int]:
    """ "1,16,256" as numbers."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers such as 1,16,256, got {text!r}") from None


def names(text: str) -> list[str]:
    """ "a,b" as a list."""
    return text.split(",")


def add_shapes(parser: argparse.ArgumentParser, default: str, help: str = "of w") -> None:
    known = ", ".join(NAMED)
    parser.add_argument("--shapes", default=default, help=f"{help}: {known} or KxN, by commas (default {default})")


def add_batch(parser: argparse.ArgumentParser, default: Sequence[int], what: str = "rows of x") -> None:
    listed = ",".join(map(str, default))
    parser.add_argument("--batch", type=integers, default=list(default), help=f"{what} (default {listed})")


def add_weights(parser: argparse.ArgumentParser, *, format: bool = True) -> None:
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    if format:
        parser.add_argument("--format", choices=tuple(CODEBOOKS), help="codes of a codebook instead of integers")
    parser.add_argument(
        "--group-size", type=int, help=f"rows of w per scale; -1: all (default {_GROUP_SIZE}; mxfp4 32, nvfp4 16)"
    )
    parser.add_argument("--zeros", action="store_true", help="quantize with zero points")


def add_run(parser: argparse.ArgumentParser, *, budget: bool = True, dtype: str = "fp16") -> None:
    parser.add_argument("--dtype", choices=tuple(DTYPES), default=dtype, help=f"of x (default {dtype}; fp32: CPU)")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU where there is one)")
    if budget:
        parser.add_argument("--budget-ms", type=float, help="device time per measurement")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def add_folder(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--out", metavar="FOLDER", default=default, help=f"rows there are kept (default {default})")
    parser.add_argument(
        "--from",
        dest="files",
        metavar="CSV",
        nargs="+",
        help="measure nothing: tables of the results.csv of earlier runs",
    )


def add_time_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--time-budget",
        metavar="SECONDS",
        type=float,
        default=math.inf,
        help="begin no row after it; run again for more",
    )


def add_csv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", metavar="FILE", help="write every measured column")


def add_providers(parser: argparse.ArgumentParser, default: str, names: Iterable[str] = PROVIDERS) -> None:
    known = ",".join(names)
    parser.add_argument("--providers", default=default, help=f"all, or some of {known} (default {default})")
    parser.add_argument(
        "--plugin", metavar="MODULE", action="append", default=[], help="import it first: it registers more providers"
    )


def providers(options: argparse.Namespace) -> str | list[str]:
    """--providers as `sweep` takes it."""
    return "all" if options.providers == "all" else names(options.providers)


def weights(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments that say how w is quantized."""
    format: str | None = getattr(options, "format", None)
    group_size = FORMAT_GROUPS.get(format or "", _GROUP_SIZE) if options.group_size is None else options.group_size
    found = {"bits": options.bits, "group_size": group_size, "symmetric": not options.zeros}
    return found | ({"format": format} if "format" in options else {})


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments that say where, with which type and for how long to measure."""
    budget = {} if getattr(options, "budget_ms", None) is None else {"budget_ms": options.budget_ms}
    return {"dtype": DTYPES[options.dtype], "device": options.device, "progress": not options.quiet, **budget}


def note_on_overlap() -> None:
    """Says on stderr that calls are timed apart."""
    print("calls are timed apart: overlap of launches is off (see chain)", file=sys.stderr)
