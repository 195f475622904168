"""The plan of a layer of experts on Hopper: what it hands to kernels, for which a stand-in computes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.ops.stand_in import SM_COUNT, STREAM, declared

import weightonly as wo
from weightonly.experts import Product
from weightonly.gate import Gate
from weightonly.heuristics import KernelConfig, Problem
from weightonly.heuristics.configs import GROUPED_CONFIGS
from weightonly.heuristics.families.grouped_decode_sm90 import MAX_SORTED_CHOICES
from weightonly.heuristics.grouped import LayerChoice
from weightonly.heuristics.problem import FP8_LAYOUT
from weightonly.ops import around_experts
from weightonly.ops.around_experts import MAX_CHOICES
from weightonly.plan import cache
from weightonly.plan import experts as layer_plans
from weightonly.plan import grouped as grouped_plans

EXPERTS, HIDDEN, INNER, GROUPS = 5, 64, 128, 2


def config_of(family: str) -> KernelConfig:
    return next(c for c in GROUPED_CONFIGS if c.family == family and "int4" in c.formats and not c.groups_of_16)


SORTS, GATES = (config_of(f"grouped_{name}") for name in ("decode_sm90", "sm90"))


def at(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The tensor that is at an address, not copied."""
    count = torch.Size(shape).numel()
    content = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(content, dtype=dtype, count=count).view(shape)


def gated(z: torch.Tensor, numbers: tuple[int, float, float, float], is_gated: bool) -> torch.Tensor:
    """What struct Gate of grouped_params.h says."""
    number, alpha, limit, shift = numbers
    act = [
        lambda v: v,
        torch.relu,
        torch.nn.functional.gelu,
        lambda v: v * torch.sigmoid(alpha * v),
        lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        lambda v: torch.relu(v) ** 2,
        lambda v: alpha * torch.tanh(v / alpha) * torch.sigmoid(v),
    ][number]
    if not is_gated:
        return act(z)
    gate, up = z.chunk(2, dim=1)
    if number == 6:
        return act(gate) * ((up if limit == torch.inf else limit * torch.tanh(up / limit)) + shift)
    return act(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + shift)


