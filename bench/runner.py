"""The runner of `model`, `experts` and `parallel`: rows of cells x providers, which are kept in a folder.

A `Bench` says what its cells are, which of them share weights in memory, and what their rows are. The runner checks the
arguments, finds the cells that have no row yet, measures them until the time is over, and writes each row as it comes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from tqdm import tqdm

from weightonly.device import gpu_state

from . import command
from .devices import default_device, require_gpu
from .kept import ROWS, KeptRows, Measured, note_of, read
from .providers import LayerProvider, choose
from .report.facts import machine_facts
from .report.results import Results, join
from .roofline import Ceilings, ceilings, describe

Rows = list[dict[str, Any]]

Measure = Callable[[Sequence[Any]], Sequence["Rows | Exception"]]
"""Measures cells side by side; for each its rows, or what it raised."""


@dataclass(frozen=True)
class Process:
    """The process that measures; `parallel` has several, which agree on what they do next."""

    rank: int
    count: int
    device: torch.device

    def most(self, value: float) -> float:
        """The greatest value of all processes."""
        return float(value)

    def agree(self, error: Exception | None) -> Exception | None:
        """An error where one of the processes has one."""
        return error


@dataclass(frozen=True, kw_only=True)
class Bench(ABC):
    """What is measured, by what, where and for how long.

    shapes: names of `models`. out: the folder of results.csv; rows that it has are not measured again. providers: names
    of `registry`, or "all" for what runs here. dtype: of activations and dense weights. device: None: the GPU; a
    CPU is measured where it is named. budget_ms: device time of a measurement. time_budget_s: no row is begun after so
    many seconds. facts: more of them for the file.

    A row without times says why in `note`. What failed is tried again by the next run; what did not fit in memory is
    not.
    """

    shapes: Sequence[str]
    out: Path
    providers: str | Sequence[str] = "all"
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str | None = None
    budget_ms: float = 50.0
    time_budget_s: float = math.inf
    facts: Mapping[str, str] = field(default_factory=dict)
    progress: bool = True

    name: ClassVar[str]  # of the command
    models: ClassVar[Mapping[str, Any]]
    registry: ClassVar[Mapping[str, LayerProvider]]
    columns: ClassVar[Sequence[str]]
    positive: ClassVar[Sequence[str]] = ()  # arguments of the subclass that are positive numbers, or None

    @property
    def where(self) -> torch.device:
        """The device. Raises RuntimeError where it is to be a GPU and there is none."""
        return require_gpu(self.name) if self.device is None else default_device(self.device)

    # --- what a subclass says --------------------------------------------------------------------------------------

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError, naming the argument, and ImportError for a package that is missing; before any work."""

    @abstractmethod
    def cells(self, labels: Sequence[str]) -> Iterable[Any]:
        """All cells (dataclasses) of providers of these labels, in the order in which they are measured."""

    @abstractmethod
    def weights_of(self, cell: Any) -> Hashable:
        """Cells of the same that follow each other are measured with the same weights in memory."""

    def side_by_side(self, cell: Any) -> Hashable:
        """Cells of the same are measured in turns."""
        return cell

    @abstractmethod
    def load(self, cells: Sequence[Any], process: Process, limits: Ceilings | None) -> Measure:
        """Brings the weights of some cells into memory. limits: of the roofline; None for a CPU."""

    @abstractmethod
    def method(self, device: torch.device) -> dict[str, str]:
        """Facts of how rows are measured: `method`, and others."""

    @classmethod
    @abstractmethod
    def tables(cls, results: Results, folder: Path) -> list[Path]:
        """Writes what the rows say; the paths."""

    def in_processes(
        self, cells: Sequence[Any], deadline: float, work: Callable[[Sequence[Any], Process], None]
    ) -> int:
        """Calls work for all cells; how many times it failed as a whole. It begins nothing after the deadline."""
        if cells:
            work(cells, Process(0, 1, self.where))
        return 0

    @classmethod
    def speaks(cls) -> bool:
        """Whether this process prints for all of them."""
        return True

    # --- what they share -------------------------------------------------------------------------------------------

    def by_label(self, device: torch.device) -> dict[str, Any]:
        """The providers by what rows call them."""
        return {one.label(device, self.dtype): one for one in self.registry.values()}

    def measure(self) -> Measured:
        """Measures what has no row yet.

        Raises ValueError naming the argument; for a file of another machine, too. Raises RuntimeError without a GPU,
        and ImportError for a package that is missing.
        """
        where = self.where
        check_some("shapes", self.shapes, self.models, "models, ")
        for name in (*self.positive, "budget_ms", "time_budget_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: expected a positive number, got {value!r}")
        if where.type == "cuda" and self.dtype == torch.float32:
            raise ValueError("dtype: expected torch.float16 or torch.bfloat16 on a GPU, got torch.float32")
        self.check()
        labels = self._labels(where)
        self.out.mkdir(parents=True, exist_ok=True)
        limits = ceilings(where)
        facts = machine_facts(where) | self.method(where) | dict(self.facts)
        if limits is not None:
            facts |= {"roofline": describe(limits), "GPU before": str(gpu_state(where))}
        cells = self._kept(facts).left(self.cells(labels))
        deadline = time.monotonic() + self.time_budget_s
        broken = self.in_processes(cells, deadline, partial(_measure_cells, self, deadline, limits, facts))
        kept = self._kept(facts)
        failed = len(kept.failures(cells))
        return Measured(kept.results(), failed + broken, len(kept.left(cells)) - failed)

    def _labels(self, device: torch.device) -> list[str]:
        """The labels of the providers that are asked for; says which ones "all" leaves out."""
        reasons = {name: one.unavailable(device, self.dtype) for name, one in self.registry.items()}
        chosen = [self.registry[name].label(device, self.dtype) for name in choose(self.providers, reasons)]
        for name, reason in reasons.items():
            if self.providers == "all" and reason is not None:
                print(f"{self.name}: {name} is left out: {reason}", file=sys.stderr)
        return chosen

    def _kept(self, facts: Mapping[str, str]) -> KeptRows:
        return KeptRows(self.out / ROWS, self.name, self.columns, facts)


