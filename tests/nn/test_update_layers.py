"""update_ of layers: new numbers for all that holds them, and none where one of the tensors does not fit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.expert_models import MODELS, logits, make
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import weightonly as wo
from weightonly import dense
from weightonly.nn import Experts, GroupedLinear, Linear

K, N = 128, 192
quantize_model: Any = wo.nn.quantize_model

KINDS: dict[str, dict[str, Any]] = {
    "int4": {"group_size": 32},
    "int4 zeros": {"group_size": 64, "symmetric": False},
    "int8": {"format": "int8", "group_size": -1},
    "nf4": {"format": "nf4"},
    "nvfp4": {"format": "nvfp4"},
}
kinds = pytest.mark.parametrize("arguments", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of these tests take several."""
    monkeypatch.setattr(dense, "_SLICE_ELEMS", 64 * 64)


def linear(seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(K, N, dtype=dtype)


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(module: torch.nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    got = module.state_dict()
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)


@kinds
def test_a_layer_has_the_bits_of_a_fresh_one(arguments: dict[str, Any]) -> None:
    layer, other = Linear.from_linear(linear(0), **arguments), linear(1)
    addresses = [p.data_ptr() for p in layer.parameters()]
    assert layer.update_(other.weight, other.bias) is layer
    assert same(layer, state(Linear.from_linear(other, **arguments)))
    assert [p.data_ptr() for p in layer.parameters()] == addresses
    bias = layer.bias.clone()  # type: ignore[union-attr]
    layer.update_(linear(2).weight)
    assert torch.equal(layer.bias, bias)  # type: ignore[arg-type]


@kinds
def test_warm_plans_views_and_compiled_functions_see_it(arguments: dict[str, Any]) -> None:
    layer, other = Linear.from_linear(linear(0), **arguments), linear(1)
    compiled, x = torch.compile(layer, fullgraph=True), torch.randn(3, K)
    view = layer.weight
    old = [layer(x), compiled(x), view + 0]
    layer.update_(other.weight, other.bias)
    w = layer.dequantize().double()
    exact = x.double() @ w + layer.bias.double()  # type: ignore[union-attr]
    for got, before in ((layer(x), old[0]), (compiled(x), old[1])):
        assert (got - exact).abs().max() < 1e-4 * exact.abs().max() < (before - exact).abs().max()
    assert torch.equal(view + 0, w.t().float()) and not torch.equal(view + 0, old[2])
    assert (w.t() - other.weight).norm() < 0.2 * other.weight.norm()


def test_layers_that_share_a_weight_change_together() -> None:
    first, second = Linear.from_linear(linear(0), group_size=32), Linear.from_linear(linear(1), group_size=32)
    for name in ("qweight", "scales", "bias"):
        setattr(second, name, getattr(first, name))
    x, other = torch.randn(2, K), linear(2)
    assert torch.equal(first(x), second(x))
    second.update_(other.weight, other.bias)
    expected = Linear.from_linear(other, group_size=32)(x)
    assert torch.equal(first(x), expected) and torch.equal(second(x), expected)


def test_scales_that_peft_made_fp32_get_the_numbers_of_16_bits() -> None:
    layer, other = Linear.from_linear(linear(0).bfloat16(), group_size=32), linear(1).bfloat16()
    for parameter in layer.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    layer.update_(other.weight, other.bias)
    fresh = Linear.from_linear(other, group_size=32)
    assert layer.scales.dtype == torch.float32 and torch.equal(layer.scales, fresh.scales.float())
    assert torch.equal(layer.qweight, fresh.qweight)


def bad(shape: tuple[int, ...], value: float = float("nan")) -> torch.Tensor:
    w = torch.zeros(shape)
    w[-1] = value
    return w


@pytest.mark.parametrize(
    ("weight", "bias", "error", "message"),
    [
        (torch.zeros(K, N), None, ValueError, rf"weight: expected shape \[{N}, {K}\], got \[{K}, {N}\]"),
        (torch.zeros(N), None, ValueError, rf"weight: expected shape \[{N}, {K}\], got \[{N}\]"),
        (torch.zeros(N, K).long(), None, TypeError, "weight: expected dtype torch.float16 or"),
        (bad((N, K)), None, ValueError, "weight: expected finite values, got NaN or Inf"),
        (torch.ones(N, K), torch.zeros(K), ValueError, rf"bias: expected shape \[{N}\], got \[{K}\]"),
        (torch.ones(N, K), bad((N,)), ValueError, "bias: expected finite values in torch.float16, got NaN or Inf"),
        (torch.ones(N, K), bad((N,), 1e5), ValueError, "bias: expected finite values in torch.float16, got"),
        (torch.ones(N, K), [0.0], TypeError, "bias: expected a tensor, got list"),
    ],
)
def test_what_does_not_fit_is_an_error_by_name_and_changes_nothing(
    weight: Any, bias: Any, error: type[Exception], message: str
) -> None:
    layer = Linear.from_linear(linear(0).half(), group_size=32)
    layer.layer_name = "mlp.up"
    before = state(layer)
    with pytest.raises(error, match=rf"^layer 'mlp.up' \(weightonly.nn.Linear {K} -> {N}\): {message}"):
        layer.update_(weight, bias)
    assert same(layer, before)


def test_layers_that_have_no_numbers_or_no_bias_are_refused() -> None:
    layer = Linear.from_linear(linear(0), group_size=32)
    with pytest.raises(TypeError, match=r"weight: expected a plain torch.Tensor, got WeightView"):
        layer.update_(layer.weight)
    without = Linear.from_linear(torch.nn.Linear(K, N, bias=False), group_size=32)
    with pytest.raises(ValueError, match="bias: expected None for a layer without a bias, got a tensor"):
        without.update_(torch.ones(N, K), torch.zeros(N))
    with pytest.raises(ValueError, match="packed: expected a tensor with numbers, got one on meta"):
        layer.to("meta").update_(torch.ones(N, K))


def llama(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


def gpt2(seed: int) -> Any:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32)).eval()


