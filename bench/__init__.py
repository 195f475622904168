"""Benchmarks.

    sweep, Report    `gemm` beside others (`register` adds some), and a page of it
    chain            a model's linears, one after another
    conversions      conversions of whole weights, beside a copy
    regret           the heuristic's choices beside every configuration, which `measure_configs` times
    tune             the quickest configurations on this GPU, for `gemm` to run them

`python -m weightonly.bench` has a command for each.
"""

from __future__ import annotations

from .chain import chain, chain_table
from .conversions import conversions, conversions_table
from .providers import PROVIDERS, Prepared, Provider, register
from .regret import heuristic_choice, measure_configs, regret
from .report import Report
from .report.plot import plot
from .roofline import CEILINGS, roofline_us
from .shapes import NAMED
from .sweep import sweep, to_csv, to_markdown
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
    "conversions",
    "conversions_table",
    "heuristic_choice",
    "host_us",
    "measure_configs",
    "plot",
    "register",
    "regret",
    "roofline_us",
    "sweep",
    "time_calls",
    "to_csv",
    "to_markdown",
    "tune",
]
