"""`quantize_model` where it has nothing to do, or would undo something: it says so."""

# mypy: disable-error-code="arg-type, has-type, index, misc, union-attr"

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import tests.hf_version  # noqa: F401
import torch
import transformers
from peft import IA3Config, LoraConfig, LoraModel, PromptEncoderConfig, get_peft_model, inject_adapter_in_model

import weightonly as wo
from weightonly.dense import DEFAULT_GROUP_SIZE
from weightonly.nn import Linear, quantize_model

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = torch.arange(6).view(1, 6)


def llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=128))


def trainable(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


LORA = LoraConfig(target_modules=["q_proj"])


ADAPTED: dict[str, Callable[[], torch.nn.Module]] = {
    "LoRA": lambda: get_peft_model(llama(), LORA),
    "LoRA, not trained": lambda: get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], inference_mode=True)),
    "LoRA on packed layers": lambda: get_peft_model(quantize_model(llama(), group_size=32), LORA),
    "LoRA, the model inside": lambda: get_peft_model(llama(), LORA).get_base_model(),
    "LoraModel": lambda: LoraModel(llama(), LORA, "default"),
    "injected LoRA": lambda: inject_adapter_in_model(LORA, llama()),
    "IA3": lambda: get_peft_model(llama(), IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
    "a prompt encoder": lambda: get_peft_model(
        llama(), PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=64)
    ),
}


@pytest.mark.parametrize("make", ADAPTED.values(), ids=ADAPTED)
def test_adapters_are_refused(make: Callable[[], torch.nn.Module]) -> None:
    import weightonly.hf  # noqa: F401 (PEFT then takes packed layers)

    model = make()
    before = trainable(model), {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"module: expected a model without adapters.*get_peft_model.*merge_and"):
        quantize_model(model, group_size=32)
    assert before == (trainable(model), {name: id(p) for name, p in model.named_parameters()})


def test_layers_in_training_beside_frozen_ones_are_left() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    model[0].requires_grad_(False)
    quantize_model(model, group_size=32)
    assert [isinstance(layer, Linear) for layer in model] == [True, False, False]
    assert "it is trained (requires_grad), and other layers are frozen" in str(model.weightonly_summary)
    quantize_model(model, group_size=32)  # none of the dense ones is frozen now
    assert all(isinstance(layer, Linear) for layer in model)


def test_layers_in_training_are_quantized_where_only_names_them() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).requires_grad_(False)
    model[1].requires_grad_(True)
    quantize_model(model, group_size=32, only=["1"])
    assert [isinstance(layer, Linear) for layer in model] == [False, True]


OTHERS: dict[str, dict[str, Any]] = {
    "format": {"format": "int8", "group_size": 32},
    "codes": {"format": "nf4", "group_size": 32},
    "group size": {"group_size": 64},
    "zero points": {"group_size": 32, "symmetric": False},
}


@pytest.mark.parametrize("arguments", OTHERS.values(), ids=OTHERS)
def test_another_format_for_a_packed_model_is_an_error(arguments: dict[str, Any]) -> None:
    model = quantize_model(llama(), group_size=32)
    with pytest.raises(ValueError, match=r"got none: layer '.*q_proj': it is int4 already, groups of 32"):
        quantize_model(model, **arguments)


def test_a_second_call_says_what_is_packed_already() -> None:
    model = quantize_model(llama(), group_size=32)
    quantize_model(model, group_size=32)
    assert "0 layers quantized, 8 left" in str(model.weightonly_summary)
    assert "packed layer: it is int4 already, groups of 32" in str(model.weightonly_summary)
    quantize_model(model, format="int8", group_size=32, only=["lm_head", "*_proj"])
    assert (model.lm_head.format, model.model.layers[0].mlp.up_proj.format) == ("int8", "int4")
    with pytest.raises(ValueError, match=r"got none: layer 'lm_head': it is int8 already, groups of 32$"):
        quantize_model(model, only=["lm_head"])


