"""What the rows of `bench experts` say: a table of ratios for each of what ours is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from ..report.results import Results
from ..report.tables import MEAN, geometric_mean, notes, page, text
from .mixture import LAYER, PRODUCTS
from .providers import Grouped

OURS = Grouped.name


def write(results: Results, folder: Path) -> list[Path]:
    """Writes experts.md; its path. Raises ValueError without rows."""
    path = folder / "experts.md"
    path.write_text(markdown(results), encoding="utf-8")
    return [path]


def markdown(results: Results) -> str:
    """A section for each dtype and measure with its tables, what has no times and why, and the facts."""
    rows = results.rows
    lines: list[str] = []
    timed = rows[rows["note"] == ""]
    for (dtype, measure), own in timed.groupby(["dtype", "measure"], sort=False):
        lines += ["", f"## {_TITLES[measure]}, {dtype}", *_sections(own)]
    if found := notes(rows, "{model}, {provider}, {measure}, M = {m}, {routing}"):
        lines += ["", *found]
    return page("Mixtures of experts", results, lines)


_TITLES = {"w13": "gate and up (w13)", "w2": "down (w2)", LAYER: "fused_experts"}
assert list(_TITLES) == [*PRODUCTS, LAYER]


def _sections(rows: pd.DataFrame) -> Iterator[str]:
    names = list(dict.fromkeys(rows["provider"]))
    for name in names:
        yield from ("", f"us of {name}:", "", _text(times(rows, name)))
    if OURS not in names:
        return
    if rows["roofline_us"].notna().any():
        yield from ("", "time of ours / roofline:", "", _text(with_means(over_roofline(rows))))
    for name in names:
        if name != OURS:
            yield from ("", f"time of {name} / time of ours:", "", _text(with_means(times_faster(rows, name))))
    eager = rows[(rows["provider"] == OURS) & (rows["captured"].astype(str) == "False") & rows["roofline_us"].notna()]
    if len(eager):
        yield from ("", f"{len(eager)} times of ours are of single calls, which no CUDA graph captures.")


def times(rows: pd.DataFrame, provider: str) -> pd.DataFrame:
    """us of one provider: a line for each model and routing, a column for each M."""
    own = rows[rows["provider"] == provider].drop_duplicates([*_LINE, "m"], keep="last")
    return own.pivot(index=_LINE, columns="m", values="us")


_LINE = ["model", "format", "routing", "skew"]


def over_roofline(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of ours / roofline."""
    own = rows[rows["provider"] == OURS].drop_duplicates([*_LINE, "m"], keep="last")
    return times(rows, OURS) / own.pivot(index=_LINE, columns="m", values="roofline_us")


def times_faster(rows: pd.DataFrame, other: str) -> pd.DataFrame:
    """Time of another provider / time of ours, where both have one."""
    return times(rows, other) / times(rows, OURS)


def with_means(table: pd.DataFrame) -> pd.DataFrame:
    """And the geometric mean of each M; none where a line has no ratio, as a mean over other models is another."""
    if len(table) < 2:
        return table
    mean = geometric_mean(table)
    return pd.concat([table, pd.DataFrame([mean], index=pd.MultiIndex.from_tuples([(MEAN, "", "", "")], names=_LINE))])


def _text(table: pd.DataFrame) -> str:
    shown = table.dropna(how="all")
    shown = shown.rename(columns=lambda m: f"M = {m}").reset_index()
    skews = [f", skew {skew}" if skew else "" for skew in shown["skew"]]
    shown["routing"] = [f"{routing}{skew}" for routing, skew in zip(shown["routing"], skews, strict=True)]
    return text(shown.drop(columns="skew"))
