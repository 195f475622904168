"""The picture of a sweep: time over batch size, one panel per shape."""

from __future__ import annotations

import math

import pandas as pd

from .providers import PROVIDERS

# One colour per provider, the same in every picture (Okabe and Ito's palette: told apart by colour-blind
# readers).
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_COLOURS = dict(zip(PROVIDERS, _PALETTE, strict=True))
_PANEL_INCHES = (4.2, 3.4)
_COLUMNS = 4  # at most


def plot(frame: pd.DataFrame, path: str) -> None:
    """Write the result of `sweep` as a picture (PNG, or what the name's ending says) with logarithmic axes.

    The dashed line is the roofline (absent on a CPU). Needs the package matplotlib. Raises ValueError for an
    empty frame.
    """
    if frame.empty:
        raise ValueError("frame: expected the rows of a sweep, got none")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator, ScalarFormatter

    panels = list(frame.groupby(["k", "n"], sort=False))
    rows = math.ceil(len(panels) / _COLUMNS)
    columns = math.ceil(len(panels) / rows)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, ((k, n), cells) in zip(axes, panels, strict=False):
        roofline = cells.drop_duplicates("m").sort_values("m")
        if roofline["roofline_us"].notna().any():
            panel.plot(roofline["m"], roofline["roofline_us"], "k--", linewidth=1.2, label="roofline", marker=".")
        for name, line in cells.groupby("provider", sort=False):
            line = line.sort_values("m")
            panel.plot(
                line["m"],
                line["us"],
                color=_COLOURS[str(name)],
                marker="o",
                markersize=3.5,
                label=str(name),
                zorder=4 if name == "ours" else 3,  # where lines coincide, ours stays visible
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_locator(FixedLocator(_ticks(sorted(set(cells["m"])))))
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_locator(FixedLocator([]))
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter(ScalarFormatter())
        panel.yaxis.set_minor_locator(FixedLocator([]))
        panel.set_title(f"K {k} x N {n}", fontsize=10)
        panel.set_xlabel("M (tokens)")
        panel.set_ylabel("us per call")
        panel.grid(True, linewidth=0.4, alpha=0.5)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 * columns, frameon=False)
    first = frame.iloc[0]
    group = "per channel" if first["group_size"] == -1 else f"group {first['group_size']}"
    figure.suptitle(f"{first['format']} {group}, {first['dtype']}: lower is better", fontsize=11)
    figure.savefig(path, dpi=130)


def _ticks(sizes: list[int]) -> list[int]:
    """Some seven of the batch sizes, with the smallest and the largest."""
    step = math.ceil(len(sizes) / 7)
    return [*sizes[:-step:step], sizes[-1]]
