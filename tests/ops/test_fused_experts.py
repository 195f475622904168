"""fused_experts on the CPU: numbers, experts of other ranks, every check, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.expert_cases import exact_stack, kinds, pack, random_stack
from torch.utils.flop_counter import FlopCounterMode

import weightonly as wo

H, I, E = 128, 64, 6  # noqa: E741 (the names that the docstring has)


def expected(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """[M, H] in the dtype of the weights, term by term."""
    return expected_between(x, w13, w2, ids, weights, lambda z: act(z.chunk(2)[0]) * z.chunk(2)[1])


def expected_between(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    between: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The same with any function of the first product's columns."""
    y = torch.zeros_like(x, dtype=w13.dtype)
    for m, chosen in enumerate(ids.tolist()):
        for j, e in enumerate(chosen):
            if 0 <= e < len(w13):
                y[m] += weights[m, j] * (between(x[m].to(w13.dtype) @ w13[e]) @ w2[e])
    return y


def assert_near(y: torch.Tensor, other: torch.Tensor) -> None:
    """The same sums in fp32, in another order."""
    assert (y - other).norm() <= 1e-5 * other.norm()


def choice(m: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [m, top_k], different experts in a row"""
    return torch.stack([torch.randperm(E, generator=generator)[:top_k] for _ in range(m)])


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_exact(top_k: int, id_dtype: torch.dtype, generator: torch.Generator) -> None:
    """Inputs on a grid: every product and sum is exact in fp32."""
    first, second = exact_stack(E, 64, 2 * I, generator, "int4"), exact_stack(E, I, 64, generator, "int4")
    x = torch.eye(64)[torch.randint(0, 64, (9,), generator=generator)]
    ids = choice(9, top_k, generator)
    weights = torch.exp2(torch.randint(-2, 1, (9, top_k), generator=generator).float())
    w13, w2 = (first.qweight, first.scales, first.zeros), (second.qweight, second.scales, second.zeros)
    y = wo.fused_experts(x, w13, w2, ids.to(id_dtype), weights, "relu")
    exact = expected(x, first.w64, second.w64, ids, weights.double(), torch.relu)
    assert torch.equal(exact, exact.float().double())
    assert torch.equal(y, exact.float())


@kinds
def test_error_beside_dense_experts(format: str, layout: str, generator: torch.Generator) -> None:
    """At most twice the error that dense experts in 16 bits have against fp64."""
    weights, dense = [], []
    for k, n in ((H, 2 * I), (I, H)):
        qweight = pack(random_stack(E, k, n, format, generator), format, layout)
        size = k**-0.5 * (1 / 64 if format == "int8" else 1 if layout == "codes" else 1 / 4)
        scales = (torch.rand(E, k // 32, n, generator=generator) * size + size / 2).bfloat16()
        zeros = torch.randn(E, k // 32, n, generator=generator).bfloat16() if format.startswith("int") else None
        weights.append((qweight, scales, zeros))
        dense.append(wo.dequantize(qweight, scales, zeros))
    x = torch.randn(16, H, generator=generator).bfloat16()
    ids, probabilities = choice(16, 3, generator), torch.rand(16, 3, generator=generator)
    y = wo.fused_experts(x, weights[0], weights[1], ids, probabilities)
    silu = torch.nn.functional.silu
    exact = expected(x, dense[0].double(), dense[1].double(), ids, probabilities.double(), silu)
    peer = expected(x, dense[0], dense[1], ids, probabilities.bfloat16(), silu)
    assert (y.double() - exact).norm() <= 2 * (peer.double() - exact).norm()


def swigluoai(z: torch.Tensor) -> torch.Tensor:
    gate, up = z[: len(z) // 2].clamp(max=7), z[len(z) // 2 :].clamp(-7, 7)
    return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))


def situ(z: torch.Tensor) -> torch.Tensor:
    return 2 * torch.tanh(z[:I] / 2) / (1 + torch.exp(-z[:I])) * 3 * torch.tanh(z[I:] / 3)


@pytest.mark.parametrize(
    ("activation", "has_gate", "between"),
    [
        ("swigluoai", True, swigluoai),
        ("relu2", True, lambda z: z[:I].clamp(min=0) ** 2 * z[I:]),
        (wo.Gate(None, limit=0.5), True, lambda z: z[:I].clamp(max=0.5) * z[I:].clamp(-0.5, 0.5)),
        (wo.Gate("situ", alpha=2, limit=3), True, situ),
        (wo.Gate("relu2", has_gate=False), False, lambda z: z.clamp(min=0) ** 2),
        ("silu", False, lambda z: z / (1 + torch.exp(-z))),
        (None, False, lambda z: z),
    ],
    ids=["swigluoai", "relu2", "a limit", "situ", "relu2 without gate", "silu without gate", "nothing"],
)
def test_gates(
    activation: str | wo.Gate | None,
    has_gate: bool,
    between: Callable[[torch.Tensor], torch.Tensor],
    generator: torch.Generator,
) -> None:
    """In fp32 beside fp64."""
    columns = 2 * I if has_gate else I
    first, second = exact_stack(E, H, columns, generator), exact_stack(E, I, H, generator)
    x, weights = torch.randn(5, H, generator=generator) / 16, torch.rand(5, 2, generator=generator)
    ids = choice(5, 2, generator)
    w13, w2 = (first.qweight, first.scales, first.zeros), (second.qweight, second.scales, second.zeros)
    y = wo.fused_experts(x, w13, w2, ids, weights, activation)
    assert_near(y, expected_between(x, first.w64, second.w64, ids, weights.double(), between))


def test_rows_of_no_expert_are_zeros_and_do_not_leak(good: dict[str, Any]) -> None:
    """Rows that pad a batch may hold anything."""
    whole = wo.fused_experts(**good)
    x, ids = good["x"].clone(), good["topk_ids"].clone()
    x[1], x[3], ids[1], ids[3] = torch.nan, torch.inf, -1, E
    y = wo.fused_experts(**good | {"x": x, "topk_ids": ids})
    assert not y[[1, 3]].any()
    assert_near(y[[0, 2, 4]], whole[[0, 2, 4]])


@pytest.fixture
def good(generator: torch.Generator) -> dict[str, Any]:
    first, second = exact_stack(E, H, 2 * I, generator), exact_stack(E, I, H, generator)
    return {
        "x": torch.randn(5, H, generator=generator),
        "w13": (first.qweight, first.scales, first.zeros),
        "w2": (second.qweight, second.scales, second.zeros),
        "topk_ids": choice(5, 2, generator),
        "topk_weights": torch.rand(5, 2, generator=generator),
    }


def test_experts_of_other_ranks_are_skipped(good: dict[str, Any]) -> None:
    ids, weights = good["topk_ids"].clone(), good["topk_weights"].clone()
    ids[0, 0], ids[1, 1], ids[2] = -1, E, torch.tensor([E, -1])
    weights[2] = torch.nan  # no part of the sum
    y = wo.fused_experts(**good | {"topk_ids": ids, "topk_weights": weights})
    for row, kept in ((0, 1), (1, 0)):
        one = {"x": good["x"][row, None], "topk_ids": ids[row, None, kept, None]}
        alone = wo.fused_experts(**good | one | {"topk_weights": weights[row, None, kept, None]})
        assert_near(y[row], alone[0])
    assert not y[2].any()
    none = wo.fused_experts(**good | {"topk_ids": torch.full_like(ids, E)})
    assert torch.equal(none, torch.zeros(5, H))


def test_halves_of_the_experts_add_up(good: dict[str, Any]) -> None:
    """Expert parallel: each rank has some experts, and calls those of others E."""
    whole, parts = wo.fused_experts(**good), []
    for begin, end in ((0, 2), (2, E)):
        mine = {name: tuple(part[begin:end] for part in good[name]) for name in ("w13", "w2")}
        ids = good["topk_ids"] - begin
        parts.append(wo.fused_experts(**good | mine | {"topk_ids": ids.where((ids >= 0) & (ids < end - begin), -1)}))
    assert_near(parts[0] + parts[1], whole)


def test_the_sum_is_in_fp32_and_in_the_order_of_the_choice() -> None:
    """1 + 2^-24 - 1 in fp32 is 0 from the left and 2^-24 from the right; in bf16 all of it would be gone."""
    one = wo.preprocess(torch.ones(3, 64, 64, dtype=torch.int8))
    two = wo.preprocess(torch.ones(3, 64, 128, dtype=torch.int8))
    x = torch.eye(64)[:1].bfloat16()
    down = torch.tensor([1.0, 2.0**-24, -1.0]).view(3, 1, 1).expand(3, 1, 64).bfloat16() / 64
    weights = two, torch.ones(3, 1, 128).bfloat16()
    for ids, total in (([0, 1, 2], 0.0), ([0, 2, 1], 2.0**-24), ([1, 0, 2], 0.0)):
        y = wo.fused_experts(x, weights, (one, down), torch.tensor([ids]), torch.ones(1, 3), None)
        assert torch.equal(y, torch.full((1, 64), total).bfloat16())


def test_bias(good: dict[str, Any], generator: torch.Generator) -> None:
    first, second = torch.randn(E, 2 * I, generator=generator), torch.randn(E, H, generator=generator)
    y = wo.fused_experts(**good | {"w13": (*good["w13"], first), "w2": (*good["w2"], second)})
    for row in range(5):
        total = torch.zeros(H)
        for e, weight in zip(good["topk_ids"][row].tolist(), good["topk_weights"][row], strict=True):
            (q, s, z), (q2, s2, z2) = (tuple(part[e] for part in good[name]) for name in ("w13", "w2"))
            gate, up = wo.gemm(good["x"][row], q, s, zeros=z, bias=first[e]).chunk(2)
            total += weight * wo.gemm(torch.nn.functional.silu(gate) * up, q2, s2, zeros=z2, bias=second[e])
        assert_near(y[row], total)


def test_no_rows(good: dict[str, Any]) -> None:
    empty = {name: good[name][:0] for name in ("x", "topk_ids", "topk_weights")}
    assert wo.fused_experts(**good | empty).shape == (0, H)


def operators(graph: torch.fx.GraphModule) -> list[str]:
    """Ours of a graph."""
    targets = [str(node.target) for node in graph.graph.nodes]
    return [target.split(".")[1] for target in targets if target.startswith("weightonly.")]


def test_compiled(good: dict[str, Any]) -> None:
    """One operator, whose bits are those of the call; in the batch-invariant mode its parts are seen."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return wo.fused_experts(x, good["w13"], good["w2"], ids, weights, wo.Gate("silu", 7, 1.702, 1))

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 3):
        arguments = [good[name][:rows] for name in ("x", "topk_ids", "topk_weights")]
        assert torch.equal(compiled(*arguments), run(*arguments))
    assert all(operators(graph) == ["fused_experts"] for graph in graphs)
    wo.set_batch_invariant(True)
    try:
        assert torch.equal(compiled(*arguments), run(*arguments))
    finally:
        wo.set_batch_invariant(False)
    assert operators(graphs[-1]) == ["route", "grouped_gemm", "grouped_gemm"]


