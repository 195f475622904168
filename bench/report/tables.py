"""What a report says of one format: ratios by shape and batch size, all numbers, and a summary in words."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from ..providers import is_dense
from ..shapes import Shape
from ..sweep import times_faster
from .results import SETUP, Results, cells, setup_name

MEAN = "geometric mean"
OVER_ROOFLINE = "time of ours / roofline"
QUICKEST = "the quickest other"
"""For a provider's name: in each cell the quickest of all but ours."""

_LOST = "▼"  # a mark that does without colour


def lost(ratio: float) -> bool:
    """Whether a speedup, as it is printed, is below 1."""
    return round(ratio, 2) < 1


def speedup_text(ratio: float) -> str:
    """Two decimals (below 0.1 two digits), and a mark where ours is the slower one; empty for NaN."""
    if np.isnan(ratio):
        return ""
    return f"{ratio:.{'2g' if ratio < 0.1 else '2f'}}{' ' + _LOST if lost(ratio) else ''}"


def number_text(value: object) -> str:
    """A number in three digits or more; empty for NaN; anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    return "" if np.isnan(value) else f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def text(table: pd.DataFrame) -> str:
    """A table as markdown, without columns that are empty."""
    shown = table.dropna(axis=1, how="all")
    return str(shown.map(number_text).to_markdown(index=False, disable_numparse=True))


def notes(rows: pd.DataFrame, template: str) -> list[str]:
    """A line for each row that has no times and says why; the template names it by its columns."""
    return [f"- {template.format(**row)}: {row['note']}" for row in rows[rows["note"] != ""].to_dict("records")]


def page(title: str, results: Results, sections: Iterable[str]) -> str:
    """A page of markdown: sections between a title, which names the machine, and the facts. Raises ValueError where
    there are no rows."""
    if results.rows.empty:
        raise ValueError("rows: expected measurements, got none")
    machine = results.facts.get("GPU") or results.facts.get("CPU") or "machine not recorded"
    lines = [f"# {title}: {machine}", *sections, "", "| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in results.facts.items())]) + "\n"


def geometric_mean(table: pd.DataFrame) -> pd.Series:
    """Per column; NaN where a row is missing, as a mean over other shapes is nothing to compare with."""
    return np.exp(np.log(table).mean(skipna=False))


def with_mean(table: pd.DataFrame) -> pd.DataFrame:
    """A row per shape, by its name, then their mean if there are more; without what is empty."""
    named = table.set_axis([f"{k} x {n}" for k, n in table.index], axis=0)
    if len(named) > 1:
        named.loc[MEAN] = geometric_mean(table)
    return named.dropna(how="all").dropna(how="all", axis=1)


def parts(rows: pd.DataFrame) -> list[Part]:
    """The rows of `sweep`, by format and grouping. Raises ValueError where there is no time of ours."""
    found = [
        Part(setup_name(dict(zip(SETUP, setup, strict=True))), frame)
        for setup, frame in cells(rows).groupby(SETUP, sort=False)
        if (frame["provider"] == "ours").any()
    ]
    if not found:
        raise ValueError('rows: expected some of the provider "ours", got none')
    return found


@dataclass(frozen=True)
class Part:
    """The times (`results.cells`) of one format and grouping. Tables have a row per shape and a column per M."""

    name: str
    cells: pd.DataFrame

    @cached_property
    def shapes(self) -> list[Shape]:
        """The shapes that have a time of ours."""
        ours = self.cells[self.cells["provider"] == "ours"]
        return list(dict.fromkeys(zip(ours["k"], ours["n"], strict=True)))

    @cached_property
    def others(self) -> list[str]:
        """The providers beside ours."""
        return [name for name in dict.fromkeys(self.cells["provider"]) if name != "ours"]

    @property
    def has_roofline(self) -> bool:
        return bool(self.cells["roofline_us"].notna().all())

    def of(self, shapes: Iterable[Shape]) -> Part:
        """Some of the shapes, in the order given."""
        places = {shape: place for place, shape in enumerate(shapes)}
        place = [places.get(shape, -1) for shape in zip(self.cells["k"], self.cells["n"], strict=True)]
        ordered = self.cells.assign(place=place).query("place >= 0").sort_values("place", kind="stable")
        return Part(self.name, ordered.drop(columns="place"))

    def us(self, provider: str) -> pd.DataFrame:
        """The times of a provider, NaN where it has none."""
        if provider == QUICKEST:
            return functools.reduce(_smaller, map(self.us, self.others))
        return self._table(provider, "us")

    def speedups(self, provider: str) -> pd.DataFrame:
        """How many times faster ours is."""
        return self.us(provider) / self.us("ours")

    def over_roofline(self, provider: str = "ours") -> pd.DataFrame:
        """How many times longer than the roofline a provider takes."""
        return self._table(provider, "x_roofline")

    def _table(self, provider: str, column: str) -> pd.DataFrame:
        table = self.cells[self.cells["provider"] == provider].pivot(index=["k", "n"], columns="m", values=column)
        ms = sorted(self.cells.loc[self.cells["provider"] == "ours", "m"].unique())
        return table.reindex(index=pd.MultiIndex.from_tuples(self.shapes), columns=ms)

    @property
    def rivals(self) -> list[str]:
        """What speedups are given over: the quickest other, where there are several, and each of them."""
        return [*([QUICKEST] if len(self.others) > 1 else []), *self.others]

    def summary(self) -> pd.DataFrame:
        """The geometric means over all shapes: a row per speedup, and one of the time over the roofline."""
        rows = {f"speedup over {name}": geometric_mean(self.speedups(name)) for name in self.rivals}
        rows[OVER_ROOFLINE] = geometric_mean(self.over_roofline())
        return pd.DataFrame(rows, index=self.us("ours").columns).T.dropna(how="all")

    def mean_ratios(self) -> pd.DataFrame:
        """`provider`, `m`, `ratio`: geometric mean of the time over the roofline, or over ours where there is none.

        A provider that lacks a shape at some M has no row for it.
        """
        frames = []
        for name in ["ours", *self.others]:
            table = self.over_roofline(name) if self.has_roofline else self.us(name) / self.us("ours")
            mean = geometric_mean(table).dropna()
            frames.append(pd.DataFrame({"provider": name, "m": mean.index, "ratio": mean.to_numpy()}))
        return pd.concat(frames, ignore_index=True)

    def all_numbers(self) -> pd.DataFrame:
        """A row per (k, n, m): the time of each provider in us, and ours beside the roofline and beside each of them.

        "range %" is how far the measurements of ours spread, in percent of their median.
        """
        lines = []
        for (k, n, m), cell in self.cells.groupby(["k", "n", "m"], sort=False):
            times = cell.set_index("provider")
            if "ours" not in times.index:
                continue
            ours = times.loc["ours"]
            line = {"K": k, "N": n, "M": m, "roofline us": ours["roofline_us"], "ours us": ours["us"]}
            line |= {"range %": 100 * (ours["high"] - ours["low"]) / ours["us"], "x roofline": ours["x_roofline"]}
            for name in self.others:
                us = times["us"].get(name, np.nan)
                line |= {f"{name} us": us, f"x {name}": us / ours["us"]}
            lines.append(line | {"kernel": ours["config"]})
        return pd.DataFrame(lines).dropna(axis=1, how="all")

    def in_words(self) -> str:
        """Where ours is faster and where slower than the dense product (or the first other), and than the quickest."""
        if not self.others:
            return "no other provider was measured"
        other = next(filter(is_dense, self.others), self.others[0])
        mean = geometric_mean(self.speedups(other)).dropna()
        if mean.empty:
            return f"{other} was not measured for all shapes"
        losing = [m for m, ratio in mean.items() if lost(ratio)]
        winning = [m for m in mean.index if m not in losing]
        if not losing:
            where = "not slower at any M"
        elif not winning:
            where = "slower at every M"
        elif max(winning) < min(losing):
            where = f"not slower up to M = {max(winning)}, slower from M = {min(losing)} on"
        else:
            where = f"slower at M = {', '.join(map(str, losing))}"
        worst = f"at worst {times_faster(mean.min())}, at M = {mean.idxmin()}"
        over = f"geometric means over {len(self.shapes)} shapes" if len(self.shapes) > 1 else "one shape"
        ratios = [ratio for ratio in self.speedups(QUICKEST).to_numpy().flat if not np.isnan(ratio)]
        return (
            f"{times_faster(mean.iloc[0])} than {other} at M = {mean.index[0]}, {where} ({worst}; {over}). "
            f"Slower than {QUICKEST} in {sum(map(lost, ratios))} of {len(ratios)} cells of shape and M"
        )


def _smaller(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Element by element; a number is smaller than NaN."""
    return a.where((a <= b) | b.isna(), b)
