"""`report`: whole models as one page, and what changed since an earlier one."""

from __future__ import annotations

from pathlib import Path

from ..command import Command, Options, Parser, add_batch, add_providers, add_run, add_shapes, keywords, names
from . import results
from .compare import TOLERANCE, compare, describe
from .document import Report
from .measure import GROUP_SIZES, MODELS, REPORT_BATCH, measure


def _add_options(parser: Parser) -> None:
    parser.add_argument("--out", metavar="FOLDER", default="report", help="where to write (default report)")
    add_shapes(parser, ",".join(MODELS), "of w, a section each")
    parser.add_argument(
        "--formats", type=names, default=["int4"], help=f"some of {','.join(GROUP_SIZES)} (default int4)"
    )
    add_batch(parser, REPORT_BATCH)
    add_providers(parser, "all")
    add_run(parser)
    parser.add_argument("--runs", type=int, default=3, help="measure everything so often (default 3)")
    parser.add_argument("--note", help="a line for the page, such as the commit where there is no git checkout")
    parser.add_argument(
        "--from", dest="files", metavar="CSV", nargs="+", help="measure nothing: results.csv of reports, or sweep --csv"
    )
    parser.add_argument("--compare", metavar="CSV", help="print what changed since; exit with 1 if something is slower")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"the least change that counts (default {TOLERANCE})"
    )


def _run(options: Options) -> int:
    models = names(options.shapes)
    old = results.read(Path(options.compare)) if options.compare else None  # before minutes of measuring
    if options.files:
        new = results.join([results.read(Path(file)) for file in options.files])
    else:
        new = measure(models, **keywords(options, measure))
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


COMMAND = Command("measure models; write a page (HTML) and its tables", _add_options, _run, lambda options: False)