@pytest.mark.parametrize("has_gate", [True, False], ids=["gate", "no gate"])
def test_operations_of_an_exported_layer_are_counted(good: dict[str, Any], has_gate: bool) -> None:
    """As many as those of an eager call, which counts its two products."""
    w13 = good["w13"] if has_gate else (wo.preprocess(torch.ones(E, H, I, dtype=torch.int8)), torch.ones(E, 1, I))

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return wo.fused_experts(x, w13, good["w2"], ids, weights)

    arguments = good["x"], good["topk_ids"], good["topk_weights"]
    exported = torch.export.export(Layer(), arguments).module()
    with FlopCounterMode(display=False) as eager:
        Layer()(*arguments)
    with FlopCounterMode(display=False) as both:
        Layer()(*arguments)
        exported(*arguments)
    assert both.get_total_flops() == 2 * eager.get_total_flops() == 4 * 10 * H * I * (3 if has_gate else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_by_inductor(good: dict[str, Any], dtype: torch.dtype) -> None:
    cast = {"w13": (good["w13"][0], *(t.to(dtype) for t in good["w13"][1:]))}
    cast |= {"w2": (good["w2"][0], *(t.to(dtype) for t in good["w2"][1:]))}

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return wo.fused_experts(x, cast["w13"], cast["w2"], ids, weights) + 1

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for rows in (5, 3):
        arguments = [good["x"][:rows].to(dtype), good["topk_ids"][:rows], good["topk_weights"][:rows]]
        assert torch.equal(compiled(*arguments), run(*arguments))
    with pytest.raises(ValueError, match=r"topk_ids: expected -1\.\.6 for 6 experts, got numbers in 7\.\.7"):
        compiled(good["x"].to(dtype), torch.full_like(good["topk_ids"], 7), good["topk_weights"])


def test_autocast(good: dict[str, Any]) -> None:
    half = {name: (w[0], w[1].bfloat16(), w[2].bfloat16()) for name, w in good.items() if name in ("w13", "w2")}
    with pytest.raises(TypeError, match=r"w13: scales: expected dtype torch\.float32 as x has, got torch\.bfloat16"):
        wo.fused_experts(**good | half)
    with torch.autocast("cpu", torch.bfloat16):
        y = wo.fused_experts(**good | half)
    assert torch.equal(y, wo.fused_experts(**good | half | {"x": good["x"].bfloat16()}))


Change = Callable[[dict[str, Any]], object]
REFUSED: dict[str, tuple[str, Change, type[Exception], str]] = {
    "x of rank 3": ("x", lambda a: a["x"][None], ValueError, r"x: expected shape \[M, H\], got \[1, 5, 128\]"),
    "fp64": ("x", lambda a: a["x"].double(), TypeError, r"x: expected dtype .*, got torch\.float64"),
    "no tuple": (
        "w13",
        lambda a: a["w13"][0],
        TypeError,
        r"w13: expected a QuantizedWeight, \(qweight, scales, zeros\) .*got PackedWeight",
    ),
    "one of a tuple": ("w2", lambda a: a["w2"][:1], TypeError, "w2: expected .*, got 1 of them"),
    "five of a tuple": ("w2", lambda a: (*a["w2"], None, None), TypeError, "w2: expected .*, got 5 of them"),
    "one weight": (
        "w2",
        lambda a: (a["w2"][0][0], *a["w2"][1:]),
        TypeError,
        r"w2: expected stacked .*got PackedWeight\(",
    ),
    "a tensor": ("w2", lambda a: (a["w2"][0].data, *a["w2"][1:]), TypeError, "w2: expected stacked .*got Tensor"),
    "swapped": ("w13", lambda a: a["w2"], ValueError, "w13: expected K = 128, the columns of x, got 64"),
    "columns of w13": (
        "w13",
        lambda a: (wo.preprocess(torch.zeros(E, H, 192).char()), torch.ones(E, 1, 192)),
        ValueError,
        "w13: expected N = 128, gate and up for K = 64 of w2, got 192",
    ),
    "H of w2": (
        "w2",
        lambda a: (a["w2"][0].slice_n(0, 64), *a["w2"][1:]),
        ValueError,
        "w2: expected 6 experts with N = 128",
    ),
    "experts of w2": (
        "w2",
        lambda a: (a["w2"][0][:2], *a["w2"][1:]),
        ValueError,
        "w2: expected 6 experts .*, got 2 with",
    ),
    "scales of w2": ("w2", lambda a: (a["w2"][0], a["w2"][1][:2]), ValueError, r"w2: scales: expected shape \[E = 6"),
    "H of x": ("x", lambda a: a["x"][:, :64], ValueError, "w13: expected K = 64, the columns of x, got 128"),
    "float ids": ("topk_ids", lambda a: a["topk_ids"].float(), TypeError, "topk_ids: expected dtype torch.int32 or"),
    "ids elsewhere": ("topk_ids", lambda a: a["topk_ids"].to("meta"), ValueError, "topk_ids: expected on cpu as x is"),
    "weights elsewhere": (
        "topk_weights",
        lambda a: a["topk_weights"].to("meta"),
        ValueError,
        "topk_weights: expected on cpu as x is",
    ),
    "M of ids": ("topk_ids", lambda a: a["topk_ids"][1:], ValueError, r"topk_ids: expected shape \[M = 5, top_k\]"),
    "rank of ids": ("topk_ids", lambda a: a["topk_ids"][:, 0], ValueError, r"topk_ids: expected shape .*got \[5\]"),
    "no ids": ("topk_ids", lambda a: a["topk_ids"][:, :0], ValueError, r"topk_ids: expected shape .*got \[5, 0\]"),
    "id too large": (
        "topk_ids",
        lambda a: a["topk_ids"] * 0 + E + 1,
        ValueError,
        r"topk_ids: expected -1\.\.6 .*7\.\.7",
    ),
    "id too small": ("topk_ids", lambda a: a["topk_ids"] * 0 - 2, ValueError, r"topk_ids: expected .*got .*-2\.\.-2"),
    "int weights": ("topk_weights", lambda a: a["topk_ids"], TypeError, "topk_weights: expected a float dtype"),
    "shape of weights": (
        "topk_weights",
        lambda a: a["topk_weights"][:, :1],
        ValueError,
        "topk_weights: expected shape",
    ),
    "activation": ("activation", lambda a: "swiglu", ValueError, "activation: expected one of None, 'identity'"),
    "no gate": (
        "activation",
        lambda a: wo.Gate("relu2", has_gate=False),
        ValueError,
        r"activation: Gate\(.* is for a first product of I columns, w13 has others",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, good: dict[str, Any]) -> None:
    wo.fused_experts(**good)
    name, change, error, message = REFUSED[case]
    with pytest.raises(error, match=f"^{message}"):
        wo.fused_experts(**good | {name: change(good)})
