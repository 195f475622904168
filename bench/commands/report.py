"""`report`: whole models as one page, and what changed since an earlier one."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..report import GROUP_SIZES, MODELS, REPORT_BATCH, Report, measure, results
from ..report.compare import TOLERANCE, compare, describe
from . import options as shared

HELP = "measure models; write a page (HTML) and its tables"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FOLDER", default="report", help="where to write (default report)")
    shared.add_shapes(parser, ",".join(MODELS), "of w, a section each")
    parser.add_argument(
        "--formats", type=shared.names, default=["int4"], help=f"some of {','.join(GROUP_SIZES)} (default int4)"
    )
    shared.add_batch(parser, REPORT_BATCH)
    shared.add_providers(parser, "all")
    shared.add_run(parser)
    parser.add_argument("--runs", type=int, default=3, help="measure everything so often (default 3)")
    parser.add_argument("--note", help="a line for the page, such as the commit where there is no git checkout")
    parser.add_argument(
        "--from", dest="files", metavar="CSV", nargs="+", help="measure nothing: results.csv of reports, or sweep --csv"
    )
    parser.add_argument("--compare", metavar="CSV", help="print what changed since; exit with 1 if something is slower")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"the least change that counts (default {TOLERANCE})"
    )


def needs_gpu(options: argparse.Namespace) -> bool:
    return False


def run(options: argparse.Namespace) -> int:
    models = shared.names(options.shapes)
    old = results.read(Path(options.compare)) if options.compare else None  # before minutes of measuring
    if options.files:
        new = results.join([results.read(Path(file)) for file in options.files])
    else:
        timing = shared.run(options)
        providers = shared.providers(options)
        new = measure(models, options.batch, options.formats, providers, runs=options.runs, **timing)
        new.facts["command"] = options.command_line
    if options.note:
        new.facts["note"] = options.note
    for path in Report(new, tuple(models)).write(Path(options.out)):
        print(path)
    if old is None:
        return 0
    changes = compare(results.cells(new.rows), results.cells(old.rows), options.tolerance)
    print(describe(changes, options.tolerance))
    return 1 if len(changes.regressions) else 0
