"""Problems, tables and made-up measurements for the tests of tuned tables and of the tuner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weightonly.heuristics import KernelConfig, Problem, candidates, select
from weightonly.heuristics.configs import CONFIGS
from weightonly.heuristics.launches import estimate_us
from weightonly.plan import tuned
from weightonly.plan.tuned import Entry, Origin, Table

H200 = Origin("0.1.0", "NVIDIA H200", 90, 132, "580.65.06")
BUILT = {config.kernel for config in CONFIGS}


def problem(m: int, k: int = 4096, n: int = 4096, format: str = "int4", group_size: int = 128) -> Problem:
    return Problem(m, n, k, format, group_size, H200.arch, H200.sm_count)


def of_model(p: Problem) -> KernelConfig:
    return select(p.m, p.n, p.k, p.format, p.group_size, p.arch, p.sm_count, p.layout, p.zeros)


def another(p: Problem) -> KernelConfig:
    """A legal configuration that the model does not pick."""
    return next(config for config in candidates(p) if config.kernel != of_model(p).kernel)


def entry(p: Problem, config: KernelConfig | None = None, dtype: str = "f16") -> Entry:
    config = config or another(p)
    names = config.name, 5.0, of_model(p).name, 6.0
    return Entry(p.m, p.n, p.k, p.format, p.group_size, p.zeros, p.layout, dtype, *names)


def table(*entries: Entry) -> Table:
    return Table(H200, entries, CONFIGS)


def written_table(folder: Path) -> Path:
    """A file below `folder`, of a table of two problems."""
    file = folder / "cache" / H200.file_name
    tuned.write(file, table(entry(problem(1)), entry(problem(16))))
    return file


class Bench:
    """Makes times up: the model's estimate times a factor per configuration. A measurement takes a second."""

    def __init__(self, factors: dict[str, float] | None = None, drift: float = 0.0) -> None:
        self.factors = factors or {}
        self.drift = drift  # by so much the clock of the GPU goes down with each measurement
        self.now = 0.0
        self.asked: list[tuple[int, str, float]] = []
        self.opened: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now

    def open_weight(self, k: int, n: int) -> Callable[..., float]:
        self.opened.append((k, n))

        def measure(m: int, config: KernelConfig, *, budget_ms: float, give_up_us: float) -> float:
            self.now += 1
            self.asked.append((m, config.name, give_up_us))
            of_codes = Problem(m, n, k, "nf4", 64, H200.arch, H200.sm_count)
            asked = problem(m, k, n) if "int4" in config.formats else of_codes
            us = estimate_us(config, asked) * self.factors.get(config.name, 1.0)
            return us * (1 + self.drift) ** len(self.asked)

        return measure
