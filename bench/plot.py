"""Pictures of a sweep: time over batch size, one panel per shape, logarithmic axes, one colour per provider."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from .providers import PROVIDERS, of_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart, less the yellow, which is pale on white; then a few
# more. The shape of the markers says the same without colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#5D3A9B", "#7A4A21")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_COLUMNS = 4  # at most
_LEGEND_ENTRIES = 3  # below each column


class Style(NamedTuple):
    """How one provider looks in every picture."""

    color: str
    marker: str
    linewidth: float
    markersize: float
    zorder: float


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style per label: the providers of `PROVIDERS` have their own, others the styles that follow."""
    keys = {label: provider.name if (provider := of_label(label)) else label for label in names}
    places = {key: place for place, key in enumerate(dict.fromkeys([*PROVIDERS, *keys.values()]))}
    found = {}
    for name, key in keys.items():
        place = places[key]
        ours = name.partition(" ")[0] == "ours"  # the thick line, on top where lines coincide
        color, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
        found[name] = Style(color, marker, 2.4 if ours else 1.3, 5 if ours else 4, 4 if ours else 3)
    return found


def plot(frame: pd.DataFrame, path: str) -> None:
    """Write the result of `sweep` as a picture with logarithmic axes. Needs the package matplotlib.

    The dashed line is the roofline (absent on a CPU).

    Args:
        frame: what `sweep` returned.
        path: of the file, PNG, or what the name's ending says.

    Raises:
        ValueError: an empty frame.

    Examples:
        >>> frame = wo.bench.sweep("512x768", 1, device="cpu", dtype=torch.float32, budget_ms=1, progress=False)
        >>> wo.bench.plot(frame, "sweep.png")
    """
    if frame.empty:
        raise ValueError("frame: expected the rows of a sweep, got none")
    figure = time_figure(frame, styles(frame["provider"]))
    first = frame.iloc[0]
    group = "per channel" if first["group_size"] == -1 else f"group {first['group_size']}"
    figure.suptitle(f"{first['format']} {group}, {first['dtype']}: lower is better", fontsize=11)
    figure.savefig(path, dpi=130)


def by_shape(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of each (k, n), by the title of its panel."""
    return {f"K {k} x N {n}": cells for (k, n), cells in frame.groupby(["k", "n"], sort=False)}


def time_figure(frame: pd.DataFrame, looks: dict[str, Style]) -> Figure:
    """`us` over `m` of every provider, a panel per (k, n), with the roofline where there is one."""
    panels = by_shape(frame)
    figure, axes = _figure(panels, "us", "us per call", looks)
    for panel, cells in zip(axes, panels.values(), strict=True):
        roofline = cells.drop_duplicates("m").sort_values("m")
        if roofline["roofline_us"].notna().any():
            panel.plot(roofline["m"], roofline["roofline_us"], "k--", linewidth=1.2, label="roofline")
    _legend(figure, axes)
    return figure


def ratio_figure(panels: dict[str, pd.DataFrame], line: str, looks: dict[str, Style]) -> Figure:
    """`ratio` over `m` of every provider, a panel per name. line: what the times are divided by, which is at 1."""
    figure, axes = _figure(panels, "ratio", f"time / {line}", looks)
    for panel in axes:
        if line not in looks:  # a provider has its line already
            panel.axhline(1, color="black", linestyle="--", linewidth=1.2, label=line)
    limits = [limit for panel in axes for limit in panel.get_ylim()]
    for panel in axes:  # one scale, so that panels compare
        panel.set_ylim(min(limits), max(limits))
    _legend(figure, axes)
    return figure


def lines_figure(
    panels: dict[str, pd.DataFrame], value: str, label: str, titles: Sequence[str], looks: dict[str, Style]
) -> Figure:
    """`value` over `m` of every provider, a panel per name. titles: what `m` is in each panel."""
    figure, axes = _figure(panels, value, label, looks, titles)
    _legend(figure, axes)
    return figure


def _figure(
    panels: dict[str, pd.DataFrame],
    value: str,
    label: str,
    looks: dict[str, Style],
    titles: Sequence[str] | None = None,
) -> tuple[Figure, list[Axes]]:
    """A panel per name, with `value` over `m` of every provider in it. titles: of `m`, where it is not M."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / _COLUMNS)
    columns = math.ceil(len(panels) / rows)
    width, height = (3.4, 3.0) if columns > 2 else (4.6, 3.4)  # inches
    figure = Figure(figsize=(width * columns, height * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    along = titles or ["M (tokens)"] * len(panels)
    for panel, (title, cells), m_title in zip(axes, panels.items(), along, strict=False):
        for name, line in cells.groupby("provider", sort=False):
            line = line.sort_values("m")
            panel.plot(line["m"], line[value], label=str(name), **looks[str(name)]._asdict())
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(m_title)
        panel.set_ylabel(label)
        _logarithmic(panel, sorted(set(cells["m"])))
    return figure, axes[: len(panels)]


def _logarithmic(panel: Axes, sizes: list[int]) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_locator(FixedLocator(sizes[:: math.ceil(len(sizes) / 5)]))  # five labels do not touch
    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(
        LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high < 20 * low else (1.0, 2.0, 5.0))
    )
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())
    panel.grid(True, linewidth=0.4, alpha=0.5)


def _legend(figure: Figure, axes: list[Axes]) -> None:
    """One for all panels: a provider may be absent from some."""
    found = {label: line for panel in axes for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    rows = math.ceil(len(found) / (_LEGEND_ENTRIES * min(len(axes), _COLUMNS)))
    columns = math.ceil(len(found) / rows)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False)
