"""A mixture in memory: its weights in the form of each provider, and the rows of its cells."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from weightonly.heuristics.problem import FORMATS

from ..kept import DoesNotFit
from ..model.build import free_memory
from ..roofline import Ceilings, roofline_us
from ..runner import Rows
from ..shapes import MIXTURES
from ..timing import Call, CallTimer, Timing, copies_beyond_l2, overlapping, time_eager, time_in_rounds
from .providers import ExpertsProvider
from .routing import Routing, topk_ids
from .weights import PRODUCTS, ExpertWeights, combined, gated

LAYER = "layer"
MEASURES = (*PRODUCTS, LAYER)

TIMES = ["us", "us_min", "us_p10", "us_p90", "roofline_us", "with_rows", "most_rows", "captured"]

# ||y - dense product|| / ||dense product||: 16-bit rounding stays below 1e-2, a wrong expert is near 1.
_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Cell:
    """What tells rows apart. m: tokens. measure: a product, or the whole layer."""

    model: str
    format: str
    group_size: int
    dtype: str
    routing: str
    skew: float  # 0 for even routing
    measure: str
    m: int
    provider: str  # a label

    def __str__(self) -> str:
        return f"{self.model} {self.provider} {self.measure} M = {self.m}, {self.routing}"


KEY = [field.name for field in fields(Cell)]


class Mixture:
    """The weights of a model's experts, and of each provider as many copies as all cells need.

    cells: all that will be measured; they are of one model and format.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        providers: Mapping[str, ExpertsProvider],
        dtype: torch.dtype,
        device: torch.device,
        limits: Ceilings | None,
        budget_ms: float,
    ) -> None:
        """providers: by label. What one raises when it packs is raised again for its rows alone."""
        first = cells[0]
        self.sizes, self.providers, self.device = MIXTURES[first.model], providers, device
        self.limits, self.budget_ms, self.group_size, self.format = limits, budget_ms, first.group_size, first.format
        most = max(cell.m for cell in cells)
        generator = torch.Generator(device).manual_seed(0)

        def randn(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)

        self.x = randn(most, self.sizes.hidden)  # [M, H]
        self.between = randn(most * self.sizes.top_k, self.sizes.inner)  # [T, I], by token
        self.ids = {
            name: topk_ids(name, most, self.sizes.experts, self.sizes.top_k, device, skew)
            for name, skew in dict.fromkeys((cell.routing, cell.skew) for cell in cells)
        }
        self.weights: dict[str, ExpertWeights] = {}
        self._operands: dict[tuple[str, str], list[Any] | Exception] = {}
        fewest = {cell.routing: min(one.m for one in cells if one.routing == cell.routing) for cell in cells}
        least = min(self._routing(name, m).with_rows for name, m in fewest.items())
        for name in PRODUCTS:
            weights = ExpertWeights.random(self.sizes, name, first.format, first.group_size, dtype, device)
            for provider in providers.values():
                if (provider.holds, name) not in self._operands:
                    try:
                        self._operands[provider.holds, name] = self._copies(provider, weights, least)
                    except Exception as error:
                        self._operands[provider.holds, name] = error.with_traceback(None)  # its frames hold tensors
            weights.q = weights.q[:0]  # packed now
            self.weights[name] = weights

    def _copies(self, provider: ExpertsProvider, weights: ExpertWeights, with_rows: int) -> list[Any]:
        """An operand, and copies of it beyond the L2 cache where so many experts are read. Raises DoesNotFit for those
        beyond the free memory."""
        operand = provider.prepare(weights)
        size_bytes = provider.weight_bytes(operand)
        count = copies_beyond_l2(self._read_bytes(size_bytes, with_rows), self.device)
        needed, free_bytes = (count - 1) * size_bytes, free_memory(self.device)
        if needed > free_bytes:
            raise DoesNotFit(f"{count - 1} copies are {needed / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB are free")
        return [operand, *(copy.deepcopy(operand) for _ in range(count - 1))]

    def _read_bytes(self, size_bytes: int, with_rows: int) -> int:
        return max(1, size_bytes * with_rows // self.sizes.experts)

    def _routing(self, name: str, m: int) -> Routing:
        return Routing.of(self.ids[name][:m], self.sizes.experts)

    # --- rows ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rows(self, cells: Sequence[Cell]) -> list[Rows | Exception]:
        """The rows of cells that differ in their providers alone, timed in turns; or what each raised."""
        cell = cells[0]
        routing = self._routing(cell.routing, cell.m)
        x, expected = self._operands_and_result(cell, routing)
        of_cell = {
            "roofline_us": self._roofline_us(cell, routing),
            "with_rows": routing.with_rows,
            "most_rows": max(routing.counts),
        }
        found: list[dict[str, Any] | Exception] = []
        timers: dict[int, CallTimer] = {}
        for place, one in enumerate(cells):
            try:
                every = self._calls(one, x, routing)
                for call in (every[0], every[-1]):
                    torch.full_like(expected, torch.nan)  # y is likely to get this memory
                    self._check(call(), expected)
                row = of_cell | {"captured": self.device.type == "cuda" and not _waits(every[0])}
                if self.device.type == "cpu" or row["captured"]:
                    timer = CallTimer(every, self.device)
                    with overlapping(False):
                        timer.prepare()
                    timers[place] = timer
                else:
                    row |= _times(time_eager(every[0], self.device, budget_ms=self.budget_ms))
                found.append(row)
            except Exception as error:  # a library of others, or memory; the other providers may still run
                found.append(error)
        if timers:
            with overlapping(False):
                timings = time_in_rounds([*timers.values()], self.budget_ms)
            for place, timing in zip(timers, timings, strict=True):
                timed = found[place]
                assert isinstance(timed, dict)
                timed |= _times(timing)
        return [one if isinstance(one, Exception) else [one] for one in found]

    def _operands_and_result(self, cell: Cell, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        """x of a cell, and what it must give."""
        w13, w2 = (self.weights[name] for name in PRODUCTS)
        rows = self.x[: cell.m][routing.order // self.sizes.top_k]  # [T, H]
        if cell.measure == "w13":
            return rows, w13.expected(rows, routing)
        if cell.measure == "w2":
            rows = self.between[: routing.rows][routing.order]  # [T, I]
            return rows, w2.expected(rows, routing)
        return self.x[: cell.m], combined(w2.expected(gated(w13.expected(rows, routing)), routing), routing)

    def _calls(self, cell: Cell, x: torch.Tensor, routing: Routing) -> Sequence[Callable[[], torch.Tensor]]:
        """One call for each copy that this cell rotates."""
        provider = self.providers[cell.provider]
        names = PRODUCTS if cell.measure == LAYER else (cell.measure,)
        copies = []
        for name in names:
            operands = self._operands[provider.holds, name]
            if isinstance(operands, Exception):
                raise operands.with_traceback(None)
            copies.append(operands)
        read = sum(self._read_bytes(provider.weight_bytes(of_one[0]), routing.with_rows) for of_one in copies)
        count = min(copies_beyond_l2(read, self.device, x.nbytes), *map(len, copies))
        if cell.measure == LAYER:
            return [partial(provider.layer, w13, w2, x, routing) for w13, w2 in zip(*copies, strict=False)][:count]
        return [partial(provider.product, w, x, routing) for w in copies[0][:count]]

    def _check(self, y: torch.Tensor, expected: torch.Tensor) -> None:
        error = float((y.float() - expected.float()).norm() / expected.float().norm())
        if not error <= _TOLERANCE:
            raise RuntimeError(f"relative error {error:.3g} against dense weights, expected at most {_TOLERANCE}")

    def _roofline_us(self, cell: Cell, routing: Routing) -> float:
        """NaN on a CPU."""
        names = PRODUCTS if cell.measure == LAYER else (cell.measure,)
        is_layer = cell.measure == LAYER  # which reads x and writes y once for each token
        return math.fsum(
            roofline_us(
                routing.rows,
                *self.sizes.shape(name),
                bits=FORMATS[self.format],
                group_size=self.group_size,
                weights=routing.with_rows,
                x_rows=cell.m if is_layer and name == "w13" else routing.rows,
                y_rows=cell.m if is_layer and name == "w2" else routing.rows,
                limits=self.limits,
            )
            for name in names
        )


def _times(timing: Timing) -> dict[str, float]:
    return {"us": timing.us, "us_min": timing.min_us, "us_p10": timing.p10_us, "us_p90": timing.p90_us}


def _waits(call: Call) -> bool:
    """Whether a call, which ran before, makes the host wait for the GPU: no CUDA graph can capture it then."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False
