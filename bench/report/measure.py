"""`measure`: sweeps of whole models, several times, with the facts of the machine."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from weightonly.device import gpu_state
from weightonly.heuristics.problem import FORMATS

from ..devices import default_device
from ..roofline import ceilings, describe
from ..sweep import BATCH, sweep
from .facts import machine_facts
from .results import Results

MODELS = ("llama3-8b", "llama3-70b")
REPORT_BATCH = (*BATCH, 2 * BATCH[-1])

GROUP_SIZES = {"int4": 128, "int8": -1, "nf4": 64}
"""Format -> the group size that it is reported with; for others: `sweep --csv`, then `report --from`."""

_METHOD_CUDA = (
    "Each time is a median over replays of one CUDA graph, between CUDA events. The graph is a chain of calls, each on "
    "its own copy of the weights, so many that three times the L2 cache passes before a copy is used again. Providers "
    "alternate, three rounds for a shape and M: after a rest of 20 ms, or, with calls above 400 us, after 60 ms of the "
    "same calls, which lower the clocks, and after one eager call. Calls do not overlap. x and w are random. Each "
    "provider's product is compared with the dense one first."
)
_METHOD_CPU = (
    "Each time is a median of single calls on random data, after each product was compared with the dense one."
)


def measure(
    models: Sequence[str] = MODELS,
    batch: Sequence[int] = REPORT_BATCH,
    formats: Sequence[str] = ("int4",),
    providers: str | Sequence[str] = "all",
    *,
    runs: int = 3,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str | None = None,
    budget_ms: float = 15.0,
    progress: bool = True,
) -> Results:
    """`sweep` of the models' shapes for each format, `runs` times, with the facts of the machine.

    models: names of shapes.NAMED, or "KxN". formats: keys of `GROUP_SIZES`. Other arguments as `sweep`.
    Raises ValueError naming the argument.
    """
    if runs < 1:
        raise ValueError(f"runs: expected at least 1, got {runs}")
    for format in formats:
        if format not in GROUP_SIZES:
            raise ValueError(f"formats: expected some of {', '.join(GROUP_SIZES)}, got {format!r}")
    where = default_device(device)
    on_gpu = where.type == "cuda"
    facts = machine_facts(where) | {"method": _METHOD_CUDA if on_gpu else _METHOD_CPU}
    limits = ceilings(where)
    if limits is not None:
        facts |= {"roofline": describe(limits), "GPU before": str(gpu_state(where))}
    frames = []
    for _ in range(runs):
        for format in formats:
            frames.append(
                sweep(
                    models,
                    batch,
                    providers,
                    bits=FORMATS[format],
                    format=format,
                    group_size=GROUP_SIZES[format],
                    dtype=dtype,
                    device=where,
                    budget_ms=budget_ms,
                    progress=progress,
                )
            )
    if on_gpu:
        facts["GPU after"] = str(gpu_state(where))
    return Results(pd.concat(frames, ignore_index=True), facts)
