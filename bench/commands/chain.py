"""`chain`: the linears of a model's layers, one after another."""

from __future__ import annotations

import argparse

from ..chain import chain, chain_table
from ..sweep import to_csv
from . import options as shared

HELP = "time the linears of a model's layers in one CUDA graph"


def add_options(parser: argparse.ArgumentParser) -> None:
    shared.add_shapes(parser, "llama3-8b", "of the linears of one layer, in order")
    shared.add_batch(parser, (1, 16))
    parser.add_argument("--layers", type=int, default=32, help="times the linears of one layer (default 32)")
    shared.add_weights(parser, format=False)
    shared.add_run(parser)
    shared.add_csv(parser)


def needs_gpu(options: argparse.Namespace) -> bool:
    return True


def run(options: argparse.Namespace) -> int:
    arguments = shared.weights(options) | shared.run(options)
    frame = chain(options.shapes, options.layers, options.batch, **arguments)
    print(chain_table(frame))
    if options.csv:
        to_csv(frame, options.csv)
    return 0
