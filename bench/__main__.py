"""Time `gemm` beside others (`sweep`), the linears of a model one after another (`chain`), or the heuristic's choice
beside the best configuration (`regret`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from .chain import chain, chain_table
from .plot import plot
from .providers import PROVIDERS
from .regret import measure_configs, regret
from .shapes import NAMED
from .sweep import BATCH, sweep, to_csv, to_markdown

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _batch(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers such as 1,16,256, got {text!r}") from None


def _names(text: str) -> str | list[str]:
    return text if text == "all" else text.split(",")


def _add_problem_options(parser: argparse.ArgumentParser, shapes: str, batch: Sequence[int]) -> None:
    names = ", ".join(NAMED)
    parser.add_argument("--shapes", default=shapes, help=f"{names} or KxN, by commas (default {shapes})")
    parser.add_argument(
        "--batch", type=_batch, default=list(batch), help=f"rows of x (default {','.join(map(str, batch))})"
    )
    _add_weight_options(parser)


def _add_weight_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group-size", type=int, default=128, help="rows of w per scale; -1: per channel")
    parser.add_argument("--asymmetric", action="store_true", help="quantize with zero points")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="fp16")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU where there is one)")
    parser.add_argument("--budget-ms", type=float, help="device time per measurement")
    parser.add_argument("--csv", metavar="FILE", help="write every measured column")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m weightonly.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("sweep", help="time shapes x batch x providers (the default command)")
    _add_problem_options(one, "llama3-8b", BATCH)
    one.add_argument(
        "--providers", type=_names, default=["ours", "cublas"], help=f"all, or some of {','.join(PROVIDERS)}"
    )
    one.add_argument("--host", action="store_true", help="also the host time of an eager call")
    one.add_argument("--markdown", metavar="FILE", help="write the printed table")
    one.add_argument("--plot", metavar="FILE", help="write a picture (PNG)")
    two = commands.add_parser("regret", help="time every compiled configuration beside the heuristic's choice")
    _add_problem_options(two, "table", (1, 4, 16, 64, 256, 1024, 4096))
    two.add_argument("--layout", help="of the weights (default: the GPU's own; Hopper reads interleaved, too)")
    two.add_argument("--read", metavar="FILE", help="judge the measurements of an earlier --csv; no GPU needed")
    three = commands.add_parser("chain", help="time the linears of a model's layers in one CUDA graph")
    three.add_argument("--model", default="llama3-8b", help=f"one of {', '.join(NAMED)} (default llama3-8b)")
    three.add_argument("--layers", type=int, default=32, help="times the linears of one layer (default 32)")
    three.add_argument("--m", type=int, nargs="+", default=[1, 16], help="rows of x (default 1 16)")
    _add_weight_options(three)
    return parser


def _note_on_overlap() -> None:
    print("calls are timed apart: overlap of launches is off (see chain)", file=sys.stderr)


def _run_chain(options: argparse.Namespace, common: dict[str, Any]) -> None:
    frame = chain(options.model, options.layers, options.m, **common)
    print(chain_table(frame))
    if options.csv:
        to_csv(frame, options.csv)


def _run_sweep(options: argparse.Namespace, common: dict[str, Any]) -> None:
    _note_on_overlap()
    frame = sweep(options.shapes, options.batch, options.providers, host=options.host, **common)
    table = to_markdown(frame)
    print(table)
    if options.csv:
        to_csv(frame, options.csv)
    if options.markdown:
        Path(options.markdown).write_text(table + "\n", encoding="utf-8")
    if options.plot:
        plot(frame, options.plot)


def _run_regret(options: argparse.Namespace, common: dict[str, Any]) -> None:
    if options.read:
        frame = pd.read_csv(options.read)
    else:
        _note_on_overlap()
        frame = measure_configs(options.shapes, options.batch, layout=options.layout, **common)
    if options.csv:
        to_csv(frame, options.csv)
    result = regret(frame)
    print(result.cells.to_markdown(index=False, floatfmt=".3f"))
    print(f"regret: mean {result.mean:.1%}, worst {result.worst:.1%} of {len(result.cells)} cells")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or 2 with a message for arguments that do not fit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "sweep")
    parser = _parser()
    options = parser.parse_args(arguments)
    common: dict[str, Any] = {
        "bits": options.bits,
        "group_size": options.group_size,
        "dtype": _DTYPES[options.dtype],
        "symmetric": not options.asymmetric,
        "device": options.device,
        "progress": not options.quiet,
    }
    if options.budget_ms is not None:
        common["budget_ms"] = options.budget_ms
    try:
        {"sweep": _run_sweep, "regret": _run_regret, "chain": _run_chain}[options.command](options, common)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
