"""`regret`: the heuristic's choice beside the quickest configuration."""

from __future__ import annotations

import argparse

import pandas as pd

from ..regret import measure_configs, regret
from ..sweep import to_csv
from . import options as shared

HELP = "time every compiled configuration beside the heuristic's choice"


def add_options(parser: argparse.ArgumentParser) -> None:
    shared.add_shapes(parser, "table")
    shared.add_batch(parser, (1, 4, 16, 64, 256, 1024, 4096))
    shared.add_weights(parser)
    shared.add_run(parser)
    shared.add_csv(parser)
    parser.add_argument("--layout", help="of the weights (default: the GPU's own; Hopper reads interleaved, too)")
    parser.add_argument("--read", metavar="FILE", help="judge the measurements of an earlier --csv; no GPU needed")


def needs_gpu(options: argparse.Namespace) -> bool:
    return options.read is None


def run(options: argparse.Namespace) -> int:
    if options.read:
        frame = pd.read_csv(options.read)
    else:
        shared.note_on_overlap()
        arguments = shared.weights(options) | shared.run(options)
        frame = measure_configs(options.shapes, options.batch, layout=options.layout, **arguments)
    if options.csv:
        to_csv(frame, options.csv)
    result = regret(frame)
    print(result.cells.to_markdown(index=False, floatfmt=".3f"))
    print(f"regret: mean {result.mean:.1%}, worst {result.worst:.1%} of {len(result.cells)} cells")
    return 0
