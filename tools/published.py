"""The tables and the pictures of the pages in `DOCUMENTS`, made from the committed measurements, or counted.

    python -m tools.published     writes them anew, from a checkout

A table stands between the lines `<!-- table: NAME -->` and `<!-- end of table -->`; `TABLES` has the names. Tests
compare them with what this module makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from weightonly.bench import accuracy, activations
from weightonly.bench.kept import read as read_kept
from weightonly.bench.model import tables as models
from weightonly.bench.model.measure import COLUMNS as OF_MODELS
from weightonly.bench.model.providers import MODEL_PROVIDERS
from weightonly.bench.report import results
from weightonly.bench.report.tables import Part, geometric_mean, lost, parts
from weightonly.bench.roofline import CEILINGS, roofline_us
from weightonly.bench.shapes import MIXTURES, Shape
from weightonly.heuristics.problem import FORMATS

from .regret_experts import problem_of, regret, rows_of_experts
from .training_memory import training_memory_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
MEASUREMENTS = ROOT / "bench" / "measurements"
ASSETS = ROOT / "docs" / "assets"
PICTURE = ASSETS / "h200_speedup.svg"
DOCUMENTS = tuple(
    ROOT / name
    for name in (
        "README.md",
        "docs/performance.md",
        "docs/kernels/sm90_grouped.md",
        "docs/guides/quantize.md",
        "docs/guides/finetune_mixture.md",
        "docs/guides/vllm.md",
    )
)

BATCH = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
"""Columns of the large tables."""

PEER_BATCH = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Where every one of `PEERS` was measured."""

OURS = "weightonly"
DENSE = "cuBLAS fp16"
PEERS = {"Machete": "machete_tuned", "Marlin": "marlin", "FasterTransformer": "fastertransformer_tuned"}
"""Name -> column of h200_peers.csv, of what was measured at all of its shapes."""

_STYLES = {
    OURS: ("#0072B2", "o"),
    "Machete": ("#D55E00", "s"),
    "Marlin": ("#009E73", "^"),
    "FasterTransformer": ("#CC79A7", "D"),
}


def report_part(format: str) -> Part:
    """Our own times and the others' of the same run: "int4", "int8" or "nf4"."""
    for part in parts(results.read(MEASUREMENTS / "h200_report.csv").rows):
        if part.name.startswith(f"{format},"):
            return part
    raise ValueError(f"format: expected one of h200_report.csv, got {format!r}")


def peer_times(bits: int) -> pd.DataFrame:
    """Rows of h200_peers.csv, by (k, n, m); us."""
    frame = pd.read_csv(MEASUREMENTS / "h200_peers.csv", comment="#")
    return frame[frame["bits"] == bits].set_index(["k", "n", "m"])


def peer_speedups() -> pd.DataFrame:
    """How many times faster than cuBLAS fp16 of its own run each is, int4 group 128: a row each, a column per M.

    Geometric means over the shapes of h200_peers.csv.
    """
    times = peer_times(4)
    shapes: list[Shape] = list(dict.fromkeys(times.droplevel("m").index))
    rows = {OURS: geometric_mean(report_part("int4").speedups(DENSE).loc[shapes])[list(PEER_BATCH)]}
    for name, column in PEERS.items():
        speedups = (times["cublas_f16"] / times[column]).unstack("m").loc[shapes]
        rows[name] = geometric_mean(speedups)[list(PEER_BATCH)]
    return pd.DataFrame(rows).T


def model_rows() -> pd.DataFrame:
    """What `bench model` measured, without the rows that have no times."""
    rows = read_kept(MEASUREMENTS / "h200_models.csv", "model", OF_MODELS).rows
    return rows[rows["note"] == ""]


def pictures() -> dict[Path, Figure]:
    """Every picture of the documents, and where it is."""
    rows = model_rows()
    found = {PICTURE: peers_picture()}
    for name in dict.fromkeys(rows["model"]):
        figure = models.picture(rows[rows["model"] == name], f"{name}, one H200")
        assert figure is not None
        found[ASSETS / f"h200_{name}.svg"] = figure
    return found


