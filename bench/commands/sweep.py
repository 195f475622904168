"""`sweep`: shapes x batch x providers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..devices import default_device
from ..report.plot import plot
from ..roofline import ceilings, describe
from ..sweep import BATCH, sweep, to_csv, to_markdown
from . import options as shared

HELP = "time shapes x batch x providers (the default command)"


def add_options(parser: argparse.ArgumentParser) -> None:
    shared.add_shapes(parser, "llama3-8b")
    shared.add_batch(parser, BATCH)
    shared.add_weights(parser)
    shared.add_providers(parser, "ours,dense")
    shared.add_run(parser)
    shared.add_csv(parser)
    parser.add_argument("--host", action="store_true", help="also the host time of an eager call")
    parser.add_argument("--markdown", metavar="FILE", help="write the printed table")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (PNG)")


def needs_gpu(options: argparse.Namespace) -> bool:
    return False


def run(options: argparse.Namespace) -> int:
    shared.note_on_overlap()
    arguments = shared.weights(options) | shared.run(options)
    frame = sweep(options.shapes, options.batch, shared.providers(options), host=options.host, **arguments)
    table = to_markdown(frame)
    print(table)
    if limits := ceilings(default_device(options.device)):
        print(f"roofline: {describe(limits)}", file=sys.stderr)
    if options.csv:
        to_csv(frame, options.csv)
    if options.markdown:
        Path(options.markdown).write_text(table + "\n", encoding="utf-8")
    if options.plot:
        plot(frame, options.plot)
    return 0
