"""A report: measurements of whole models, as one HTML page and as tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from inspect import cleandoc
from pathlib import Path

import pandas as pd

from ..plot import Style, by_shape, ratio_figure, styles, time_figure
from ..providers import is_dense, of_label
from ..shapes import resolve
from . import page
from .measure import MODELS
from .results import SETUP, Results
from .tables import OVER_ROOFLINE, Part, number_text, parts, speedup_text, with_mean


@dataclass(frozen=True)
class Report:
    """Measurements, and the models that its sections are about; measured shapes of no model come last.

    Args:
        results: the rows, and facts of the machine.
        models: names of `NAMED`, a section each.

    Examples:
        >>> wo.bench.Report.__dataclass_fields__["models"].default
        ('llama3-8b', 'llama3-70b')
    """

    results: Results
    models: tuple[str, ...] = MODELS

    @cached_property
    def parts(self) -> list[Part]:
        """One per format. Raises ValueError where there is no time of ours."""
        return parts(self.results.rows)

    @cached_property
    def sections(self) -> list[tuple[str, list[Part]]]:
        """(model, the parts with the shapes that it has)."""
        measured = dict.fromkeys(shape for part in self.parts for shape in part.shapes)
        shapes = {model: resolve(model) for model in self.models}
        others = set(measured).difference(*shapes.values())
        shapes["other shapes"] = [shape for shape in measured if shape in others]
        found = [(name, [part.of(wanted) for part in self.parts]) for name, wanted in shapes.items()]
        return [
            (name, present) for name, all_parts in found if (present := [part for part in all_parts if part.shapes])
        ]

    @cached_property
    def looks(self) -> dict[str, Style]:
        """One per provider, in all pictures."""
        return styles(name for part in self.parts for name in ["ours", *part.others])

    @property
    def title(self) -> str:
        facts = self.results.facts
        return f"weightonly benchmark: {facts.get('GPU') or facts.get('CPU') or 'machine not recorded'}"

    @property
    def lead(self) -> str:
        """What is compared, in two sentences."""
        others = dict.fromkeys(name for part in self.parts for name in part.others)
        names = ", ".join(f"{name} (on the dense weight)" if is_dense(name) else name for name in others)
        return (
            "How long y = x w takes, where x holds M rows (tokens) of activations and w is a K x N matrix of "
            f"weights in 4 or 8 bits, for the linear layers of {', '.join(name for name, _ in self.sections)}. "
            f'"ours" is weightonly.gemm{f"; beside it {names}" if names else ""}.'
        )

    def _roofline(self) -> Iterator[str]:
        """What the word means, before the report uses it; nothing where there is none."""
        if any(part.has_roofline for part in self.parts):
            meaning = "The roofline of a call is about the least time that memory and tensor cores allow for it"
            formula = self.results.facts.get("roofline")
            yield f"{meaning}: {formula}." if formula else f"{meaning}."

    @property
    def facts(self) -> dict[str, str]:
        """Facts of the file, and what the rows say of runs and clocks."""
        facts = {name: value for name, value in self.results.facts.items() if name not in ("method", "roofline")}
        runs = sorted({int(count) for part in self.parts for count in part.cells["runs"]})
        facts["runs"] = f"{' to '.join(map(str, runs[:: max(1, len(runs) - 1)]))} of each time; the median is shown"
        rows = self.results.rows
        if "sm_mhz" in rows and rows["sm_mhz"].notna().any():
            clocks = rows["sm_mhz"].dropna()
            facts["SM clock"] = f"right after a measurement: median {clocks.median():.0f} MHz, "
            facts["SM clock"] += f"{clocks.min():.0f} to {clocks.max():.0f}"
        return facts

    def html(self) -> str:
        """The page."""
        body = [f"<h1>{escape(self.title)}</h1>", f'<p class="lead">{escape(self.lead)}</p>', "<ul>"]
        body += [f"<li><b>{escape(part.name)}</b>: {escape(part.in_words())}.</li>" for part in self.parts]
        body += ["</ul>", *(f"<p>{escape(text)}</p>" for text in self._roofline()), self._summary_picture()]
        for part in self.parts:
            body.append(page.ratio_table(f"{part.name}: {_MEANS}", part.summary(), speedup=True))
        body += self._provider_list()
        for number, (name, present) in enumerate(self.sections):
            body.append(f"<h2>{escape(name)}</h2>")
            for place, part in enumerate(present):
                body += _part_html(part, f"s{number}p{place}", self.looks)
        method = self.results.facts.get("method")
        body += ["<h2>How it was measured</h2>", f"<p>{escape(method)}</p>" if method else ""]
        return page.document(self.title, [*body, page.fact_table(self.facts)])

    def _summary_picture(self) -> str:
        by_roofline = all(part.has_roofline for part in self.parts)
        what = "the roofline" if by_roofline else "the time of ours"
        caption = (
            f"Time divided by {what}, over M: geometric mean over the shapes. Both axes logarithmic; lower is better."
        )
        line = "roofline" if by_roofline else "ours"
        panels = {part.name: part.mean_ratios() for part in self.parts}
        return page.picture(ratio_figure(panels, line, self.looks), "summary", caption)

    def _provider_list(self) -> Iterator[str]:
        names = dict.fromkeys(name for part in self.parts for name in ["ours", *part.others])
        known = {name: about for name in names if (about := _about(name))}
        if known:
            items = "".join(f"<li><b>{escape(name)}</b>: {escape(about)}</li>" for name, about in known.items())
            yield f'<ul class="note">{items}</ul>'

    def markdown(self) -> str:
        """The page's tables."""
        lines = [f"# {self.title}", "", self.lead, ""]
        lines += [f"- {part.name}: {part.in_words()}." for part in self.parts]
        lines += [line for text in self._roofline() for line in ("", text)]
        for part in self.parts:
            lines += ["", f"{part.name}: {_MEANS}:", "", _markdown(part.summary(), speedup=True)]
        for name, present in self.sections:
            lines += ["", f"## {name}"]
            for part in present:
                for caption, table, speedup in _ratios(part):
                    lines += ["", f"{part.name}. {caption}:", "", _markdown(table, speedup)]
        lines += ["", "## How it was measured", "", self.results.facts.get("method", ""), "", "| | |", "|---|---|"]
        return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in self.facts.items())]) + "\n"

    def times(self) -> pd.DataFrame:
        """All numbers of all parts, one below the other."""
        frames = []
        for part in self.parts:
            setup = part.cells[SETUP].iloc[:1].to_dict("records")[0]
            frames.append(part.all_numbers().assign(**setup))
        table = pd.concat(frames, ignore_index=True)
        return table[SETUP + [name for name in table if name not in SETUP]]

    def write(self, folder: Path) -> list[Path]:
        """Writes the four files; their paths, the page's first."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / name for name in ("report.html", "report.md", "times.csv", "results.csv")]
        paths[0].write_text(self.html(), encoding="utf-8")
        paths[1].write_text(self.markdown(), encoding="utf-8")
        self.times().to_csv(paths[2], index=False, float_format="%.3f")
        self.results.write(paths[3])
        return paths


_MEANS = "speedups, geometric means over all shapes; above 1 ours is faster, ▼ slower"


def _ratios(part: Part) -> Iterator[tuple[str, pd.DataFrame, bool]]:
    """(caption, table, whether it is of speedups): ours beside the others, and beside the roofline."""
    for rival in part.rivals:
        yield f"Speedup over {rival} (above 1 ours is faster, ▼ slower)", with_mean(part.speedups(rival)), True
    if part.has_roofline:
        yield "Time of ours over the roofline (about 1 is the limit)", with_mean(part.over_roofline()), False


def _part_html(part: Part, name: str, looks: dict[str, Style]) -> Iterator[str]:
    """One format of one model. name: unique on the page."""
    yield f"<h3>{escape(part.name)}</h3>"
    yield page.picture(time_figure(part.cells, looks), f"{name}us", "Time per call in us over M; lower is better.")
    if part.has_roofline:
        panels = by_shape(part.cells.assign(ratio=part.cells["x_roofline"]))
        figure = ratio_figure(panels, "roofline", looks)
        yield page.picture(figure, f"{name}x", "The same times, divided by the roofline.")
    tables = [page.ratio_table(caption, table, speedup=speedup) for caption, table, speedup in _ratios(part)]
    if len(part.others) > 1:  # beside the quickest and the roofline; each of the others on a click
        yield from (tables[0], tables[-1] if part.has_roofline else "")
        yield page.folded("Beside each of the others", "".join(tables[1 : 1 + len(part.others)]))
    else:
        yield from tables
    yield page.folded("All numbers", page.number_table(part.all_numbers()))


def _markdown(table: pd.DataFrame, speedup: bool) -> str:
    text = table.apply(
        lambda row: row.map(speedup_text if speedup and row.name != OVER_ROOFLINE else number_text), axis=1
    )
    return str(text.rename_axis("M =").to_markdown(disable_numparse=True))


def _about(label: str) -> str:
    """The first paragraph of its provider's docstring, without backticks; empty for one that is not registered here."""
    provider = of_label(label)
    text = cleandoc(type(provider).__doc__ or "").partition("\n\n")[0] if provider else ""
    return " ".join(text.replace("`", "").split())
