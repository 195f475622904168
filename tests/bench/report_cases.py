"""Measurements made up for the tests of the benchmark's report, and a reader of its page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pandas as pd

from weightonly.bench.report import GROUP_SIZES
from weightonly.bench.report.results import Results
from weightonly.bench.shapes import NAMED

BATCH = (1, 16, 256)
# us of "ours" as a multiple of the roofline, then of others as a multiple of ours: by M.
TIMES = {"ours": (1.2, 1.5, 1.3), "cuBLAS fp16": (3.0, 1.8, 0.8), "marlin": (1.1, 0.9, 2.0)}


def made_up(factor: float = 1.0, spread: float = 0.01, format: str = "int4", runs: int = 1) -> pd.DataFrame:
    """Rows of a sweep of Llama-3-8B and one shape more. factor: of the times of ours; spread: of a run's replays."""
    rows = []
    for run in range(runs):
        for place, (k, n) in enumerate([*NAMED["llama3-8b"], (256, 128)]):
            for i, m in enumerate(BATCH):
                roofline_us = 2.0 * m**0.5 * (place + 1)
                for provider, ratios in TIMES.items():
                    us = roofline_us * TIMES["ours"][i] * (factor if provider == "ours" else ratios[i])
                    us *= 1 + 0.02 * run
                    rows.append(
                        {
                            "k": k,
                            "n": n,
                            "m": m,
                            "format": format,
                            "group_size": GROUP_SIZES[format],
                            "zeros": False,
                            "dtype": "fp16",
                            "provider": provider,
                            "us": us,
                            "us_p10": us * (1 - spread),
                            "us_p90": us * (1 + spread),
                            "roofline_us": roofline_us,
                            "config": "kernel_a" if provider == "ours" else "",
                            "sm_mhz": 1980.0 - m,
                        }
                    )
    return pd.DataFrame(rows)


FACTS = {
    "GPU": "NVIDIA <H200>",
    "driver": "580.65",
    "command": "python -m weightonly.bench report: x",
    "roofline": "the longer of bytes and operations",
    "method": "So.",
}


def written_results(folder: Path) -> Path:
    """A file in `folder`, of the rows of `made_up` and of FACTS."""
    file = folder / "results.csv"
    Results(made_up(), FACTS).write(file)
    return file


class Page(HTMLParser):
    """What a browser would fetch, the ids, the marked cells and the text; and that every element is closed."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.lost: list[str] = []
        self.headings: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert tag not in ("script", "link", "img", "iframe")
        self.fetched += [value for name in ("src", "href", "xlink:href") if (value := values.get(name))]
        if identity := values.get("id"):
            self.ids.append(identity)
        if tag not in self.VOID:
            self._open.append((tag, values.get("class")))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == ("td", "lost"):
            self.lost.append(data)
        if self._open and self._open[-1][0] in ("h1", "h2", "h3"):
            self.headings.append(data)
