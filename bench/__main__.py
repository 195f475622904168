"""Time `gemm` beside others (`sweep`, `report`), the linears of a model one after another (`chain`), the heuristic's
choice beside the best configuration (`regret`), or the conversions of whole weights beside a copy (`conversions`)."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from weightonly.code_tables import CODE_TABLES

from . import results
from .chain import chain, chain_table
from .compare import TOLERANCE, compare, describe
from .conversions import ELEMENTS, SHAPES, conversions, conversions_table
from .plot import plot
from .providers import PROVIDERS
from .regret import measure_configs, regret
from .report import GROUP_SIZES, MODELS, REPORT_BATCH, Report, measure
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


def _list(text: str) -> list[str]:
    return text.split(",")


def _add_problem_options(parser: argparse.ArgumentParser, shapes: str, batch: Sequence[int]) -> None:
    names = ", ".join(NAMED)
    parser.add_argument("--shapes", default=shapes, help=f"{names} or KxN, by commas (default {shapes})")
    _add_batch_option(parser, batch)
    parser.add_argument("--format", choices=tuple(CODE_TABLES), help="codes of a table instead of integers")
    _add_weight_options(parser)


def _add_batch_option(parser: argparse.ArgumentParser, batch: Sequence[int]) -> None:
    listed = ",".join(map(str, batch))
    parser.add_argument("--batch", type=_batch, default=list(batch), help=f"rows of x (default {listed})")


def _add_weight_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group-size", type=int, default=128, help="rows of w per scale; -1: per channel")
    parser.add_argument("--asymmetric", action="store_true", help="quantize with zero points")
    parser.add_argument("--csv", metavar="FILE", help="write every measured column")
    _add_run_options(parser)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="fp16")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU where there is one)")
    parser.add_argument("--budget-ms", type=float, help="device time per measurement")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_provider_options(parser: argparse.ArgumentParser, default: str) -> None:
    names = ",".join(PROVIDERS)
    parser.add_argument(
        "--providers", type=_names, default=_names(default), help=f"all, or some of {names} (default {default})"
    )
    parser.add_argument(
        "--plugin", metavar="MODULE", action="append", default=[], help="import it first: it registers more providers"
    )


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(NAMED)
    parser.add_argument("--out", metavar="FOLDER", default="report", help="where to write (default report)")
    parser.add_argument(
        "--models", type=_list, default=list(MODELS), help=f"sections: {names} or KxN (default {','.join(MODELS)})"
    )
    parser.add_argument(
        "--formats", type=_list, default=["int4"], help=f"some of {','.join(GROUP_SIZES)} (default int4)"
    )
    _add_batch_option(parser, REPORT_BATCH)
    _add_provider_options(parser, "all")
    _add_run_options(parser)
    parser.add_argument("--runs", type=int, default=3, help="measure everything so often (default 3)")
    parser.add_argument("--note", help="a line for the page, such as the commit where there is no git checkout")
    parser.add_argument(
        "--from", dest="files", metavar="CSV", nargs="+", help="measure nothing: results.csv of reports, or sweep --csv"
    )
    parser.add_argument("--compare", metavar="CSV", help="print what changed since; exit with 1 if something is slower")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"the least change that counts (default {TOLERANCE})"
    )


def _add_conversion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of AWQ weights, KxN (default %(default)s)")
    parser.add_argument("--elements", type=_batch, default=list(ELEMENTS), help="of 4-bit blocks, by commas")
    parser.add_argument("--group-size", type=int, default=128, help="of AWQ weights; -1: per channel")
    parser.add_argument("--blocksize", type=int, default=64, help="of 4-bit blocks")
    parser.add_argument("--csv", metavar="FILE", help="write every measured column")
    _add_run_options(parser)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m weightonly.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("sweep", help="time shapes x batch x providers (the default command)")
    _add_problem_options(one, "llama3-8b", BATCH)
    _add_provider_options(one, "ours,cublas")
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
    _add_report_options(commands.add_parser("report", help="measure models; write a page (HTML) and its tables"))
    _add_conversion_options(commands.add_parser("conversions", help="time awq_dequantize and 4-bit blocks, both ways"))
    return parser


def _note_on_overlap() -> None:
    print("calls are timed apart: overlap of launches is off (see chain)", file=sys.stderr)


def _weights(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments that sweep, regret and chain share."""
    shared = {"bits": options.bits, "group_size": options.group_size, "symmetric": not options.asymmetric}
    return shared | _timing(options) | ({"format": options.format} if "format" in options else {})


def _timing(options: argparse.Namespace) -> dict[str, Any]:
    budget = {} if options.budget_ms is None else {"budget_ms": options.budget_ms}
    return {"dtype": _DTYPES[options.dtype], "device": options.device, "progress": not options.quiet, **budget}


def _run_chain(options: argparse.Namespace) -> int:
    frame = chain(options.model, options.layers, options.m, **_weights(options))
    print(chain_table(frame))
    if options.csv:
        to_csv(frame, options.csv)
    return 0


def _run_sweep(options: argparse.Namespace) -> int:
    _note_on_overlap()
    frame = sweep(options.shapes, options.batch, options.providers, host=options.host, **_weights(options))
    table = to_markdown(frame)
    print(table)
    if options.csv:
        to_csv(frame, options.csv)
    if options.markdown:
        Path(options.markdown).write_text(table + "\n", encoding="utf-8")
    if options.plot:
        plot(frame, options.plot)
    return 0


def _run_conversions(options: argparse.Namespace) -> int:
    sizes = {"group_size": options.group_size, "blocksize": options.blocksize}
    frame = conversions(options.shapes, options.elements, **sizes, **_timing(options))
    print(conversions_table(frame))
    if options.csv:
        to_csv(frame, options.csv)
    return 0


def _run_regret(options: argparse.Namespace) -> int:
    if options.read:
        frame = pd.read_csv(options.read)
    else:
        _note_on_overlap()
        frame = measure_configs(options.shapes, options.batch, layout=options.layout, **_weights(options))
    if options.csv:
        to_csv(frame, options.csv)
    result = regret(frame)
    print(result.cells.to_markdown(index=False, floatfmt=".3f"))
    print(f"regret: mean {result.mean:.1%}, worst {result.worst:.1%} of {len(result.cells)} cells")
    return 0


def _run_report(options: argparse.Namespace) -> int:
    old = results.read(Path(options.compare)) if options.compare else None  # before minutes of measuring
    if options.files:
        new = results.join([results.read(Path(file)) for file in options.files])
    else:
        timing = _timing(options)
        new = measure(options.models, options.batch, options.formats, options.providers, runs=options.runs, **timing)
        new.facts["command"] = options.command_line
    if options.note:
        new.facts["note"] = options.note
    for path in Report(new, tuple(options.models)).write(Path(options.out)):
        print(path)
    if old is None:
        return 0
    changes = compare(results.cells(new.rows), results.cells(old.rows), options.tolerance)
    print(describe(changes, options.tolerance))
    return 1 if len(changes.regressions) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0, 1 for a `report --compare` with regressions, 2 with a message for wrong arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "sweep")
    parser = _parser()
    options = parser.parse_args(arguments)
    options.command_line = shlex.join(["python", "-m", "weightonly.bench", *arguments])
    run = {
        "sweep": _run_sweep,
        "regret": _run_regret,
        "chain": _run_chain,
        "report": _run_report,
        "conversions": _run_conversions,
    }[options.command]
    try:
        for module in getattr(options, "plugin", ()):
            importlib.import_module(module)
        return run(options)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
