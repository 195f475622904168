"""Benchmarks: `sweep` compares `gemm` with others, `chain` times a model's linears one after another, `measure_configs`
and `regret` judge the heuristic."""

from __future__ import annotations

from .chain import chain, chain_table
from .plot import plot
from .providers import PROVIDERS
from .regret import heuristic_choice, measure_configs, regret
from .roofline import CEILINGS, roofline_us
from .shapes import NAMED
from .sweep import sweep, to_csv, to_markdown
from .timing import host_us, time_calls

__all__ = [
    "CEILINGS",
    "NAMED",
    "PROVIDERS",
    "chain",
    "chain_table",
    "heuristic_choice",
    "host_us",
    "measure_configs",
    "plot",
    "regret",
    "roofline_us",
    "sweep",
    "time_calls",
    "to_csv",
    "to_markdown",
]
