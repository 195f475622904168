"""Fused MoE layers of vLLM on tensors that the tests make. Import this where vLLM is installed."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm import vllm_cases as cases
from vllm.config import ParallelConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe import MoEActivation
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.quantization import get_quantization_config

import weightonly as wo
from weightonly.vllm import register
from weightonly.vllm.experts import WeightOnlyExpertsMethod, take_experts

E, TOP_K = 6, 3
HIDDEN, INNER = 128, 192
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_numbers = itertools.count()

needs_cpu_experts = pytest.mark.skipif(
    importlib.util.find_spec("vllm.model_executor.layers.fused_moe.router.cpu_router") is None,
    reason="experts and routers of this vLLM need its compiled operators",
)

needs_vllms_experts = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's own quantized experts need a CPU with AMX"
)


def keep_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered from here on is gone when the test ends."""
    register()  # first: what it adds to lists stays
    registered = dict(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG)
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", registered)


def take_ours(monkeypatch: pytest.MonkeyPatch, arch: str | None = None) -> None:
    """vLLM's configs with our experts, packing for `arch`, until the test ends."""
    keep_configs(monkeypatch)
    monkeypatch.setattr(WeightOnlyExpertsMethod, "arch", arch)
    take_experts()


def route(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, the topk of them, in the form of vLLM's custom_routing_function."""
    weights, ids = gating_output.float().softmax(-1).topk(topk)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids.int()


@dataclass
class Experts:
    """The weights of E experts: projection -> a weight for each expert."""

    weights: dict[str, list[cases.Weight]]
    bias: dict[str, torch.Tensor] | None = None  # projection -> [E, N]

    def tensors(self, method: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a checkpoint of `method`, named as inside of the experts of a layer."""
        for projection, weights in self.weights.items():
            for expert, w in enumerate(weights):
                for name, tensor in cases.tensors(method, w).items():
                    yield f"{expert}.{projection}.{name}", tensor
                if self.bias is not None:
                    yield f"{expert}.{projection}.bias", self.bias[projection][expert]

    def stacks(self, arch: str | None = None) -> tuple[Any, Any]:
        """w13 and w2, as `fused_experts` takes them."""
        first = [
            cases.beside(gate, up) for gate, up in zip(self.weights["gate_proj"], self.weights["up_proj"], strict=True)
        ]
        biases: tuple[torch.Tensor | None, ...] = (None, None)
        if self.bias is not None:
            biases = (torch.cat([self.bias["gate_proj"], self.bias["up_proj"]], 1), self.bias["down_proj"])
        return stack(first, biases[0], arch), stack(self.weights["down_proj"], biases[1], arch)

    def dense(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        act: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.silu,
    ) -> torch.Tensor:
        """The layer in fp64."""
        y = torch.zeros(x.shape, dtype=torch.float64)
        for e in ids.unique().tolist():
            bias = [0 if self.bias is None else self.bias[name][e].double() for name in PROJECTIONS]
            gate, up, down = (self.weights[name][e].dense for name in PROJECTIONS)
            inner = act(x.double() @ gate + bias[0]) * (x.double() @ up + bias[1])
            y += (weights.double() * (ids == e)).sum(1, keepdim=True) * (inner @ down + bias[2])
        return y


def stack(
    weights: list[cases.Weight], bias: torch.Tensor | None, arch: str | None
) -> tuple[wo.PackedWeight, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    bits, middle = weights[0].bits, 1 << (weights[0].bits - 1)
    q = torch.stack([(w.u - middle).to(torch.int8) for w in weights])
    scales = torch.stack([w.scales for w in weights])
    zeros = None
    if weights[0].z is not None:
        zeros = torch.stack([(w.z - middle).to(scales.dtype) for w in weights if w.z is not None])
    return wo.preprocess(q, bits, arch=arch), scales, zeros, bias


def random_experts(
    g: torch.Generator,
    hidden: int,
    inner: int,
    *,
    bits: int = 4,
    group: int = 64,
    zeros: bool = False,
    dtype: torch.dtype = torch.float16,
    has_bias: bool = False,
) -> Experts:
    shapes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    weights = {
        name: [cases.weight(g, k, n, bits=bits, group=group, zeros=zeros, dtype=dtype) for _ in range(E)]
        for name, (k, n) in shapes.items()
    }
    bias = {name: torch.randn(E, n, generator=g).to(dtype) for name, (_, n) in shapes.items()} if has_bias else None
    return Experts(weights, bias)


def build(method: str | None, options: dict[str, Any], hidden: int, inner: int, **arguments: Any) -> Any:
    """vLLM's runner of a fused MoE layer with a quantization method, or none, its tensors not yet loaded."""
    config = None if method is None else get_quantization_config(method).from_config(options)
    arguments = {"num_experts": E, "top_k": TOP_K, "custom_routing_function": route} | arguments
    prefix = f"model.layers.{next(_numbers)}.mlp.experts"  # one process cannot have two of one name
    return FusedMoEFactory(hidden_size=hidden, intermediate_size=inner, quant_config=config, prefix=prefix, **arguments)


def load(runner: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """By vLLM's own loader; then what it does at the end."""
    list(runner.routed_experts.load_weights(tensors))
    runner.routed_experts.quant_method.process_weights_after_loading(runner.routed_experts)


def forward(runner: Any, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    with set_forward_context(None, get_current_vllm_config()):
        y = runner(x, logits)
    assert isinstance(y, torch.Tensor)
    return y


@contextmanager
def rank_of(monkeypatch: pytest.MonkeyPatch, rank: int, expert_parallel: bool) -> Iterator[None]:
    """Layers that are built in here with tp_size are those of one rank, without the sum over ranks."""
    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.config.get_tensor_model_parallel_rank", lambda: rank)
    parallel = ParallelConfig(enable_expert_parallel=expert_parallel)
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        yield


def fake_layer(**changes: Any) -> Any:
    """What `why_no_experts` looks at, of a layer that is computed."""
    parallel = SimpleNamespace(tp_rank=0, tp_size=1, enable_eplb=False, use_all2all_kernels=False)
    moe_config = SimpleNamespace(
        activation=MoEActivation.SILU,
        moe_parallel_config=parallel,
        swiglu_limit=None,
        is_lora_enabled=False,
        intermediate_size_per_partition=INNER,
        hidden_dim=HIDDEN,
        in_dtype=torch.float16,
        moe_backend="auto",
    )
    layer = SimpleNamespace(moe_config=moe_config, apply_router_weight_on_input=False, top_k=2, local_num_experts=E)
    for name, value in changes.items():
        holder: Any = next(each for each in (layer, moe_config, parallel) if hasattr(each, name))
        setattr(holder, name, value)
    return layer
