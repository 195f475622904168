"""fuse_model: layers that read the same x compute one product; each stays a layer of its own for everybody else."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly.nn.fuse import unfuse_model
from weightonly.nn.same_input import same_input


class Attention(torch.nn.Module):
    def __init__(self, bias: bool = True, n: int = 64) -> None:
        super().__init__()
        self.q = torch.nn.Linear(128, 2 * n, bias=bias)
        self.k, self.v = (torch.nn.Linear(128, n, bias=bias) for _ in range(2))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        k = self.k(x)
        if self.fails:
            raise RuntimeError("between the calls")
        return torch.cat([q * 2, k, self.v(x)], -1)


class Writes(torch.nn.Module):
    """Writes to x between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(128, 64), torch.nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        x.mul_(2)
        return y + self.b(x)


def packed(make: Callable[[], torch.nn.Module], **options: Any) -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {"format": "int4", "group_size": 32} | options
    return wo.nn.quantize_model(torch.nn.Sequential(make()), **given)


def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """N of each product from now on."""
    seen: list[int] = []
    multiply = wo.nn.Linear._multiply

    def counted(self: Any, x: Any, w: Any, *args: Any) -> torch.Tensor:
        seen.append(w.n)
        return multiply(self, x, w, *args)

    monkeypatch.setattr(wo.nn.Linear, "_multiply", counted)
    return seen


OPTIONS: list[dict[str, Any]] = [
    {},
    {"symmetric": False},
    {"format": "int8"},
    {"format": "nf4"},
    {"format": "fp8", "group_size": 64},
    {"activations": "fp8", "group_size": 64},
    {"arch": "sm90"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_one_product_gives_the_bits_of_three(
    options: dict[str, Any], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed(lambda: Attention(bias), **options)
    fused = copy.deepcopy(model)
    x = torch.randn(2, 5, 128)
    assert wo.nn.fuse_model(fused) == [("0.q", "0.k", "0.v")]
    assert wo.nn.fuse_model(fused) == []
    seen = products(monkeypatch)
    if "arch" not in options:
        assert torch.equal(fused(x), model(x))
        assert seen == [256, 128, 64, 64]
    for name, tensor in model.state_dict().items():
        assert torch.equal(fused.state_dict()[name], tensor), name
    assert torch.equal(fused[0].q._fused._operand.dequantize()[:, 128:192], model[0].k.dequantize())
    assert sum(t.numel() for t in fused.parameters()) == sum(t.numel() for t in model.parameters())


def test_nothing_is_kept_after_the_forward_or_an_error() -> None:
    model = packed(Attention)
    wo.nn.fuse_model(model)
    x = torch.randn(3, 128)
    kept = weakref.ref(x)
    model(x)
    model[0].fails = True
    with pytest.raises(RuntimeError, match="between"):
        model(x)
    assert model[0].q._fused._kept is None
    del x
    gc.collect()
    assert kept() is None


def test_a_layer_that_is_called_otherwise_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = packed(Attention), torch.randn(3, 128)
    expected = model[0].k(x)
    wo.nn.fuse_model(model)
    seen = products(monkeypatch)
    assert torch.equal(model[0].k(x), expected)
    assert seen == [64]


def test_another_x_and_one_that_was_written_to_are_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = packed(Writes), torch.randn(3, 128)
    expected = model(x.clone())
    assert wo.nn.fuse_model(model) == [("0.a", "0.b")]
    seen = products(monkeypatch)
    with torch.no_grad():
        assert torch.equal(model(x.clone()), expected)
    assert seen == [128, 128]

    def clones(module: torch.nn.Module, args: Any) -> Any:
        return (args[0].clone() + 1,)

    model = packed(Attention)
    model[0].k.register_forward_pre_hook(clones)
    expected = model(x)
    wo.nn.fuse_model(model)
    assert torch.equal(model(x), expected)


def test_gradients_are_those_of_the_layers_alone() -> None:
    model, x = packed(Attention), torch.randn(3, 128)
    fused = copy.deepcopy(model)
    wo.nn.fuse_model(fused)
    grads = []
    for each in (model, fused):
        leaf = x.clone().requires_grad_()
        each(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-4)


def test_what_is_written_to_a_layer_is_in_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, other = packed(Attention), torch.randn(3, 128), packed(Attention)
    w, b = torch.randn(64, 128), torch.randn(64)
    other[0].v.weight.mul_(2)
    wo.nn.fuse_model(model)
    model[0].k.update_(w, b)
    model[0].v.weight.mul_(2)
    model[0].q.load_state_dict(other[0].q.state_dict())
    expected = copy.deepcopy(model)
    unfuse_model(expected)
    seen = products(monkeypatch)
    assert torch.equal(model(x), expected(x))
    assert seen == [256, 128, 64, 64]
    assert not torch.equal(model(x)[:, 128:192], packed(Attention)(x)[:, 128:192])


def test_copies_casts_and_assigned_states_stay_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = packed(Attention), torch.randn(3, 128)
    fused = copy.deepcopy(model)
    wo.nn.fuse_model(fused)
    seen = products(monkeypatch)
    copied = copy.deepcopy(fused)
    copied[0].k.scales.data.mul_(2)
    assert torch.equal(fused(x), model(x)) and not torch.equal(copied(x), model(x))
    torch.save(fused, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(x), model(x))
    assert torch.equal(fused.bfloat16()(x.bfloat16()), model.bfloat16()(x.bfloat16()))
    seen.clear()
    fused(x.bfloat16())
    assert seen == [256]
    # One layer, moved to other tensors by who tells nobody.
    state = {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    state["0.k.scales"] *= 2
    fused.load_state_dict(state, assign=True)
    model.load_state_dict(state)
    assert torch.equal(fused(x.bfloat16()), model(x.bfloat16()))
    fused[0].v.scales.data = fused[0].v.scales.data * 2
    model[0].v.scales.data.mul_(2)
    assert torch.equal(fused(x.bfloat16()), model(x.bfloat16()))


def test_repacking_one_layer_ends_the_product() -> None:
    model = packed(Attention, arch="sm90")
    wo.nn.fuse_model(model)
    model[0].k.repack("cpu")
    assert model[0].q._fused._operand is None
    for layer in (model[0].q, model[0].v):
        layer.repack("cpu")
    x = torch.randn(2, 128)
    assert torch.equal(model(x), packed(Attention, arch="cpu")(x))
    assert model[0].q._fused._operand is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "k", wo.nn.Linear.from_linear(torch.nn.Linear(128, 64), 4, 64)),
        lambda module: setattr(module, "k", wo.nn.Linear.from_linear(torch.nn.Linear(128, 64, bias=False), 4, 32)),
        lambda module: setattr(module, "k", wo.nn.Linear.from_linear(torch.nn.Linear(128, 64), 8, 32)),
        lambda module: setattr(module, "k", torch.nn.Linear(128, 64)),
        lambda module: module.k.half(),
    ],
)
def test_a_layer_that_differs_stays_alone(change: Any) -> None:
    model = packed(Attention)
    change(model[0])
    assert wo.nn.fuse_model(model) == [("0.q", "0.v")]


def test_layers_whose_columns_are_padded_or_no_neighbours_stay_alone() -> None:
    assert wo.nn.fuse_model(packed(Attention, arch="sm70")) == []
    assert wo.nn.fuse_model(packed(lambda: Attention(n=40))) == []


def test_a_compiled_model_computes_one_product_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = packed(Attention), torch.randn(3, 128)
    expected = model(x)
    wo.nn.fuse_model(model)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        assert torch.equal(compiled(x), expected)
        assert torch.equal(compiled(x), expected)
    (graph,) = graphs
    assert sum("weightonly" in str(node.target) for node in graph.graph.nodes if node.op == "call_function") == 1
    assert model[0].q._fused._kept is None
    torch.compiler.reset()


def test_one_function_is_compiled_for_all_owners() -> None:
    models = [packed(Attention) for _ in range(3)]
    for model in models:
        wo.nn.fuse_model(model)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    def run(model: Any, x: torch.Tensor) -> Any:
        return model(x)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    x = torch.randn(3, 128)
    with torch.no_grad():
        for model in models:
            assert torch.equal(compiled(model, x), model(x))
    assert len(graphs) == 1
    torch.compiler.reset()


class Branches(torch.nn.Module):
    a: Any
    b: Any
    c: Any
    d: Any
    e: Any
    f: Any
    g: Any
    h: Any
    i: Any

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        a = self.a(x)
        if other is None:
            a, b = self.b(x), self.c(x)
        else:
            b = self.d(other)
        c = self.e(x)
        x = self.f(x)
        return self.g(x), a, b, c, self.h(x), self.i(x, other)


def test_what_reads_the_same_variable_is_read_from_the_source() -> None:
    assert same_input(Branches) == (("a", "e", "f"), ("b", "c"), ("g", "h"))
    assert same_input(torch.nn.Identity) == ()


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module, got str$"):
        wo.nn.fuse_model("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^fuse: expected True or False, got "):
        wo.nn.quantize_model(torch.nn.Linear(64, 64), fuse=1)  # type: ignore[arg-type]
