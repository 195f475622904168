"""The plan of a layer of experts on Hopper.

Few choices of tokens are three launches: the first product's kernel sorts them and gates its result, the second's
sorts them again while the first one ends, and a small kernel adds the results of each token. More choices are
five: they are sorted and their rows of x gathered in front. With x in E4M3 there are six: what is between the products
is rounded to E4M3.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import invariance
from ..device import device_arch, sm_count
from ..gate import Gate
from ..grouped import Product
from ..heuristics import KernelConfig, Problem
from ..heuristics.families.grouped_decode_sm90 import GATED_COLUMNS
from ..heuristics.grouped import select_layer
from ..heuristics.legal import has_kernels
from ..kernels import FLOAT_TYPES, is_compiled, runs_on
from ..ops.around_experts import MAX_CHOICES, add_choices, is_rows, route
from ..ops.quantize_activations import quantize_rows
from ..plain import are_plain
from . import cache
from .choose import problem_of, types_of
from .grouped import launches_of
from .kernel import _current_stream


def layer(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first: Product,
    gate: Gate,
    second: Product,
    x_scales: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """y [M, H] of rows x [M, H], as `fused_experts` has it; None where no such plan computes it.

    ids, weights: [M, top_k]. x_scales: fp32 [M], for an x in E4M3, which is given `in_pairs`. All are on one GPU of
    compute capability 9.0, and no gradient is asked for.
    """
    invariant = invariance._on
    if not 1 <= ids.numel() <= MAX_CHOICES or not is_rows(x) or not are_plain(x, ids, weights, x_scales):
        return None
    try:
        if not (first.holds() and second.holds()):
            return None
        dtype = x.dtype if x_scales is None else None
        key = (ids.shape, ids.dtype, x.shape, dtype, x.get_device(), gate.key, first.kind, second.kind, invariant)
    except TypeError:  # the checks of the products say what is wrong
        return None
    plan = cache.layers.get(key)
    if plan is None:
        if len(cache.layers) >= cache.MAX_PLANS:
            cache.layers.clear()
        plan = cache.layers[key] = _make(x, dtype, ids, first, gate, second, invariant) or NO_LAYER
    return plan.run(x, ids, weights, first, second, x_scales) if isinstance(plan, LayerPlan) else None


NO_LAYER = object()
"""The plan of a layer that is computed in other ways."""


def _make(
    x: torch.Tensor,
    x_dtype: torch.dtype | None,
    ids: torch.Tensor,
    first: Product,
    gate: Gate,
    second: Product,
    invariant: bool,
) -> LayerPlan | None:
    """x_dtype: None: x is in E4M3."""
    device, dtype = x.get_device(), x_dtype or first.operand.dtype
    arch = device_arch(device)
    experts, inner = first.operand.experts or 0, second.operand.k
    fits = (
        dtype in FLOAT_TYPES
        and first.operand.k == (x.shape[1] if x_dtype else 2 * x.shape[1])
        and first.operand.n == (2 * inner if gate.has_gate else inner)
        and first.operand.k == second.operand.n
        and inner % GATED_COLUMNS == 0
        and all(
            has_kernels(p.operand.format, p.operand.group_size, arch, p.operand.packed.layout) for p in (first, second)
        )
        and all(p.operand.perm is None and p.operand.dtype == dtype and _in_place(p) for p in (first, second))
    )
    if not fits:
        return None
    problems = [problem_of(ids.numel(), p.operand, arch, sm_count(device), invariant) for p in (first, second)]
    choice = select_layer(problems[0], problems[1], experts, gate.has_gate)
    if choice is None:
        return None
    products = [(problems[0], choice.first), (problems[1], choice.second)]
    if any(not runs_on(c, arch) or not is_compiled(c, types_of(problem, dtype)) for problem, c in products):
        return None
    return LayerPlan(device, dtype, ids, first, gate, second, products, choice.sorts)


def _in_place(product: Product) -> bool:
    """Whether kernels read scales, zeros and bias where they are."""
    w, bias = product.operand, product.bias
    rows = [w.scales] if w.zeros is None else [w.scales, w.zeros]
    if any(not t.is_contiguous() or t.shape[2] != w.packed.n_padded for t in rows):
        return False
    return bias is None or bias.is_contiguous()


class LayerPlan:
    """Holds no address, so that all layers of one kind share it. sorts: see `LayerChoice`."""

    def __init__(
        self,
        device: int,
        dtype: torch.dtype,
        ids: torch.Tensor,
        first: Product,
        gate: Gate,
        second: Product,
        products: list[tuple[Problem, KernelConfig]],
        sorts: bool,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.tokens, self.top_k = ids.shape
        self.experts = first.operand.experts or 0
        self.inner, self.columns = second.operand.k, second.operand.n
        self.sorts = sorts
        choices: dict[str, Any] = {}
        if self.sorts:
            choices = {"top_k": self.top_k, "is_int64": ids.dtype == torch.int64}
        gated = {"is_gated": gate.has_gate, "gate": gate.numbers, "is_in_layer": not self.sorts}
        self._first = self._launches(first, products[0], **gated, **choices)
        self._second = self._launches(second, products[1], is_in_layer=True, **choices)

    def _launches(self, product: Product, chosen: tuple[Problem, KernelConfig], **fields: Any) -> tuple[Any, int]:
        w = product.operand.packed
        plan, codebook = launches_of(w, *chosen, self.dtype, self.device, k=w.k, **fields)
        return plan.launch_choices if self.sorts else plan.launch, codebook

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        first: Product,
        second: Product,
        x_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = self.tokens * self.top_k
        ids = ids.contiguous()
        weights = weights.float().contiguous()
        numbers = torch.empty(rows + (1 if self.sorts else self.experts), dtype=torch.int32, device=x.device)
        places, ends = numbers[:rows], numbers[rows:]  # (T), and the end of all rows, or (E): of each expert
        between, parts, y = (
            torch.empty(m, n, dtype=self.dtype, device=x.device)
            for m, n in ((rows, self.inner), (rows, self.columns), (self.tokens, self.columns))
        )
        row_scales = None if x_scales is None else torch.empty(rows, dtype=torch.float32, device=x.device)
        row_of, end_of = places.data_ptr(), ends.data_ptr()
        of_first: tuple[int, ...] = (end_of,)
        of_second: tuple[int, ...] = (end_of,)
        if self.sorts:
            source, distance = x, x.stride(0) if self.tokens > 1 else self.columns
            of_first, of_second = (ids.data_ptr(), row_of, end_of), (ids.data_ptr(), 0, 0)
        else:
            # The rows of x lie where the result will: the second product writes no row before all of the first are.
            source, distance = parts, self.columns
            route(x, ids, parts, ends, places, None if x_scales is None else x_scales.contiguous(), row_scales)
        stream = _current_stream(self.device)
        self._launch(self._first, first, source, distance, row_scales, between, of_first, stream)
        if row_scales is not None:
            between, row_scales = quantize_rows(between, ends[-1:])
        self._launch(self._second, second, between, self.inner, row_scales, parts, of_second, stream)
        add_choices(parts, weights, places, ends[-1:], y)
        return y

    def _launch(
        self,
        launch: tuple[Any, int],
        product: Product,
        source: torch.Tensor,
        distance: int,
        x_scales: torch.Tensor | None,
        target: torch.Tensor,
        rows: tuple[int, ...],
        stream: int,
    ) -> None:
        enqueue, codebook = launch
        weight, scales, zeros, bias = product.addresses
        enqueue(
            source.data_ptr(),
            weight,
            scales,
            zeros or codebook,
            bias,
            target.data_ptr(),
            *rows,
            distance,
            target.shape[1],
            stream,
            *(() if self.sorts else (0 if x_scales is None else x_scales.data_ptr(),)),
        )
