"""What `bench parallel` measures: a cell for each model, provider, number of ranks, piece, and number of rows."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from .. import runner
from ..devices import NoGpu
from ..kept import require_packages
from ..model.providers import Ours
from ..report.results import Results
from ..roofline import Ceilings
from ..shapes import LLAMAS, MODELS
from ..weights import dtype_name
from . import BATCH, DEFAULT_PROVIDERS, PIECES, PROVIDERS, RANKS, tables
from .decode import STEP, DecodeRows
from .pieces import EXPERTS, LAYER, check_ranks
from .ranks import Ranks, is_first, launched_ranks, run
from .rows import CALLS, ERRORS, GRAPHS, KEY, METHOD, TIMES, Cell, PieceRows

COLUMNS = [*KEY, *TIMES, *ERRORS, "note"]


@dataclass(frozen=True, kw_only=True)
class ParallelBench(runner.Bench):
    """The linears of models, cut over several ranks.

    ranks: how many; None: of `RANKS` as many as there are GPUs, on a CPU 1 and 2, under torchrun as many as it
    started. batch: rows of x. pieces: some of `PIECES`, in this order. decode: batches of decode steps of whole models,
    after `context` tokens each, of `layers` decoder layers (None: all). compile: whether the
    ranks are compared with one rank under torch.compile, too, at the most rows of the batch; None: on GPUs. device:
    "cuda" or "cpu". Other arguments as `runner.Bench`.

    Where processes fail, the other numbers of ranks are measured still; the cells of the failed ones are left.
    """

    providers: str | Sequence[str] = DEFAULT_PROVIDERS
    ranks: Sequence[int] | None = None
    batch: Sequence[int] = BATCH
    pieces: Sequence[str] = PIECES
    decode: Sequence[int] = ()
    context: int = 512
    layers: int | None = None
    compile: bool | None = None

    name = "parallel"
    models = MODELS
    registry = PROVIDERS
    columns = COLUMNS
    positive = ("context", "layers")

    def check(self) -> None:
        if str(self.where) not in ("cuda", "cpu"):
            raise ValueError(f"device: expected cuda or cpu, as each rank has its own GPU, got {self.where}")
        runner.check_integers("batch", self.batch)
        runner.check_some("pieces", self.pieces, PIECES)
        if self.decode:
            runner.check_integers("decode", self.decode)
        for name, number in itertools.product(self.shapes, self.numbers()):
            check_ranks(MODELS[name], name, number)
        if self.decode or not all(name in LLAMAS for name in self.shapes):
            require_packages("parallel", "transformers")

    def numbers(self) -> list[int]:
        """How many ranks to measure. Raises ValueError for more than there are GPUs, or than torchrun has started."""
        launched = launched_ranks()
        gpus = torch.cuda.device_count() if self.where.type == "cuda" else None
        if self.ranks is None:
            if launched is not None:
                return [launched]
            return [n for n in RANKS if n <= gpus] if gpus is not None else [1, 2]
        runner.check_integers("ranks", self.ranks)
        if launched is not None and list(self.ranks) != [launched]:
            raise ValueError(f"ranks: expected {launched}, the processes of torchrun, got {list(self.ranks)}")
        if gpus is not None and max(self.ranks) > gpus:
            few = f"{gpus} are visible, and {max(self.ranks)} ranks were asked for"
            raise NoGpu(f"parallel needs a GPU for each rank: {few}")
        return list(dict.fromkeys(self.ranks))

    def cells(self, labels: Sequence[str]) -> Iterator[Cell]:
        compile = self.where.type == "cuda" if self.compile is None else self.compile
        dtype = dtype_name(self.dtype)
        providers = self.by_label(self.where)
        for ranks in self.numbers():
            for model, label, piece in itertools.product(self.shapes, labels, self.pieces):
                is_mixture = model not in LLAMAS
                if piece == STEP or is_mixture != (piece == EXPERTS):
                    continue
                if is_mixture and not isinstance(providers[label], Ours):
                    continue  # dense experts are not cut here
                for m in self.batch:
                    compiled = compile and piece == LAYER and m == max(self.batch)
                    yield Cell(model, label, dtype, ranks, piece, m, compiled)
            models = [model for model in self.shapes if model in LLAMAS and STEP in self.pieces]
            for model, label, m in itertools.product(models, labels, self.decode):
                layers = self.layers or LLAMAS[model].layers
                yield Cell(model, label, dtype, ranks, STEP, m, compile, layers, self.context)

    def weights_of(self, cell: Cell) -> tuple[str, str, str, int]:
        return cell.model, cell.provider, cell.piece, cell.layers

    def load(self, cells: Sequence[Cell], process: runner.Process, limits: Ceilings | None) -> runner.Measure:
        assert isinstance(process, Ranks)
        first, provider = cells[0], self.by_label(process.device)[cells[0].provider]
        of_cell: PieceRows | DecodeRows
        if first.piece == STEP:
            of_cell = DecodeRows(first.model, first.layers, provider, self.dtype, process, self.budget_ms)
        else:
            sizes = max(self.batch), self.dtype
            of_cell = PieceRows(first.model, first.piece, provider, *sizes, process, limits, self.budget_ms)
        return lambda cells: [[of_cell.row(cell)] for cell in cells]

    def in_processes(
        self, cells: Sequence[Cell], deadline: float, work: Callable[[Sequence[Cell], Ranks], None]
    ) -> int:
        failed = 0
        for number, group in itertools.groupby(cells, lambda cell: cell.ranks):
            if time.monotonic() > deadline:
                break
            try:
                run(number, self.where.type, partial(work, list(group)))
            except RuntimeError as error:
                if launched_ranks() is not None:
                    raise
                failed += 1
                print(f"parallel: {error}", file=sys.stderr)
        return failed

    def method(self, device: torch.device) -> dict[str, str]:
        if device.type == "cpu":
            return {"method": METHOD + CALLS, "ranks talk by": "gloo"}
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return {"method": METHOD + GRAPHS, "ranks talk by": f"NCCL {nccl}, {torch.cuda.device_count()} GPUs"}

    @classmethod
    def tables(cls, results: Results, folder: Path) -> list[Path]:
        return tables.write(results, folder)

    @classmethod
    def speaks(cls) -> bool:
        return is_first()
