"""Layers of experts with activations="fp8" on a GPU: the explicit call, a CPU, graphs, torch.compile, gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly.heuristics.configs import FP8_CONFIGS, GROUPED_FP8_CONFIGS
from weightonly.nn import Experts, GroupedLinear

pytestmark = pytest.mark.gpu

E, HIDDEN, INNER = 6, 256, 192
formats = pytest.mark.parametrize("format", ["int4", "mxfp4"])


@pytest.fixture(autouse=True)
def verified(cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    """Skips where no kernel takes experts and x in 8 bits; else they are chosen, whether or not they are verified."""
    if not (wo.fp8_kernels() and wo.grouped_fp8_kernels()):
        pytest.skip("no kernel takes x in 8 bits")
    for config in (*FP8_CONFIGS, *GROUPED_FP8_CONFIGS):
        monkeypatch.setattr(config.rules, "verified", True)


def experts_of(format: str = "int4", arch: Any = None) -> Experts:
    """Of the same random weights, in bfloat16, packed for the GPU or for a CPU."""
    g = torch.Generator().manual_seed(3)
    options: dict[str, Any] = {"format": format, "group_size": 32, "dtype": torch.bfloat16, "activations": "fp8"}
    first, down = (
        GroupedLinear(E, k, n, device="cpu", arch=arch or 90, **options).update_(
            torch.randn(E, n, k, generator=g) / k**0.5
        )
        for k, n in ((HIDDEN, 2 * INNER), (INNER, HIDDEN))
    )
    return Experts(first, down, wo.Gate("silu")).to("cpu" if arch else "cuda")


def choices(tokens: int, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Some are of no expert."""
    x = torch.randn(tokens, HIDDEN, generator=g) * torch.logspace(-1, 1, tokens)[:, None]
    ids = torch.randint(-1, E + 1, (tokens, 2), generator=g)
    return x.bfloat16().cuda(), ids.cuda(), torch.rand(tokens, 2, generator=g).cuda()


@formats
def test_beside_the_explicit_call_and_a_cpu(format: str, generator: torch.Generator) -> None:
    experts, on_cpu = experts_of(format), experts_of(format, "cpu")
    assert experts.down_proj.layout == "tiled_fp8"
    for tokens in (1, 7, 200):
        x, ids, weights = choices(tokens, generator)
        y = experts(x, ids, weights)
        x8, x_scales = wo.quantize_activations(x)
        w13, w2 = experts.gate_up_proj.operand, experts.down_proj.operand
        assert torch.equal(y, wo.fused_experts(x8, w13, w2, ids, weights, "silu", x_scales=x_scales))
        expected = on_cpu(x.cpu(), ids.cpu(), weights.cpu()).float()
        assert (y.cpu().float() - expected).norm() <= 0.05 * expected.norm()


def test_in_a_cuda_graph(generator: torch.Generator) -> None:
    experts = experts_of()
    given = choices(5, generator)
    with torch.no_grad():
        experts(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(*given)
        for old, new in zip(given, choices(5, generator), strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(y, experts(*given))


def test_torch_compile(generator: torch.Generator) -> None:
    experts = experts_of()
    compiled = torch.compile(experts, fullgraph=True)
    with torch.no_grad():
        for tokens in (3, 64):
            given = choices(tokens, generator)
            expected = experts(*given)
            assert (compiled(*given) - expected).float().norm() <= 0.05 * expected.float().norm()


@formats
def test_gradients_are_those_of_the_cpu(format: str, generator: torch.Generator) -> None:
    experts, on_cpu = experts_of(format), experts_of(format, "cpu")
    x, ids, weights = choices(40, generator)
    grads = []
    for layer, device in ((experts, "cuda"), (on_cpu, "cpu")):
        z, w = (copy.deepcopy(t).to(device).requires_grad_() for t in (x, weights))
        layer(z, ids.to(device), w).float().square().sum().backward()
        assert z.grad is not None and w.grad is not None
        grads.append([z.grad.cpu().float(), w.grad.cpu().float()])
    for got, expected in zip(*grads, strict=True):
        assert (got - expected).norm() <= 0.1 * expected.norm()
