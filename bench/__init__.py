"""Benchmarks.

    sweep, Report    `gemm` beside others (`register` adds some), and a page of it
    chain            a model's linears, one after another
    tune             the quickest configurations on this GPU, for `gemm` to run them

`python -m weightonly.bench` has a command for each.
"""

from __future__ import annotations

from . import needs  # noqa: F401  (first: it says which package the others need)

# isort: split
from .chain import chain, chain_table
from .command import to_csv
from .plot import plot
from .providers import PROVIDERS, Prepared, Provider, register
from .report import Report
from .roofline import CEILINGS, roofline_us
from .shapes import NAMED
from .sweep import sweep, to_markdown
from .timing import host_us, time_calls
from .tune import tune

__all__ = [
    "CEILINGS",
    "NAMED",
    "PROVIDERS",
    "Prepared",
    "Provider",
    "Report",
    "chain",
    "chain_table",
    "host_us",
    "plot",
    "register",
    "roofline_us",
    "sweep",
    "time_calls",
    "to_csv",
    "to_markdown",
    "tune",
]
