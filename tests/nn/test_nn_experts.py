"""nn.Experts: the experts of real transformers models, state, records of checkpoints, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.expert_models import TOKENS, densified, logits, make, models
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

import weightonly as wo
from weightonly.formats import QuantizedLayer
from weightonly.nn import Experts, GroupedLinear
from weightonly.nn.experts import why_not_experts
from weightonly.nn.recipe import Recipe

quantize_model: Any = wo.nn.quantize_model
"""Untyped: tests look into the model."""

FORMATS: dict[str, dict[str, Any]] = {
    "int4, zero points": {"group_size": 32, "symmetric": False},
    "int8": {"format": "int8", "group_size": -1},
    "nf4": {"format": "nf4", "group_size": 32},
}


@models
@pytest.mark.parametrize("arguments", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_logits_are_those_of_the_dequantized_experts(name: str, arguments: dict[str, Any], implementation: str) -> None:
    original = make(name)
    original.set_experts_implementation(implementation)
    model = quantize_model(copy.deepcopy(original), **arguments)
    experts = [child for child in model.modules() if isinstance(child, Experts)]
    assert len(experts) == 2
    assert not any("experts" in layer.names[0] for layer in model.weightonly_summary.left)
    got, exact = logits(model), logits(densified(model, original))
    assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert (got - logits(make(name))).abs().max() > 1e-3 * exact.abs().max()  # the experts do count


@models
def test_bf16_beside_dense_experts(name: str) -> None:
    """At most twice the error of the dense experts in bf16, against the same in fp64."""
    original = make(name).bfloat16()
    original.set_experts_implementation("eager")  # the one that takes fp64
    model = quantize_model(copy.deepcopy(original), group_size=32)
    dense = densified(model, original)
    ours, peer = (m.model.layers[0].mlp.experts for m in (model, dense))
    g = torch.Generator().manual_seed(1)
    x = torch.randn(40, 64, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(ours.num_experts, generator=g)[:2] for _ in range(40)])
    weights = torch.rand(40, 2, generator=g).bfloat16()
    with torch.no_grad():
        got, other = ours(x, ids, weights), peer(x, ids, weights)
        exact = copy.deepcopy(peer).double()(x.double(), ids, weights.double())
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).norm() <= 2 * (other.double() - exact).norm()


def test_generates() -> None:
    model = quantize_model(make("mixtral"), group_size=32)
    dense = densified(model, make("mixtral"))
    made = [m.generate(TOKENS[:1], max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (model, dense)]
    assert torch.equal(*made)


def test_experts_without_a_gate() -> None:
    config: Any = SimpleNamespace(
        n_routed_experts=3,
        hidden_size=64,
        moe_intermediate_size=96,
        moe_latent_size=None,
        mlp_hidden_act="relu2",
        _experts_implementation="eager",
    )
    dense = NemotronHExperts(config)
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter)
    layer = Experts.from_module(dense, Recipe("int4", 32))
    assert {name.split(".")[0] for name in layer.state_dict()} == {"up_proj", "down_proj"}
    for product in ("up_proj", "down_proj"):
        getattr(dense, product).data = getattr(layer, product).dequantize().transpose(1, 2)
    x, ids, weights = torch.randn(7, 64), torch.randint(0, 3, (7, 1)), torch.rand(7, 1)
    with torch.no_grad():
        exact = dense(x, ids, weights)
        assert (layer(x, ids, weights) - exact).norm() <= 1e-5 * exact.norm()


# --- state ------------------------------------------------------------------------------------------------------


@models
def test_state_loads_into_a_model_from_meta(name: str, tmp_path: Path) -> None:
    model = quantize_model(make(name), group_size=32, symmetric=False)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        again = make(name)
    again = quantize_model(again, group_size=32, symmetric=False)
    assert again.model.layers[1].mlp.experts.down_proj.qweight.is_meta
    again.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    for layer in range(2):
        ours, other = (m.model.layers[layer].mlp.experts for m in (model, again))
        x, ids, weights = torch.randn(9, 64), torch.randint(0, ours.num_experts, (9, 2)), torch.rand(9, 2)
        assert torch.equal(ours(x, ids, weights), other(x, ids, weights))


@pytest.fixture
def layer() -> Experts:
    return quantize_model(make("gpt-oss"), group_size=32).model.layers[0].mlp.experts


@pytest.fixture
def inputs(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(9)])
    return torch.randn(9, 64, generator=generator), ids, torch.rand(9, 2, generator=generator)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(clone: Callable[[Experts], Experts], layer: Experts, inputs: Inputs) -> None:
    layer(*inputs)
    other = clone(layer)
    assert torch.equal(other(*inputs), layer(*inputs))
    other.down_proj.scales.data.zero_()
    assert layer(*inputs).any()


def test_parameters_are_frozen_stacks(layer: Experts) -> None:
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters() if "qweight" not in name}
    assert shapes == {
        "gate_up_proj.scales": (5, 2, 192),
        "gate_up_proj.bias": (5, 192),
        "down_proj.scales": (5, 3, 64),
        "down_proj.bias": (5, 64),
    }
    assert layer.down_proj.qweight.shape[0] == 5 and layer.down_proj.qweight.dim() == 3
    assert not any(p.requires_grad for p in layer.parameters())
    assert layer.down_proj.packed.data.data_ptr() == layer.down_proj.qweight.data_ptr()


def test_dtypes_and_repack(layer: Experts, inputs: Inputs) -> None:
    x, ids, weights = inputs
    y = layer(*inputs)
    for arch in ("sm90", "sm80", "sm70"):
        for part in (layer.gate_up_proj, layer.down_proj):
            assert part.repack(arch) is part
        assert torch.equal(layer(*inputs), y)
    half = copy.deepcopy(layer).bfloat16()
    assert half(x.bfloat16(), ids, weights).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(half(*inputs), half(x.bfloat16(), ids, weights))
    with pytest.raises(TypeError, match="GroupedLinear: expected float16, bfloat16 or float32, got float64"):
        layer.double()


def test_a_state_of_another_layout_is_refused(layer: Experts) -> None:
    state = copy.deepcopy(layer.down_proj).repack("sm90").state_dict()
    with pytest.raises(ValueError, match=r"state dict: qweight: .* for layout '\w+', .* layout 'tiled'"):
        layer.down_proj.load_state_dict(state)


def test_compiled(layer: Experts, inputs: Inputs) -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (9, 4):
        part = [tensor[:rows] for tensor in inputs]
        exact = layer(*part)
        assert (compiled(*part) - exact).norm() <= 1e-5 * exact.norm()


def test_errors_name_the_layer(inputs: Inputs) -> None:
    x, ids, weights = inputs
    layer = quantize_model(make("mixtral"), group_size=32).model.layers[1].mlp.experts
    title = r"^layer 'model\.layers\.1\.mlp\.experts' \(weightonly\.nn\.Experts\): "
    with pytest.raises(ValueError, match=title + r"topk_ids: expected -1\.\.5 for 5 experts, got numbers in 6\.\.6"):
        layer(x, torch.full_like(ids, 6), weights)
    with pytest.raises(TypeError, match=title + "scales: expected dtype torch.float16 as x has"):
        layer(x.half(), ids, weights)


# --- records ----------------------------------------------------------------------------------------------------


def record(k: int, n: int, g: torch.Generator, **fields: Any) -> QuantizedLayer:
    """A random layer [k, n], as a reader of checkpoints makes it."""
    w = torch.randn(k, n, generator=g) / k**0.5
    q, scales, zeros = wo.quantize(w, group_size=32, symmetric=False)
    return QuantizedLayer(
        "expert", wo.preprocess(q, layout=fields.pop("layout", "tiled")), scales.half(), zeros, **fields
    )


def records(n: int, g: torch.Generator, **fields: Any) -> list[QuantizedLayer]:
    return [record(64, 96, g, **fields) for _ in range(n)]


def downs(n: int, g: torch.Generator, **fields: Any) -> list[QuantizedLayer]:
    return [record(96, 64, g, **fields) for _ in range(n)]


@pytest.mark.parametrize("layout", ["tiled", "interleaved", "row_major"])
@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
def test_from_records_of_each_expert(act_order: bool, layout: str, generator: torch.Generator, inputs: Inputs) -> None:
    """Gate and up side by side, expert by expert: the experts of the dequantized records."""
    g = generator
    pairs, second = [], []
    for _ in range(5):
        perm = torch.randperm(64, generator=g).int() if act_order else None
        last = torch.randperm(96, generator=g).int() if act_order else None
        pairs.append((record(64, 96, g, perm=perm, layout=layout), record(64, 96, g, perm=perm, layout=layout)))
        second.append(record(96, 64, g, perm=last, layout=layout, bias=torch.randn(64, generator=g)))
    layer = Experts.from_quantized(pairs, second, dtype=torch.float32)
    x, ids, weights = inputs
    y = torch.zeros(9, 64)
    for m in range(9):
        for e, weight in zip(ids[m].tolist(), weights[m], strict=True):
            gate, up = (x[m] @ part.dequantize() for part in pairs[e])
            bias = second[e].bias
            assert bias is not None
            y[m] += weight * ((torch.nn.functional.silu(gate) * up) @ second[e].dequantize() + bias)
    assert (layer(x, ids, weights) - y).norm() <= 1e-5 * y.norm()
    assert layer.down_proj.layout == layout
    assert torch.equal(layer.gate_up_proj.dequantize()[3, :, 96:], pairs[3][1].dequantize())


def test_from_records_into_the_experts_of_a_model(generator: torch.Generator, inputs: Inputs) -> None:
    """What is between the products is the model's: gpt-oss interleaves gate and up, and clamps."""
    with torch.device("meta"):
        module = make("gpt-oss").model.layers[0].mlp.experts
    first = [record(64, 192, generator, bias=torch.randn(192, generator=generator)) for _ in range(5)]
    second = downs(5, generator, bias=torch.randn(64, generator=generator))
    layer = Experts.from_quantized(first, second, module=module, dtype=torch.float32)
    dense = make("gpt-oss").model.layers[0].mlp.experts
    for name, parts in (("gate_up_proj", first), ("down_proj", second)):
        getattr(dense, name).data = torch.stack([part.dequantize() for part in parts])
        getattr(dense, f"{name}_bias").data = torch.stack([part.bias for part in parts if part.bias is not None])
    with torch.no_grad():
        exact = dense(*inputs)
    assert (layer(*inputs) - exact).norm() <= 1e-5 * exact.norm()


