"""The plan of a layer of experts for few tokens: three launches.

1. The first grouped product sorts the choices of tokens, gathers their rows of x, and gates its result.
2. The second one reads the rows where the first has put them.
3. A small kernel adds the results of each token.

Taken once a GPU has passed the tests of it: `lists_verified` of the kernel's family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..activations import activation_of
from ..codebooks import codebook_on
from ..device import device_arch, sm_count
from ..heuristics import KernelConfig, Problem
from ..heuristics.families import FAMILIES
from ..heuristics.families.grouped_decode_sm90 import GATED_COLUMNS, MAX_SORTED_CHOICES
from ..heuristics.grouped import select_grouped
from ..heuristics.machine import resident_clusters
from ..kernels import _C, FLOAT_TYPES, grouped_kernel_numbers, is_compiled, runs_on
from ..plain import are_plain
from . import cache
from .grouped import types_of
from .kernel import _current_stream

if TYPE_CHECKING:
    from ..experts import Gate, Product

_VECTOR_BYTES = 16
_LIST_HEAD, _LIST_ENTRY = 2, 2  # int32 of RowTileCounts and RowTile (cutlass_ext/grouped_params.h)


def decode_layer(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: Product, gate: Gate, second: Product
) -> torch.Tensor | None:
    """y [M, H] of rows x [M, H], as `fused_experts` has it; None where it takes other launches.

    ids, weights: [M, top_k]. All are on one GPU of compute capability 9.0, and no gradient is asked for.
    """
    choices = ids.numel()
    if not FAMILIES["grouped_decode_sm90"].lists_verified or not 1 <= choices <= MAX_SORTED_CHOICES:
        return None
    if first.perm is not None or second.perm is not None:
        return None
    key = (ids.shape, ids.dtype, x.shape, x.dtype, x.get_device(), gate.activation, first.kind(), second.kind())
    plan = cache.layers.get(key)
    if plan is None:
        if len(cache.layers) >= cache.MAX_PLANS:
            cache.layers.clear()
        plan = cache.layers[key] = _make(x, ids, first, gate, second) or NO_DECODE
    if not isinstance(plan, DecodeLayer) or x.stride() != (x.shape[1], 1):
        return None
    if not are_plain(*(t for p in (first, second) for t in (p.qweight.data, p.scales, p.zeros, p.bias))):
        return None
    vectors = (x, first.scales, first.zeros, second.scales, second.zeros)
    if any(t is not None and t.data_ptr() % _VECTOR_BYTES for t in vectors):
        return None
    return plan.run(x, ids, weights, first, second)


NO_DECODE = object()
"""The plan of a layer that takes other launches."""


def _make(x: torch.Tensor, ids: torch.Tensor, first: Product, gate: Gate, second: Product) -> DecodeLayer | None:
    device = x.get_device()
    arch = device_arch(device)
    experts, inner = first.qweight.experts or 0, second.qweight.k
    fits = (
        _C is not None
        and x.dtype in FLOAT_TYPES
        and first.qweight.n == 2 * inner
        and inner % GATED_COLUMNS == 0
        and x.shape[1] % 8 == 0
        and all(p.scales.dtype == x.dtype and p.in_place() for p in (first, second))
    )
    if not fits:
        return None
    products = []
    for product in (first, second):
        w = product.qweight
        groups = product.scales.shape[1]
        group_size = w.k // groups if groups > 1 else -1
        problem = Problem(
            ids.numel(), w.n, w.k, w.format, group_size, arch, sm_count(device), w.layout, product.zeros is not None
        )
        config = select_grouped(problem, experts)
        if config is None or not config.rules.lists_rows:
            return None
        if not runs_on(config, arch) or not is_compiled(config, types_of(problem, x.dtype)):
            return None
        products.append((problem, config))
    return DecodeLayer(x, ids, first, gate, second, products)


class DecodeLayer:
    """Holds no address, so that all layers of one kind share it."""

    def __init__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        first: Product,
        gate: Gate,
        second: Product,
        products: list[tuple[Problem, KernelConfig]],
    ) -> None:
        self.device, self.dtype = x.get_device(), x.dtype
        self.tokens, self.top_k = ids.shape
        self.inner, self.columns = second.qweight.k, second.qweight.n
        gated: dict[str, Any] = {
            "is_gated": True,
            "activation": activation_of(gate.activation).number,
            "top_k": self.top_k,
            "is_int64": ids.dtype == torch.int64,
        }
        self._first = self._launches(first, *products[0], **gated)
        self._second = self._launches(second, *products[1])

    def _launches(self, product: Product, problem: Problem, config: KernelConfig, **choices: Any) -> tuple[Any, int]:
        w = product.qweight
        plan = _C.GroupedPlan(
            kernel=grouped_kernel_numbers()[f"{config.kernel}_{types_of(problem, self.dtype).name}"],
            device=self.device,
            experts=w.experts or 0,
            m=problem.m,
            n=w.n,
            k=w.k,
            n_padded=w.n_padded,
            k_padded=w.k_padded,
            group_size=w.k_padded if problem.per_channel else problem.group_size,
            ld_scales=w.n_padded,
            clusters=resident_clusters(problem.sm_count, 1),
            **choices,
        )
        codebook = 0
        if w.code is not None:
            codebook = codebook_on(w.code, torch.device("cuda", self.device), self.dtype).data_ptr()
        return plan.launch_choices, codebook

    def run(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: Product, second: Product
    ) -> torch.Tensor:
        rows = self.tokens * self.top_k
        ids = ids.contiguous()
        weights = weights.float().contiguous()
        entries = torch.empty(_LIST_HEAD + _LIST_ENTRY * rows + rows, dtype=torch.int32, device=x.device)
        list_, places = entries.data_ptr(), entries[_LIST_HEAD + _LIST_ENTRY * rows :].data_ptr()
        between = x.new_empty(rows, self.inner)
        parts = x.new_empty(rows, self.columns)
        y = x.new_empty(self.tokens, self.columns)
        stream = _current_stream(self.device)
        for (launch, codebook), product, source, target, chosen in (
            (self._first, first, x, between, ids.data_ptr()),
            (self._second, second, between, parts, 0),
        ):
            launch(
                source.data_ptr(),
                product.qweight.data.data_ptr(),
                product.scales.data_ptr(),
                codebook if product.zeros is None else product.zeros.data_ptr(),
                0 if product.bias is None else product.bias.data_ptr(),
                target.data_ptr(),
                chosen,
                list_,
                places,
                source.shape[1],
                target.shape[1],
                stream,
            )
        # Rows of no expert come last. The number of the others is the second of the list, as if it ended one expert.
        ends = list_ + 4
        _C.combine(
            self.device,
            FLOAT_TYPES[self.dtype],
            self.tokens,
            self.top_k,
            1,
            self.columns,
            parts.data_ptr(),
            weights.data_ptr(),
            places,
            ends,
            y.data_ptr(),
            stream,
        )
        return y
