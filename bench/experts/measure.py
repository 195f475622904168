"""`measure`: mixtures of experts within a time budget."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from weightonly.device import gpu_state

from ..devices import default_device, require_gpu
from ..kept import ROWS, KeptRows, Measured, note_of
from ..model.rows import free_unused
from ..providers import choose
from ..report.facts import machine_facts
from ..roofline import ceilings, describe
from ..shapes import MIXTURES
from ..weights import dtype_name
from .mixture import KEY, MEASURES, TIMES, Cell, Mixture
from .providers import EXPERTS_PROVIDERS, ExpertsProvider
from .routing import ROUTINGS, SKEW

COLUMNS = [*KEY, *TIMES, "note"]

BATCH = (1, 4, 16, 64, 256, 1024, 4096)

GROUP_SIZES = {"int4": 128, "int8": -1, "nf4": 64, "mxfp4": 32}
"""Format -> the rows of w per scale that it is measured with."""

METHOD = (
    "random weights and x; each token has different experts. even: experts in turns; skewed: drawn with chances "
    "r ** -skew for the expert of rank r, always the same. w13: gate and up of all rows sorted by expert; w2: down; "
    "layer: M tokens in and out. Ours sorts the choices in the layer, the others are given them sorted. Before its "
    "timing each result is compared with that of the dense values. roofline: the longer of bytes (experts that have "
    "rows, x, y) and operations at the GPU's rates, plus a launch for each product. Weights rotate beyond the L2 "
    "cache. Providers take turns. Times are medians "
)
GRAPHS = "of replays of CUDA graphs; where captured is False, of single calls, the host's time included."
CALLS = "of single calls."


def measure(
    shapes: Sequence[str],
    out: Path,
    batch: Sequence[int] = BATCH,
    providers: str | Sequence[str] = "all",
    measures: Sequence[str] = MEASURES,
    routings: Sequence[str] = ROUTINGS,
    *,
    skew: float = SKEW,
    format: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    budget_ms: float = 50.0,
    time_budget_s: float = math.inf,
    facts: Mapping[str, str] | None = None,
    progress: bool = True,
) -> Measured:
    """Measures mixtures of experts, and writes out/results.csv after each cell; rows that are there already are not
    measured again.

    shapes: names of shapes.MIXTURES. batch: tokens. providers: some of `EXPERTS_PROVIDERS`, or "all" for those that run
    here. measures, routings: some of `MEASURES` and `ROUTINGS`. skew: of skewed routing. format: one of `GROUP_SIZES`;
    None: each model's own. Other arguments as `measure` of models has them.

    Raises ValueError naming the argument; for a file of another machine, too. Raises RuntimeError without a GPU.
    """
    where = require_gpu("experts") if device is None else default_device(device)
    for argument, names, known in (
        ("shapes", shapes, MIXTURES),
        ("measures", measures, MEASURES),
        ("routings", routings, ROUTINGS),
        ("format", [] if format is None else [format], GROUP_SIZES),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{argument}: expected some of {', '.join(known)}, got {name!r}")
    if not batch or min(batch) < 1:
        raise ValueError(f"batch: expected integers from 1 on, got {list(batch)}")
    for argument, value in (("skew", skew), ("budget_ms", budget_ms), ("time_budget_s", time_budget_s)):
        if not value > 0:
            raise ValueError(f"{argument}: expected a positive number, got {value!r}")
    if where.type == "cuda" and dtype == torch.float32:
        raise ValueError("dtype: expected torch.float16 or torch.bfloat16 on a GPU, got torch.float32")
    formats = {name: format or MIXTURES[name].format for name in shapes}
    for name in shapes:
        _check_groups(name, formats[name])
    reasons = {name: one.unavailable(where, dtype) for name, one in EXPERTS_PROVIDERS.items()}
    chosen = {one.label(where, dtype): one for one in map(EXPERTS_PROVIDERS.__getitem__, choose(providers, reasons))}
    for name, reason in reasons.items():
        if providers == "all" and reason is not None:
            print(f"experts: {name} is left out: {reason}", file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    limits = ceilings(where)
    here = machine_facts(where) | {"method": METHOD + (GRAPHS if where.type == "cuda" else CALLS), **(facts or {})}
    if limits is not None:
        here |= {"roofline": describe(limits), "GPU before": str(gpu_state(where))}
    kept = KeptRows(out / ROWS, "experts", COLUMNS, here)
    todo = {
        name: kept.left(
            Cell(
                name,
                formats[name],
                GROUP_SIZES[formats[name]],
                dtype_name(dtype),
                routing,
                skew if routing == "skewed" else 0.0,
                one,
                m,
                label,
            )
            for routing in routings
            for one in measures
            for m in batch
            for label in chosen
        )
        for name in shapes
    }
    deadline = time.monotonic() + time_budget_s
    total = sum(map(len, todo.values()))
    with tqdm(total=total, disable=not progress, unit="row") as bar:
        for cells in todo.values():
            if cells and time.monotonic() <= deadline:
                _measure_model(cells, chosen, dtype, where, budget_ms, deadline, kept, bar)
    return Measured(kept.results(), kept.failed, total - kept.measured)


def _check_groups(model: str, format: str) -> None:
    group_size = GROUP_SIZES[format]
    for product in ("w13", "w2"):
        k, _ = MIXTURES[model].shape(product)
        if group_size != -1 and k % group_size:
            raise ValueError(
                f"format: expected one whose groups divide K = {k} of {model}, got {format}, groups of {group_size}"
            )


def _measure_model(
    cells: Sequence[Cell],
    providers: Mapping[str, ExpertsProvider],
    dtype: torch.dtype,
    device: torch.device,
    budget_ms: float,
    deadline: float,
    kept: KeptRows,
    bar: tqdm,
) -> None:
    bar.set_postfix_str(f"{cells[0].model}: weights")
    free_unused()
    used = {label: one for label, one in providers.items() if any(cell.provider == label for cell in cells)}
    try:
        mixture = Mixture(cells, used, dtype, device, ceilings(device), budget_ms)
    except Exception as error:  # memory
        for cell in cells:
            kept.add(cell, [{"note": note_of(error)}])
            bar.update()
        return
    for (routing, one, m), group in itertools.groupby(cells, key=lambda cell: (cell.routing, cell.measure, cell.m)):
        if time.monotonic() > deadline:
            return
        bar.set_postfix_str(f"{cells[0].model} {one} M = {m}, {routing}")
        side_by_side = list(group)
        try:
            rows = mixture.rows(side_by_side)
        except Exception as error:
            rows = [error] * len(side_by_side)
        for cell, row in zip(side_by_side, rows, strict=True):
            kept.add(cell, [{"note": note_of(row)} if isinstance(row, Exception) else row])
            bar.update()
