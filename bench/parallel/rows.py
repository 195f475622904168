"""The rows of a piece: what its ranks compute compared with one rank, and what it takes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from weightonly.nn.summary import module_bytes
from weightonly.parallel.sums import SharedSums, shared_of

from ..model.providers import ModelProvider
from ..roofline import Ceilings, activation_bytes, least_us
from ..shapes import MODELS, MixtureModelSizes
from ..timing import Call, CallTimer, captured, copies_beyond_l2, overlapping, time_in_rounds
from .experts import ExpertsPiece
from .pieces import (
    LINEARS,
    ROWWISE,
    Piece,
    all_reduce,
    names_of,
    only_nccl,
    own_input,
    own_output,
    shape_of,
    shared_sums,
)
from .ranks import Ranks

METHOD = (
    "random weights, x random. A layer is its four linears one after another, without attention and norms; what it "
    "computes is compared with one rank before its timing. product: what a rank multiplies, without all-reduces; sums: "
    "the all-reduces alone; us: both, as the layers run them; nccl_sums, nccl: the same with all sums by NCCL; "
    "shared: the sums alone, over memory that GPUs share. Of all ranks the slowest counts. Weights rotate "
    "beyond the L2 cache. Launches of a layer overlap, launches of single linears do not. experts: those of a decoder "
    "layer, chosen evenly, of which a rank has some and computes them for all tokens. decode: a step of transformers' "
    "LlamaForCausalLM as `bench model` measures it, its decoder layers cut, embeddings and output embeddings dense and "
    "on every rank. "
)
GRAPHS = "Times are medians of replays of CUDA graphs."
CALLS = "Times are medians of single calls."

SUMS = ["sums_us", "nccl_sums_us", "shared_us"]
TIMES = ["product_us", "product_us_min", *SUMS, "us", "nccl_us", "roofline_us", "tokens_s"]
ERRORS = ["eager_error_percent", "graph_error_percent", "compiled_error_percent"]
"""Greatest ||y - y of one rank|| / ||y of one rank|| of all ranks."""

_MOST_PERCENT = 2.0  # roundings to 16 bits stay below 1, a wrong part of a weight is near 100


Way = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Cell:
    """What tells rows apart.

    compiled: whether the ranks are compared with one rank
    under torch.compile, too; of a decode step, whether it is compiled. layers, context: of a decode step; 0 of pieces.
    """

    model: str
    provider: str  # a label
    dtype: str
    ranks: int
    piece: str  # a linear, LAYER, or STEP
    m: int
    compiled: bool
    layers: int = 0
    context: int = 0

    def __str__(self) -> str:
        return f"{self.model} {self.provider} {self.piece} M = {self.m}, {self.ranks} ranks"


KEY = [field.name for field in fields(Cell)]


class PieceRows:
    """A piece on this rank, with copies of its weights beyond the L2 cache."""

    def __init__(
        self,
        model: str,
        name: str,
        provider: ModelProvider,
        max_m: int,
        dtype: torch.dtype,
        ranks: Ranks,
        limits: Ceilings | None,
        budget_ms: float,
    ) -> None:
        """max_m: the most rows of x that will be asked for. limits: of the roofline; None for a CPU."""
        self.ranks, self.limits, self.budget_ms = ranks, limits, budget_ms
        self.sizes, self.name, self.dtype = MODELS[model], name, dtype
        device, count = ranks.device, ranks.count
        whole: Piece
        if isinstance(self.sizes, MixtureModelSizes):
            whole = ExpertsPiece(self.sizes, max_m, dtype, device)
        else:
            whole = Piece(self.sizes, name, dtype, device)
        provider.quantize(whole)
        generator = torch.Generator(device).manual_seed(0)
        k = shape_of(self.sizes, names_of(name)[0])[0]
        x = torch.randn(max_m, k, generator=generator, device=device, dtype=dtype)  # [max_m, K]
        with torch.no_grad():
            self.expected = own_output(whole(x), self.sizes, name, count, ranks.rank)  # [max_m, N of this rank]
        self.weight_bytes = module_bytes(whole) // count
        copies = int(ranks.most(copies_beyond_l2(self._read_bytes(1), device)))
        pieces = [copy.deepcopy(whole) for _ in range(copies - 1)] + [whole]
        self.pieces = pieces if ranks.mesh is None else [piece.cut(ranks.mesh) for piece in pieces]
        self.shared = self._shared()
        self.x = own_input(x, name, count, ranks.rank)  # [max_m, K of this rank]

    def _shared(self) -> SharedSums | None:
        """That of packed layers, of GPUs that share memory."""
        mesh = self.ranks.mesh
        if mesh is None or not self.pieces[0].rowwise or not self.pieces[0].is_packed:
            return None
        return shared_of(mesh.get_group(), torch.ones(1, 8, device=self.ranks.device, dtype=self.dtype))

    @torch.no_grad()
    def row(self, cell: Cell, backend: str = "inductor") -> dict[str, Any]:
        """Compares a cell and times it. backend: of torch.compile. Raises RuntimeError, on all ranks, for a wrong y."""
        x = self.x[: cell.m]
        errors = self._errors(x, backend if cell.compiled else None)
        return errors | self._times(x) | {"roofline_us": self._roofline_us(cell.m)}

    # --- compared with one rank ------------------------------------------------------------------------------------

    def _errors(self, x: torch.Tensor, backend: str | None) -> dict[str, float]:
        """`ERRORS`; NaN for what is not asked for."""
        piece, device = self.pieces[-1], self.ranks.device
        ways: list[Way | None] = [piece, partial(_replayed, piece, device) if device.type == "cuda" else None, None]
        if backend is not None:
            torch.compiler.reset()
            ways[-1] = torch.compile(piece, dynamic=False, backend=backend)
        named = zip(ERRORS, ways, strict=True)
        return {name: math.nan if way is None else self._error(name, way(x)) for name, way in named}

    def _error(self, name: str, y: torch.Tensor) -> float:
        expected = self.expected[: y.shape[0]].float()
        percent = float(100 * (y.float() - expected).norm() / expected.norm())
        percent = self.ranks.most(percent if math.isfinite(percent) else math.inf)
        if not percent <= _MOST_PERCENT:
            way = name.partition("_")[0]
            raise RuntimeError(f"{way}: error of {percent:.3g}% against one rank, expected at most {_MOST_PERCENT}%")
        return percent

    # --- times -----------------------------------------------------------------------------------------------------

    def _times(self, x: torch.Tensor) -> dict[str, float]:
        count = copies_beyond_l2(self._read_bytes(len(x)), self.ranks.device, x.nbytes)
        pieces = self.pieces[: int(self.ranks.most(count))]
        calls: dict[str, list[Call]] = {"product_us": [partial(piece.products, x) for piece in pieces]}
        mesh, rowwise = self.ranks.mesh, pieces[0].rowwise
        if mesh is not None and rowwise:
            columns = [shape_of(self.sizes, name)[1] for name in rowwise]
            terms = [torch.randn(x.shape[0], n, device=x.device, dtype=x.dtype) for n in columns]  # (M, N) each
            by_nccl: list[Call] = [partial(_by_nccl, partial(all_reduce, mesh, terms))]
            ours: list[Call] = [partial(piece, x) for piece in pieces]
            calls |= {"sums_us": by_nccl, "us": ours}
            if self.shared is not None:
                calls["sums_us"] = [partial(all_reduce, mesh, terms)]
                calls["nccl_sums_us"], calls["nccl_us"] = by_nccl, [partial(_by_nccl, call) for call in ours]
                calls["shared_us"] = [partial(shared_sums, self.shared, terms)]
        timers = [CallTimer(of_one, self.ranks.device, self.ranks.most) for of_one in calls.values()]
        with overlapping(self.name not in LINEARS):
            timings = time_in_rounds(timers, self.budget_ms)
        found = {name: self.ranks.most(timing.us) for name, timing in zip(calls, timings, strict=True)}
        found["product_us_min"] = self.ranks.most(timings[0].min_us)
        return {"us": found["product_us"]} | found

    def _read_bytes(self, m: int) -> int:
        """Of this rank's weights, what m rows read."""
        if not isinstance(self.sizes, MixtureModelSizes):
            return self.weight_bytes
        return self.weight_bytes * min(m * self.sizes.top_k, self.sizes.experts) // self.sizes.experts

    def _roofline_us(self, m: int) -> float:
        """Of the products of a rank; NaN on a CPU."""
        if self.limits is None:
            return math.nan
        shapes = [shape_of(self.sizes, name) for name in names_of(self.name)]
        count, rows, moved = self.ranks.count, m, float(self._read_bytes(m))
        if isinstance(self.sizes, MixtureModelSizes):
            rows *= self.sizes.top_k  # of all experts
        for name, (k, n) in zip(names_of(self.name), shapes, strict=True):
            own = (m, k // count, n) if name in ROWWISE else (m, k, n // count)
            moved += activation_bytes(*(own if rows == m else (rows // count, k, n)), self.dtype)
        operations = 2 * rows * sum(k * n for k, n in shapes) // count
        return least_us(moved, operations, self.limits) + len(shapes) * self.limits.launch_us


def _by_nccl(call: Call) -> None:
    with only_nccl():
        call()


def _replayed(piece: Piece, device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """y of a replay of a CUDA graph; its memory held NaN before it."""
    results: list[torch.Tensor] = []
    replay = captured(lambda: results.append(piece(x)), device)
    results[-1].fill_(torch.nan)
    replay()
    torch.cuda.synchronize(device)
    return results[-1].clone()
