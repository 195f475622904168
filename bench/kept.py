"""A file of rows that grows: each row is written as soon as it is measured, and a later run does what is left."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd
import torch

from .report.results import Results, join, read_rows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Cell = TypeVar("Cell", bound=DataclassInstance)

ROWS = "results.csv"
"""The file in the folder that --out names."""

_FAILED = "failed: "  # begins the note of a row that a later run tries again


class DoesNotFit(RuntimeError):
    """What is to be measured is larger than the memory that is free."""


@dataclass(frozen=True)
class Measured:
    """results: all rows of the file. failed, left: how many cells of this call have no times, for an error or for lack
    of time."""

    results: Results
    failed: int
    left: int


class KeptRows:
    """The rows of one file. A cell, a dataclass, is what tells them apart: its fields are the first columns."""

    def __init__(self, path: Path, command: str, columns: Sequence[str], facts: Mapping[str, str]) -> None:
        """command: that makes the rows. facts: of this run.

        Raises ValueError for a file of another command, or of another machine.
        """
        self.path, self._command, self._columns = path, command, columns
        found = [read(path, command, columns)] if path.exists() else []
        self._rows: list[dict[str, Any]] = found[0].rows.to_dict("records") if found else []
        self._facts = join([*found, Results(pd.DataFrame(), dict(facts))]).facts

    def results(self) -> Results:
        """All rows so far."""
        return Results(pd.DataFrame(self._rows, columns=list(self._columns)), self._facts)

    def left(self, cells: Iterable[Cell]) -> list[Cell]:
        """The cells that have no row yet, or one that failed."""
        return [cell for cell, note in self._notes(cells) if note is None or note.startswith(_FAILED)]

    def failures(self, cells: Iterable[Cell]) -> list[Cell]:
        """The cells with a row that failed."""
        return [cell for cell, note in self._notes(cells) if note is not None and note.startswith(_FAILED)]

    def _notes(self, cells: Iterable[Cell]) -> list[tuple[Cell, str | None]]:
        """Each cell with the note of its row; None without a row."""
        wanted = [(cell, asdict(cell)) for cell in cells]
        names = list(wanted[0][1]) if wanted else []
        notes = {tuple(row[name] for name in names): str(row["note"]) for row in self._rows}
        return [(cell, notes.get(tuple(key.values()))) for cell, key in wanted]

    def add(self, cell: DataclassInstance, rows: Sequence[Mapping[str, Any]]) -> None:
        """Puts the rows of a cell, at least one, in the place of its rows before, and writes the file."""
        key = asdict(cell)
        if note := str(rows[0].get("note", "")):
            print(f"{self._command}: {cell}: {note}", file=sys.stderr)
        self._rows = [row for row in self._rows if any(row[name] != value for name, value in key.items())]
        self._rows += [key | {"note": ""} | dict(row) for row in rows]
        self.results().write(self.path)


def read(path: Path, command: str, columns: Sequence[str]) -> Results:
    """The rows of a file of `KeptRows`. Raises ValueError, naming the file, for anything else."""
    found = read_rows(path, f"bench {command}", columns)
    return Results(found.rows.astype({"note": object}).fillna({"note": ""}), found.facts)


def note_of(error: Exception) -> str:
    """Why a row has no times, in a line."""
    line = (str(error).splitlines() or [""])[0]
    if isinstance(error, DoesNotFit | torch.cuda.OutOfMemoryError):
        return f"does not fit: {line}"
    return f"{_FAILED}{type(error).__name__}: {line}"


def require_packages(command: str, *packages: str) -> None:
    """Raises ImportError, which says what installs it, for a package that is not there."""
    for name in packages:
        if find_spec(name) is None:
            raise ImportError(f"bench {command} needs the package {name}: pip install '.[bench,hf]'")
