"""The plug-in in real fused MoE layers of SGLang: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import PackedTopKOutput, StandardTopKOutput
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.runtime_context import get_context, get_parallel
from tests import quantized_cases as cases

from .test_sglang import CONFIGS, hooks, hopper  # noqa: F401

EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 256, 128

Stack = dict[str, list[cases.Weight]]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    ranks = dict.fromkeys(("moe_ep_rank", "moe_tp_rank", "tp_rank", "attn_tp_rank", "attn_dp_rank"), 0)
    with get_context().override_server_args(), get_parallel().override(**ranks):
        rendezvous = f"file://{tmp_path_factory.mktemp('ranks') / 'file'}"
        init_distributed_environment(1, 0, rendezvous, 0, backend="gloo")
        initialize_model_parallel()
        yield
        destroy_model_parallel()
        destroy_distributed_environment()


def stack(bits: int, group: int, zeros: bool, generator: torch.Generator, dtype: torch.dtype) -> Stack:
    """gate, up and down of each expert."""

    def weights(k: int, n: int) -> list[cases.Weight]:
        return [cases.weight(generator, k, n, bits=bits, group=group, zeros=zeros, dtype=dtype) for _ in range(EXPERTS)]

    return {"w1": weights(HIDDEN, INNER), "w3": weights(HIDDEN, INNER), "w2": weights(INNER, HIDDEN)}


def build(
    method: str, bits: int, group: int, zeros: bool, dtype: torch.dtype, act_order: bool = False, **options: Any
) -> FusedMoE:
    config = get_quantization_config(CONFIGS[method]).from_config(cases.config(method, bits, group, zeros, act_order))
    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INNER, "layer_id": 0, "top_k": TOP_K}
    prefix = "model.layers.0.mlp.experts"
    return FusedMoE(**(sizes | options), params_dtype=dtype, quant_config=config, prefix=prefix)


def load(layer: FusedMoE, method: str, experts: Stack) -> None:
    """By SGLang's loader, tensor after tensor."""
    parameters: dict[str, Any] = dict(layer.named_parameters())
    for shard, weights in experts.items():
        for expert, w in enumerate(weights):
            for name, tensor in cases.tensors(method, w).items():
                parameter = parameters[f"{'w2' if shard == 'w2' else 'w13'}_{name}"]
                parameter.weight_loader(parameter, tensor, f"experts.{name}", shard, expert)
    layer.quant_method.process_weights_after_loading(layer)


def inputs(generator: torch.Generator, dtype: torch.dtype, rows: int = 7) -> tuple[torch.Tensor, StandardTopKOutput]:
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    logits = torch.randn(rows, EXPERTS, generator=generator)
    weights, ids = logits.softmax(1).topk(TOP_K)
    return x, StandardTopKOutput(weights, ids.int(), logits)


def exact(experts: Stack, x: torch.Tensor, topk: StandardTopKOutput, limit: float | None = None) -> torch.Tensor:
    """In fp64, what is between rounded to the dtype of x."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for weight, expert in zip(topk.topk_weights[row], topk.topk_ids[row], strict=True):
            if expert < 0:
                continue
            gate, up = (x[row].double() @ experts[w][expert].dense for w in ("w1", "w3"))
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            z = (torch.nn.functional.silu(gate) * up).to(x.dtype).double()
            y[row] += weight.double() * (z @ experts["w2"][expert].dense)
    return y


def close(y: torch.Tensor, wanted: torch.Tensor) -> bool:
    step = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[y.dtype]
    return bool((y.double() - wanted).norm() <= 4 * step * wanted.norm())


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")])
@pytest.mark.parametrize("group", [-1, 32, 128])
@pytest.mark.parametrize(("method", "bits", "zeros"), cases.METHODS)
def test_experts_of_each_method(
    method: str, bits: int, zeros: bool, group: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    if method == "awq" and group == -1:
        pytest.skip("SGLang has no experts of AWQ per channel")
    if method == "compressed-tensors" and zeros:
        pytest.skip("SGLang's loader does not turn zero points as it turns words and scales")
    experts = stack(bits, group, zeros, generator, dtype)
    layer = build(method, bits, group, zeros, dtype)
    load(layer, method, experts)
    x, topk = inputs(generator, dtype)
    y = layer(x, topk)
    assert y.dtype == dtype and close(y, exact(experts, x, topk))
    assert not [name for name, _ in layer.named_parameters(recurse=False)], "held once"


def test_what_a_model_asks_of_its_experts(generator: torch.Generator) -> None:
    """A factor, a limit, rows of no expert, and a choice in one tensor."""
    experts = stack(4, 32, False, generator, torch.float16)
    layer = build("compressed-tensors", 4, 32, False, torch.float16, routed_scaling_factor=2.5, swiglu_limit=0.5)
    load(layer, "compressed-tensors", experts)
    x, topk = inputs(generator, torch.float16)
    topk.topk_ids[2] = -1
    wanted = 2.5 * exact(experts, x, topk, limit=0.5)
    y = layer(x, topk)
    assert close(y, wanted) and not y[2].any()
    weights = topk.topk_weights.bfloat16()
    packed = topk.topk_ids << 16 | (weights.view(torch.int16).int() & 0xFFFF)
    wanted = 2.5 * exact(experts, x, topk._replace(topk_weights=weights), limit=0.5)
    assert close(layer(x, PackedTopKOutput(packed, topk.router_logits)), wanted)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "a gate with alpha"),
        ({"activation": "tanh"}, "activation: expected one of"),
        ({"apply_router_weight_on_input": True}, "router weights on the input"),
        ({"no_combine": True}, "results that are not summed"),
    ],
    ids=["alpha", "activation", "input weights", "no sum"],
)
def test_left_to_sglang(
    options: dict[str, Any], reason: str, generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """Comes to Marlin, which a CPU does not have."""
    layer = build("compressed-tensors", 4, 32, False, torch.float16, **options)
    with caplog.at_level("INFO", "weightonly.sglang"), pytest.raises(Exception, match=r"(?i)cuda|nvidia|sgl_kernel"):
        load(layer, "compressed-tensors", stack(4, 32, False, generator, torch.float16))
    assert not hasattr(layer, "weightonly") and reason in caplog.text


def test_act_order_is_left_to_sglang(generator: torch.Generator, caplog: pytest.LogCaptureFixture) -> None:
    layer = build("gptq", 4, 32, False, torch.float16, act_order=True)
    with caplog.at_level("INFO", "weightonly.sglang"), pytest.raises(Exception, match=r"(?i)cuda|nvidia|sgl_kernel"):
        load(layer, "gptq", stack(4, 32, False, generator, torch.float16))
    assert not hasattr(layer, "weightonly") and "experts in act-order" in caplog.text