def peers_picture() -> Figure:
    """`peer_speedups` over M."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(8.0, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, line in peer_speedups().iterrows():
        color, marker = _STYLES[str(name)]
        ours = name == OURS
        axes.plot(
            line.index, line, color=color, marker=marker, label=name, linewidth=2.6 if ours else 1.5, markersize=5
        )
    axes.axhline(1, color="#444444", linestyle="--", linewidth=1.2, label="cuBLAS fp16")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(PEER_BATCH)))
    axes.yaxis.set_major_locator(FixedLocator([0.3, 0.5, 0.7, 1, 1.5, 2, 3]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("M (tokens)")
    axes.set_ylabel("times as fast as cuBLAS fp16")
    axes.set_title("int4 weights, group 128, fp16, one H200: higher is better", fontsize=11)
    axes.grid(True, linewidth=0.4, alpha=0.5)
    axes.legend(frameon=False, ncols=1, loc="upper right")
    return figure


def save_picture(figure: Figure, path: Path) -> None:
    """An SVG file, the same bytes for the same data and version of matplotlib."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "weightonly"}):
        figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _markdown(head: Iterable[object], lines: Iterable[Iterable[str]]) -> str:
    names = [str(name) for name in head]
    rows = [names, ["---"] * len(names), *map(list, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ratio(ratio: float) -> str:
    """Two decimals, in bold where we lose."""
    text = f"{ratio:.2f}"
    return f"**{text}**" if lost(ratio) else text


def _us(us: float) -> str:
    return f"{us:.{1 if us < 100 else 0}f}"


def peers_table() -> str:
    """`peer_speedups`."""
    table = peer_speedups()
    head = ["times as fast as cuBLAS fp16", *(f"M = {m}" for m in table.columns)]
    return _markdown(head, ([str(name), *(f"{ratio:.2f}" for ratio in row)] for name, row in table.iterrows()))


def report_table(format: str) -> str:
    """Our us, and how many times faster than each other provider of the run, by shape and M."""
    part = report_part(format)
    ours = part.us("ours")[list(BATCH)]
    speedups = [part.speedups(name)[list(BATCH)] for name in part.others]
    lines = []
    for shape in part.shapes:
        cells = [
            f"{_us(ours.loc[shape, m])} ({', '.join(_ratio(table.loc[shape, m]) for table in speedups)})" for m in BATCH
        ]
        lines.append([f"{shape[0]} x {shape[1]}", *cells])
    means = [geometric_mean(table) for table in speedups]
    lines.append(["geometric mean", *(f"({', '.join(_ratio(mean[m]) for mean in means)})" for m in BATCH)])
    roofline = geometric_mean(part.over_roofline()[list(BATCH)])
    lines.append(["geometric mean, times the roofline", *(f"{roofline[m]:.2f}" for m in BATCH)])
    return _markdown(["K x N", *(f"M = {m}" for m in BATCH)], lines)


def losses_table() -> str:
    """Where cuBLAS fp16 was faster, of all cells of the report."""
    lines = []
    for format, name in (("int4", "int4, group 128"), ("int8", "int8, per channel"), ("nf4", "NF4, blocks of 64")):
        speedups = report_part(format).speedups(DENSE).stack()
        slower = speedups[np.round(speedups, 2) < 1]
        k, n, m = speedups.idxmin()
        by_m = ", ".join(f"{m}" for m in sorted(slower.index.get_level_values(2).unique()))
        worst = f"{speedups.min():.2f} ({k} x {n}, M = {m})"
        lines.append([name, str(len(speedups)), str(len(slower)), by_m, worst])
    return _markdown(["weights", "cells", "cuBLAS is faster in", "at M", "worst: times as fast as cuBLAS"], lines)


def peer_losses_table() -> str:
    """The best peer's time over ours, beside cuBLAS of each run, at the shapes of h200_peers.csv."""
    table = peer_speedups()
    lines = []
    for name in PEERS:
        ratio = table.loc[OURS] / table.loc[name]
        lines.append([name, *(_ratio(value) for value in ratio)])
    return _markdown(["weightonly is faster than", *(f"M = {m}" for m in table.columns)], lines)


def peer_us_table() -> str:
    """us of every peer at each shape, M of 1, 16, 64, 256 and 1024."""
    times = peer_times(4)
    ours = report_part("int4").us("ours")
    names = {
        "cuBLAS fp16": "cublas_f16",
        **PEERS,
        "CUTLASS example 55": "cutlass_ex55_tuned",
        "Humming": "humming",
        "GemLite": "gemlite",
        "bitsandbytes NF4": "bitsandbytes_nf4",
        "PyTorch tinygemm": "torch_tinygemm",
    }
    lines = []
    for (k, n, m), row in times.iterrows():
        if m in (1, 16, 64, 256, 1024):
            cells = ["" if np.isnan(row[column]) else _us(row[column]) for column in names.values()]
            lines.append([f"{k} x {n}", str(m), _us(ours.loc[(k, n), m]), *cells])
    return _markdown(["K x N", "M", OURS, *names], lines)


_MODEL_COLUMNS = {
    "decode": "decode, batch {batch}",
    "prefill": "prompt of {tokens}",
    "train": "LoRA, {batch} x {tokens}",
}
"""Measure -> the head of a column of `model_table`."""


def model_table(name: str) -> str:
    """tokens/s of a model: a line for each provider, in bold where a dense one of 16 bits is faster than ours."""
    rows = model_rows()
    rows = rows[(rows["model"] == name) & rows["measure"].isin(list(_MODEL_COLUMNS))]
    heads = [_MODEL_COLUMNS[row.measure].format(batch=row.batch, tokens=row.tokens) for row in rows.itertuples()]
    rows = rows.assign(head=heads)
    columns = list(dict.fromkeys(rows.sort_values(["measure", "batch", "tokens"])["head"]))
    speeds = rows.pivot(index="provider", columns="head", values="tokens_s")[columns]
    first = rows[rows["measure"] == "decode"].groupby("provider")["weights_mb"].first() / 1e3
    order = [provider.label(torch.device("cuda"), torch.bfloat16) for provider in MODEL_PROVIDERS.values()]
    speeds = speeds.loc[sorted(speeds.index, key=order.index)]
    dense = speeds.loc["cuBLAS bf16"]

    def cell(provider: str, head: str) -> str:
        speed = speeds.loc[provider, head]
        if np.isnan(speed):
            return ""
        text = f"{speed:.{1 if speed < 100 else 0}f}"
        return f"**{text}**" if provider.startswith("ours") and lost(speed / dense[head]) else text

    lines = [
        [provider, *(cell(provider, head) for head in columns), f"{first[provider]:.1f}"] for provider in speeds.index
    ]
    return _markdown(["tokens/s", *columns, "GB"], lines)


def overlap_table() -> str:
    """A decode step by what launches may overlap: times as fast as without, and whether tokens are the same."""
    rows = model_rows()
    rows = rows[rows["measure"] == "overlap"]
    lines = []
    for (model, provider, batch), found in rows.groupby(["model", "provider", "batch"], sort=False):
        ms = found.set_index("overlap")["ms"]
        same = "yes" if found["same_tokens"].astype(str).eq("True").all() else "no"
        gains = [f"{ms['False'] / ms[mode]:.2f}" for mode in ("True", "constant_weights")]
        lines.append([str(model), str(provider), str(batch), f"{ms['False']:.2f}", *gains, same])
    return _markdown(
        ["model", "weights", "batch", "ms without", "overlap", "and constant weights", "the same greedy tokens"], lines
    )


_ROUTINGS = {("even", 0.0): "in turns", ("skewed", 0.0): "by chance", ("skewed", 1.0): "with favourites"}
"""Routing and skew -> its name in `grouped_table`."""


def grouped_rows(format: str) -> pd.DataFrame:
    """What the choice takes of the measured grouped configurations: a row for each cell, with its roofline."""
    frame = pd.read_csv(MEASUREMENTS / "h200_grouped.csv.xz")
    cells = regret(frame[frame["format"] == format]).cells

    def of_cell(cell: pd.Series) -> float:
        problem, _ = problem_of(cell)
        routed = [(counts > 0).sum() for counts in rows_of_experts(cell)]
        return roofline_us(
            *(problem.m, problem.k, problem.n),
            bits=FORMATS[format],
            group_size=problem.group_size,
            weights=round(float(np.mean(routed))),
            limits=CEILINGS["NVIDIA H200"],
        )

    return cells.assign(roofline_us=cells.apply(of_cell, axis=1))


def grouped_table(format: str) -> str:
    """us of single grouped products, tokens in turns to the experts; below times the roofline, for each routing."""
    rows = grouped_rows(format)
    batch = sorted(rows["m"].unique())
    lines = []
    even = rows[rows["routing"] == "even"]
    for (model, k, n), found in even.groupby(["model", "k", "n"], sort=False):
        us = found.set_index("m")["chosen_us"]
        sizes = MIXTURES[str(model)]
        lines.append([f"{model}: {sizes.experts}, {sizes.top_k}, {k} x {n}", *(_us(us[m]) for m in batch)])
    for (routing, skew), name in _ROUTINGS.items():
        found = rows[(rows["routing"] == routing) & (rows["skew"] == skew)]
        ratio = (found["chosen_us"] / found["roofline_us"]).groupby(found["m"])
        means = ratio.apply(lambda r: float(np.exp(np.log(r).mean())))
        lines.append([f"times the roofline, tokens {name}", *(f"{means[m]:.2f}" for m in batch)])
    return _markdown(["E, top k, K x N", *(f"M = {m}" for m in batch)], lines)


def layer_table(routing: str) -> str:
    """us of layers of experts, times the roofline, and the slowest and quickest of the others beside it."""
    frame = pd.read_csv(MEASUREMENTS / "h200_experts_layer.csv", comment="#")
    frame = frame[frame["routing"] == routing]
    ours = frame[frame["provider"] == "ours"]
    batch = sorted(ours["m"].unique())
    lines = []
    for model, of_model in ours.groupby("model", sort=False):
        rows = of_model.set_index("m")
        cells = [f"{_us(rows['us'][m])} ({rows['us'][m] / rows['roofline_us'][m]:.2f})" for m in batch]
        lines.append([f"{model}, {rows['format'].iloc[0]}", *cells])
    for provider, of_provider in frame[frame["provider"] != "ours"].groupby("provider", sort=False):
        beside = of_provider.merge(ours, on=["model", "m"])
        ratio = (beside["us_x"] / beside["us_y"]).groupby(beside["m"])
        lines.append([f"{provider}, times ours", *(f"{ratio.min()[m]:.2f} to {ratio.max()[m]:.2f}" for m in batch)])
    return _markdown(["", *(f"M = {m}" for m in batch)], lines)


def serve_table() -> str:
    """vLLM's engine with our kernels and with the quickest of its own: tokens/s, ms to a first token."""
    models = {
        "H200": "h200_serve.csv",
        "20 layers, H200": "h200_serve_70b.csv",
        "16 layers, H200": "h200_serve_mixtral.csv",
        "16 layers, H100": "h100_serve.csv",
        "12 layers, H200": "h200_serve_gpt_oss.csv",
        "16 layers, 2 H200": "h200_serve_70b_two.csv",
    }
    frame = pd.concat(pd.read_csv(MEASUREMENTS / file, comment="#").assign(on=on) for on, file in models.items())
    units = {"decode": "tokens/s, {} prompts", "ttft": "ms to the first token of {}"}
    lines = ["| model | | weightonly | vLLM's | times as fast |", "|---|---|---|---|---|"]
    for (model, on, quant, measure, size), rows in frame.groupby(
        ["model", "on", "quant", "measure", "size"], sort=False
    ):
        of = rows.set_index("provider")["value"]
        ours, others = of["weightonly"], of.drop("weightonly")
        theirs = others.max() if measure == "decode" else others.min()
        ratio = ours / theirs if measure == "decode" else theirs / ours
        what = units[measure].format(size).replace(" 1 prompts", " 1 prompt")
        digits = 0 if measure == "decode" else 1
        lines.append(f"| {model}, {quant}, {on} | {what} | {ours:.{digits}f} | {theirs:.{digits}f} | {ratio:.2f} |")
    return "\n".join(lines)


def accuracy_table() -> str:
    """What quantizing loses, ours beside others."""
    return accuracy.accuracy_table(
        results.read_rows(MEASUREMENTS / "accuracy.csv", "bench accuracy", accuracy.COLUMNS).rows
    )


def activations_table() -> str:
    """What rounding activations loses beside int4 weights."""
    return activations.activations_table(
        results.read_rows(MEASUREMENTS / "activations.csv", "bench activations", activations.COLUMNS).rows
    )


TABLES: dict[str, Callable[[], str]] = {
    "peers": peers_table,
    "peer-ratios": peer_losses_table,
    "peer-times": peer_us_table,
    "losses": losses_table,
    "int4": lambda: report_table("int4"),
    "int8": lambda: report_table("int8"),
    "nf4": lambda: report_table("nf4"),
    "llama3-8b": lambda: model_table("llama3-8b"),
    "llama3-70b": lambda: model_table("llama3-70b"),
    "overlap": overlap_table,
    "grouped-int4": lambda: grouped_table("int4"),
    "grouped-int8": lambda: grouped_table("int8"),
    "grouped-mxfp4": lambda: grouped_table("mxfp4"),
    "layer-even": lambda: layer_table("even"),
    "serve": serve_table,
    "accuracy": accuracy_table,
    "activations": activations_table,
    "training-memory": training_memory_table,
    "layer-skewed": lambda: layer_table("skewed"),
}

_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """A document with its tables made anew. Raises KeyError for a name that is none of `TABLES`."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def main() -> None:
    ASSETS.mkdir(parents=True, exist_ok=True)
    for path, figure in pictures().items():
        save_picture(figure, path)
    for path in DOCUMENTS:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
