"""`conversions`: the conversions of whole weights beside a copy of as many bytes."""

from __future__ import annotations

import argparse

from ..conversions import ELEMENTS, SHAPES, conversions, conversions_table
from ..sweep import to_csv
from . import options as shared

HELP = "time dequantize, awq_dequantize and 4-bit blocks, both ways"


def add_options(parser: argparse.ArgumentParser) -> None:
    shared.add_shapes(parser, ",".join(SHAPES), "of packed and of AWQ weights")
    parser.add_argument("--elements", type=shared.integers, default=list(ELEMENTS), help="of 4-bit blocks, by commas")
    parser.add_argument("--group-size", type=int, default=128, help="of the weights; -1: per channel (default 128)")
    parser.add_argument("--blocksize", type=int, default=64, help="of 4-bit blocks (default 64)")
    shared.add_run(parser)
    shared.add_csv(parser)


def needs_gpu(options: argparse.Namespace) -> bool:
    return True


def run(options: argparse.Namespace) -> int:
    sizes = {"group_size": options.group_size, "blocksize": options.blocksize}
    frame = conversions(options.shapes, options.elements, **sizes, **shared.run(options))
    print(conversions_table(frame))
    if options.csv:
        to_csv(frame, options.csv)
    return 0
