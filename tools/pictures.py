"""The pictures of the documentation, made from the committed measurements: SVG files that are readable on light and
dark pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from weightonly.bench.model import tables as models

from .measured import OURS, PEER_BATCH, ROOT, layer_rows, model_rows, parallel_rows, peer_speedups, serve_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ASSETS = ROOT / "docs" / "assets"

_PAPER, _INK, _FAINT = "#fffffe", "#24292e", "#8b949e"
_BLUE, _LIGHT_BLUE, _ORANGE, _GREEN, _PINK, _GREY = "#0072b2", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#7f7f7f"

_DARK = {
    _PAPER: "#0d1117",
    _INK: "#e6edf3",
    "#000000": "#e6edf3",
    "#b0b0b0": "#484f58",
    _BLUE: "#4aa8e0",
    _LIGHT_BLUE: "#a5d8f3",
    _ORANGE: "#f0883e",
    _GREEN: "#2fc492",
    "#e69f00": "#e8b339",
    _GREY: "#9a9a9a",
}
"""Colour on a light page -> on a dark one, where another one is wanted."""

_STYLES = {
    OURS: (_BLUE, "o"),
    "Machete": (_ORANGE, "s"),
    "Marlin": (_GREEN, "^"),
    "FasterTransformer": (_PINK, "D"),
}


def pictures() -> dict[Path, Callable[[], Figure]]:
    """What draws each picture of the documents, by its place."""
    rows = model_rows()
    found: dict[str, Callable[[], Figure]] = {
        "tokens": tokens_picture,
        "h200_speedup": peers_picture,
        "h200_experts": experts_picture,
        "h200x2": two_gpus_picture,
    }
    for name in dict.fromkeys(rows["model"]):
        found[f"h200_{name}"] = partial(_of_model, rows, str(name))
    return {ASSETS / f"{name}.svg": draw for name, draw in found.items()}


def save_picture(draw: Callable[[], Figure], path: Path) -> None:
    """An SVG file, the same bytes for the same data and version of matplotlib."""
    with _colours():
        draw().savefig(path, format="svg", metadata={"Date": None})
    text = "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()) + "\n"
    path.write_text(text.replace("</metadata>", f"</metadata>\n{_dark_style()}", 1), encoding="utf-8")


@contextmanager
def _colours() -> Iterator[None]:
    """Text and frames in ink on paper, which `_dark_style` finds by their colours."""
    import matplotlib

    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    paper = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    settings: Any = {"svg.fonttype": "path", "svg.hashsalt": "weightonly"}
    settings |= dict.fromkeys(ink, _INK) | dict.fromkeys(paper, _PAPER)
    with matplotlib.rc_context(settings):
        yield


def _dark_style() -> str:
    """Other colours where a reader's system asks for dark pages, the paper of the picture among them."""
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"


def _of_model(rows: pd.DataFrame, name: str) -> Figure:
    figure = models.picture(rows[rows["model"] == name], f"{name}, one H200, 2026-11-24")
    assert figure is not None
    return figure


_ENGINE = {"weightonly": ("weightonly int4", _BLUE), "vllm": ("vLLM's Machete", _ORANGE)}
_TRANSFORMERS = {
    "ours int4": ("weightonly int4", _BLUE),
    "ours nf4": ("weightonly NF4", _LIGHT_BLUE),
    "cuBLAS bf16": ("bf16", _GREY),
    "bitsandbytes nf4": ("bitsandbytes NF4", _PINK),
}
"""Provider of the rows -> its name and colour in `tokens_picture`."""


