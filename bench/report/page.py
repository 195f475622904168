"""The page of a report: one HTML file with its pictures and style in it, which needs nothing from a network."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from .tables import MEAN, OVER_ROOFLINE, lost, number_text, speedup_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1b1b1b; background: #fff;
       max-width: 1180px; margin: 0 auto; padding: 24px; }
h1 { font-size: 1.7em; margin-bottom: 0.2em; } h2 { margin-top: 2em; border-bottom: 1px solid #ccc; }
h3 { margin-bottom: 0.3em; } p.lead { font-size: 1.1em; max-width: 62em; }
figure { margin: 1em 0; overflow-x: auto; } figure svg { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: 0.9em; max-width: 66em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.82em; margin: 0.4em 0 1.2em; }
caption { text-align: left; font-weight: 600; padding: 0.2em 0; white-space: nowrap; }
th, td { padding: 2px 8px; border-bottom: 1px solid #e4e4e4; text-align: right; white-space: nowrap; }
th { background: #f5f5f5; } th:first-child, td.text { text-align: left; }
td.lost { background: #ffe3c2; font-weight: 600; } tr.mean th, tr.mean td { border-top: 2px solid #888; }
table.facts td { text-align: left; white-space: normal; } summary { cursor: pointer; color: #0050a0; }
code, pre { background: #f5f5f5; font-size: 0.9em; } pre { padding: 8px; overflow-x: auto; }
"""


def document(title: str, body: Iterable[str]) -> str:
    """The whole file."""
    parts = "\n".join(body)
    head = f'<meta charset="utf-8">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{parts}\n</body>\n</html>\n'


def picture(figure: Figure, name: str, caption: str) -> str:
    """The figure as inline SVG with its text as text. name: unique on the page, for the ids inside."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    drawing = file.getvalue()
    drawing = drawing[drawing.index("<svg") :]  # without the XML prologue
    drawing = re.sub(r'(?<= id=")|(?<="#)|(?<=url\(#)', f"{name}-", drawing)
    label = f'role="img" aria-label="{escape(caption)}"'
    return f"<figure>{drawing.replace('<svg', f'<svg {label}', 1)}<figcaption>{escape(caption)}</figcaption></figure>"


def ratio_table(caption: str, table: pd.DataFrame, *, speedup: bool) -> str:
    """A row per name, a column per M. speedup: more is better, and values below 1 are marked, but in OVER_ROOFLINE."""
    lines = []
    for name, values in table.iterrows():
        mean = ' class="mean"' if name in (MEAN, OVER_ROOFLINE) else ""
        make = _speedup_cell if speedup and name != OVER_ROOFLINE else _cell
        cells = "".join(map(make, values))
        lines.append(f"<tr{mean}><th>{escape(str(name))}</th>{cells}</tr>")
    return _table(["M =", *map(str, table.columns)], lines, caption)


def number_table(table: pd.DataFrame) -> str:
    """`Part.all_numbers`, with the speedups below 1 marked."""
    speedups = [name.startswith("x ") and name != "x roofline" for name in table.columns]
    lines = []
    for values in table.itertuples(index=False):
        cells = (_speedup_cell(v) if s else _cell(v) for v, s in zip(values, speedups, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return _table(table.columns, lines)


def folded(summary: str, content: str) -> str:
    """Shown on a click."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _speedup_cell(ratio: float) -> str:
    mark = ' class="lost"' if lost(ratio) else ""
    return f"<td{mark}>{speedup_text(ratio)}</td>"


def _cell(value: object) -> str:
    mark = ' class="text"' if isinstance(value, str) else ""
    return f"<td{mark}>{escape(number_text(value))}</td>"


def fact_table(facts: dict[str, str]) -> str:
    lines = [f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items()]
    return f'<table class="facts">{"".join(lines)}</table>'


def _table(names: Iterable[str], lines: Iterable[str], caption: str = "") -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "\n".join(lines)
    return f'<div class="wide"><table>{title}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
