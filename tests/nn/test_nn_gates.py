"""nn.Experts: which gate is that of transformers' modules, and gates and up that are in turns in their columns."""

from __future__ import annotations

import math
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import expert_models

import weightonly as wo
from weightonly.formats import QuantizedLayer
from weightonly.gate import Gate
from weightonly.nn import Experts
from weightonly.nn.experts import ModuleGate, gates_first, in_turns
from weightonly.nn.recipe import Recipe

CONFIG: dict[str, Any] = {
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "moe_latent_size": None,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "swiglu_limit": 2.5,
    "swiglu_alpha": 1.5,
    "_experts_implementation": "eager",
}


def module(model: str, name: str, **options: Any) -> Any:
    found = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)
    torch.manual_seed(0)
    made = found(SimpleNamespace(**CONFIG | options))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


OAI = Gate("silu", limit=2.5, alpha=1.5, shift=1.0)
MODULES: dict[str, tuple[str, Gate | None]] = {
    "mixtral": ("MixtralExperts", Gate("silu")),
    "gpt_oss": ("GptOssExperts", OAI),
    "openai_privacy_filter": ("OpenAIPrivacyFilterExperts", OAI),
    "minimax_m3_vl": ("MiniMaxM3VLExperts", OAI),
    "deepseek_v4": ("DeepseekV4Experts", Gate("silu", limit=2.5)),
    "glm5_next": ("Glm5NextTextExperts", Gate("silu", limit=2.5)),
    "nemotron_h": ("NemotronHExperts", Gate("relu2", has_gate=False)),
}


def inputs(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(2, generator=generator) for _ in range(9)])
    return torch.randn(9, 64, generator=generator), ids, torch.rand(9, 2, generator=generator)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("model", MODULES)
def test_gates_of_modules(model: str, device: str, generator: torch.Generator) -> None:
    """Kernels compute it; in fp32 the layer gives what the module gives with the same weights."""
    name, gate = MODULES[model]
    with torch.device(device):
        dense = module(model, name)
        found = ModuleGate.of(dense).gate
    assert found is not None and gate is not None and found.key == gate.key
    if device == "cpu":
        layer = Experts.from_module(dense, Recipe("int8", -1))
        x, ids, weights = inputs(generator)
        with torch.no_grad():
            exact = layer.to_dense()(x, ids, weights)
        assert (layer(x, ids, weights) - exact).norm() <= 1e-5 * exact.norm()


def test_the_limit_is_the_modules_own() -> None:
    for limit in (0.25, 7.0, 100.0):
        gate = ModuleGate.of(module("deepseek_v4", "DeepseekV4Experts", swiglu_limit=limit)).gate
        assert gate is not None and gate.limit == limit
    without = ModuleGate.of(module("deepseek_v4", "DeepseekV4Experts", swiglu_limit=math.inf)).gate
    assert without is not None and without.key == Gate("silu").key


def test_a_limit_of_what_the_activation_gives_is_none_of_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Step3p7."""
    dense = module("deepseek_v4", "DeepseekV4Experts")

    def apply(self: Any, z: torch.Tensor) -> torch.Tensor:
        gate, up = z.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)

    monkeypatch.setattr(type(dense), "_apply_gate", apply)
    assert ModuleGate.of(dense).gate is None


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "linear": "identity",
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
    **dict.fromkeys(("quick_gelu", "gelu_10", "tanh", "mish", "relu6", "leaky_relu", "sigmoid")),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_transformers(activation: str) -> None:
    """By what they compute: those that no kernel has are called between the products."""
    name = ACTIVATIONS[activation]
    for has_gate, dense in (
        (True, module("mixtral", "MixtralExperts", hidden_act=activation)),
        (False, module("nemotron_h", "NemotronHExperts", mlp_hidden_act=activation)),
    ):
        gate = ModuleGate.of(dense).gate
        assert (None if gate is None else gate.key) == (None if name is None else Gate(name, has_gate=has_gate).key)


def test_a_module_that_computes_elsewhere_alone_keeps_its_gate() -> None:
    class Refuses(torch.nn.Module):
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not on the CPU")

    class Leaves(torch.nn.Module):
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(z, device="meta")

    for act in (Refuses(), Leaves()):
        for dense in (module("mixtral", "MixtralExperts"), module("nemotron_h", "NemotronHExperts")):
            dense.act_fn = act
            assert ModuleGate.of(dense).gate is None


# --- columns in turns -------------------------------------------------------------------------------------------


def test_columns() -> None:
    assert gates_first(torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]
    assert gates_first(torch.arange(8).view(4, 2), 0).tolist() == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert torch.equal(in_turns(gates_first(torch.arange(30).view(3, 10))), torch.arange(30).view(3, 10))


def test_layers_have_gates_first_and_modules_as_they_had_them(generator: torch.Generator) -> None:
    dense = expert_models.make("gpt-oss").model.layers[0].mlp.experts
    layer: Any = Experts.from_module(dense, Recipe("int8", -1))
    again = layer.to_dense()
    assert torch.equal(layer.gate_up_proj.dequantize()[..., :96], again.gate_up_proj[..., ::2])
    assert torch.equal(layer.gate_up_proj.bias, gates_first(dense.gate_up_proj_bias))
    assert torch.equal(again.gate_up_proj_bias, dense.gate_up_proj_bias)
    assert (again.gate_up_proj - dense.gate_up_proj).abs().max() <= 0.01 * dense.gate_up_proj.abs().max()


def part(k: int, n: int, generator: torch.Generator, layout: str) -> QuantizedLayer:
    w = torch.randn(k, n, generator=generator) / k**0.5
    q, scales, zeros = wo.quantize(w, group_size=32, symmetric=False)
    bias = torch.randn(n, generator=generator)
    return QuantizedLayer("expert", wo.preprocess(q, layout=layout), scales, zeros, bias)


@pytest.mark.parametrize("layout", ["tiled", "interleaved", "row_major", "cpu"])
def test_records_in_turns_and_in_pairs(layout: str, generator: torch.Generator) -> None:
    """Of gpt-oss: one layer for each expert as the model has it, or gate and up by themselves."""
    dense = module("gpt_oss", "GptOssExperts")
    pairs = [(part(64, 96, generator, layout), part(64, 96, generator, layout)) for _ in range(2)]
    downs = [part(96, 64, generator, layout) for _ in range(2)]
    by_pairs = Experts.from_quantized(pairs, downs, module=dense)
    both: Any = by_pairs.gate_up_proj
    in_file = [
        QuantizedLayer(
            "expert",
            wo.preprocess(in_turns(wo.unpack(both.packed[e])), layout=layout),
            in_turns(both.scales[e]),
            in_turns(both.zeros[e]),
            in_turns(both.bias[e]),
        )
        for e in range(2)
    ]
    layer: Any = Experts.from_quantized(in_file, downs, module=dense)
    assert all(torch.equal(t, by_pairs.state_dict()[name]) for name, t in layer.state_dict().items())
    assert torch.equal(layer.to_dense().gate_up_proj[1], in_file[1].dequantize())
    x, ids, weights = inputs(generator)
    with torch.no_grad():
        exact = layer.to_dense()(x, ids, weights)
    assert (layer(x, ids, weights) - exact).norm() <= 1e-5 * exact.norm()