def tokens_picture() -> Figure:
    """tokens/s of Llama-3-8B on one H200: in vLLM's engine, and in transformers."""
    from matplotlib.figure import Figure

    served = serve_rows()
    served = served[(served["model"] == "llama3-8b") & (served["measure"] == "decode")]
    decoded = model_rows()
    decoded = decoded[(decoded["model"] == "llama3-8b") & (decoded["measure"] == "decode")]
    figure = Figure(figsize=(6.0, 4.6), layout="constrained")  # narrow, so that phones show its text
    halves: Any = figure.subfigures(2, 1, height_ratios=(3, 7))
    above, below = halves
    for part, columns, title, speeds, looks in (
        (above, 3, "vLLM 0.33, GPTQ int4", served.pivot(index="size", columns="provider", values="value"), _ENGINE),
        (below, 2, "transformers", decoded.pivot(index="batch", columns="provider", values="tokens_s"), _TRANSFORMERS),
    ):
        part.suptitle(f"{title}: Llama-3-8B, one H200, tokens/s", fontsize=10)
        panels = part.subplots(len(speeds) // columns, columns, sharey=True, squeeze=False).flatten()
        for panel, (batch, row) in zip(panels, speeds.iterrows(), strict=True):
            _bars(panel, [looks[name] for name in looks], [row[name] for name in looks])
            panel.set_title(f"batch {batch}", fontsize=9)
    return figure


def _bars(panel: Axes, looks: Sequence[tuple[str, str]], values: Sequence[float]) -> None:
    """A bar for each value, from the top down, its number beside it."""
    names, colors = zip(*reversed(looks), strict=True)
    bars = panel.barh(names, values[::-1], color=colors, height=0.7)
    panel.bar_label(bars, labels=[f"{value:,.0f}" for value in values[::-1]], padding=2, fontsize=8, color=_INK)
    panel.set_xlim(0, 1.45 * max(values))
    panel.set_xticks([])
    panel.tick_params(axis="y", length=0, labelsize=8)
    for side in ("top", "right", "bottom"):
        panel.spines[side].set_visible(False)


def peers_picture() -> Figure:
    """`peer_speedups` over M."""
    lines = {str(name): (line, *_STYLES[str(name)]) for name, line in peer_speedups().iterrows()}
    title = "int4 weights, group 128, fp16, one H200: higher is better"
    return _lines(lines, "cuBLAS fp16", title, list(PEER_BATCH), [0.3, 0.5, 0.7, 1, 1.5, 2, 3])


def experts_picture() -> Figure:
    """Layers of experts: how many times as fast as dense bf16 ones of torch's grouped_mm."""
    rows = layer_rows("even")
    us = rows.pivot(index=["model", "m"], columns="provider", values="us")
    ratios = (us["torch grouped_mm bf16"] / us["ours"]).dropna()
    looks = zip(dict.fromkeys(rows["model"]), ((_BLUE, "o"), (_ORANGE, "s"), (_GREEN, "^"), (_PINK, "D")), strict=True)
    formats = rows.groupby("model")["format"].first()
    lines = {f"{name}, {formats[name]}": (ratios[name], *look) for name, look in looks}
    title = "A layer of experts, one H200: higher is better"
    return _lines(lines, "torch grouped_mm, bf16", title, sorted(set(rows["m"])), [1, 1.5, 2, 3, 4, 5, 6])


def two_gpus_picture() -> Figure:
    """tokens/s of decode steps on one GPU and on two."""
    from matplotlib.figure import Figure

    rows = parallel_rows()
    speeds = rows[rows["piece"] == "decode"].set_index(["m", "provider", "ranks"])["tokens_s"]
    batches = sorted(speeds.index.get_level_values("m").unique())
    looks = [
        ("ours int4", 2, "int4, two GPUs", _BLUE),
        ("ours int4", 1, "int4, one GPU", _LIGHT_BLUE),
        ("cuBLAS bf16", 2, "bf16, two GPUs", _GREY),
        ("cuBLAS bf16", 1, "bf16, one GPU", _FAINT),
    ]
    figure = Figure(figsize=(8.0, 2.2), layout="constrained")
    figure.suptitle("16 layers of Llama-3-70B, H200s over NCCL, tokens/s, higher is better", fontsize=10)
    for panel, batch in zip(figure.subplots(1, len(batches), sharey=True), batches, strict=True):
        values = [float(speeds[batch, provider, ranks]) for provider, ranks, _, _ in looks]
        _bars(panel, [(name, color) for _, _, name, color in looks], values)
        panel.set_title(f"batch {batch}", fontsize=9)
    return figure


def _lines(
    lines: dict[str, tuple[pd.Series, str, str]], beside: str, title: str, sizes: list[int], ratios: list[float]
) -> Figure:
    """Speedups over M. lines: name -> values by M, colour, marker. ratios: the marks of the axis."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(8.0, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, (line, color, marker) in lines.items():
        width = 2.6 if name == OURS else 1.5
        axes.plot(line.index, line, color=color, marker=marker, label=name, linewidth=width, markersize=5)
    axes.axhline(1, color=_GREY, linestyle="--", linewidth=1.2, label=beside)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.yaxis.set_major_locator(FixedLocator(ratios))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("M (tokens)")
    axes.set_ylabel(f"times as fast as {beside}")
    axes.set_title(title, fontsize=11)
    axes.grid(True, linewidth=0.4, alpha=0.5)
    axes.legend(frameon=False, ncols=1, loc="upper right" if OURS in lines else "best")
    return figure
