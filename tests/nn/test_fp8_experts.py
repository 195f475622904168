"""Experts with activations="fp8": fused_experts of quantize_activations, bit for bit; gradients, state, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.expert_cases import ends
from tests.expert_models import make, models

import weightonly as wo
from weightonly.heuristics.families import FAMILIES
from weightonly.nn import Experts, GroupedLinear
from weightonly.nn.recipe import Recipe

DTYPE = torch.bfloat16
K, N, E = 64, 96, 4
FORMATS: dict[str, dict[str, Any]] = {"int4": {"group_size": 32}, "mxfp4": {"format": "mxfp4"}}
formats = pytest.mark.parametrize("format", FORMATS)
archs = pytest.mark.parametrize("arch", ["sm90", "cpu"])

quantize_model: Any = wo.nn.quantize_model
"""Untyped: tests look into the model."""


def experts_of(name: str, dtype: torch.dtype = DTYPE, **options: Any) -> Experts:
    """Of the first layer."""
    defaults = {"group_size": 32, "activations": "fp8", "arch": "sm90"}
    found: Any = quantize_model(make(name).to(dtype), **defaults | options).model.layers[0].mlp.experts
    return found


def choices(experts: Experts, dtype: torch.dtype = DTYPE, tokens: int = 9) -> tuple[torch.Tensor, ...]:
    """Rows of very different sizes; some choices are of no expert."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 64, generator=g) * torch.logspace(-2, 1, tokens)[:, None]
    ids = torch.randint(-1, experts.num_experts + 1, (tokens, 3), generator=g)
    return x.to(dtype), ids, torch.rand(tokens, 3, generator=g).to(dtype)