class Kernels:
    """Computes what the kernels of a layer do, from what is at the addresses. Memory that they do not write is NaN."""

    def __init__(self, weights: dict[int, torch.Tensor]) -> None:
        self.weights = weights  # address of packed weights -> q [E, K, N]
        self.launches: list[str] = []
        self.sizes: list[dict[str, Any]] = []
        self.experts_of_rows: list[int] = []  # as the kernel in front sorted them
        kernels = self

        class GroupedPlan:
            def __init__(self, **sizes: Any) -> None:
                assert set(sizes) <= set(declared()["GroupedPlan.__init__"])
                self.sizes = sizes
                kernels.sizes.append(sizes)

            def launch_choices(self, *arguments: int) -> None:
                p = dict(zip(declared()["GroupedPlan.launch_choices"], arguments, strict=True))
                kernels.launches.append("sort, multiply")
                rows = kernels.sort(p["ids"], self.sizes["m"], self.sizes["experts"], self.sizes["is_int64"])
                tokens = list(range(len(rows)))
                if p["places"]:
                    assert not self.sizes["is_in_layer"]
                    tokens = [choice // self.sizes["top_k"] for _, choice in rows]
                    kernels.place(rows, at(p["places"], torch.int32, self.sizes["m"]))
                    at(p["rows"], torch.int32, 1)[0] = len(rows)
                else:
                    assert self.sizes["is_in_layer"] and not p["rows"]
                kernels.multiply(self.sizes, p, [e for e, _ in rows], tokens)

            def launch(self, *arguments: int) -> None:
                p = dict(zip(declared()["GroupedPlan.launch"], arguments, strict=True))
                kernels.launches.append("multiply")
                assert self.sizes["is_in_layer"]
                offs = at(p["offs"], torch.int32, self.sizes["experts"])
                experts = torch.arange(len(offs)).repeat_interleave(offs.diff(prepend=offs.new_zeros(1))).tolist()
                kernels.multiply(self.sizes, p, experts, list(range(len(experts))))

        self.GroupedPlan = GroupedPlan

    @staticmethod
    def sort(ids: int, choices: int, experts: int, is_int64: bool) -> list[tuple[int, int]]:
        """Expert and number of each choice of an expert."""
        given = at(ids, torch.int64 if is_int64 else torch.int32, choices).tolist()
        return sorted((e, choice) for choice, e in enumerate(given) if 0 <= e < experts)

    @staticmethod
    def place(rows: list[tuple[int, int]], places: torch.Tensor) -> None:
        here = [choice for _, choice in rows]
        places[here + sorted(set(range(len(places))) - set(here))] = torch.arange(len(places), dtype=torch.int32)

    def multiply(self, sizes: dict[str, Any], p: dict[str, int], experts: list[int], source: list[int]) -> None:
        k, n = sizes["k"], sizes["n"]
        assert p["stream"] == STREAM and sizes["group_size"] * GROUPS == k == sizes["k_padded"]
        is_fp8 = bool(p.get("x_scales"))
        x_dtype = torch.float8_e4m3fn if is_fp8 else torch.float16
        x = at(p["x"], x_dtype, (max(source) + 1) * p["ldx"])[: max(source) * p["ldx"] + k]
        x = x.as_strided((max(source) + 1, k), (p["ldx"], 1)).float()[source]
        if is_fp8:
            x *= at(p["x_scales"], torch.float32, sizes["m"])[source, None]
        scales = at(p["scales"], torch.float16, EXPERTS, GROUPS, n).float()
        w = self.weights[p["weight"]]
        if p["zeros"]:
            zeros = at(p["zeros"], torch.float16, EXPERTS, GROUPS, n).float()
            w = w - zeros.repeat_interleave(sizes["group_size"], 1)
        w = w * scales.repeat_interleave(sizes["group_size"], 1)
        z = torch.stack([row @ w[e] for row, e in zip(x, experts, strict=True)])
        if p["bias"]:
            z += at(p["bias"], torch.float16, EXPERTS, n).float()[experts]
        z = gated(z.half().float(), sizes.get("gate", (0, 1.0, torch.inf, 0.0)), sizes.get("is_gated", False)).half()
        y = at(p["y"], torch.float16, sizes["m"], p["ldy"])
        assert y.shape[1] == z.shape[1]
        y[:] = torch.nan
        y[: len(z)] = z

    def route(self, *arguments: int) -> None:
        p = dict(zip(declared()["route"], arguments, strict=True))
        self.launches.append("route")
        rows = self.sort(p["ids"], p["choices"], p["experts"], bool(p["is_int64"]))
        self.place(rows, at(p["places"], torch.int32, p["choices"]))
        counts = torch.bincount(torch.tensor([e for e, _ in rows], dtype=torch.int64), minlength=p["experts"])
        at(p["offs"], torch.int32, p["experts"])[:] = counts.cumsum(0)

    def gather(self, *arguments: int) -> None:
        p = dict(zip(declared()["gather"], arguments, strict=True))
        self.launches.append("gather")
        tokens, top_k, columns = p["tokens"], p["top_k"], p["columns"]
        x = at(p["x"], torch.float16, (tokens - 1) * p["ldx"] + columns).as_strided((tokens, columns), (p["ldx"], 1))
        rows, end = (
            at(p["sorted"], torch.float16, tokens * top_k, columns),
            at(p["offs"], torch.int32, p["experts"])[-1],
        )
        places = at(p["places"], torch.int32, tokens, top_k).long()
        rows[places] = x[:, None].expand(-1, top_k, -1)
        rows[int(end) :] = torch.nan
        assert bool(p["scales"]) == bool(p["sorted_scales"])
        if p["scales"]:
            scales = at(p["sorted_scales"], torch.float32, tokens * top_k)
            scales[places] = at(p["scales"], torch.float32, tokens)[:, None]
            scales[int(end) :] = torch.nan

    def combine(self, *arguments: int) -> None:
        p = dict(zip(declared()["combine"], arguments, strict=True))
        self.launches.append("add")
        tokens, top_k, columns = p["tokens"], p["top_k"], p["columns"]
        end = int(at(p["rows_end"], torch.int32, 1))
        rows = at(p["rows"], torch.float16, tokens * top_k, columns).float()
        places = at(p["places"], torch.int32, tokens, top_k).long()
        weights = at(p["weights"], torch.float32, tokens, top_k) * (places < end)
        rows = torch.where(torch.arange(tokens * top_k)[:, None] < end, rows, 0.0)
        at(p["y"], torch.float16, tokens, columns)[:] = (rows[places] * weights[..., None]).sum(1).half()


Layer = tuple[Product, Product, Kernels]


@pytest.fixture
def chosen() -> list[KernelConfig]:
    """Of the first product and the second one. Where both sort, few choices are sorted by them."""
    return [SORTS, SORTS]


@pytest.fixture
def make(
    chosen: list[KernelConfig], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Layer]]:
    """Products of a layer, for which an H200's kernels stand in."""

    def made(has_gate: bool = True, bias: bool = False, inner: int = INNER, layout: str = "tiled") -> Layer:
        products, packed = [], {}
        for k, n in ((HIDDEN, 2 * inner if has_gate else inner), (inner, HIDDEN)):
            q = torch.randint(-8, 8, (EXPERTS, k, n), generator=generator, dtype=torch.int8)
            scales = torch.full((EXPERTS, GROUPS, n), 2.0**-6).half()
            zeros = torch.randint(-2, 3, (EXPERTS, GROUPS, n), generator=generator).half()
            given = torch.randn(EXPERTS, n, generator=generator).half() if bias else None
            zeros_given = None if layout == FP8_LAYOUT else zeros
            w = wo.QuantizedWeight(wo.preprocess(q, bits=4, layout=layout), scales, zeros_given)
            products.append(Product(w, given))
            packed[w.packed.data.data_ptr()] = q.float()
        kernels = Kernels(packed)

        def select(first: Problem, second: Problem, experts: int, is_gated: bool) -> LayerChoice:
            return LayerChoice(chosen[0], chosen[1], first.m <= MAX_SORTED_CHOICES and chosen == [SORTS, SORTS])

        monkeypatch.setattr(grouped_plans, "_C", kernels)
        monkeypatch.setattr(grouped_plans, "grouped_kernel_numbers", Numbers)
        for name, value in (
            ("select_layer", select),
            ("device_arch", lambda device: 90),
            ("sm_count", lambda device: SM_COUNT),
            ("runs_on", lambda config, arch: True),
            ("is_compiled", lambda config, types: True),
            ("_current_stream", lambda device: STREAM),
        ):
            monkeypatch.setattr(layer_plans, name, value)
        monkeypatch.setattr(around_experts, "_C", kernels)
        monkeypatch.setattr(around_experts, "_current_stream", lambda device: STREAM)
        cache.clear()
        return products[0], products[1], kernels

    yield made
    cache.clear()


class Numbers(dict[str, int]):
    def __missing__(self, name: str) -> int:
        return 0


def choices(
    tokens: int, top_k: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, whose rows have a distance of their own; ids, of which one at least is of an expert; weights."""
    x = torch.randn(tokens, HIDDEN + 8, generator=generator).half()[:, :HIDDEN]
    ids = torch.randint(-1, EXPERTS + 1, (tokens, top_k), generator=generator).to(dtype)
    ids[0, 0] = 0
    return x, ids, torch.rand(tokens, top_k, generator=generator).half()


def of_cpu(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: Layer, gate: Gate) -> torch.Tensor:
    w13, w2 = ((p.operand.packed, p.operand.scales, p.operand.zeros, p.bias) for p in layer[:2])
    return wo.fused_experts(x, w13, w2, ids, weights, gate)


THREE, FIVE = ["sort, multiply", "sort, multiply", "add"], ["route", "gather", "multiply", "multiply", "add"]
GATES_OF_LAYERS = [
    Gate("silu"),
    Gate.of("swigluoai"),
    Gate("situ", alpha=3.0, limit=2.0),
    Gate("relu2", has_gate=False),
]


@pytest.mark.parametrize("gate", GATES_OF_LAYERS, ids=["silu", "swigluoai", "situ", "relu2 alone"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "top_k", "launches"),
    [(1, 2, THREE), (3, 1, THREE), (16, 8, THREE), (17, 8, FIVE), (129, 1, FIVE)],
    ids=["1 x 2", "3 x 1", "16 x 8", "17 x 8", "129 x 1"],
)
def test_a_layer_gives_what_the_cpu_gives(
    tokens: int,
    top_k: int,
    launches: list[str],
    dtype: torch.dtype,
    gate: Gate,
    make: Callable[..., Layer],
    generator: torch.Generator,
) -> None:
    first, second, kernels = layer = make(gate.has_gate, bias=tokens > 1)
    x, ids, weights = choices(tokens, top_k, dtype, generator)
    wanted = of_cpu(x, ids, weights, layer, gate)
    for _ in range(2):  # the second time by the plan that is kept
        y = layer_plans.layer(x, ids, weights, first, gate, second)
        assert y is not None
        torch.testing.assert_close(y, wanted, rtol=1e-2, atol=1e-2)
    assert kernels.launches == 2 * launches
    assert [sizes.get("gate") for sizes in kernels.sizes] == [gate.numbers, None], "one plan, the gate in front"


@pytest.mark.parametrize("gate", GATES_OF_LAYERS, ids=["silu", "swigluoai", "situ", "relu2 alone"])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (16, 8), (129, 1)], ids=["1 x 2", "16 x 8", "129 x 1"])
def test_a_layer_of_x_in_e4m3_gives_what_the_cpu_gives(
    tokens: int,
    top_k: int,
    gate: Gate,
    make: Callable[..., Layer],
    chosen: list[KernelConfig],
    generator: torch.Generator,
) -> None:
    chosen[:] = [GATES, GATES]
    first, second, kernels = layer = make(gate.has_gate, bias=tokens > 1, layout=FP8_LAYOUT)
    x, ids, weights = choices(tokens, top_k, torch.int64, generator)
    x8, x_scales = wo.quantize_activations(x)
    w13, w2 = ((p.operand, p.bias) for p in layer[:2])
    wanted = wo.fused_experts(x8, w13, w2, ids, weights, gate, x_scales=x_scales)
    wide = torch.zeros(tokens, HIDDEN + 16, dtype=torch.uint8)
    wide[:, :HIDDEN] = x8.view(torch.uint8)
    for given in (x8, wide.view(x8.dtype)[:, :HIDDEN]):
        y = layer_plans.layer(around_experts.in_pairs(given), ids, weights, first, gate, second, x_scales)
        assert y is not None
        assert (y - wanted).float().norm() <= 5e-2 * wanted.float().norm(), "few numbers between are rounded elsewhere"
    assert kernels.launches == 2 * FIVE
    assert [sizes.get("gate") for sizes in kernels.sizes] == [gate.numbers, None], "one plan, the gate in front"


def test_a_kernel_that_does_not_sort_makes_it_five_launches(
    make: Callable[..., Layer], chosen: list[KernelConfig], generator: torch.Generator
) -> None:
    for chosen[:] in ([GATES, SORTS], [SORTS, GATES], [GATES, GATES]):
        first, second, kernels = layer = make()
        given = choices(4, 2, torch.int64, generator)
        y = layer_plans.layer(*given, first, Gate("silu"), second)
        assert y is not None and kernels.launches == FIVE
        torch.testing.assert_close(y, of_cpu(*given, layer, Gate("silu")), rtol=1e-2, atol=1e-2)


def test_layers_of_one_kind_share_a_plan_and_gates_do_not(
    make: Callable[..., Layer], generator: torch.Generator
) -> None:
    first, second, kernels = layer = make()
    given = choices(4, 2, torch.int64, generator)
    for gate in (Gate("silu"), Gate("silu", limit=0.5), Gate("silu", alpha=2.0), Gate("silu", shift=1.0), Gate("silu")):
        y = layer_plans.layer(*given, first, gate, second)
        assert y is not None
        torch.testing.assert_close(y, of_cpu(*given, layer, gate), rtol=1e-2, atol=1e-2)
    assert len(kernels.sizes) == 2 * 4
    x, ids, weights = given
    y = layer_plans.layer(x, ids.int(), weights, first, gate, second)
    again = layer_plans.layer(*given, first, gate, second)
    assert y is not None and again is not None and torch.equal(y, again)


def test_what_takes_other_launches(
    make: Callable[..., Layer], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, kernels = make()
    x, ids, weights = choices(16, 8, torch.int64, generator)

    def other(product: Product, **operands: Any) -> Product:
        w = product.operand
        given: dict[str, Any] = {"packed": w.packed, "scales": w.scales, "zeros": w.zeros}
        return Product(wo.QuantizedWeight(**given | operands))

    def takes(x: torch.Tensor = x, ids: torch.Tensor = ids, first: Product = first, second: Product = second) -> bool:
        return layer_plans.layer(x, ids, weights[: len(ids)], first, Gate("silu"), second) is not None

    assert takes()
    perm = torch.arange(HIDDEN).repeat(EXPERTS, 1)
    strided = torch.randn(16, 2 * HIDDEN, generator=generator).half()[:, ::2]
    shifted = torch.randn(16 * HIDDEN + 1, generator=generator).half()[1:].view(16, HIDDEN)
    assert not takes(x[:0], ids[:0]), "no choices"
    assert not takes(ids=torch.zeros(1, 1, dtype=torch.int64).expand(MAX_CHOICES + 1, 1)), "more than are sorted"
    assert not takes(first=other(first, perm=perm)), "act-order"
    assert not takes(x=strided) and not takes(x=shifted), "rows that vectors do not read"
    assert not takes(x=x.float()), "dtypes without kernels"
    assert not takes(second=other(second, scales=second.operand.scales.bfloat16(), zeros=None)), (
        "scales of another dtype"
    )
    scales = second.operand.scales
    sparse = scales.repeat_interleave(2, 2)[:, :, ::2]
    between = torch.cat([scales.flatten(), scales.flatten()])[1 : 1 + scales.numel()].view_as(scales)
    assert not takes(second=other(second, scales=sparse))
    assert not takes(second=other(second, scales=between)), "no vector's address"
    assert takes() and len(kernels.launches) == 2 * len(THREE)
    cache.clear()
    monkeypatch.setattr(layer_plans, "select_layer", lambda *arguments: None)
    assert not takes(), "products without kernels of layers"
    assert len(kernels.launches) == 2 * len(THREE)


@pytest.mark.parametrize(
    ("has_gate", "inner", "takes"), [(True, 96, False), (True, 256, True), (False, 96, False), (False, 256, True)]
)
def test_columns_that_kernels_gate(
    has_gate: bool, inner: int, takes: bool, make: Callable[..., Layer], generator: torch.Generator
) -> None:
    """Gates are 64 columns at a time; without any, scales that end within 64 columns would need a copy."""
    first, second, _ = make(has_gate, inner=inner)
    gate = Gate("relu", has_gate=has_gate)
    y = layer_plans.layer(*choices(2, 2, torch.int64, generator), first, gate, second)
    assert (y is not None) == takes


def test_the_rows_of_a_problem_are_choices(
    make: Callable[..., Layer], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = make()
    asked: list[tuple[Problem, Problem, int, bool]] = []
    monkeypatch.setattr(layer_plans, "select_layer", lambda *arguments: asked.append(arguments))
    given = choices(3, 2, torch.int64, generator)
    assert layer_plans.layer(*given, first, Gate("silu"), second) is None
    ((one, other, experts, is_gated),) = asked
    assert (one.m, one.n, one.k, experts, is_gated) == (6, 2 * INNER, HIDDEN, EXPERTS, True)
    assert (other.m, other.n, other.k) == (6, HIDDEN, INNER)
    assert (one.group_size, one.zeros) == (HIDDEN // GROUPS, True)


def test_a_layer_has_a_plan_for_each_mode(
    make: Callable[..., Layer], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, kernels = make()
    given = choices(4, 2, torch.int64, generator)
    seen: list[Problem] = []
    chosen_by = layer_plans.select_layer

    def select(*arguments: Any) -> LayerChoice | None:
        seen.extend(arguments[:2])
        return chosen_by(*arguments)

    monkeypatch.setattr(layer_plans, "select_layer", select)
    for on in (False, True, True):
        wo.set_batch_invariant(on)
        assert layer_plans.layer(*given, first, Gate("silu"), second) is not None
    wo.set_batch_invariant(False)
    assert [p.invariant for p in seen] == [False, False, True, True]
    assert len(kernels.sizes) == 4


class OnGpu(torch.Tensor):
    is_cuda = True


def test_rows_that_kernels_do_not_read_are_copied_in_the_invariant_mode() -> None:
    x = torch.randn(3, 20).half().as_subclass(OnGpu)[:, :16]
    ids = torch.zeros(3, 2, dtype=torch.int64)
    assert around_experts.invariant_rows(x, ids) is x
    wo.set_batch_invariant(True)
    try:
        copy = around_experts.invariant_rows(x, ids)
        assert around_experts.is_rows(copy) and torch.equal(copy, x)
        assert around_experts.invariant_rows(copy, ids) is copy
        many = ids[:1, :1].expand(MAX_CHOICES + 1, 1)
        with pytest.raises(ValueError, match=rf"^topk_ids: expected at most {MAX_CHOICES} choices in the batch-inv"):
            around_experts.invariant_rows(x, many)
    finally:
        wo.set_batch_invariant(False)
