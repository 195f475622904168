"""Gradients through grouped_gemm, fused_experts and the experts of a model: those of the dequantized weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tests.hf_version  # noqa: F401
import torch
import transformers
from tests.expert_cases import KINDS, Stack, ends, exact_stack, random_stack

import weightonly as wo
from weightonly import grouped_gradient
from weightonly.grouped_gradient import by_slices
from weightonly.ops.around_experts import combine

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


@pytest.mark.parametrize("limit_bytes", [1, 70_000, 1 << 27], ids=["64 rows", "some rows", "one slice"])
@pytest.mark.parametrize(("format", "layout"), [kind for kind in KINDS if kind[1] != "row_major"])
def test_the_gradient_by_slices_of_all_experts(
    format: str, layout: str, limit_bytes: int, generator: torch.Generator
) -> None:
    """What a GPU computes: K and N that are no multiples of a slice or of a layout's blocks, and rows of no expert."""
    for k, n in ((192, 72), (64, 136)):
        stack = exact_stack(4, k, n, generator, format, layout)
        w = wo.QuantizedWeight(stack.qweight, stack.scales, stack.zeros if format.startswith("int") else None)
        grad = torch.randn(10, n, generator=generator)
        dense = w.dequantize().double()  # (E, K, N)
        expected = torch.cat([rows.double() @ dense[e].T for e, rows in enumerate(grad[:8].split(COUNTS))])
        got = by_slices(grad, w, ends(COUNTS), limit_bytes)
        assert got.shape == (10, k) and near(got[:8], expected) and not got[8:].any()


@pytest.mark.parametrize(("k", "group_size"), [(192, 32), (192, 16), (192, -1), (100, -1), (640, 320)])
def test_slices_of_other_groups(k: int, group_size: int, generator: torch.Generator) -> None:
    parts = [wo.quantize(torch.randn(k, 72, generator=generator), 4, group_size, False) for _ in range(3)]
    q, scales, zeros = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    w = wo.QuantizedWeight(wo.preprocess(q, 4, layout="tiled"), scales, zeros)
    grad = torch.randn(5, 72, generator=generator)
    expected = torch.cat([grad[:3] @ w.dequantize()[0].T, grad[3:] @ w.dequantize()[2].T])
    for limit_bytes in (1, 128 * 4 * 4 * 128, 1 << 27):
        assert near(by_slices(grad, w, ends([3, 0, 2]), limit_bytes), expected)


@pytest.mark.parametrize(("rows_of_a_sum", "elems"), [(128, 1 << 24), (4, 50)])
def test_the_gradient_of_a_bias_is_a_sum_for_each_expert(
    rows_of_a_sum: int, elems: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any number of rows, in slices of columns; rows of no expert, which may be NaN, have no part in it."""
    monkeypatch.setattr(grouped_gradient, "_ROWS_OF_A_SUM", rows_of_a_sum)
    monkeypatch.setattr(grouped_gradient, "_COPIED_ELEMS", elems)
    for counts, rest in (([3, 0, 4, 1], 0), ([0, 0], 5), ([0], 0), ([300, 1, 128], 7), ([4, 4, 4], 0)):
        parts = [torch.randint(-9, 9, (count, 12), generator=generator).float() for count in counts]
        grad = torch.cat([*parts, torch.full((rest, 12), torch.nan)])
        got = torch.ops.weightonly.grouped_bias_gradient(grad, ends(counts))
        assert torch.equal(got, torch.stack([part.sum(0) for part in parts]))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [192, 512])
@pytest.mark.parametrize("format", ["int4", "int8", "nf4"])
def test_gradients_on_a_gpu(
    format: str, k: int, cuda_device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices, and without waiting for the ends; a layer of experts keeps no more than rows of its products."""
    monkeypatch.setattr(grouped_gradient, "SLICE_BYTES", 5 * 256 * 2 * 128)
    arch = torch.cuda.get_device_capability()
    q = random_stack(4, k, 256, format, generator)
    scales = torch.rand(4, k // 64, 256, generator=generator).bfloat16().cuda() / 64
    w = wo.QuantizedWeight(wo.preprocess(q, 8 if format == "int8" else 4, format=format, arch=arch).to("cuda"), scales)
    x = torch.randn(300, k, generator=generator).bfloat16().cuda().requires_grad_()
    offs = torch.tensor([100, 100, 180, 300], dtype=torch.int32, device="cuda")
    grad = torch.randn(300, 256, generator=generator).bfloat16().cuda()
    bias = torch.randn(4, 256, generator=generator).bfloat16().cuda().requires_grad_()
    first, first_of_bias = torch.autograd.grad(wo.grouped_gemm(x, w, offs=offs, bias=bias), (x, bias), grad)
    y = wo.grouped_gemm(x, w, offs=offs, bias=bias)
    torch.cuda.set_sync_debug_mode("error" if arch >= (8, 0) else "default")
    try:
        got, of_bias = torch.autograd.grad(y, (x, bias), grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    dense = w.dequantize().double()
    parts = grad.double().split([100, 0, 80, 120])
    exact = torch.cat([rows @ dense[e].T for e, rows in enumerate(parts)])
    assert (got.double() - exact).norm() < 5e-3 * exact.norm() and torch.equal(got, first)
    torch.testing.assert_close(of_bias.double(), torch.stack([rows.sum(0) for rows in parts]), rtol=2**-8, atol=1e-5)
    assert torch.equal(of_bias, first_of_bias)


@pytest.mark.gpu
def test_gradients_of_a_layer_on_a_gpu(cuda_device: torch.device, generator: torch.Generator) -> None:
    """Beside the dequantized weights, of x and of the choice's weights. Kept: rows of both products and between."""
    tokens, hidden, inner, top_k = 512, 512, 256, 4

    def stack(k: int, n: int) -> wo.QuantizedWeight:
        q = random_stack(8, k, n, "int4", generator)
        scales = (torch.rand(8, k // 64, n, generator=generator) / 64).bfloat16().cuda()
        return wo.QuantizedWeight(wo.preprocess(q, 4, arch=torch.cuda.get_device_capability()).to("cuda"), scales)

    w13, w2 = stack(hidden, 2 * inner), stack(inner, hidden)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16().cuda().requires_grad_()
    weights, ids = torch.randn(tokens, 8, generator=generator).cuda().softmax(-1).topk(top_k)
    weights = weights.detach().requires_grad_()
    grad = torch.randn(tokens, hidden, generator=generator).bfloat16().cuda()
    before = torch.cuda.memory_allocated()
    y = wo.fused_experts(x, w13, w2, ids, weights)
    kept = torch.cuda.memory_allocated() - before
    # gate and up, silu(gate), what is between, and the rows of down; the result; ids and places are small
    assert kept < 2 * tokens * (top_k * (4 * inner + hidden) + hidden) + (1 << 20)
    y.backward(grad)
    first, second = w13.dequantize().double(), w2.dequantize().double()
    x64, weights64 = (t.detach().double().requires_grad_() for t in (x, weights))
    exact = torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda")
    for e in range(8):
        row, j = torch.where(ids == e)
        gate, up = (x64[row] @ first[e]).chunk(2, 1)
        hidden_rows = (torch.nn.functional.silu(gate) * up) @ second[e]
        exact = exact.index_add(0, row, hidden_rows * weights64[row, j][:, None])
    exact.backward(grad.double())
    for got, wanted in ((x.grad, x64.grad), (weights.grad, weights64.grad)):
        assert got is not None and wanted is not None
        assert (got.double() - wanted).norm() < 2e-2 * wanted.norm()


def test_what_a_layer_keeps_for_its_gradients(generator: torch.Generator) -> None:
    """Rows of the products and of what is between; of x, and of copies in fp32, nothing."""
    first, second = (exact_stack(5, 64, n, generator, dtype=torch.bfloat16) for n in (128, 64))
    x = torch.randn(6, 64, generator=generator).bfloat16().requires_grad_()
    weights = torch.rand(6, 2, generator=generator).requires_grad_()
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(6)])
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weight_bytes = [t.nbytes for s in (first, second) for t in (s.qweight.data, s.scales, s.zeros)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        w13, w2 = ((s.qweight, s.scales, s.zeros) for s in (first, second))
        wo.fused_experts(x, w13, w2, ids, weights)
    rows = 12 * 2 * (128 + 64 + 64)  # gate and up, silu(gate), the rows of down
    assert rows <= sum(kept.values()) - sum(weight_bytes) <= rows + 512  # the choice


def test_rows_of_no_expert_have_no_gradient(generator: torch.Generator) -> None:
    """Kernels leave any numbers in them."""
    rows = torch.randn(4, 8, generator=generator)
    rows[3] = torch.nan
    rows.requires_grad_()
    weights = torch.rand(2, 2, generator=generator).requires_grad_()
    ids, offs, places = torch.tensor([[0, 1], [1, -1]]), ends([1, 2]), torch.tensor([0, 1, 2, 3])
    y = combine(rows, weights, ids, offs, places, torch.float32)
    grad = torch.randn(2, 8, generator=generator)
    y.backward(grad)
    assert rows.grad is not None and weights.grad is not None
    torch.testing.assert_close(weights.grad[0], rows.detach()[:2] @ grad[0])
    torch.testing.assert_close(rows.grad[2], weights.detach()[1, 0] * grad[1])
    assert not weights.grad[1, 1] and not rows.grad[3].any()


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
