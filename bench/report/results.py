"""Files of measurements: the rows of `sweep` below lines of facts, and what several runs say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from weightonly.storage import publish, staged

SETUP = ["format", "group_size", "zeros", "dtype"]
CELL = ["k", "n", "m", *SETUP]

_OF_BEFORE = {"zeros": False, "config": ""}  # columns that older files lack
_NEEDED = ["k", "n", "m", "format", "group_size", "dtype", "provider", "us", "us_p10", "us_p90", "roofline_us"]


@dataclass(frozen=True)
class Results:
    """`rows`: of `sweep`, one run or more. `facts`: name -> value, see facts.py."""

    rows: pd.DataFrame
    facts: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """A CSV file; each fact is a line "# name: value" before its header, which pandas skips by comment="#"."""
        lines = [f"# {name}: {value}".replace("\n", " ") for name, value in self.facts.items()]
        table = self.rows.to_csv(index=False, float_format="%.3f")
        with staged(path) as folder:
            made = folder / path.name
            made.write_text("".join(f"{line}\n" for line in lines) + table, encoding="utf-8")
            publish(made, path)


def read(path: Path) -> Results:
    """What `Results.write`, or `sweep --csv`, wrote. Raises ValueError, naming the file, for anything else."""
    found = read_rows(path, "a sweep", _NEEDED)
    rows = found.rows.assign(**{name: value for name, value in _OF_BEFORE.items() if name not in found.rows})
    return Results(rows.fillna({"config": ""}), found.facts)


def read_rows(path: Path, what: str, needed: Sequence[str]) -> Results:
    """What `Results.write` wrote of rows with these columns. what: where they come from, for errors.

    Raises ValueError, naming the file, for anything else.
    """
    facts: dict[str, str] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            name, colon, value = line.removeprefix("# ").rstrip("\n").partition(": ")
            if not line.startswith("# ") or not colon:
                break
            facts[name] = value
    try:
        rows = pd.read_csv(path, skiprows=len(facts))
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{path}: expected a CSV file of {what}, got none: {error}") from None
    missing = [name for name in needed if name not in rows]
    if missing or rows.empty:
        got = f"none of {', '.join(missing)}" if missing else "no rows"
        raise ValueError(f"{path}: expected the rows of {what}, got {got}")
    return Results(rows, facts)


def join(results: Sequence[Results]) -> Results:
    """The rows of all. A fact that differs between files has its values one after another.

    Raises ValueError where they are of more than one GPU, or CPU: times of two machines do not compare.
    """
    gpus = {one.facts.get("GPU", one.facts.get("CPU", "")) for one in results} - {""}
    if len(gpus) > 1:
        raise ValueError(f"files: expected measurements of one GPU, got {', '.join(sorted(gpus))}")
    names = dict.fromkeys(name for one in results for name in one.facts)
    values = {name: dict.fromkeys(one.facts[name] for one in results if name in one.facts) for name in names}
    facts = {name: "; ".join(different) for name, different in values.items()}
    return Results(pd.concat([one.rows for one in results], ignore_index=True), facts)


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per (cell, provider), from all runs of it.

    `us` is the median of the runs' medians; `low` and `high` reach from the 10th percentile of the quickest run to the
    90th of the slowest: what a repetition may give without any change. `runs` counts them. `x_roofline` is how many
    times longer than the roofline it took, NaN without one.
    """
    grouped = rows.groupby([*CELL, "provider"], sort=False, dropna=False)
    table = grouped.agg(
        us=("us", "median"),
        low=("us_p10", "min"),
        high=("us_p90", "max"),
        runs=("us", "size"),
        roofline_us=("roofline_us", "first"),
        config=("config", "last"),
    ).reset_index()
    return table.assign(x_roofline=table["us"] / table["roofline_us"])


def setup_name(setup: Mapping[str, object]) -> str:
    """Such as "int4, group 128, fp16"."""
    group = "per channel" if setup["group_size"] == -1 else f"group {setup['group_size']}"
    return f"{setup['format']}, {group}{', zero points' if setup['zeros'] else ''}, {setup['dtype']}"