def _measure_cells(
    bench: Bench,
    deadline: float,
    limits: Ceilings | None,
    facts: Mapping[str, str],
    cells: Sequence[Any],
    process: Process,
) -> None:
    """Measures cells in this process, until the deadline of time.monotonic, which all processes of a machine share; the
    first process writes the rows."""
    kept = bench._kept(facts) if process.rank == 0 else None
    silent = kept is None or not bench.progress
    ranks = None if process.count == 1 else f"{process.count} ranks"
    with tqdm(total=len(cells), disable=silent, unit="cell", desc=ranks) as bar:

        def is_over() -> bool:
            return process.most(time.monotonic()) > deadline

        def add(cells: Sequence[Any], found: Sequence[Rows | Exception]) -> None:
            for cell, rows in zip(cells, found, strict=True):
                if kept is not None:
                    kept.add(cell, [{"note": note_of(rows)}] if isinstance(rows, Exception) else rows)
                bar.update()

        def measure_group(cells: Sequence[Any]) -> None:
            """What is in memory goes with the call."""
            measure = attempt(lambda: bench.load(cells, process, limits), process)
            if isinstance(measure, Exception):
                add(cells, [measure] * len(cells))
                return
            for _, together in itertools.groupby(cells, bench.side_by_side):
                own = list(together)
                if is_over():
                    return
                bar.set_postfix_str(str(own[0]))
                found = attempt(partial(measure, own), process)
                add(own, [found] * len(own) if isinstance(found, Exception) else found)

        for _, group in itertools.groupby(cells, bench.weights_of):
            if is_over():
                return
            same_weights = list(group)
            bar.set_postfix_str(f"{same_weights[0]}: weights")
            free_unused()
            measure_group(same_weights)


def attempt(work: Callable[[], Any], process: Process) -> Any:
    """What work returns, or the exception of a process: a package of others, or memory; other cells may still run."""
    error: Exception | None = None
    try:
        found = work()
    except Exception as caught:
        error = caught.with_traceback(None)  # its frames hold tensors
    return process.agree(error) or found


def free_unused() -> None:
    """Gives back the memory of what is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_some(argument: str, values: Iterable[str], known: Iterable[str], what: str = "") -> None:
    """Raises ValueError for a value that is not known."""
    for value in values:
        if value not in known:
            raise ValueError(f"{argument}: expected {what}some of {', '.join(known)}, got {value!r}")


def check_integers(argument: str, values: int | Sequence[int], least: int = 1) -> None:
    """Raises ValueError for none, and for one below the least."""
    numbers = [values] if isinstance(values, int) else list(values)
    if not numbers or min(numbers) < least:
        raise ValueError(f"{argument}: expected integers from {least} on, got {values!r}")


# --- the command line ------------------------------------------------------------------------------------------


def add_options(parser: command.Parser, bench_name: str, models: Sequence[str], default: str) -> None:
    """Options of every bench, but its providers."""
    known = ", ".join(models)
    parser.add_argument(
        "--shapes",
        type=command.names,
        default=default,
        help=f"models, by commas: {known} (default {default})",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, default=bench_name, help=f"rows there are kept (default {bench_name})"
    )
    parser.add_argument(
        "--from",
        dest="files",
        metavar="CSV",
        nargs="+",
        type=Path,
        help="measure nothing: tables of the results.csv of earlier runs",
    )
    parser.add_argument(
        "--time-budget",
        metavar="SECONDS",
        dest="time_budget_s",
        type=float,
        default=math.inf,
        help="begin no row after it; run again for more",
    )
    command.add_run(parser, dtype="bf16")


def add_compile(parser: command.Parser, help: str) -> None:
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help=help)


def needs_gpu(options: command.Options) -> bool:
    """Unless a CPU is named, or nothing is measured."""
    return options.device is None and options.files is None


def run(bench: type[Bench], options: command.Options) -> int:
    """Measures and writes tables; 1 where a row failed."""
    if options.files:
        results = join([read(file, bench.name, bench.columns) for file in options.files])
        options.out.mkdir(parents=True, exist_ok=True)
        print(*bench.tables(results, options.out), sep="\n")
        return 0
    options.facts = {"command": options.command_line}
    found = bench(**command.keywords(options, bench)).measure()
    if bench.speaks() and not found.results.rows.empty:
        file = options.out / ROWS
        print(file, *bench.tables(read(file, bench.name, bench.columns), options.out), sep="\n")
    if bench.speaks() and found.left:
        print(f"{found.left} cells are left: the same command measures them", file=sys.stderr)
    return 1 if found.failed else 0
