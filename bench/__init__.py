"""Benchmarks: `sweep` compares `gemm` with others (`register` adds some), `Report` makes a page of it, `chain` times a
model's linears one after another, `measure_configs` and `regret` judge the heuristic, `conversions` times conversions
of whole weights."""

from __future__ import annotations

from .chain import chain, chain_table
from .conversions import conversions, conversions_table
from .plot import plot
from .providers import PROVIDERS, Prepared, Provider, register
from .regret import heuristic_choice, measure_configs, regret
from .report import Report
from .roofline import CEILINGS, roofline_us
from .shapes import NAMED
from .sweep import sweep, to_csv, to_markdown
from .timing import host_us, time_calls

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
]
