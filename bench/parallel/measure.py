"""`measure`: pieces of models on several numbers of ranks, within a time budget."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from ..devices import NoGpu, default_device, require_gpu
from ..kept import ROWS, KeptRows, Measured, note_of, require_packages
from ..model.providers import MODEL_PROVIDERS, ModelProvider
from ..model.rows import free_unused
from ..providers import choose
from ..report.facts import machine_facts
from ..roofline import Ceilings, ceilings, describe
from ..shapes import LLAMAS
from ..weights import dtype_name
from . import BATCH, DEFAULT_PROVIDERS, PROVIDERS, RANKS
from .decode import STEP, DecodeRows
from .pieces import LAYER, LINEARS, check_ranks
from .ranks import Ranks, RanksApart, launched_ranks, run
from .rows import CALLS, ERRORS, GRAPHS, KEY, METHOD, TIMES, Cell, PieceRows

COLUMNS = [*KEY, *TIMES, *ERRORS, "note"]


@dataclass(frozen=True)
class _Setup:
    """What processes are told. deadline: of time.monotonic, which all processes of a machine share."""

    path: Path
    dtype: torch.dtype
    max_m: int
    backend: str
    budget_ms: float
    deadline: float
    limits: Ceilings | None
    facts: Mapping[str, str]
    progress: bool


def measure(
    shapes: Sequence[str],
    out: Path,
    batch: Sequence[int] = BATCH,
    providers: str | Sequence[str] = DEFAULT_PROVIDERS,
    ranks: Sequence[int] | None = None,
    *,
    slices: int = 4,
    decode: Sequence[int] = (),
    context: int = 512,
    layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    compile: bool | None = None,
    backend: str = "inductor",
    budget_ms: float = 50.0,
    time_budget_s: float = math.inf,
    facts: Mapping[str, str] | None = None,
    progress: bool = True,
) -> Measured:
    """Measures the linears of models on several numbers of ranks, and writes out/results.csv after each row; rows that
    are there already are not measured again.

    shapes: names of shapes.LLAMAS. providers: some of `PROVIDERS`, or "all". ranks: how many; None: those of `RANKS`
    that there are GPUs for, on a CPU 1 and 2, under torchrun as many as it started. slices: of overlapped sums.
    decode: lines of decode steps of whole models, after `context` tokens each, of `layers` decoder layers (None: all).
    device: "cuda", "cpu", or None: GPUs. compile: whether the ranks are compared with one rank under torch.compile,
    too, at the most rows of the batch; None: on GPUs. backend: of it. budget_ms, time_budget_s, facts: as `measure` of
    models has them. Where processes fail, those of the other numbers of ranks are measured still; those cells are left.

    Raises ValueError naming the argument; for a file of another machine, too. Raises RuntimeError without GPUs.
    """
    where = require_gpu("parallel") if device is None else default_device(device)
    if str(where) not in ("cuda", "cpu"):
        raise ValueError(f"device: expected cuda or cpu, as each rank has its own GPU, got {where}")
    for name in shapes:
        if name not in LLAMAS:
            raise ValueError(f"shapes: expected models, some of {', '.join(LLAMAS)}, got {name!r}")
    if not batch or min(batch) < 1:
        raise ValueError(f"batch: expected integers from 1 on, got {list(batch)}")
    if decode and min(decode) < 1:
        raise ValueError(f"decode: expected integers from 1 on, got {list(decode)}")
    positive = {"slices": slices, "context": context, "layers": 1 if layers is None else layers}
    for argument, value in (positive | {"budget_ms": budget_ms, "time_budget_s": time_budget_s}).items():
        if not value > 0:
            raise ValueError(f"{argument}: expected a positive number, got {value!r}")
    if where.type == "cuda" and dtype == torch.float32:
        raise ValueError("dtype: expected torch.float16 or torch.bfloat16 on a GPU, got torch.float32")
    reasons = {name: MODEL_PROVIDERS[name].unavailable(where, dtype) for name in PROVIDERS}
    chosen = [MODEL_PROVIDERS[name] for name in choose(providers, reasons)]
    numbers = _numbers(ranks, where)
    for name in shapes:
        for number in numbers:
            check_ranks(LLAMAS[name], name, number)
    if decode:
        require_packages("parallel", "transformers")
    out.mkdir(parents=True, exist_ok=True)
    is_compiled = where.type == "cuda" if compile is None else compile
    setup = _Setup(
        out / ROWS,
        dtype,
        max(batch),
        backend,
        budget_ms,
        time.monotonic() + time_budget_s,
        ceilings(where),
        _facts(where) | dict(facts or {}),
        progress,
    )
    kept, labels = _kept(setup), [provider.label(where, dtype) for provider in chosen]
    todo: dict[int, list[Cell]] = {}
    for number in numbers:
        pieces = [
            Cell(
                *(model, label, dtype_name(dtype), number, piece, m, slices),
                compiled=is_compiled and piece == LAYER and m == max(batch),
            )
            for model in shapes
            for label in labels
            for piece in (LAYER, *LINEARS)
            for m in batch
        ]
        steps = [
            Cell(
                *(model, label, dtype_name(dtype), number, STEP, m, 1, is_compiled),
                layers=layers or LLAMAS[model].layers,
                context=context,
            )
            for model in shapes
            for label in labels
            for m in decode
        ]
        todo[number] = kept.left(pieces + steps)
    broken = 0
    for number, cells in todo.items():
        if not cells or time.monotonic() > setup.deadline:
            continue
        try:
            run(number, where.type, partial(_measure_on, setup, cells))
        except RuntimeError as error:
            if launched_ranks() is not None:
                raise
            broken += 1
            print(f"parallel: {error}", file=sys.stderr)
    kept, every = _kept(setup), [cell for cells in todo.values() for cell in cells]
    failed = len(kept.failures(every))
    return Measured(kept.results(), failed + broken, len(kept.left(every)) - failed)


def _numbers(ranks: Sequence[int] | None, device: torch.device) -> list[int]:
    """How many ranks to measure. Raises ValueError for more than there are GPUs, or than torchrun has started."""
    launched = launched_ranks()
    gpus = torch.cuda.device_count() if device.type == "cuda" else None
    if ranks is None:
        if launched is not None:
            return [launched]
        return [n for n in RANKS if n <= gpus] if gpus is not None else [1, 2]
    if not ranks or min(ranks) < 1:
        raise ValueError(f"ranks: expected integers from 1 on, got {list(ranks)}")
    if launched is not None and list(ranks) != [launched]:
        raise ValueError(f"ranks: expected {launched}, the processes of torchrun, got {list(ranks)}")
    if gpus is not None and max(ranks) > gpus:
        raise NoGpu(f"parallel needs a GPU for each rank: {gpus} are visible, and {max(ranks)} ranks were asked for")
    return list(dict.fromkeys(ranks))


def _facts(device: torch.device) -> dict[str, str]:
    on_gpu = device.type == "cuda"
    found = machine_facts(device) | {"method": METHOD + (GRAPHS if on_gpu else CALLS)}
    if not on_gpu:
        return found | {"ranks talk by": "gloo"}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    limits = ceilings(device)
    assert limits is not None
    return found | {"ranks talk by": f"NCCL {nccl}, {torch.cuda.device_count()} GPUs", "roofline": describe(limits)}


def _kept(setup: _Setup) -> KeptRows:
    return KeptRows(setup.path, "parallel", COLUMNS, setup.facts)


def _measure_on(setup: _Setup, cells: Sequence[Cell], ranks: Ranks) -> None:
    """Measures cells on these ranks, until the deadline; the first of them writes the rows."""
    kept = _kept(setup) if ranks.rank == 0 else None
    providers = {one.label(ranks.device, setup.dtype): one for one in map(MODEL_PROVIDERS.__getitem__, PROVIDERS)}
    held: tuple[str, str, str, int] | None = None
    measured: PieceRows | DecodeRows | None = None
    bar = tqdm(cells, disable=not setup.progress or kept is None, unit="cell", desc=f"{ranks.count} ranks")
    for cell in bar:
        if ranks.most(time.monotonic()) > setup.deadline:
            return
        bar.set_postfix_str(f"{cell.provider} {cell.piece} M = {cell.m}")
        rows, error = {}, None
        try:
            if held != (held := (cell.model, cell.provider, cell.piece, cell.layers)) or measured is None:
                measured = None  # its memory is freed first
                free_unused()
                measured = _in_memory(setup, cell, providers[cell.provider], ranks)
            rows = measured.row(cell, setup.backend)
        except Exception as caught:  # memory, or a compiler; the rows that follow may still run
            error = caught
        try:
            has_failed = ranks.most(error is not None, step=1)
        except RanksApart as apart:
            raise error or apart from apart
        if has_failed:
            rows = {"note": note_of(error or RuntimeError("on another rank"))}
        if kept is not None:
            kept.add(cell, [rows])


def _in_memory(setup: _Setup, cell: Cell, provider: ModelProvider, ranks: Ranks) -> PieceRows | DecodeRows:
    if cell.piece == STEP:
        return DecodeRows(cell.model, cell.layers, provider, setup.dtype, ranks, setup.budget_ms)
    return PieceRows(cell.model, cell.piece, provider, setup.max_m, setup.dtype, ranks, setup.limits, setup.budget_ms)
