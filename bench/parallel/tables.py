"""What the rows of `bench parallel` say: scaling of products, the share of all-reduces, both beside dense weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from ..providers import is_dense
from ..report.results import Results
from ..report.tables import MEAN, geometric_mean, notes, page, text
from .decode import STEP
from .pieces import EXPERTS, LAYER, LINEARS
from .rows import ERRORS

_PLACES = {name: place for place, name in enumerate((*LINEARS, LAYER, EXPERTS))}
_MANY_ROWS = 16  # from so many on products are to scale; fewer are near the time of a launch
_MODEL = ["model", "dtype", "layers", "context"]
_NOTE = "{provider}, {piece}, M = {m}, {ranks} ranks"
_CELL = ["provider", "piece", "m"]


def write(results: Results, folder: Path) -> list[Path]:
    """Writes parallel.md; its path. Raises ValueError without rows."""
    path = folder / "parallel.md"
    path.write_text(markdown(results), encoding="utf-8")
    return [path]


def markdown(results: Results) -> str:
    """A section for each model with its tables, what has no times and why, and the facts."""
    lines: list[str] = []
    is_step = results.rows["piece"] == STEP
    for (model, dtype), rows in results.rows[~is_step].groupby(["model", "dtype"], sort=False):
        lines += ["", f"## {model}, {dtype}", *_sections(rows)]
    for (model, dtype, layers, context), rows in results.rows[is_step].groupby(_MODEL, sort=False):
        title = f"## {model}, {dtype}, {layers} layers: tokens/s of decode steps after {context} tokens"
        lines += ["", title, "", text(tokens(rows[rows["note"] == ""])), "", *notes(rows, _NOTE)]
    return page("Tensor parallel", results, lines)


def _sections(rows: pd.DataFrame) -> Iterator[str]:
    timed = rows[rows["note"] == ""]
    timed = timed.assign(place=timed["piece"].map(_PLACES))
    timed = timed.drop_duplicates([*_CELL, "ranks"], keep="last")  # one that was compared compiled, too, is the same
    timed = timed.sort_values(["place", "m", "ranks"], kind="stable")
    if len(timed):
        yield from ("", "Products alone, the slowest rank's us. Of ideal: (us of 1 rank / ranks) / us", "")
        for provider, own in timed.groupby("provider", sort=False):
            yield from (f"{provider}:", "", text(scaling(own)), "")
    summed = timed[timed["sums_us"].notna()]
    if len(summed):
        yield from ("All-reduces, us. Share: of the time beyond the products", "", text(reductions(summed)), "")
    if len(timed):
        beside = times_dense(timed)
        if len(beside):
            yield from ("Times as fast as dense weights on as many ranks, all-reduces included", "", text(beside), "")
        errors = timed.groupby(["provider", "ranks"], sort=False)[ERRORS].max().reset_index()
        errors.columns = ["provider", "ranks", *(f"{name.partition('_')[0]}, %" for name in ERRORS)]
        title = "The greatest error against one rank, which sums in another order: norm of the difference / norm"
        yield from (title, "", text(errors))
    yield from notes(rows, _NOTE)


def scaling(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each piece and M of one provider, and geometric means; for each number of ranks its us, the share of
    ideal, and on one rank how many times the roofline."""
    us = rows.pivot(index=["piece", "m"], columns="ranks", values="product_us")
    us = us.sort_index(key=lambda level: level.map(_PLACES) if level.name == "piece" else level)
    table = pd.DataFrame(index=us.index)
    for ranks in us:
        table[f"{_ranks(ranks)} us"] = us[ranks]
        if ranks > 1 and 1 in us:
            table[f"{ranks} of ideal"] = us[1] / ranks / us[ranks]
        if rows["roofline_us"].notna().any():
            roofline = rows[rows["ranks"] == ranks].set_index(["piece", "m"])["roofline_us"]
            table[f"{ranks} x roofline"] = us[ranks] / roofline.reindex(us.index)
    many = table[table.index.get_level_values("m") >= _MANY_ROWS]
    ratios = [name for name in table if not name.endswith(" us")]
    found = table.reset_index()
    if ratios and len(many):
        mean = geometric_mean(many[ratios])
        found = pd.concat([found, pd.DataFrame([{"piece": f"{MEAN}, M >= {_MANY_ROWS}", "m": ""} | mean.to_dict()])])
    return found.rename(columns={"m": "M"})


def reductions(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each provider, number of ranks, piece with an all-reduce, and M."""
    table = rows[["provider", "ranks", "piece", "m"]].rename(columns={"m": "M"})
    table["products"], table["all-reduces alone"] = rows["product_us"], rows["sums_us"]
    table["both"], table["share"] = rows["us"], 1 - rows["product_us"] / rows["us"]
    if rows["nccl_us"].notna().any():
        names = {"nccl_sums": "by NCCL", "shared": "over shared memory", "nccl": "both, NCCL"}
        for column, name in names.items():
            table[name] = rows[f"{column}_us"]
        table["times NCCL"] = rows["nccl_us"] / rows["us"]
    return table.sort_values(["provider", "ranks"], kind="stable")


def times_dense(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each piece and M, a column for each packed provider and number of ranks; empty without dense ones."""
    wide = rows.pivot(index=["piece", "m", "ranks"], columns="provider", values="us")
    dense = [name for name in wide if is_dense(name)]
    if not dense or len(wide.columns) == 1:
        return pd.DataFrame()
    packed = wide[[name for name in dict.fromkeys(rows["provider"]) if name not in dense]]
    ratios = packed.rdiv(wide[dense[0]], axis=0).unstack("ranks")
    ratios = ratios.sort_index(key=lambda level: level.map(_PLACES) if level.name == "piece" else level)
    ratios.columns = [f"{provider}, {_ranks(ranks)}" for provider, ranks in ratios.columns]
    return ratios.reset_index().rename(columns={"m": "M"})


def tokens(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each provider and batch: tokens/s and, beyond one rank, how many times the tokens/s of one."""
    rows = rows.drop_duplicates([*_CELL, "ranks"], keep="last")
    found = rows.pivot(index=["provider", "m"], columns="ranks", values="tokens_s")
    table = pd.DataFrame(index=found.index)
    for ranks in found:
        table[_ranks(ranks)] = found[ranks]
        if ranks > 1 and 1 in found:
            table[f"{ranks} x 1 rank"] = found[ranks] / found[1]
    return table.reset_index().rename(columns={"m": "batch"})


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