def test_packed_experts_are_named_as_well() -> None:
    config = transformers.MixtralConfig(**SIZES, intermediate_size=128, num_key_value_heads=2, num_local_experts=4)
    model = quantize_model(transformers.MixtralForCausalLM(config), group_size=32, skip=["*_proj"])
    with pytest.raises(ValueError, match=r"layer '.*experts.*': it is int4 already"):
        quantize_model(model, format="int8", only=["*.experts.*"])
    quantize_model(model, format="int8", group_size=32)
    names = [name for layer in model.weightonly_summary.left for name in layer.names if "experts" in name]
    assert names == [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]


NOTHING: dict[str, Callable[[], torch.nn.Module]] = {
    "no layers": lambda: torch.nn.ReLU(),
    "convolutions": lambda: torch.nn.Sequential(torch.nn.Conv1d(64, 64, 1), torch.nn.Embedding(4, 64)),
    "subclasses": lambda: torch.nn.MultiheadAttention(64, 2),
    "a gate": lambda: torch.nn.Sequential(torch.nn.Linear(64, 1)),
    "a bare head": lambda: tied(),
}


def tied() -> torch.nn.Module:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(96, 64), "head": torch.nn.Linear(64, 96, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize("make", NOTHING.values(), ids=NOTHING)
def test_a_model_in_which_nothing_is_quantized_is_an_error(make: Callable[[], torch.nn.Module]) -> None:
    with pytest.raises(ValueError, match="module: expected layers that can be quantized, got none: "):
        quantize_model(make(), group_size=32)


def test_a_caller_that_skips_all_is_told_so_in_the_summary() -> None:
    model = quantize_model(torch.nn.Sequential(torch.nn.Linear(64, 64)), skip=["*"])
    assert "0 layers quantized, 1 left" in str(model.weightonly_summary)


def test_falcon_has_linear_layers_of_its_own_class() -> None:
    config = transformers.FalconConfig(**SIZES, ffn_hidden_size=128)
    model = transformers.FalconForCausalLM(config).eval()
    with torch.no_grad():
        dense = model(TOKENS).logits
        quantize_model(model, format="int8", group_size=32)
        packed = model(TOKENS).logits
    assert len(model.weightonly_summary.quantized) == 4
    assert (packed - dense).norm() < 0.02 * dense.norm()


# --- defaults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", DEFAULT_GROUP_SIZE)
def test_defaults_are_those_of_one_table(format: str) -> None:
    from weightonly.hf import WeightOnlyConfig

    linear = torch.nn.Linear(256, 64)
    rows = {
        "table": DEFAULT_GROUP_SIZE[format],
        "quantize": 256 // len(wo.quantize(linear.weight.detach().t(), format=format)[1]),
        "from_linear": 256 // len(Linear.from_linear(linear, format=format).scales),
        "layer": 256 // len(Linear(256, 64, format=format).scales),
        "grouped layer": 256 // groups_of_experts(format),
        "quantize_model": quantize_model(torch.nn.Sequential(linear), format=format)[0].operand.group_rows,
        "config": WeightOnlyConfig(format=format).group_size,
    }
    assert set(rows.values()) == {DEFAULT_GROUP_SIZE[format]}, rows


def groups_of_experts(format: str) -> int:
    return wo.nn.GroupedLinear(2, 256, 64, format=format).scales.shape[1]


def test_the_default_format_and_zero_points_are_the_same() -> None:
    from weightonly.hf import WeightOnlyConfig

    config, layer = WeightOnlyConfig(), Linear(256, 64)
    [model] = quantize_model(torch.nn.Sequential(torch.nn.Linear(256, 64)))
    assert {(c.format, c.symmetric, c.group_size) for c in (config, layer, model)} == {("int4", True, 128)}
    assert inspect.signature(wo.quantize).parameters["symmetric"].default is True
