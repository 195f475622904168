"""What became slower or faster since an earlier file, beyond what repetitions differ by.

A time has changed where the ranges of both (`results.cells`) do not meet and the medians differ by more than
`tolerance`. The ranges hold the noise that was measured. The tolerance stands for what a single run does not see of it:
another process, other addresses, other clocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from .results import CELL, setup_name

TOLERANCE = 0.03
"""Single runs of the same kernels differed by so much (bench/measurements/LOG.md)."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    cells    one row per (cell, provider) that both have: `old_us`, `new_us`, `change` = new / old - 1, and `verdict`,
             "slower", "faster" or ""
    missing  how many of them the old file has and the new one lacks
    """

    cells: pd.DataFrame
    missing: int

    @property
    def regressions(self) -> pd.DataFrame:
        """Where we became slower, the worst first."""
        return self._ours("slower").sort_values("change", ascending=False)

    @property
    def improvements(self) -> pd.DataFrame:
        """Where we became faster, the most first."""
        return self._ours("faster").sort_values("change")

    def _ours(self, verdict: str) -> pd.DataFrame:
        return self.cells[(self.cells["provider"] == "ours") & (self.cells["verdict"] == verdict)]


def compare(new: pd.DataFrame, old: pd.DataFrame, tolerance: float = TOLERANCE) -> Comparison:
    """Compares two frames of `results.cells`. Raises ValueError if they have no cell of "ours" in common."""
    keys = [*CELL, "provider"]
    both = new.merge(old, on=keys, suffixes=("_new", "_old"))
    if not (both["provider"] == "ours").any():
        raise ValueError("compare: expected measurements of the same shapes, batch sizes and formats, got none of ours")
    change = both["us_new"] / both["us_old"] - 1
    slower = (both["low_new"] > both["high_old"]) & (change > tolerance)
    faster = (both["high_new"] < both["low_old"]) & (1 / (1 + change) - 1 > tolerance)
    table = both[keys].assign(
        old_us=both["us_old"],
        new_us=both["us_new"],
        change=change,
        verdict=["slower" if s else "faster" if f else "" for s, f in zip(slower, faster, strict=True)],
    )
    return Comparison(table, len(old) - len(both))


def describe(comparison: Comparison, tolerance: float = TOLERANCE) -> str:
    """Regressions, improvements, and how much the other providers, which did not change, moved."""
    cells = comparison.cells
    ours = cells[cells["provider"] == "ours"]
    lines = [
        f"{len(ours)} times of ours compared: {len(comparison.regressions)} regressions, "
        f"{len(comparison.improvements)} improvements, beyond the measured ranges and {tolerance:.1%}"
    ]
    if comparison.missing:
        lines.append(f"{comparison.missing} measurements of the old file are not in the new one")
    for name, rows in cells[cells["provider"] != "ours"].groupby("provider", sort=False):
        logs = [math.log1p(change) for change in rows["change"]]
        mean, worst = math.expm1(math.fsum(logs) / len(logs)), rows["change"].abs().max()
        lines.append(f"for comparison, {name}: {mean:+.1%} in the geometric mean, {worst:.1%} at most")
    for title, rows in (("regression", comparison.regressions), ("improvement", comparison.improvements)):
        lines += [
            f"{title}: {row['k']}x{row['n']} M = {row['m']} ({setup_name(row)}): "
            f"{row['old_us']:.2f} us -> {row['new_us']:.2f} us ({row['change']:+.1%})"
            for row in rows.to_dict("records")
        ]
    return "\n".join(lines)
