"""The tables and the pictures of the pages in `DOCUMENTS`, made from the committed measurements, or counted.

    python -m tools.published     writes them anew, from a checkout

A table stands between the lines `<!-- table: NAME -->` and `<!-- end of table -->`; `TABLES` has the names. Tests
compare them with what this module makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import pandas as pd
import torch

from weightonly.bench import accuracy, activations
from weightonly.bench.model.providers import MODEL_PROVIDERS
from weightonly.bench.report import results
from weightonly.bench.report.tables import geometric_mean, lost, parts
from weightonly.bench.shapes import MIXTURES

from .measured import (
    DENSE,
    MEASUREMENTS,
    OURS,
    PEERS,
    ROOT,
    grouped_rows,
    layer_rows,
    model_rows,
    parallel_rows,
    peer_speedups,
    peer_times,
    report_part,
    serve_rows,
    source,
)
from .model_sizes import sizes_table
from .pictures import ASSETS, pictures, save_picture
from .regret import regret
from .training_memory import training_memory_table

DOCUMENTS = tuple(
    ROOT / name
    for name in (
        "README.md",
        "docs/performance.md",
        "docs/kernels/sm90_grouped.md",
        "docs/guides/finetune_mixture.md",
        "docs/guides/memory.md",
        "docs/guides/quantize.md",
        "docs/guides/vllm.md",
    )
)

BATCH = (1, 4, 16, 64, 128, 256, 512, 1024, 4096)
"""Columns of the large tables; the rows have more."""


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


def peer_us_table() -> str:
    """us of every peer at each shape, M of 1, 64 and 1024."""
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
        if m in (1, 64, 1024):
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
    frame = layer_rows(routing)
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
    units = {"decode": "tokens/s, {} prompts", "ttft": "ms to the first token of {}"}
    lines = ["| model | | weightonly | vLLM's | times as fast |", "|---|---|---|---|---|"]
    for (model, on, quant, measure, size), rows in serve_rows().groupby(
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


def humming_table() -> str:
    """us of the report beside humming-kernels, and how many times as fast as it and as cuBLAS fp16."""
    lines = []
    batch: list[int] = []
    for part in parts(results.read(MEASUREMENTS / "h200_humming.csv").rows):
        ours = part.us("ours")
        batch = list(ours.columns)
        beside = [part.speedups(name) for name in ("humming", DENSE)]
        for k, n in part.shapes:
            ratios = (", ".join(_ratio(table.loc[(k, n), m]) for table in beside) for m in batch)
            cells = (f"{_us(ours.loc[(k, n), m])} ({text})" for m, text in zip(batch, ratios, strict=True))
            lines.append([f"{part.name}: {k} x {n}", *cells])
    return _markdown(["K x N", *(f"M = {m}" for m in batch)], lines)


def host_table() -> str:
    """Medians of what a call costs the host, by the last version that was measured."""
    frame = pd.read_csv(MEASUREMENTS / "h100_host.csv", comment="#")
    us = frame[frame["commit"] == "new"].groupby("way")["us"].median().sort_values()
    return _markdown(["call", "us"], ([str(way), f"{value:.1f}"] for way, value in us.items()))


def again_table() -> str:
    """Our times of the report of a later day over those of the published one."""
    rows = pd.read_csv(MEASUREMENTS / "h200_report_again.csv.xz", comment="#")
    lines = []
    for part in parts(rows.fillna({"config": ""})):
        ratios = (part.us("ours") / report_part(part.name.partition(",")[0]).us("ours")).stack()
        mean = float(np.exp(np.log(ratios).mean()))
        lines.append([part.name, str(len(ratios)), f"{mean:.3f}", f"{ratios.min():.2f} to {ratios.max():.2f}"])
    return _markdown(["weights", "cells", "new time / published time, geometric mean", "least, greatest"], lines)


def h100_table() -> str:
    """us of what is chosen on an H100, and how much slower than the best configuration of that cell."""
    result = regret(pd.read_csv(MEASUREMENTS / "h100_regret_int4.csv.xz"))
    cells = result.cells
    batch = sorted(cells["m"].unique())
    lines = []
    for (k, n), of in cells.groupby(["k", "n"], sort=False):
        rows = of.set_index("m")
        texts = (f"{_us(rows['chosen_us'][m])} ({100 * rows['regret'][m]:.1f}%)" for m in batch)
        lines.append([f"{k} x {n}", *texts])
    table = _markdown(["K x N", *(f"M = {m}" for m in batch)], lines)
    return f"{table}\n\nMean {result.mean:.1%}, worst {result.worst:.1%} of {len(cells)} cells."


_PROVIDERS = ("ours int4", "ours int8", "cuBLAS bf16")
"""Of `bench parallel`, in the order of tables."""


def two_gpus_table() -> str:
    """us of the four linears of a layer on one GPU and on two: products alone, sums alone, and both."""
    rows = parallel_rows()
    rows = rows[rows["piece"] == "layer"].set_index(["provider", "ranks", "m"]).sort_index()
    batch = sorted(rows.index.get_level_values("m").unique())
    lines = []
    for provider in _PROVIDERS:
        one, two = rows.loc[(provider, 1)], rows.loc[(provider, 2)]
        lines.append([f"{provider}, one GPU", *(_us(one["us"][m]) for m in batch)])
        parts_us = ("product_us", "sums_us", "us")
        both = (" / ".join(_us(two[name][m]) for name in parts_us) for m in batch)
        lines.append([f"{provider}, two GPUs: products / sums / both", *both])
    return _markdown(["", *(f"M = {m}" for m in batch)], lines)


def two_gpus_decode_table() -> str:
    """tokens/s of decode steps on one GPU and on two."""
    rows = parallel_rows()
    speeds = rows[rows["piece"] == "decode"].set_index(["provider", "ranks", "m"])["tokens_s"]
    batch = sorted(speeds.index.get_level_values("m").unique())
    providers = [name for name in _PROVIDERS if name in speeds.index.get_level_values("provider")]
    lines = [[name, *(f"{speeds[name, 1, m]:.0f}, {speeds[name, 2, m]:.0f}" for m in batch)] for name in providers]
    return _markdown(["tokens/s on one GPU, on two", *(f"batch {m}" for m in batch)], lines)


SOURCES = {
    "report": "h200_report.csv",
    "again": "h200_report_again.csv.xz",
    "humming": "h200_humming.csv",
    "host": "h100_host.csv",
    "models": "h200_models.csv",
    "serve": "h200_serve.csv",
    "layer": "h200_experts_layer.csv",
    "two-gpus": "h200x2_parallel.csv",
    "two-gpus-decode": "h200x2_decode.csv",
}
"""Name -> file of bench/measurements/ whose `source` is published as "source-NAME"."""

TABLES: dict[str, Callable[[], str]] = {
    "peers": peers_table,
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
    "humming": humming_table,
    "host": host_table,
    "again": again_table,
    "h100": h100_table,
    "two-gpus": two_gpus_table,
    "two-gpus-decode": two_gpus_decode_table,
    "sizes": sizes_table,
    **{f"source-{name}": partial(source, file) for name, file in SOURCES.items()},
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