def explicit(experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same by `fused_experts`."""
    gate: Any = experts.between if isinstance(experts.between, wo.Gate) else experts.between.gate
    first, second = (getattr(experts, name) for name in experts.products)
    x8, x_scales = wo.quantize_activations(x)
    products = (first.operand, first.bias), (second.operand, second.bias)
    return wo.fused_experts(x8, *products, ids, weights, gate, x_scales=x_scales)


def layer_of(format: str = "int4") -> GroupedLinear:
    """Weights of random numbers."""
    layer = GroupedLinear(E, K, N, bias=True, format=format, group_size=32, dtype=DTYPE, arch="sm90", activations="fp8")
    return layer.update_(torch.randn(E, N, K), torch.randn(E, N))


@models
@archs
@formats
def test_experts_are_fused_experts_of_quantized_activations(name: str, arch: str, format: str) -> None:
    experts = experts_of(name, arch=arch, **FORMATS[format])
    layout = {"sm90": "tiled_fp8", "cpu": "cpu"}[arch]
    assert {(p.layout, p.activations, p.format) for p in (experts.gate_up_proj, experts.down_proj)} == {
        (layout, "fp8", format)
    }
    assert f"layout={layout}, activations=fp8" in repr(experts)
    x, ids, weights = choices(experts)
    y = experts(x, ids, weights)
    assert y.dtype == DTYPE and torch.equal(y, explicit(experts, x, ids, weights))
    in_16_bits = experts_of(name, arch=arch, activations=None, **FORMATS[format])
    other = in_16_bits(x, ids, weights)
    assert torch.equal(in_16_bits.down_proj.dequantize(), experts.down_proj.dequantize())
    assert 0 < (y - other).norm() < 0.1 * other.norm()


def test_a_gate_that_only_the_module_has() -> None:
    experts = experts_of("mixtral")
    x, ids, weights = choices(experts)
    y = experts(x, ids, weights)
    experts.between = type(experts.between)(experts.between.module, True, None)  # type: ignore[union-attr]
    torch.testing.assert_close(experts(x, ids, weights), y, rtol=2**-6, atol=1e-2 * float(y.abs().max()))


@archs
@formats
def test_one_layer(arch: str, format: str) -> None:
    layer = layer_of(format).repack(arch)
    x, offs = torch.randn(10, K).to(DTYPE), ends([3, 0, 4, 2])
    y = layer(x, offs)
    x8, x_scales = wo.quantize_activations(x[:9])
    assert torch.equal(y[:9], wo.grouped_gemm(x8, layer.operand, offs=offs, x_scales=x_scales, bias=layer.bias))
    assert not y[9].any()  # of no expert
    with pytest.raises(TypeError, match=r"scales: expected dtype torch\.float32 as x has"):
        layer(x.float(), offs)


def test_hooks_see_the_products() -> None:
    experts = experts_of("mixtral")
    given = choices(experts)
    expected, seen = experts(*given), []
    experts.down_proj.register_forward_hook(lambda *arguments: seen.append(arguments[2].dtype))
    assert torch.equal(experts(*given), expected) and seen == [DTYPE]


def test_products_of_two_kinds() -> None:
    """Only the second one rounds its x."""
    experts, other = experts_of("mixtral", arch="cpu"), experts_of("mixtral", arch="cpu", activations=None)
    x, ids, weights = choices(experts)
    mixed = Experts(other.gate_up_proj, experts.down_proj, experts.between)
    y = mixed(x, ids, weights)
    assert not torch.equal(y, experts(x, ids, weights)) and not torch.equal(y, other(x, ids, weights))
    torch.testing.assert_close(y, other(x, ids, weights), rtol=0.1, atol=0.05 * float(y.abs().max()))


def test_gradients_are_those_of_products_without_rounding() -> None:
    """Those of x and of the router's weights, which are of the rounded products."""
    experts = experts_of("mixtral", torch.float32, arch="cpu")
    x, ids, weights = choices(experts, torch.float32)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    y = experts(x, ids, weights)
    grad = torch.randn_like(y)
    with torch.no_grad():
        assert torch.equal(y, experts(x, ids, weights))
    y.backward(grad)
    x8, x_scales = wo.quantize_activations(x.detach())
    rows = (x8.float() * x_scales[:, None]).requires_grad_()  # what the products see, in fp32
    exact = torch.zeros_like(y)
    of_weights = weights.detach().clone().requires_grad_()
    for m in range(len(x)):
        for j, e in enumerate(ids[m].tolist()):
            if 0 <= e < experts.num_experts:
                z = rows[m] @ experts.gate_up_proj.dequantize()[e]
                between = torch.nn.functional.silu(z[:128]) * z[128:]
                b8, b_scale = wo.quantize_activations(between.detach()[None])
                between = between + ((b8.float() * b_scale)[0] - between).detach()
                exact[m] = exact[m] + of_weights[m, j] * (between @ experts.down_proj.dequantize()[e])
    torch.testing.assert_close(y, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
    exact.backward(grad)
    for got, expected in ((x.grad, rows.grad), (weights.grad, of_weights.grad)):
        assert got is not None and expected is not None and bool(expected.any())
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_gradients_of_the_routers_weights_alone() -> None:
    experts = experts_of("mixtral", torch.float32, arch="cpu")
    x, ids, weights = choices(experts, torch.float32)
    grads: list[Any] = []
    for asks in (False, True):
        asked = weights.clone().requires_grad_()
        experts(x.clone().requires_grad_(asks), ids, asked).square().sum().backward()
        grads.append(asked.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert bool(grads[0].any())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(backend: str) -> None:
    experts = experts_of("mixtral", arch="cpu")
    x, ids, weights = choices(experts)
    compiled = torch.compile(experts, backend=backend, fullgraph=True)
    expected = experts(x, ids, weights)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(x, ids, weights), expected, rtol=2**-6, atol=1e-2 * float(expected.abs().max())
        )
    grads: list[Any] = []
    for call in (experts, compiled):
        z = x.clone().requires_grad_()
        call(z, ids, weights).float().square().sum().backward()
        grads.append(z.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0.05, atol=0.02 * float(grads[0].abs().max()))


@formats
def test_copies_states_and_layouts(format: str) -> None:
    experts = experts_of("gpt-oss", **FORMATS[format])
    given = choices(experts)
    y, state = experts(*given), experts.state_dict()
    fresh = experts_of("gpt-oss", **FORMATS[format])
    for parameter in fresh.parameters():
        parameter.zero_()
    fresh.load_state_dict(state)
    with torch.device("meta"):
        dense = make("gpt-oss")
    on_meta = quantize_model(dense, activations="fp8", arch=90, dtype=DTYPE, **FORMATS[format])
    on_meta = on_meta.model.layers[0].mlp.experts
    on_meta.load_state_dict(state, assign=True)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts)), fresh, on_meta, experts.to("cpu")):
        assert other.down_proj.activations == "fp8" and torch.equal(other(*given), y)
    for arch, layout in (("cpu", "cpu"), ("sm90", "tiled_fp8")):
        for product in (experts.gate_up_proj, experts.down_proj):
            assert product.repack(arch).layout == layout
        assert torch.equal(experts(*given), y)
    assert all(torch.equal(value, state[name]) for name, value in experts.state_dict().items())
    half = copy.deepcopy(experts).half()
    x, ids, weights = given
    assert torch.equal(half(x.half(), ids, weights), explicit(half, x.half(), ids, weights))


def test_other_weights_and_dense_ones() -> None:
    dense = make("mixtral").to(DTYPE).model.layers[1].mlp.experts
    experts = experts_of("mixtral")
    experts.update_(dense.gate_up_proj, dense.down_proj)
    expected = Experts.from_module(dense, Recipe.of(None, None, 32, True, None, 90, activations="fp8"))
    for product in ("gate_up_proj", "down_proj"):
        assert torch.equal(getattr(experts, product).qweight, getattr(expected, product).qweight)
        weights = getattr(experts.to_dense(), product)
        assert torch.equal(weights, getattr(expected, product).dequantize().mT)


def test_from_the_layers_of_each_expert() -> None:
    parts: dict[str, Any] = {}
    for arch in ("sm90", "cpu"):
        recipe = Recipe.of(None, None, 32, True, DTYPE, arch, activations="fp8")
        g = torch.Generator().manual_seed(2)
        parts[arch] = [
            [
                wo.nn.Linear.from_weight(torch.randn(k, n, generator=g), None, recipe)
                for k, n in ((64, 32), (64, 32), (32, 64))
            ]
            for _ in range(3)
        ]
    made = [
        Experts.from_quantized([(p[0], p[1]) for p in of], [p[2] for p in of], activations=asked)
        for of, asked in ((parts["sm90"], None), (parts["sm90"], "fp8"), (parts["cpu"], "fp8"), (parts["cpu"], None))
    ]
    assert [e.gate_up_proj.activations for e in made] == ["fp8", "fp8", "fp8", None]
    given = choices(made[0])
    y = [e(*given) for e in made]
    assert torch.equal(y[0], y[1]) and torch.equal(y[0], y[2]) and not torch.equal(y[0], y[3])


def test_a_model_its_summary_and_layers_of_16_bits() -> None:
    options: dict[str, Any] = {"group_size": 32, "activations": "fp8", "arch": "sm90"}
    model = quantize_model(make("qwen2-moe").to(DTYPE), **options)
    mlp = model.model.layers[0].mlp
    assert mlp.shared_expert.down_proj.activations == mlp.experts.down_proj.activations == "fp8"
    assert "x as it is" not in str(model.weightonly_summary)
    mixtral = quantize_model(make("mixtral").to(DTYPE), **options)
    assert quantize_model(mixtral, **options) is mixtral  # all is as it was asked for
    left = {"experts": {"activations": "16bit"}}
    other = quantize_model(make("qwen2-moe").to(DTYPE), **options, layers=left)
    mlp = other.model.layers[0].mlp
    assert (mlp.shared_expert.down_proj.activations, mlp.experts.down_proj.activations) == ("fp8", None)
    assert mlp.experts.down_proj.layout == "tiled"
    assert "\n  x as it is, not in fp8: model.layers.0.mlp.experts" in str(other.weightonly_summary)
    with pytest.raises(ValueError, match="it is int4 already, groups of 32, x in fp8"):
        quantize_model(torch.nn.Sequential(mlp.shared_expert.down_proj), group_size=32)
    with pytest.raises(ValueError, match=r"experts', expert 0: activations: expected scales in float16|float16 or bf"):
        quantize_model(make("mixtral"), **options, only=["experts"])


