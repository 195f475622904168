"""Experts of the plug-in in real fused MoE layers of vLLM: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.vllm import vllm_cases as cases
from tests.vllm import vllm_experts as moe
from tests.vllm.vllm_experts import HIDDEN, INNER, fake_layer, needs_cpu_experts
from vllm.model_executor.layers import activation as layers
from vllm.model_executor.layers.fused_moe import MoEActivation
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform

import weightonly as wo
from weightonly.gate import Gate
from weightonly.vllm.expert_layer import Shard, gate_of
from weightonly.vllm.expert_tensors import of_rows
from weightonly.vllm.experts import WeightOnlyExpertsMethod

DTYPES = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]


def near(y: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Two products and what is between them, each rounded to `dtype`."""
    step = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    assert (y.double() - expected).abs().max() <= 8 * step * expected.abs().max()


def inputs(g: torch.Generator, dtype: torch.dtype, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the router's logits"""
    return torch.randn(rows, HIDDEN, generator=g).to(dtype), torch.randn(rows, moe.E, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [-1, 16, 32, 64])
@pytest.mark.parametrize(("method", "bits", "zeros"), cases.METHODS)
def test_layer_of_each_method(
    method: str,
    bits: int,
    zeros: bool,
    group: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit what `fused_experts` gives, and near the dense layer."""
    moe.take_ours(monkeypatch, "sm90")
    experts = moe.random_experts(generator, HIDDEN, INNER, bits=bits, group=group, zeros=zeros, dtype=dtype)
    x, logits = inputs(generator, dtype)
    with cases.serving(dtype):
        runner = moe.build(method, cases.config(method, bits, group, zeros), HIDDEN, INNER)
        moe.load(runner, experts.tensors(method))
        y = moe.forward(runner, x, logits)
    weights, ids = moe.route(x, logits, moe.TOP_K, True)
    stacks = experts.stacks("sm90")
    assert torch.equal(y, wo.fused_experts(x, *stacks, ids, weights))
    near(y, experts.dense(x, ids, weights), dtype)
    held = sum(p.numel() * p.element_size() for p in runner.routed_experts.parameters())
    scales = sum(s.numel() * s.element_size() * (1 + zeros) for _, s, _, _ in stacks)
    assert held == sum(s[0].data.numel() for s in stacks) + scales, "the weights are held twice"


@needs_cpu_experts
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "as they are"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid in groups"])
def test_routers_of_vllm(
    scoring: str, renormalize: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's router chooses the experts and their weights, and scales them."""
    moe.take_ours(monkeypatch)
    experts = moe.random_experts(generator, HIDDEN, INNER)
    x, logits = inputs(generator, torch.float16)
    options: dict[str, Any] = {"custom_routing_function": None, "renormalize": renormalize}
    scores = logits.float().softmax(-1)
    if scoring != "softmax":
        groups = {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1}
        options |= groups | {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5}
        scores = logits.float().sigmoid()
        best = scores.view(len(x), 2, -1).amax(-1).argmax(-1, keepdim=True)  # (rows, 1): of two groups of experts
        is_mine = torch.arange(moe.E).expand(len(x), -1) // (moe.E // 2) == best
        scores = scores.where(is_mine, -1.0)
    weights, ids = scores.topk(moe.TOP_K)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    weights = weights * options.get("routed_scaling_factor", 1.0)
    with cases.serving():
        runner = moe.build("gptq", cases.config("gptq", 4, 64, False), HIDDEN, INNER, **options)
        moe.load(runner, experts.tensors("gptq"))
        y = moe.forward(runner, x, logits)
    near(y, experts.dense(x, ids, weights), torch.float16)


@pytest.mark.parametrize(("method", "bits", "zeros"), cases.METHODS)
def test_experts_of_other_ranks(
    method: str, bits: int, zeros: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four ranks has one or two of the six experts, by vLLM's expert map; their results add up."""
    moe.take_ours(monkeypatch)
    experts = moe.random_experts(generator, HIDDEN, INNER, bits=bits, zeros=zeros)
    x, logits = inputs(generator, torch.float16)
    weights, ids = moe.route(x, logits, moe.TOP_K, True)
    w13, w2 = experts.stacks()
    total = torch.zeros(x.shape, dtype=torch.float64)
    begin = 0
    with cases.serving():
        for rank in range(4):
            with moe.rank_of(monkeypatch, rank, expert_parallel=True):
                runner = moe.build(method, cases.config(method, bits, 64, zeros), HIDDEN, INNER, tp_size=4)
                moe.load(runner, experts.tensors(method))
                y = moe.forward(runner, x, logits)
            end = begin + runner.routed_experts.local_num_experts
            mine13, mine2 = (tuple(t if t is None else t[begin:end] for t in stack) for stack in (w13, w2))
            local = torch.where((ids >= begin) & (ids < end), ids - begin, -1)
            assert torch.equal(y, wo.fused_experts(x, mine13, mine2, local, weights))
            total += y.double()
            layer = runner.routed_experts
            y = layer.quant_method.apply(layer, x, weights, ids.where(ids != 0, -1))  # -1: to no expert
            local = torch.where((ids > 0) & (local >= 0), local, -1)
            assert torch.equal(y, wo.fused_experts(x, mine13, mine2, local, weights))
            begin = end
    assert begin == moe.E
    near(total, experts.dense(x, ids, weights), torch.float16)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("group", [-1, 32, 64])
@pytest.mark.parametrize(("method", "bits", "zeros"), cases.METHODS)
def test_shards_of_each_expert(
    method: str,
    bits: int,
    zeros: bool,
    group: int,
    ranks: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The results of the ranks of tensor parallelism add up. Two ranks have 96 rows each, and cut a group of 64."""
    moe.take_ours(monkeypatch)
    has_bias = group == 32
    experts = moe.random_experts(generator, HIDDEN, INNER, bits=bits, group=group, zeros=zeros, has_bias=has_bias)
    x, logits = inputs(generator, torch.float16)
    weights, ids = moe.route(x, logits, moe.TOP_K, True)
    total = torch.zeros(x.shape, dtype=torch.float64)
    with cases.serving():
        for rank in range(ranks):
            with moe.rank_of(monkeypatch, rank, expert_parallel=False):
                options = cases.config(method, bits, group, zeros)
                runner = moe.build(method, options, HIDDEN, INNER, tp_size=ranks, has_bias=has_bias)
                moe.load(runner, experts.tensors(method))
                total += moe.forward(runner, x, logits).double()
    near(total, experts.dense(x, ids, weights), torch.float16)


def test_router_weights_on_the_input(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    moe.take_ours(monkeypatch)
    experts = moe.random_experts(generator, HIDDEN, INNER)
    x, logits = inputs(generator, torch.float16)
    weights, ids = moe.route(x, logits, 1, False)
    options = cases.config("gptq", 4, 64, False)
    with cases.serving():
        runner = moe.build(
            "gptq", options, HIDDEN, INNER, top_k=1, renormalize=False, apply_router_weight_on_input=True
        )
        moe.load(runner, experts.tensors("gptq"))
        y = moe.forward(runner, x, logits)
    near(y, experts.dense(x * weights.half(), ids, torch.ones_like(weights)), torch.float16)


SITU = {"activation_situ_beta": 2.0, "activation_situ_linear_beta": 3.0}
OAI = {"swiglu_limit": 0.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
ACTIVATIONS: dict[str, tuple[dict[str, Any], Gate]] = {
    "gelu": ({}, Gate("gelu")),
    "gelu_tanh": ({}, Gate("gelu_tanh")),
    "silu": ({"swiglu_limit": 0.5}, Gate("silu", limit=0.5)),
    "situ": (SITU, Gate("situ", alpha=2.0, limit=3.0)),
    "swigluoai_uninterleave": (OAI, Gate("silu", limit=0.5, alpha=1.702, shift=1.0)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    options, gate = ACTIVATIONS[activation]
    known = inspect.signature(FusedMoEFactory).parameters
    if not options.keys() <= known.keys() or activation not in (known_one.value for known_one in MoEActivation):
        pytest.skip("this vLLM does not have it")
    moe.take_ours(monkeypatch)
    experts = moe.random_experts(generator, HIDDEN, INNER)
    x, logits = inputs(generator, torch.float16)
    weights, ids = moe.route(x, logits, moe.TOP_K, True)
    with cases.serving():
        config = cases.config("gptq", 4, 64, False)
        runner = moe.build("gptq", config, HIDDEN, INNER, activation=activation, **options)
        moe.load(runner, experts.tensors("gptq"))
        y = moe.forward(runner, x, logits)
    assert torch.equal(y, wo.fused_experts(x, *experts.stacks(), ids, weights, gate))
    assert not torch.equal(y, wo.fused_experts(x, *experts.stacks(), ids, weights, "silu"))


def applied(activation: str, fields: dict[str, Any], z: torch.Tensor) -> torch.Tensor:
    """What vLLM computes between the products: its own function, or of those in its library the one in PyTorch."""
    if activation.endswith("_no_mul"):
        y = torch.empty_like(z)
        apply_moe_activation(MoEActivation(activation), y, z.clone())
        return y
    of_silu = (
        {} if activation == "silu" else {"alpha": fields.get("swiglu_alpha", 0), "beta": fields.get("swiglu_beta", 0)}
    )
    if "swiglu_limit" in fields:
        return layers.SiluAndMulWithClamp(fields["swiglu_limit"], **of_silu).forward_native(z)
    if activation == "situ":
        return layers.SituAndMul(*fields.values()).forward_native(z)
    if activation == "silu":
        return layers.SiluAndMul.forward_native(z)
    form: Any = SimpleNamespace(approximate="tanh" if activation == "gelu_tanh" else "none")  # 0.29 makes none on CPUs
    return layers.GeluAndMul.forward_native(form, z)


@pytest.mark.parametrize(
    ("activation", "fields"),
    [
        ("silu", {}),
        *((activation, fields) for activation, (fields, _) in ACTIVATIONS.items()),
        ("situ", {"activation_situ_beta": 4.0, "activation_situ_linear_beta": None}),
        *((f"{name}_no_mul", {}) for name in ("silu", "gelu", "gelu_tanh", "relu2")),
    ],
    ids=str,
)
def test_gates_are_what_vllm_applies(activation: str, fields: dict[str, Any], generator: torch.Generator) -> None:
    """In fp32, beyond the limits, too."""
    moe_config = fake_layer(activation=SimpleNamespace(value=activation)).moe_config
    for name, value in fields.items():
        setattr(moe_config, name, value)
    z = torch.randn(50, 64, generator=generator) * 4
    with cases.serving(torch.float32):
        wanted = applied(activation, fields, z)
    torch.testing.assert_close(gate_of(moe_config)(z), wanted, rtol=1e-5, atol=1e-6)


def test_an_activation_that_no_gate_has() -> None:
    with pytest.raises(ValueError, match=r"activation: expected one of silu, .*, relu2_no_mul, got swiglustep"):
        gate_of(fake_layer(activation=SimpleNamespace(value="swiglustep")).moe_config)


def test_experts_without_a_gate(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Nemotron: one first projection, whose tensors come as those of "w1"."""
    moe.take_ours(monkeypatch)
    monkeypatch.setattr(type(current_platform), "is_xpu", lambda _: True)  # vLLM has none on CPUs
    experts = moe.random_experts(generator, HIDDEN, INNER)
    x, logits = inputs(generator, torch.float16)
    weights, ids = moe.route(x, logits, moe.TOP_K, True)
    options = cases.config("gptq", 4, 64, False)
    with cases.serving():
        names = {"ckpt_names": ("gate_proj", "down_proj", None)}
        runner = moe.build("gptq", options, HIDDEN, INNER, activation="relu2_no_mul", **names)
        monkeypatch.undo()
        mine = ((name, t) for name, t in experts.tensors("gptq") if "up_proj" not in name)
        moe.load(runner, mine)
        y = runner.routed_experts.quant_method.apply(runner.routed_experts, x, weights, ids)
    first = moe.stack(experts.weights["gate_proj"], None, None)
    assert torch.equal(y, wo.fused_experts(x, first, experts.stacks()[1], ids, weights, "relu2"))


def test_groups_that_a_rank_cuts_are_counted_on_the_cpu() -> None:
    """vLLM builds layers where the GPU is the default device: the host would wait for it."""
    layer = fake_layer(tp_size=2, tp_rank=1, intermediate_size_per_partition=96)
    with torch.device("meta"):
        shard = Shard(layer, of_rows("int4", 64, 64, False), "w2")
    assert shard.source is not None and shard.source.tolist() == [0, 1, 1] and shard.group_size == 32


def test_parameters_that_move(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a trainer moves them: the scales alone, too."""
    moe.take_ours(monkeypatch)
    x, logits = inputs(generator, torch.float16)
    with cases.serving():
        runner = moe.build("gptq", cases.config("gptq", 4, 64, False), HIDDEN, INNER)
        moe.load(runner, moe.random_experts(generator, HIDDEN, INNER).tensors("gptq"))
        before = moe.forward(runner, x, logits)
        runner.routed_experts.w2_scales.data = runner.routed_experts.w2_scales.data * 2
        torch.testing.assert_close(moe.forward(runner, x, logits), before * 2)


def test_weights_are_made_once(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    moe.take_ours(monkeypatch)
    x, logits = inputs(generator, torch.float16)
    with cases.serving():
        runner = moe.build("gptq", cases.config("gptq", 4, 64, False), HIDDEN, INNER)
        moe.load(runner, moe.random_experts(generator, HIDDEN, INNER).tensors("gptq"))
        made: list[str] = []
        make = WeightOnlyExpertsMethod._weight

        def counted(method: WeightOnlyExpertsMethod, layer: Any, stem: str) -> tuple[Any, ...]:
            made.append(stem)
            return make(method, layer, stem)

        monkeypatch.setattr(WeightOnlyExpertsMethod, "_weight", counted)
        for _ in range(3):
            moe.forward(runner, x, logits)
    assert made == ["w13", "w2"]


def test_tensors_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other shapes than the config says, words of another loader, and experts of another rank."""
    tensors = of_rows("int4", 64, 64, False)
    with cases.serving():
        method = WeightOnlyExpertsMethod("a layer", moe.build(None, {}, HIDDEN, INNER).routed_experts, tensors)
    layer: Any = torch.nn.Module()
    method.create_weights(layer, moe.E, HIDDEN, INNER, torch.float16)
    wrong = {
        "qweight": torch.zeros(INNER - 1, HIDDEN // 2, dtype=torch.uint8),
        "scales": torch.ones(INNER, HIDDEN // 64 - 1),
    }
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match=rf"a layer\.{name}: expected \[N, K\] = \[{INNER}, {HIDDEN}\]"):
            method.load(getattr(layer, f"w13_{name}"), tensor, f"w13_{name}", "w1", 0)
    with pytest.raises(ValueError, match=r"qweight: expected uint8 .* got torch\.int32"):
        tensors.read["qweight"](torch.zeros(8, 8, dtype=torch.int32))
    whole = torch.zeros(INNER, HIDDEN // 2, dtype=torch.uint8)
    assert method.load(layer.w13_qweight, whole, "w13_qweight", "w1", 0, return_success=True) is True
    monkeypatch.setattr(method, "local_expert", lambda expert: -1)
    assert method.load(layer.w13_qweight, whole, "w13_qweight", "w1", 0, return_success=True) is False


def test_act_order_is_refused(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with an order that its config does not say."""
    moe.take_ours(monkeypatch)
    experts = moe.random_experts(generator, HIDDEN, INNER)
    for w in experts.weights["down_proj"]:
        w.g_idx = w.g_idx[torch.arange(INNER).flip(0)]
    with cases.serving():
        runner = moe.build("gptq", cases.config("gptq", 4, 64, False), HIDDEN, INNER)
        with pytest.raises(ValueError, match=r"experts\.g_idx: expected groups in order"):
            moe.load(runner, experts.tensors("gptq"))


def test_reload(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are loaded again run from the memory of the first ones."""
    moe.take_ours(monkeypatch, "sm90")
    first, second = (moe.random_experts(generator, HIDDEN, INNER, zeros=True) for _ in range(2))
    x, logits = inputs(generator, torch.float16)
    weights, ids = moe.route(x, logits, moe.TOP_K, True)
    with cases.serving():
        runner = moe.build("awq", cases.config("awq", 4, 64, True), HIDDEN, INNER)
        layer = runner.routed_experts
        layerwise.record_metadata_for_reloading(layer)
        moe.load(runner, first.tensors("awq"))
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
        assert torch.equal(moe.forward(runner, x, logits), wo.fused_experts(x, *first.stacks("sm90"), ids, weights))
        layerwise.initialize_layerwise_reload(layer)
        list(layer.load_weights(second.tensors("awq")))
        assert not layerwise.get_layerwise_info(layer).can_load(), "kept until all layers are loaded"
        layerwise.finalize_layerwise_reload(layer, None)
        assert torch.equal(moe.forward(runner, x, logits), wo.fused_experts(x, *second.stacks("sm90"), ids, weights))
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses
