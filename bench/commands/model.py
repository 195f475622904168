"""`model`: tokens a second of whole models."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..kept import ROWS, read
from ..model.cells import MEASURES, Sizes
from ..model.measure import COLUMNS, measure
from ..model.providers import MODEL_PROVIDERS
from ..model.tables import write
from ..report.results import join
from ..shapes import LLAMAS
from . import options as shared

HELP = "decode, prompts, LoRA and overlap of launches in transformers' models with random weights; writes a folder"


def add_options(parser: argparse.ArgumentParser) -> None:
    shared.add_folder(parser, "models")
    known = ", ".join(LLAMAS)
    parser.add_argument("--shapes", default="llama3-8b", help=f"models, by commas: {known} (default llama3-8b)")
    parser.add_argument("--layers", type=int, help="of each model (default: all that it has)")
    parser.add_argument(
        "--measures", type=shared.names, help=f"some of {','.join(MEASURES)} (default: all that the device has)"
    )
    shared.add_providers(parser, "all", MODEL_PROVIDERS)
    shared.add_batch(parser, (1, 8, 32, 128))
    parser.add_argument("--context", type=int, default=512, help="tokens before a decode step (default 512)")
    parser.add_argument(
        "--prompts", type=shared.integers, default=[512, 4096], help="tokens of a prompt (default 512,4096)"
    )
    parser.add_argument(
        "--train", metavar="LINES,TOKENS", type=shared.integers, default=[4, 512], help="of a step (default 4,512)"
    )
    shared.add_run(parser, dtype="bf16")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="the decode step, by torch.compile (default: on a GPU)"
    )
    shared.add_time_budget(parser)


def needs_gpu(options: argparse.Namespace) -> bool:
    return options.device is None and options.files is None  # a CPU is measured where it is named


def run(options: argparse.Namespace) -> int:
    out = Path(options.out)
    if options.files:
        results = join([read(Path(file), "model", COLUMNS) for file in options.files])
        out.mkdir(parents=True, exist_ok=True)
        print(*write(results, out), sep="\n")
        return 0
    if len(options.train) != 2:
        raise ValueError(f"--train: expected LINES,TOKENS such as 4,512, got {len(options.train)} numbers")
    found = measure(
        shared.names(options.shapes),
        out,
        Sizes(options.batch, options.context, options.prompts, *options.train),
        shared.providers(options),
        options.measures,
        layers=options.layers,
        compile=options.compile,
        time_budget_s=options.time_budget,
        facts={"command": options.command_line},
        **shared.run(options),
    )
    if not found.results.rows.empty:
        file = out / ROWS
        print(file, *write(read(file, "model", COLUMNS), out), sep="\n")  # of the file, so that --from makes the same
    if found.left:
        print(f"{found.left} cells are left: the same command measures them", file=sys.stderr)
    return 1 if found.failed else 0