REFUSED: dict[str, tuple[Callable[[GroupedLinear], object], str]] = {
    "a word": (lambda _: GroupedLinear(E, K, N, activations="int8"), "activations: expected None, '16bit' or 'fp8'"),
    "a format": (
        lambda _: GroupedLinear(E, K, N, format="nf4", activations="fp8"),
        "activations: expected None for nf4, got 'fp8', which is for symmetric int4 and mxfp4 alone",
    ),
    "zero points": (
        lambda _: GroupedLinear(E, K, N, symmetric=False, activations="fp8"),
        "activations: expected None for int4 with zero points",
    ),
    "groups": (lambda _: GroupedLinear(E, K, N, group_size=16, arch="cpu", activations="fp8"), "activations 'fp8': gr"),
    "a GPU": (lambda _: GroupedLinear(E, K, N, arch="sm80", activations="fp8"), "activations: expected None for sm80"),
    "a layout": (
        lambda layer: GroupedLinear.from_quantized(
            wo.repack(layer.packed, layout="tiled"), layer.scales, activations="fp8"
        ),
        "weight: expected layout 'tiled_fp8' or 'cpu' for activations='fp8', got 'tiled'",
    ),
    "another GPU": (lambda layer: layer.repack("sm89"), "activations: expected None for sm89"),
    "a state of 16 bits": (
        lambda layer: layer.load_state_dict(
            GroupedLinear(E, K, N, bias=True, group_size=32, dtype=DTYPE, arch=90).state_dict()
        ),
        "expected layout 'tiled_fp8' or 'cpu' for activations='fp8', got 'tiled'",
    ),
    "a state of 8 bits": (
        lambda layer: GroupedLinear(E, K, N, bias=True, group_size=32, dtype=DTYPE, arch=90).load_state_dict(
            layer.state_dict()
        ),
        "expected a layout for x in 16 bits, got 'tiled_fp8'; make the layer with activations='fp8'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    layer = layer_of()
    with pytest.raises(ValueError, match=message):
        call(layer)


def test_what_experts_refuse() -> None:
    experts = experts_of("mixtral")
    experts.layer_name = "experts"
    x, ids, weights = choices(experts)
    with pytest.raises(TypeError, match=r"layer 'experts' .*expected dtype torch\.float32 as x has"):
        experts(x.float(), ids, weights)
    with pytest.raises(ValueError, match=r"layer 'experts' .*x: expected \[\.\.\., K\] with K = 64"):
        experts(torch.cat([x, x], 1), ids, weights)
    with torch.autocast("cpu", dtype=DTYPE):
        assert torch.equal(experts(x.float(), ids, weights), experts(x, ids, weights))


def test_explain_says_which_kernels(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    monkeypatch.setattr(FAMILIES["gemm_sm90_fp8"], "verified", True)
    experts = experts_of("mixtral")
    rows = wo.explain(experts, m=64, arch="sm90").rows
    assert len(rows) == 2 and all("quantize_activations(x) before it" in row.why for row in rows)
    assert "x in fp8" in str(wo.explain(experts, m=64, arch="sm90"))
    of_one = wo.explain(k=64, n=256, group_size=32, experts=5, m=64, arch="sm90", activations="fp8")
    assert "quantize_activations(x) before it" in of_one.rows[0].why