Records = Callable[[torch.Generator], dict[str, Any]]
BAD_RECORDS: dict[str, tuple[Records, type[Exception], str]] = {
    "count": (
        lambda g: {"gate_up": [record(64, 192, g)], "down": downs(2, g)},
        ValueError,
        "down: expected 1 experts as gate_up has, got 2",
    ),
    "none": (
        lambda g: {"gate_up": [], "down": []},
        ValueError,
        "gate_up: parts: expected at least one expert, got none",
    ),
    "shape": (
        lambda g: {"gate_up": [record(64, 192, g), record(64, 128, g)], "down": downs(2, g)},
        ValueError,
        "gate_up: expert 1: weight: expected .*'n': 192.* as expert 0 has, got .*'n': 128",
    ),
    "layout": (
        lambda g: {"gate_up": [record(64, 192, g)] * 2, "down": [*downs(1, g), *downs(1, g, layout="row_major")]},
        ValueError,
        "down: expert 1: weight: expected .*'tiled'.*got .*'row_major'",
    ),
    "bias": (
        lambda g: {"gate_up": [record(64, 192, g)] * 2, "down": [*downs(1, g), *downs(1, g, bias=torch.zeros(64))]},
        ValueError,
        r"down: expert 1: bias: expected None as expert 0 has, got \[64\]",
    ),
    "two act-orders": (
        lambda g: {
            "gate_up": [(records(1, g, perm=torch.arange(64))[0], records(1, g, perm=torch.arange(64).flip(0))[0])],
            "down": downs(1, g),
        },
        ValueError,
        "gate_up: expert 0: expected one act-order for gate and up, got different ones",
    ),
    "gate of another kind": (
        lambda g: {"gate_up": [(record(64, 96, g), record(64, 64, g))], "down": downs(1, g)},
        ValueError,
        r"gate_up: expert 0: expected gate and up of one kind, got PackedWeight\(int4 \[64, 96\]",
    ),
    "no up": (
        lambda g: {"gate_up": records(1, g), "down": downs(1, g)},
        ValueError,
        "first: expected 192 columns for down of K = 96, got 96",
    ),
    "H": (
        lambda g: {"gate_up": [record(128, 192, g)], "down": downs(1, g)},
        ValueError,
        "down: expected 1 experts with N = 128, got 1 with N = 64",
    ),
    "activation": (
        lambda g: {"gate_up": [record(64, 192, g)], "down": downs(1, g), "activation": "swiglu"},
        ValueError,
        "activation: expected one of None, 'identity'",
    ),
    "module": (
        lambda g: {"gate_up": [record(64, 192, g)], "down": downs(1, g), "module": torch.nn.Linear(1, 1)},
        TypeError,
        "module: expected experts in transformers' interface, got Linear",
    ),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_records_that_do_not_fit(case: str, generator: torch.Generator) -> None:
    arguments, error, message = BAD_RECORDS[case]
    with pytest.raises(error, match=f"^{message}"):
        Experts.from_quantized(**arguments(generator))


# --- what is left ---------------------------------------------------------------------------------------------


def test_what_is_not_in_the_interface_is_left() -> None:
    experts = make("qwen3-moe").model.layers[0].mlp.experts
    assert why_not_experts(experts) is None
    assert "use_experts_implementation" in str(why_not_experts(torch.nn.ParameterList([torch.zeros(2, 64, 64)])))
    experts.register_buffer("scale", torch.ones(1))
    assert "tensors other than" in str(why_not_experts(experts))
    config: Any = SimpleNamespace(
        num_local_experts=2, moe_hidden_size=64, moe_intermediate_size=64, hidden_act="silu", post_norm_eps=1e-6
    )
    normed: Any = torch.nn.ModuleDict({"experts": MuseSparkExperts(config), "linear": torch.nn.Linear(64, 64)})
    quantize_model(normed, group_size=32)
    [left] = normed.weightonly_summary.left
    assert left.names == ("experts",) and left.kind == "experts"


def test_only_and_skip_take_names_of_experts() -> None:
    name = "model.layers.1.mlp.experts"
    model = quantize_model(make("mixtral"), group_size=32, only=[name])
    assert [layer.names for layer in model.weightonly_summary.quantized] == [(name,)]
    model = quantize_model(make("mixtral"), group_size=32, skip=[name])
    assert [layer.left for layer in model.weightonly_summary.left if name in layer.names] == ["skip"]
    with pytest.raises(ValueError, match=r"layer 'model\.layers\.1\.mlp\.experts': group_size: .*K=64"):
        quantize_model(make("mixtral"), group_size=128, only=[name])


def test_weights_that_cannot_be_quantized_are_named() -> None:
    model = make("mixtral")
    model.model.layers[1].mlp.experts.down_proj.data[3, 5, 7] = torch.nan
    message = r"^layer 'model\.layers\.1\.mlp\.experts': down_proj, expert 3: w: expected finite values"
    with pytest.raises(ValueError, match=message):
        quantize_model(model, group_size=32)


def test_codebooks_and_act_order_have_buffers(generator: torch.Generator) -> None:
    code = torch.linspace(-1, 1, 16)
    codes = torch.randint(0, 16, (3, 64, 70), generator=generator).to(torch.uint8)
    scales, perm = torch.rand(3, 2, 70, generator=generator), torch.arange(64).flip(0).repeat(3, 1)
    layer = GroupedLinear.from_quantized(wo.preprocess(codes, format="code4", code=code), scales, perm=perm)
    again = GroupedLinear(3, 64, 70, format="code4", group_size=32, dtype=torch.float32, act_order=True)
    again.load_state_dict(layer.state_dict())
    x, offs = torch.randn(5, 64, generator=generator), torch.tensor([1, 1, 5], dtype=torch.int32)
    assert torch.equal(again(x, offs), layer(x, offs))
    exact = torch.cat([x[:1] @ layer.dequantize()[0], x[1:] @ layer.dequantize()[2]])
    assert (layer(x, offs) - exact).norm() <= 1e-5 * exact.norm()
    assert torch.equal(layer.dequantize()[0, 0], code[codes[0, 63].int()] * scales[0, 1])
