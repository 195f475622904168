"""Target "rows": in the batch-invariant mode a row has the bits that it has alone, wherever and among what it is.

A case is a weight, or a stack of experts, and some rows. Each row is computed alone, then all of them in batches: in
any order and more than once, among rows of NaN, Inf and large numbers, in memory of any form, with any number of
threads.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

import weightonly as wo
from weightonly.heuristics.problem import CODE_FORMATS, FLOAT_FORMATS, FORMAT_GROUPS, FORMATS
from weightonly.plan import cache

from .calls import arranged, packed
from .draw import DTYPES, X_FORMS, Drawer, Weight
from .loop import Outcome, Target

_BATCHES = 8  # of one case
_ROWS = 6  # that are computed alone
_MOST_ROWS = 700
_GATES = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai", wo.Gate("situ", limit=3.0), wo.Gate("silu", limit=2.0))

Product = Callable[[torch.Tensor], torch.Tensor]


class Rows(Target):
    """Products of every kind, format, layout, type, group size and shape."""

    name = "rows"
    covers = "kinds of products"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.drawer = Drawer(device)
        self.has_fp8 = device.type == "cpu"  # GPUs read another layout for it

    def to_cover(self) -> set[str]:
        has_floats = self.device.type == "cpu" or any(config.has_floats for config in self.drawer.configs)
        kinds = ("gemm", "grouped_gemm", "fused_experts", *(("gemm of x in 8 bits",) if self.has_fp8 else ()))
        return {
            f"{kind}, {format}" for kind in kinds for format in FORMATS if has_floats or format not in FLOAT_FORMATS
        }

    def run(self, seed: int, index: int) -> Outcome:
        draw = random.Random(f"{seed}:{index}")
        weight = self.drawer.weight(draw)
        if self.drawer.configs:
            weight = replace(weight, layout=self.drawer.chooses[0])
        kinds = [_gemm, _gemm, _grouped, _fused] + [_gemm_fp8] * self.has_fp8
        outcome, g = Outcome(), torch.Generator().manual_seed(draw.getrandbits(63))
        try:
            with invariant(), torch.no_grad():
                name, k, product = draw.choice(kinds)(draw, weight, g, self.device)
                x = (torch.randn(_ROWS, k, generator=g) * 2.0 ** draw.randint(-2, 2)).to(self.device)
                x = x.to(DTYPES[weight.dtype])
                outcome.covered.add(f"{name}, {weight.format}")
                alone = torch.cat([product(row[None]) for row in x])
                for _ in range(_BATCHES):
                    outcome.calls += 1
                    if (wrong := _batch(draw, product, x, alone, g)) is not None:
                        outcome.failures.append(f"{name}: {wrong}")
        except Exception as error:  # whatever a random call makes the library raise is a finding
            outcome.failures.append(f"{type(error).__name__}: {error}")
            outcome.fatal = "CUDA error" in str(error)
        if outcome.failures:
            outcome.failures.append(str(weight))
        return outcome


@contextlib.contextmanager
def invariant() -> Iterator[None]:
    """The batch-invariant mode; threads as they were afterwards."""
    before, threads = wo.batch_invariant(), torch.get_num_threads()
    wo.set_batch_invariant(True)
    try:
        yield
    finally:
        wo.set_batch_invariant(before)
        torch.set_num_threads(threads)
        if len(cache.plans()) > 1000:
            cache.clear()


def _batch(
    draw: random.Random, product: Product, x: torch.Tensor, alone: torch.Tensor, g: torch.Generator
) -> str | None:
    """What is wrong of one batch that has every row of x; None: nothing."""
    many = draw.randint(_ROWS, _MOST_ROWS) if draw.random() < 0.2 else draw.randint(_ROWS, 40)
    source = torch.cat([torch.randperm(_ROWS, generator=g), torch.randint(_ROWS, (many - _ROWS,), generator=g)])
    source = source[torch.randperm(many, generator=g)].to(x.device)
    batch = x[source]
    kept = torch.rand(many, generator=g) < draw.choice([1.0, 0.9, 0.3])
    if not kept.all():
        largest = torch.finfo(x.dtype).max
        others = (float("nan"), float("inf"), -float("inf"), largest, 0.0)
        columns = torch.ones(x.shape[1], dtype=torch.bool, device=x.device)
        if draw.random() < 0.5:
            columns = torch.arange(x.shape[1], device=x.device) == draw.randrange(x.shape[1])
        is_other = (~kept).to(x.device)[:, None] & columns
        batch = batch.masked_fill(is_other, others[draw.randrange(len(others))])
    if x.device.type == "cpu":
        torch.set_num_threads(draw.choice([1] * 8 + [2, 3]))
    form = draw.choice([form for form in X_FORMS if form not in ("vector", "batched")])
    y = product(arranged(batch, form))
    bits = torch.int32 if y.dtype == torch.float32 else torch.int16
    expected = alone[source]
    is_same = (y.view(bits) == expected.view(bits)) | (y.isnan() & expected.isnan())  # of NaN the sign may differ
    differ = (~is_same).any(1).cpu() & kept
    if not differ.any():
        return None
    places = differ.nonzero().flatten().tolist()
    return f"{len(places)} of {many} rows have other bits than alone, first row {places[0]}, x {form}"


# --- kinds of products: (name, K, the product of rows [M, K]) ---------------------------------------------------------


def _operand(
    weight: Weight, g: torch.Generator, device: torch.device, experts: int | None = None
) -> wo.QuantizedWeight:
    """Random numbers, of which sums round."""
    lead = () if experts is None else (experts,)
    if weight.format in FLOAT_FORMATS:
        q = torch.randint(-15, 16, (*lead, weight.k, weight.n), generator=g).to(torch.int8)
    elif weight.format in CODE_FORMATS:
        q = torch.randint(0, 16, (*lead, weight.k, weight.n), generator=g).to(torch.int8)
    else:
        limit = 1 << (FORMATS[weight.format] - 1)
        q = torch.randint(-limit, limit, (*lead, weight.k, weight.n), generator=g).to(torch.int8)
    table = torch.randn(16, generator=g) if weight.format == "code4" else None
    groups = 1 if weight.group_size == -1 else weight.k // weight.group_size
    dtype = DTYPES[weight.dtype]
    size = 2.0 ** (-9 if FORMATS[weight.format] == 8 else -6)  # sums of sums stay within fp16
    scales = ((torch.rand(*lead, groups, weight.n, generator=g) + 0.5) * size).to(dtype)
    zeros = None
    if weight.zeros != "none":
        zeros = (torch.rand(*lead, groups, weight.n, generator=g) * 8 - 4).to(dtype).to(device)
    perm = torch.randperm(weight.k, generator=g).to(device) if weight.perm and experts is None else None
    return wo.QuantizedWeight(packed(weight, q.to(device), table), scales.to(device), zeros, perm)


def _drawn(
    draw: random.Random, weight: Weight, g: torch.Generator, device: torch.device
) -> tuple[wo.QuantizedWeight, dict[str, object]]:
    bias = torch.randn(weight.n, generator=g).to(DTYPES[weight.dtype]).to(device) if draw.random() < 0.4 else None
    return _operand(weight, g, device), {"bias": bias, "activation": draw.choice([None, "relu", "gelu", "silu"])}


def _gemm(draw: random.Random, weight: Weight, g: torch.Generator, device: torch.device) -> tuple[str, int, Product]:
    w, others = _drawn(draw, weight, g, device)
    return "gemm", weight.k, lambda x: wo.gemm(x, w, **others)  # type: ignore[arg-type]


def _gemm_fp8(
    draw: random.Random, weight: Weight, g: torch.Generator, device: torch.device
) -> tuple[str, int, Product]:
    w, others = _drawn(draw, weight, g, device)

    def product(x: torch.Tensor) -> torch.Tensor:
        x8, x_scales = wo.quantize_activations(x)
        return wo.gemm(x8, w, x_scales=x_scales, **others)  # type: ignore[arg-type]

    return "gemm of x in 8 bits", weight.k, product


def _grouped(draw: random.Random, weight: Weight, g: torch.Generator, device: torch.device) -> tuple[str, int, Product]:
    """All rows are of the last expert but one, behind as many rows of others."""
    experts = draw.randint(2, 4)
    w = _operand(replace(weight, n=min(weight.n, 200)), g, device, experts)

    def product(x: torch.Tensor) -> torch.Tensor:
        m = x.shape[0]
        rows = torch.cat([x.flip(0), x, x[:1]])
        offs = torch.full((experts,), 2 * m, dtype=torch.int32)
        offs[: experts - 2], offs[-1] = m, 2 * m + 1
        if experts == 2:
            rows, offs = rows[m:], offs - m
        return wo.grouped_gemm(rows, w, offs=offs.to(device))[m if experts > 2 else 0 :][:m]

    return "grouped_gemm", weight.k, product


def _fused(draw: random.Random, weight: Weight, g: torch.Generator, device: torch.device) -> tuple[str, int, Product]:
    """Which experts a row goes to, and how much each counts, follow from its first numbers."""
    experts, top_k = 4, draw.randint(1, 3)
    gate = wo.Gate.of(draw.choice(_GATES))
    own = FORMAT_GROUPS.get(weight.format, weight.group_size)
    step = max(own, 64 if device.type == "cuda" else 8)
    inner = step * draw.randint(1, max(1, 256 // step))
    first = replace(weight, n=2 * inner)
    second = replace(weight, n=weight.k, k=inner, group_size=own)
    w13, w2 = (_operand(each, g, device, experts) for each in (first, second))

    def product(x: torch.Tensor) -> torch.Tensor:
        sign = (x[:, :1] > 0).long() + 2 * (x[:, -1:] > 0).long()  # (M, 1), 0 .. 3, of NaN 0
        ids = (sign + torch.arange(top_k, device=x.device)) % experts
        return wo.fused_experts(x, w13, w2, ids, 0.3 * ids + 0.1, gate)

    return "fused_experts", weight.k, product
