"""QuantizedWeight: one operand, with the bits of the tensors one by one, checked where it is made."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly.heuristics.problem import FORMATS

K, N, E = 256, 128, 3

KINDS: dict[str, dict[str, Any]] = {
    "int4": {},
    "int4 zeros": {"zeros": True},
    "int8 perm": {"format": "int8", "perm": True},
    "int4 zeros perm": {"zeros": True, "perm": True},
    "per channel": {"group_size": -1},
    "nf4": {"format": "nf4"},
    "nvfp4": {"format": "nvfp4"},
}


def make(
    format: str = "int4",
    group_size: int | None = None,
    zeros: bool = False,
    perm: bool = False,
    dtype: torch.dtype = torch.float32,
    layout: str = "cpu",
) -> wo.QuantizedWeight:
    q, scales, points = wo.quantize(
        torch.randn(K, N, dtype=dtype), format=format, group_size=group_size, symmetric=not zeros
    )
    packed = wo.preprocess(q, FORMATS[format], format=format, layout=layout)
    return wo.QuantizedWeight(packed, scales, points, torch.randperm(K) if perm else None)


def stack(perm: bool = False) -> wo.QuantizedWeight:
    weights = [make(zeros=True) for _ in range(E)]
    packed = wo.preprocess(torch.stack([wo.unpack(w.packed) for w in weights]), layout="cpu")
    zeros = torch.stack([w.zeros for w in weights if w.zeros is not None])
    order = torch.stack([torch.randperm(K) for _ in weights]) if perm else None
    return wo.QuantizedWeight(packed, torch.stack([w.scales for w in weights]), zeros, order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 5])
def test_gemm_gives_the_bits_of_the_tensors_one_by_one(kind: str, m: int) -> None:
    w, x, bias = make(**KINDS[kind]), torch.randn(m, K), torch.randn(N)
    expected = wo.gemm(x, w.packed, w.scales, zeros=w.zeros, perm=w.perm, bias=bias, activation="silu")
    for _ in range(2):  # the second time by the plan of the first
        out = torch.full_like(expected, torch.nan)
        assert wo.gemm(x, w, bias=bias, activation="silu", out=out) is out
        assert torch.equal(out, expected) and torch.equal(wo.gemm(x, w, bias=bias, activation="silu"), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_is_what_gemm_multiplies_with(kind: str) -> None:
    w = make(**KINDS[kind])
    torch.testing.assert_close(wo.gemm(torch.eye(K), w), w.dequantize())
    assert w.dequantize(torch.float16).dtype == torch.float16
    with pytest.raises(TypeError, match=r"dtype: expected one of .*, got torch\.int8"):
        w.dequantize(torch.int8)


@pytest.mark.parametrize("perm", [False, True], ids=["in order", "act-order"])
def test_experts_are_those_of_the_stack(perm: bool) -> None:
    w, x, offs = stack(perm), torch.randn(7, K), torch.tensor([2, 2, 7], dtype=torch.int32)
    y = wo.grouped_gemm(x, w, offs=offs)
    assert torch.equal(y, wo.grouped_gemm(x, w.packed, w.scales, offs, zeros=w.zeros, perm=w.perm))
    assert torch.equal(y[2:], wo.gemm(x[2:], w[2]))
    assert torch.equal(w.dequantize(), torch.stack([one.dequantize() for one in w]))


def test_fused_experts_take_one_object_for_each_product() -> None:
    down = wo.quantize(torch.randn(N // 2, K), 4, -1)
    q = torch.stack([down[0]] * E)
    second = wo.QuantizedWeight(wo.preprocess(q, layout="cpu"), torch.stack([down[1]] * E))
    first, x = stack(), torch.randn(4, K)
    ids, weights = torch.tensor([[0, 1], [2, 0], [1, 2], [-1, 2]]), torch.rand(4, 2)
    expected = wo.fused_experts(
        x, (first.packed, first.scales, first.zeros), (second.packed, second.scales), ids, weights
    )
    assert torch.equal(wo.fused_experts(x, first, second, ids, weights), expected)
    bias = torch.randn(E, N)
    expected = wo.fused_experts(
        x, (first.packed, first.scales, first.zeros, bias), (second.packed, second.scales), ids, weights
    )
    assert torch.equal(wo.fused_experts(x, (first, bias), (second, None), ids, weights), expected)
    with pytest.raises(ValueError, match="w13: expected rows in order, got a QuantizedWeight with perm"):
        wo.fused_experts(x, stack(perm=True), second, ids, weights)


def test_layers_are_made_of_one_object() -> None:
    w, experts, x = make(zeros=True, perm=True), stack(), torch.randn(7, K)
    assert torch.equal(wo.nn.Linear.from_quantized(w, bias=torch.ones(N))(x), wo.gemm(x, w, bias=torch.ones(N)))
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)
    layer = wo.nn.GroupedLinear.from_quantized(experts)
    assert torch.equal(layer(x, offs), wo.grouped_gemm(x, experts, offs=offs))
    with pytest.raises(ValueError, match="weight: expected one weight"):
        wo.nn.Linear.from_quantized(experts)
    with pytest.raises(TypeError, match="scales: expected None beside a QuantizedWeight"):
        wo.nn.Linear.from_quantized(w, w.scales)


def test_a_layer_holds_one_until_a_tensor_of_it_is_another() -> None:
    layer, x = wo.nn.Linear.from_quantized(make(zeros=True, perm=True)), torch.randn(2, K)
    w = layer.operand
    assert layer.operand is w and torch.equal(layer(x), wo.gemm(x, w))
    layer.scales = torch.nn.Parameter(2 * layer.scales, requires_grad=False)
    assert layer.operand is not w and torch.equal(layer(x), wo.gemm(x, layer.operand))
    assert layer.half().operand.dtype == torch.float16


def test_a_weight_is_checked_where_it_is_made_and_not_in_warm_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    w, experts, x = make(zeros=True), stack(), torch.randn(2, K)
    offs = torch.tensor([0, 1, 2], dtype=torch.int32)

    def call() -> None:
        wo.gemm(x, w)
        wo.gemm(x, w.packed, w.scales, zeros=w.zeros)
        wo.grouped_gemm(x, experts, offs=offs)

    call()
    monkeypatch.setattr(wo.QuantizedWeight, "check", lambda *_: pytest.fail("checked again"))
    call()


def test_it_says_what_it_is() -> None:
    w = make("int8", 64, zeros=True, perm=True, dtype=torch.float16)
    assert (w.format, w.group_size, w.k, w.n, w.experts) == ("int8", 64, K, N, None)
    assert (w.dtype, w.device) == (torch.float16, torch.device("cpu"))
    assert repr(w) == "QuantizedWeight(int8 [256, 128], group_size=64, zeros=True, perm=True, torch.float16 on cpu)"
    assert make(group_size=-1).group_size == -1 and stack().experts == E
    with pytest.raises(AttributeError):
        w.scales = w.scales  # type: ignore[misc]


def test_moves_and_copies() -> None:
    w, x = make(zeros=True, perm=True), torch.randn(2, K)
    assert w.to("cpu") is w
    moved = w.to("meta")
    assert {t.device.type for t in (moved.packed, moved.scales, moved.zeros, moved.perm)} == {"meta"}  # type: ignore[union-attr]
    for other in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert torch.equal(wo.gemm(x, other), wo.gemm(x, w))


def test_weights_of_one_kind_share_it() -> None:
    assert make().kind is make().kind
    assert len({id(make(**arguments).kind) for arguments in KINDS.values()}) == len(KINDS)


def test_a_tensor_that_is_set_anew_is_seen() -> None:
    w, x = make(group_size=64), torch.randn(1, K)
    wo.gemm(x, w)
    w.scales.data = torch.rand(1, N)
    assert torch.equal(wo.gemm(x, w), wo.gemm(x, w.packed, w.scales))
    w.scales.data = torch.rand(3, N)
    with pytest.raises(ValueError, match="scales: expected K / group_size rows"):
        wo.gemm(x, w)


@pytest.mark.parametrize("what", ["x", "bias"])
def test_gradients_are_those_of_the_tensors_one_by_one(what: str) -> None:
    w = make(zeros=True, perm=True)
    given: dict[str, Any] = {"x": torch.randn(3, K), "bias": torch.randn(N)}
    given[what].requires_grad_()
    one = torch.autograd.grad(wo.gemm(**given, qweight=w).sum(), given[what])
    loose = wo.gemm(**given, qweight=w.packed, scales=w.scales, zeros=w.zeros, perm=w.perm)
    assert torch.equal(one[0], torch.autograd.grad(loose.sum(), given[what])[0])


def test_torch_compile_traces_it() -> None:
    w, x = make(zeros=True), torch.randn(2, K)
    compiled = torch.compile(lambda x: wo.gemm(x, w) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), wo.gemm(x, w) + 1)


@pytest.mark.parametrize("name", ["scales", "zeros", "perm"])
def test_operands_beside_it_are_errors(name: str) -> None:
    w, offs = make(zeros=True, perm=True), torch.tensor([1], dtype=torch.int32)
    other: dict[str, Any] = {name: getattr(w, name)}
    match = f"^{name}: expected None beside a QuantizedWeight, which has its own, got Tensor"
    with pytest.raises(TypeError, match=match):
        wo.gemm(torch.randn(1, K), w, **other)
    with pytest.raises(TypeError, match=match):
        wo.grouped_gemm(torch.randn(1, K), w, offs=offs, **other)


BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no PackedWeight": (TypeError, "packed: expected the PackedWeight", {"packed": torch.zeros(K, N)}),
    "no scales": (TypeError, "scales: expected a", {"scales": None}),
    "scales of whole numbers": (TypeError, "scales: expected dtype", {"scales": torch.ones(2, N, dtype=torch.int8)}),
    "groups that do not divide K": (ValueError, "scales: expected K / group_size rows", {"scales": torch.ones(3, N)}),
    "other columns": (ValueError, r"scales: expected shape \[K / group_size, N", {"scales": torch.ones(2, N + 1)}),
    "scales elsewhere": (ValueError, "scales: expected on cpu", {"scales": torch.ones(2, N, device="meta")}),
    "zeros of other groups": (ValueError, "zeros: expected shape", {"zeros": torch.ones(4, N)}),
    "zeros of another dtype": (TypeError, "zeros: expected dtype", {"zeros": torch.ones(2, N).half()}),
    "a permutation of floats": (TypeError, "perm: expected dtype", {"perm": torch.ones(K)}),
    "a short permutation": (ValueError, r"perm: expected shape \[K\]", {"perm": torch.arange(K - 1)}),
    "a permutation elsewhere": (ValueError, "perm: expected on cpu", {"perm": torch.arange(K, device="meta")}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_an_error_where_it_is_made(case: str) -> None:
    error, match, other = BAD[case]
    w = make()
    given: dict[str, Any] = {"packed": w.packed, "scales": w.scales}
    with pytest.raises(error, match=f"^{match}"):
        wo.QuantizedWeight(**given | other)


def test_stacked_experts_need_a_permutation_each() -> None:
    w = stack()
    with pytest.raises(ValueError, match=r"perm: expected shape \[E, K\] = \[3, 256\], got \[256\]"):
        wo.QuantizedWeight(w.packed, w.scales, w.zeros, torch.arange(K))


def test_codes_have_no_zeros() -> None:
    w = make("nf4")
    with pytest.raises(ValueError, match="zeros: expected None for a weight of format nf4"):
        wo.QuantizedWeight(w.packed, w.scales, torch.zeros_like(w.scales))


def test_what_the_bytes_were_packed_for_is_asked_for() -> None:
    q, scales, zeros = wo.quantize(torch.randn(K, N), 4, 64, symmetric=False)
    packed = wo.preprocess(q, 4, layout="cpu", group_size=64, zeros=True, perm=False)
    assert zeros is not None
    wrong: dict[str, Any] = {
        "zeros: expected shape": (scales,),
        "perm: expected None": (scales, zeros, torch.arange(K)),
        "scales: expected 4 rows": (scales[:2], zeros[:2]),
    }
    for match, operands in wrong.items():
        with pytest.raises(ValueError, match=match):
            wo.QuantizedWeight(packed, *operands)


def test_the_bytes_alone_are_no_weight() -> None:
    packed, x = stack().packed, torch.randn(1, K)
    with pytest.raises(TypeError, match="scales: expected a tensor, got NoneType"):
        wo.gemm(x, make().packed)
    with pytest.raises(TypeError, match="scales: expected a tensor, got NoneType"):
        wo.grouped_gemm(x, packed)
    with pytest.raises(TypeError, match="offs: expected a tensor, got NoneType"):
        wo.grouped_gemm(x, stack())
