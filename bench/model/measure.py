"""`measure`: whole models, within a time budget. Rows are written as they come, and a later run does what is left."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from weightonly.device import gpu_state

from ..devices import default_device, require_gpu
from ..kept import ROWS, KeptRows, Measured, note_of, require_packages
from ..providers import choose
from ..report.facts import machine_facts
from ..roofline import ceilings, describe
from ..shapes import LLAMAS
from ..weights import dtype_name
from .build import build
from .cells import KEY, MEASURES, Cell, Sizes, cells_of
from .providers import MODEL_PROVIDERS, ModelProvider
from .rows import ModelRows, free_unused, method

COLUMNS = [*KEY, "overlap", "ms", "ms_min", "tokens_s", "linears_ms", "head_ms", "roofline_ms", "same_tokens"]
COLUMNS += ["weights_mb", "peak_mb", "load_s", "ready_s", "note"]


def measure(
    shapes: Sequence[str],
    out: Path,
    sizes: Sizes,
    providers: str | Sequence[str] = "all",
    measures: Sequence[str] | None = None,
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    compile: bool | None = None,
    budget_ms: float = 300.0,
    time_budget_s: float = math.inf,
    facts: Mapping[str, str] | None = None,
    progress: bool = True,
) -> Measured:
    """Measures models, and writes out/results.csv after each row; rows that are there already are not measured again.

    shapes: names of shapes.LLAMAS. providers: names of `MODEL_PROVIDERS`, or "all" for those that run here. measures:
    some of `MEASURES`; None: all, on a CPU all but overlap. device: None: the GPU; a CPU is measured where it is named.
    layers: of each model; None: all that it has. dtype: of activations and dense weights. compile: the decode step;
    None: on a GPU. budget_ms: device time of a measurement. time_budget_s: no row is begun after so many seconds.
    facts: more of them for the file. A row without times says why in `note`. What failed is tried again by the next
    run; what did not fit in memory is not.

    Raises ValueError naming the argument; for a file of another machine, too. Raises RuntimeError without a GPU. Raises
    ImportError without transformers, and, for `train`, without PEFT.
    """
    where = require_gpu("model") if device is None else default_device(device)
    measures = _measures(measures, where)
    for name in shapes:
        if name not in LLAMAS:
            raise ValueError(f"shapes: expected models, some of {', '.join(LLAMAS)}, got {name!r}")
    for argument, value in (("layers", layers), ("budget_ms", budget_ms), ("time_budget_s", time_budget_s)):
        if value is not None and not value > 0:
            raise ValueError(f"{argument}: expected a positive number, got {value!r}")
    if where.type == "cuda" and dtype == torch.float32:
        raise ValueError("dtype: expected torch.float16 or torch.bfloat16 on a GPU, got torch.float32")
    require_packages("model", "transformers", *(["peft"] if "train" in measures else []))
    reasons = {name: one.unavailable(where, dtype) for name, one in MODEL_PROVIDERS.items()}
    chosen = [MODEL_PROVIDERS[name] for name in choose(providers, reasons)]
    for name, reason in reasons.items():
        if providers == "all" and reason is not None:
            print(f"model: {name} is left out: {reason}", file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    compile = where.type == "cuda" if compile is None else compile
    session = _Session(out / ROWS, where, dtype, compile, budget_ms, facts or {})
    todo = [
        (provider, session.left(model, layers or LLAMAS[model].layers, provider, measures, sizes))
        for model in shapes
        for provider in chosen
    ]
    deadline = time.monotonic() + time_budget_s
    with tqdm(total=sum(len(cells) for _, cells in todo), disable=not progress, unit="cell") as bar:
        for provider, cells in todo:
            session.run(provider, cells, deadline, bar)
    kept = session.kept
    return Measured(kept.results(), kept.failed, sum(len(cells) for _, cells in todo) - kept.measured)


class _Session:
    """A file of rows, and the model whose rows are being added."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
        compile: bool,
        budget_ms: float,
        facts: Mapping[str, str],
    ) -> None:
        self.device, self.dtype = device, dtype
        self.compile, self.budget_ms = compile, budget_ms
        self.limits = ceilings(device)
        here = machine_facts(device) | {"method": method(device), **facts}
        if self.limits is not None:
            here |= {"roofline": describe(self.limits), "GPU before": str(gpu_state(device))}
        self.kept = KeptRows(path, "model", COLUMNS, here)

    def left(
        self, model: str, layers: int, provider: ModelProvider, measures: Sequence[str], sizes: Sizes
    ) -> list[Cell]:
        """What of a provider has no row yet, or one that failed."""
        label = provider.label(self.device, self.dtype)
        cells = cells_of(model, layers, provider, label, dtype_name(self.dtype), self.compile, measures, sizes)
        return self.kept.left(cells)

    def run(self, provider: ModelProvider, cells: Sequence[Cell], deadline: float, bar: tqdm) -> None:
        """Measures cells of one model and provider, until the deadline."""
        if not cells or time.monotonic() > deadline:
            return
        bar.set_postfix_str(f"{cells[0].model} {cells[0].provider}: weights")
        free_unused()
        try:
            built = build(
                LLAMAS[cells[0].model], cells[0].layers, provider, self.dtype, self.device, progress=not bar.disable
            )
        except Exception as error:
            for cell in cells:
                self.kept.add(cell, [{"note": note_of(error)}])
                bar.update()
            return
        measured = ModelRows(built, self.device, self.limits, self.budget_ms)
        for cell in cells:
            if time.monotonic() > deadline:
                return
            bar.set_postfix_str(f"{cell.model} {cell.provider}: {cell.measure} {cell.batch} x {cell.tokens}")
            try:
                rows = measured.rows(cell)
            except Exception as error:  # a package of others, or memory; the rows that follow may still run
                rows = [{"note": note_of(error)}]
            self.kept.add(cell, rows)
            bar.update()
        del measured, built


def _measures(measures: Sequence[str] | None, device: torch.device) -> list[str]:
    """Those to measure. Raises ValueError for unknown ones, and for overlap on a CPU."""
    on_gpu = device.type == "cuda"
    if measures is None:
        return [name for name in MEASURES if on_gpu or name != "overlap"]
    for name in measures:
        if name not in MEASURES:
            raise ValueError(f"measures: expected some of {', '.join(MEASURES)}, got {name!r}")
    if not on_gpu and "overlap" in measures:
        raise ValueError(f"measures: overlap is that of launches on a GPU, got device {device}")
    if not measures:
        raise ValueError(f"measures: expected some of {', '.join(MEASURES)}, got none")
    return list(measures)
