"""Gradients through grouped_gemm, fused_experts and the experts of a model: those of the dequantized weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tests.hf_version  # noqa: F401
import torch
import transformers
from tests.expert_cases import Stack, ends, exact_stack

import weightonly as wo

COUNTS = [3, 0, 4, 1]
ACTIVATIONS = {
    None: lambda y: y,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


@pytest.fixture
def stack(generator: torch.Generator) -> Stack:
    return exact_stack(4, 128, 70, generator)


def near(got: torch.Tensor | None, exact: torch.Tensor | None) -> bool:
    assert got is not None and exact is not None
    return bool((got.double() - exact.double()).norm() <= 1e-5 * exact.double().norm())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gradients_of_x_and_bias(
    activation: str | None, compiled: bool, stack: Stack, generator: torch.Generator
) -> None:
    def run(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        arguments: dict[str, Any] = {"zeros": stack.zeros, "bias": bias, "activation": activation, "perm": perm}
        return wo.grouped_gemm(x, stack.qweight, stack.scales, ends(COUNTS), **arguments)

    perm = torch.stack([torch.randperm(128, generator=generator) for _ in COUNTS])
    x = (torch.randn(8, 128, generator=generator) / 64).requires_grad_()
    bias = torch.randn(4, 70, generator=generator).requires_grad_()
    grad = torch.randn(8, 70, generator=generator)
    (torch.compile(run, fullgraph=True) if compiled else run)(x, bias).backward(grad)
    x64, bias64 = (t.detach().double().requires_grad_() for t in (x, bias))
    parts = x64.split(COUNTS)
    z = torch.cat([part[:, perm[e]] @ stack.w64[e] + bias64[e] for e, part in enumerate(parts)])
    ACTIVATIONS[activation](z).backward(grad.double())
    assert near(x.grad, x64.grad) and near(bias.grad, bias64.grad)
    assert bias.grad is not None and not bias.grad[1].any()  # an expert without rows


def test_gradients_of_a_layer(generator: torch.Generator) -> None:
    """Of x and of the weights of the choice, which train a router; rows of other ranks add nothing, NaN or not."""
    first, second = exact_stack(5, 64, 128, generator), exact_stack(5, 64, 64, generator)
    x = (torch.randn(6, 64, generator=generator) / 64).requires_grad_()
    weights = torch.rand(6, 2, generator=generator).requires_grad_()
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(6)])
    ids[2] = torch.tensor([-1, 5])
    w13, w2 = (first.qweight, first.scales, first.zeros), (second.qweight, second.scales, second.zeros)
    grad = torch.randn(6, 64, generator=generator)
    wo.fused_experts(x, w13, w2, ids, weights).backward(grad)
    x64, weights64 = (t.detach().double().requires_grad_() for t in (x, weights))
    y = torch.zeros(6, 64, dtype=torch.float64)
    for m in (0, 1, 3, 4, 5):
        for j, e in enumerate(ids[m].tolist()):
            gate, up = (x64[m] @ first.w64[e]).chunk(2)
            hidden = (torch.nn.functional.silu(gate) * up) @ second.w64[e]
            y = y.index_add(0, torch.tensor([m]), (weights64[m, j] * hidden)[None])
    y.backward(grad.double())
    assert near(x.grad, x64.grad) and near(weights.grad, weights64.grad)
    assert x.grad is not None and not x.grad[2].any()


def test_what_has_no_gradient(stack: Stack) -> None:
    x = torch.ones(8, 128, requires_grad=True)
    with pytest.raises(ValueError, match="scales: expected a tensor that requires no gradient"):
        wo.grouped_gemm(x, stack.qweight, stack.scales.requires_grad_(), ends(COUNTS), zeros=stack.zeros)
    scales = stack.scales.detach()
    with pytest.raises(ValueError, match="out: expected None where x requires a gradient"):
        wo.grouped_gemm(x, stack.qweight, scales, ends(COUNTS), zeros=stack.zeros, out=torch.empty(8, 70))
    y = wo.grouped_gemm(x, stack.qweight, scales, ends(COUNTS), zeros=stack.zeros)
    [grad] = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="grouped_gemm is differentiable once"):
        grad.sum().backward()


def test_gradients_of_a_model() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    choice: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2}
    dense: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **heads, **choice))
    experts = [f"model.layers.{i}.mlp.experts" for i in range(2)]
    model: Any = wo.nn.quantize_model(copy.deepcopy(dense), group_size=32, only=experts)
    for name in experts:
        for product in ("gate_up_proj", "down_proj"):
            w = getattr(model.get_submodule(name), product).dequantize()
            getattr(dense.get_submodule(name), product).data = w.transpose(1, 2).contiguous()
    tokens = torch.arange(24).view(2, 12)
    for each in (model, dense):
        each(input_ids=tokens, labels=tokens).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert "model.layers.0.mlp.gate.weight" in trained  # the router
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, dense.get_parameter(name).grad, rtol=1e-3, atol=1e-6)
