"""`parallel`: the linears of models on several GPUs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..kept import ROWS, read
from ..parallel import BATCH, DEFAULT_PROVIDERS, PROVIDERS
from ..report.results import join
from ..shapes import LLAMAS
from . import options as shared

HELP = "the linears of models cut over several GPUs (torch.distributed), and the sums between them; writes a folder"


def add_options(parser: argparse.ArgumentParser) -> None:
    shared.add_folder(parser, "parallel")
    known = ", ".join(LLAMAS)
    parser.add_argument("--shapes", default="llama3-70b", help=f"models, by commas: {known} (default llama3-70b)")
    parser.add_argument(
        "--ranks", type=shared.integers, help="such as 1,2,4 (default: those that there are GPUs for; on a CPU 1,2)"
    )
    cut, default = ",".join(PROVIDERS), ",".join(DEFAULT_PROVIDERS)
    parser.add_argument("--providers", default=default, help=f"all, or some of {cut} (default {default})")
    shared.add_batch(parser, BATCH)
    parser.add_argument("--slices", type=int, default=4, help="of rows, of overlapped sums (default 4)")
    parser.add_argument(
        "--decode", metavar="LINES", type=shared.integers, default=[], help="such as 1,16: also steps of whole models"
    )
    parser.add_argument("--context", type=int, default=512, help="tokens before a decode step (default 512)")
    parser.add_argument("--layers", type=int, help="of whole models (default: all that they have)")
    shared.add_run(parser, dtype="bf16")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="a layer, too, and steps (default: on GPUs)"
    )
    shared.add_time_budget(parser)


def needs_gpu(options: argparse.Namespace) -> bool:
    return options.device is None and options.files is None  # a CPU is measured where it is named


def run(options: argparse.Namespace) -> int:
    try:
        from ..parallel.measure import COLUMNS, measure
        from ..parallel.ranks import is_first
        from ..parallel.tables import write
    except ImportError as error:
        raise ImportError(f"bench parallel needs PyTorch 2.5 or later, with torch.distributed: {error}") from error
    out = Path(options.out)
    if options.files:
        results = join([read(Path(file), "parallel", COLUMNS) for file in options.files])
        out.mkdir(parents=True, exist_ok=True)
        print(*write(results, out), sep="\n")
        return 0
    found = measure(
        shared.names(options.shapes),
        out,
        options.batch,
        shared.providers(options),
        options.ranks,
        slices=options.slices,
        decode=options.decode,
        context=options.context,
        layers=options.layers,
        compile=options.compile,
        time_budget_s=options.time_budget,
        facts={"command": options.command_line},
        **shared.run(options),
    )
    if is_first() and not found.results.rows.empty:
        file = out / ROWS
        print(file, *write(read(file, "parallel", COLUMNS), out), sep="\n")
    if is_first() and found.left:
        print(f"{found.left} cells are left: the same command measures them", file=sys.stderr)
    return 1 if found.failed else 0
