"""`experts`: grouped products of mixtures of experts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from ..experts.configs import GROUP_SIZES as CONFIG_FORMATS
from ..experts.configs import measure_configs, regret
from ..experts.measure import BATCH, COLUMNS, GROUP_SIZES, measure
from ..experts.mixture import MEASURES
from ..experts.providers import EXPERTS_PROVIDERS
from ..experts.routing import ROUTINGS, SKEW
from ..experts.tables import write
from ..kept import ROWS, read
from ..report.results import join
from ..shapes import MIXTURES
from . import options as shared

HELP = "grouped products and layers of mixtures of experts, beside others; writes a folder"


def add_options(parser: argparse.ArgumentParser) -> None:
    shared.add_folder(parser, "experts")
    models = [name for name in MIXTURES if name != "tiny"]
    default = ",".join(models)
    parser.add_argument(
        "--shapes", default=default, help=f"models, by commas: {', '.join(MIXTURES)} (default {default})"
    )
    parser.add_argument("--measures", type=shared.names, default=list(MEASURES), help=f"some of {','.join(MEASURES)}")
    parser.add_argument("--routings", type=shared.names, default=list(ROUTINGS), help=f"some of {','.join(ROUTINGS)}")
    parser.add_argument(
        "--skew", type=float, default=SKEW, help=f"skewed: chances of experts are rank ** -SKEW (default {SKEW})"
    )
    parser.add_argument("--format", choices=tuple(GROUP_SIZES), help="of the weights (default: each model's own)")
    shared.add_providers(parser, "all", EXPERTS_PROVIDERS)
    shared.add_batch(parser, BATCH, "tokens")
    shared.add_run(parser, dtype="bf16")
    shared.add_time_budget(parser)
    parser.add_argument(
        "--configs",
        metavar="FILE",
        help="time every grouped configuration instead, into a CSV file, and judge the choice",
    )
    parser.add_argument("--read", action="store_true", help="judge what the file of --configs has; no GPU needed")


def needs_gpu(options: argparse.Namespace) -> bool:
    if options.configs:
        return not options.read
    return options.device is None and options.files is None  # a CPU is measured where it is named


def run(options: argparse.Namespace) -> int:
    if options.configs:
        return _configs(options)
    out = Path(options.out)
    if options.files:
        results = join([read(Path(file), "experts", COLUMNS) for file in options.files])
        out.mkdir(parents=True, exist_ok=True)
        print(*write(results, out), sep="\n")
        return 0
    found = measure(
        shared.names(options.shapes),
        out,
        options.batch,
        shared.providers(options),
        options.measures,
        options.routings,
        skew=options.skew,
        format=options.format,
        time_budget_s=options.time_budget,
        facts={"command": options.command_line},
        **shared.run(options),
    )
    if not found.results.rows.empty:
        file = out / ROWS
        print(file, *write(read(file, "experts", COLUMNS), out), sep="\n")
    if found.left:
        print(f"{found.left} cells are left: the same command measures them", file=sys.stderr)
    return 1 if found.failed else 0


def _configs(options: argparse.Namespace) -> int:
    if options.read:
        frame = pd.read_csv(options.configs)
    else:
        formats = [options.format] if options.format else list(CONFIG_FORMATS)
        frame = measure_configs(shared.names(options.shapes), options.batch, formats, **shared.run(options))
        frame.to_csv(options.configs, index=False)
    result = regret(frame)
    print(result.cells.to_markdown(index=False, floatfmt=".3f"))
    print(f"regret: mean {result.mean:.1%}, worst {result.worst:.1%} of {len(result.cells)} cells")
    return 0
