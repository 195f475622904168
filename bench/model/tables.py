"""What the rows of models say: a markdown table for each measure, and a picture for each model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ..plot import lines_figure, styles
from ..report.results import Results
from ..report.tables import notes, page, text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {
    "decode": "tokens/s of decode steps; tokens: the context that they read",
    "prefill": "tokens/s of prompts; tokens: their length",
    "overlap": "decode steps of ours by overlap of launches, and whether greedy tokens are the same",
    "train": "tokens/s of LoRA training steps; tokens: the length of a line",
}
"""Name -> what its rows are, in the order in which they are measured: `train` changes the model."""

_COLUMNS = {
    "provider": "provider",
    "batch": "batch",
    "tokens": "tokens",
    "overlap": "overlap",
    "tokens_s": "tokens/s",
    "ms": "ms",
    "linears_share": "linears / ms",
    "head_share": "head / ms",
    "x_roofline": "x roofline",
    "gain": "x without overlap",
    "same_tokens": "same tokens",
    "weights_mb": "weights MB",
    "peak_mb": "peak MB",
    "load_s": "load s",
    "ready_s": "ready s",
}
"""Column of a table -> its title."""

_LINES = {"decode": ("batch", "batch"), "prefill": ("tokens", "length of the prompt")}
"""Measure -> the column that its lines go along, and what that is."""


def write(results: Results, folder: Path) -> list[Path]:
    """Writes model.md, and NAME.png for each model with lines to draw; their paths. Raises ValueError without rows."""
    paths = [folder / "model.md"]
    paths[0].write_text(markdown(results), encoding="utf-8")
    for model, rows in results.rows.groupby("model", sort=False):
        figure = picture(rows, str(model))
        if figure is not None:
            paths.append(folder / f"{model}.png")
            figure.savefig(paths[-1], dpi=130)
    return paths


def markdown(results: Results) -> str:
    """A section for each model with a table for each measure, what has no times and why, and the facts."""
    lines: list[str] = []
    for (model, layers, dtype), rows in results.rows.groupby(["model", "layers", "dtype"], sort=False):
        lines += ["", f"## {model}, {layers} layers, {dtype}"]
        for name, about in MEASURES.items():
            if (rows["measure"] == name).any():
                lines += ["", f"{name}: {about}", "", *_measure_lines(rows[rows["measure"] == name])]
    return page("Models", results, lines)


def _measure_lines(rows: pd.DataFrame) -> Iterator[str]:
    """One measure of one model."""
    timed = rows[rows["note"] == ""]
    if len(timed):
        table = _with_ratios(timed)
        table = table[[name for name in _COLUMNS if name in table]].rename(columns=_COLUMNS)
        yield text(table)
    yield from notes(rows, "{provider}, {batch} x {tokens}")


def _with_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """The columns of `_COLUMNS` that follow from others, by batch and tokens, with each provider in its order."""
    order = {label: place for place, label in enumerate(dict.fromkeys(rows["provider"]))}
    places = rows["provider"].map(order)
    table = rows.assign(place=places).sort_values(["batch", "tokens", "place"], kind="stable").drop(columns="place")
    ratios = {
        "linears_share": ("linears_ms", "ms"),
        "head_share": ("head_ms", "ms"),
        "x_roofline": ("ms", "roofline_ms"),
    }
    for name, (above, below) in ratios.items():
        table[name] = table[above] / table[below]
    if (table["measure"] == "overlap").all():
        without = table[table["overlap"] == "False"].set_index(["provider", "batch", "tokens"])["ms"]
        keys = zip(table["provider"], table["batch"], table["tokens"], strict=True)
        table["gain"] = [without[key] / ms for key, ms in zip(keys, table["ms"], strict=True)]
    return table


def picture(rows: pd.DataFrame, title: str) -> Figure | None:
    """tokens/s of one model: a panel for decode, over the batch, and one for prefill; None without such rows."""
    timed = rows[(rows["note"] == "") & rows["measure"].isin(list(_LINES))]
    if timed.empty:
        return None
    panels, titles = {}, []
    for name, (column, what) in _LINES.items():
        part = timed[timed["measure"] == name]
        if len(part):
            panels[name] = part.assign(m=part[column])
            titles.append(what)
    looks = styles(timed["provider"])
    figure = lines_figure(panels, "tokens_s", "tokens/s", titles, looks)
    figure.suptitle(f"{title}: higher is better", fontsize=11)
    return figure