@pytest.mark.parametrize("model", [llama, gpt2])
def test_a_model_of_transformers_follows_another_one(model: Any) -> None:
    """As an RL loop does it: packed layers by update_, all else by copy_. GPT-2 has Conv1D, [K, N]."""
    ours, other = quantize_model(model(0), group_size=32), model(1)
    before = logits(ours)
    updated = 0
    with torch.no_grad():
        for name, module in other.named_modules():
            mine = ours.get_submodule(name)
            if isinstance(mine, Linear):
                mine.update_(module.weight, module.bias)
                updated += 1
            else:
                for parameter_name, parameter in module.named_parameters(recurse=False):
                    getattr(mine, parameter_name).copy_(parameter)
    assert updated == len([m for m in ours.modules() if isinstance(m, Linear)]) > 7
    expected = logits(quantize_model(other, group_size=32))
    assert torch.equal(logits(ours), expected) and not torch.equal(before, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("arguments", [KINDS["int4 zeros"] | {"group_size": 32}, {"format": "mxfp4"}])
def test_experts_of_transformers(name: str, arguments: dict[str, Any]) -> None:
    """gpt-oss has its weights transposed, gate and up in turns, and biases."""
    original = make(name)
    torch.manual_seed(1)
    other = copy.deepcopy(original)
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    fresh = quantize_model(copy.deepcopy(other), **arguments)
    ours = quantize_model(original, **arguments)
    found = 0
    for path, child in ours.named_modules():
        if isinstance(child, Experts):
            module = other.get_submodule(path)
            biases = [getattr(module, f"{product}_proj_bias", None) for product in ("gate_up", "down")]
            before = [p.data_ptr() for p in child.parameters()]
            child.update_(module.gate_up_proj, module.down_proj, *biases)
            assert same(child, state(fresh.get_submodule(path)))
            assert [p.data_ptr() for p in child.parameters()] == before
            found += 1
    assert found == 2


def test_one_bad_product_of_experts_changes_neither() -> None:
    ours, other = quantize_model(make("mixtral"), group_size=32), make("mixtral")
    experts = next(m for m in ours.modules() if isinstance(m, Experts))
    module = other.model.layers[0].mlp.experts
    before = state(experts)
    module.down_proj.data[3, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"^GroupedLinear: down: expert 3: expected finite values"):
        experts.update_(module.gate_up_proj * 2, module.down_proj)
    with pytest.raises(ValueError, match=r"^GroupedLinear: first: expected shape \[5, 256, 64\], got \[5, 64, 256\]"):
        experts.update_(module.gate_up_proj.mT, module.down_proj)
    assert same(experts, before)


def test_a_stack_in_act_order() -> None:
    torch.manual_seed(0)
    w, other = torch.randn(3, N, K), torch.randn(3, N, K)
    perm = torch.stack([torch.randperm(K) for _ in range(3)])

    def made(w: torch.Tensor) -> GroupedLinear:
        each = [wo.quantize(one.t()[order], 4, 32) for one, order in zip(w, perm, strict=True)]
        packed = wo.preprocess(torch.stack([q for q, _, _ in each]))
        return GroupedLinear.from_quantized(packed, torch.stack([s for _, s, _ in each]), perm=perm)

    assert same(made(w).update_(other), state(made(other)))
