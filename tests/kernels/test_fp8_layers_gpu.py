"""Layers with activations="fp8" on a GPU: the explicit calls, fp64, CUDA graphs, torch.compile, gradients, a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly.heuristics.families import FAMILIES
from weightonly.nn import Linear, quantize_model

pytestmark = pytest.mark.gpu

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def verified(cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    """Skips where no kernel takes x in 8 bits; else they are chosen, whether or not they count as verified."""
    if not wo.fp8_kernels():
        pytest.skip("no kernel takes x in 8 bits")
    monkeypatch.setattr(FAMILIES["gemm_sm90_fp8"], "verified", True)


def layer_of(k: int = 1024, n: int = 328, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Linear:
    torch.manual_seed(k + n)
    defaults: dict[str, Any] = {"group_size": 128, "activations": "fp8", "dtype": dtype}
    return Linear.from_linear(torch.nn.Linear(k, n).cuda(), **defaults | options)


def tokens(m: int, g: torch.Generator, k: int = 1024, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(m, k, generator=g) * torch.logspace(-2, 2, m)[:, None]
    x[:, ::100] *= 30
    return x.to(dtype).cuda()


def explicit(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    x8, x_scales = wo.quantize_activations(x)
    return wo.gemm(x8, layer.operand, x_scales=x_scales, bias=layer.bias, activation=layer.activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
def test_near_fp64(group_size: int, dtype: str, generator: torch.Generator) -> None:
    layer = layer_of(dtype=DTYPES[dtype], group_size=group_size)
    assert layer.layout == "tiled_fp8"
    w, bias = layer.dequantize(torch.float32).double(), layer.bias
    assert bias is not None
    for m in (1, 2, 7, 16, 64, 100, 300):
        x = tokens(m, generator, dtype=DTYPES[dtype])
        y = layer(x)
        assert torch.equal(y, explicit(layer, x))
        x8, x_scales = wo.quantize_activations(x)
        expected = (x8.double() @ w) * x_scales.double()[:, None] + bias.double()
        rounding = (expected.to(y.dtype).double() - expected).norm()
        assert (y.double() - expected).norm() <= rounding + 5e-4 * expected.norm(), m


def test_packed_on_a_cpu_and_repacked(generator: torch.Generator) -> None:
    layer = layer_of()
    on_cpu = Linear.from_linear(_dense(layer), group_size=128, activations="fp8", dtype=torch.bfloat16, arch="cpu")
    moved = copy.deepcopy(on_cpu).cuda()
    x = tokens(20, generator)
    with pytest.raises(ValueError, match="qweight: packed in layout 'cpu', but x is float8_e4m3fn; repack"):
        moved(x)
    assert moved.repack().layout == "tiled_fp8"
    y, expected = moved(x).cpu().float(), on_cpu(x.cpu()).float()
    assert (y - expected).norm() <= 2**-8 * expected.norm()
    with pytest.raises(ValueError, match=r"activations: expected scales in float16 or bfloat16 for 'fp8' on a GPU"):
        layer_of(dtype=torch.float32)
    with pytest.raises(TypeError, match=r"scales: expected dtype torch\.float16 or torch\.bfloat16, got torch"):
        layer.float()(x.float())


def _dense(layer: Linear) -> torch.nn.Linear:
    dense = torch.nn.Linear(layer.in_features, layer.out_features)
    dense.weight.data = layer.dequantize(torch.float32).t().cpu().contiguous()
    return dense


def test_in_a_cuda_graph(generator: torch.Generator) -> None:
    model = torch.nn.Sequential(layer_of(), layer_of(328, 64, group_size=-1, activation="silu"))
    x = tokens(5, generator)
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for _ in range(2):
            x.copy_(tokens(5, generator))
            graph.replay()
            assert torch.equal(y, model(x))
    layer: Any = model[0]
    layer.update_(torch.randn(328, 1024, generator=generator) / 32)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(y, model(x))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(mode: str, generator: torch.Generator) -> None:
    layer = layer_of()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.no_grad():
        for m in (3, 64):
            x = tokens(m, generator)
            for _ in range(3):
                assert torch.equal(compiled(x), layer(x))


def test_quantized_activations_compiled_have_the_same_bits(generator: torch.Generator) -> None:
    x = tokens(40, generator)
    got8, got_scales = torch.compile(wo.quantize_activations, fullgraph=True)(x)
    x8, x_scales = wo.quantize_activations(x)
    assert torch.equal(got8.view(torch.uint8), x8.view(torch.uint8)) and torch.equal(got_scales, x_scales)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradients(activation: str | None, generator: torch.Generator) -> None:
    """Those of the product of an x that was not rounded; silu's at the numbers that were computed."""
    layer = layer_of(activation=activation)
    x = torch.randn(20, 1024, generator=generator).bfloat16().cuda().requires_grad_()
    grad = torch.randn(20, 328, generator=generator).bfloat16().cuda()
    layer(x).backward(grad)
    inner = grad.double()
    if activation is not None:
        plain = copy.deepcopy(layer)
        plain.activation = None
        z = plain(x.detach()).double().requires_grad_()
        torch.nn.functional.silu(z).backward(inner)
        assert z.grad is not None
        inner = z.grad
    expected = inner @ layer.dequantize(torch.float32).double().t()
    assert x.grad is not None
    assert (x.grad.double() - expected).norm() <= 1e-2 * expected.norm()


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16().cuda()
    on_gpu: Any = quantize_model(copy.deepcopy(model), activations="fp8")
    on_cpu: Any = quantize_model(model.cpu(), activations="fp8", arch="cpu")
    tokens = torch.arange(24).view(2, 12) * 7 % 96
    with torch.no_grad():
        y, expected = on_gpu(tokens.cuda()).logits.cpu().float(), on_cpu(tokens).logits.float()
    assert (y - expected).norm() <= 0.05 * expected.norm()
    assert on_gpu.generate(tokens[:1].cuda(), max_new_tokens=3, do_sample=False).shape == (1, 15)
