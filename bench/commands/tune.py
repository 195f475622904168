"""`tune`: measures which configurations are the quickest on this GPU, for `gemm` to run them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch

from weightonly.plan.tuned import VARIABLE, Origin

from ..devices import require_gpu
from ..tune import BATCH, SECONDS, table_path, tune
from . import options as shared

HELP = "measure which configurations are the quickest on this GPU, for gemm to run them"


def add_options(parser: argparse.ArgumentParser) -> None:
    shared.add_shapes(parser, "llama3-8b")
    shared.add_batch(parser, BATCH)
    shared.add_weights(parser)
    shared.add_run(parser, budget=False)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"about how long (default {SECONDS})")
    parser.add_argument("--folder", help=f"where the table goes (default: ${VARIABLE}, else the user's cache)")


def needs_gpu(options: argparse.Namespace) -> bool:
    return True


def run(options: argparse.Namespace) -> int:
    arguments = shared.weights(options) | shared.run(options)
    frame = tune(options.shapes, options.batch, seconds=options.seconds, folder=options.folder, **arguments)
    print(frame.to_string(index=False, float_format="{:.2f}".format))
    device = require_gpu("tune", options.device)
    index = torch.cuda.current_device() if device.index is None else device.index
    print(describe_gains(frame["gain"].tolist()))
    print(f"gemm uses it from now on: {table_path(Origin.of(index), options.folder)}")
    return 0


def describe_gains(gains: Sequence[float]) -> str:
    """How much faster the tuned choices are than the cost model's."""
    mean = math.exp(math.fsum(map(math.log, gains)) / len(gains))
    faster = sum(gain > 1 for gain in gains)
    return f"{faster} of {len(gains)} choices changed; gain: geometric mean {mean:.3f}, largest {max(gains):.2f}"
