"""`host`: the host's time of one call, by the ways that programs call it."""

from __future__ import annotations

import argparse

from ..host import GROUP_SIZE, SHAPES, host, host_table
from ..sweep import to_csv
from . import options as shared

HELP = "time what a call at M = 1 costs the host: eager, out=, compiled, in modules, beside others' calls"


def add_options(parser: argparse.ArgumentParser) -> None:
    shared.add_shapes(parser, SHAPES)
    parser.add_argument(
        "--group-size", type=int, default=GROUP_SIZE, help=f"rows of w per scale (default {GROUP_SIZE})"
    )
    shared.add_run(parser, budget=False)
    shared.add_csv(parser)


def needs_gpu(options: argparse.Namespace) -> bool:
    return True


def run(options: argparse.Namespace) -> int:
    arguments = shared.run(options)
    frame = host(options.shapes, group_size=options.group_size, **arguments)
    print(host_table(frame))
    if options.csv:
        to_csv(frame, options.csv)
    return 0
