"""LoRA on quantized models, with PEFT, transformers' Trainer, and bitsandbytes beside them."""

# mypy: disable-error-code="arg-type, index, operator, union-attr"

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tests.hf_version  # noqa: F401
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from tests import ROOT

import weightonly as wo
import weightonly.hf
from weightonly.hf.peft import LoraLinear
from weightonly.nn import Linear

TOKENS = torch.arange(32).view(2, 16) * 5 % 96
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"group_size": 32},
    "int4, zero points": {"group_size": 32, "symmetric": False},
    "int8": {"format": "int8", "group_size": -1},
    "nf4": {"format": "nf4"},
    "fp4": {"format": "fp4"},
}
formats = pytest.mark.parametrize("arguments", FORMATS.values(), ids=FORMATS)


def llama(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def quantized(dtype: torch.dtype = torch.float32, **arguments: Any) -> Any:
    return wo.nn.quantize_model(llama(dtype), **arguments or FORMATS["nf4"])


def lora(targets: Any = "all-linear", **options: Any) -> LoraConfig:
    torch.manual_seed(1)
    return LoraConfig(**{"target_modules": targets, "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits.float()


def train(model: Any, steps: int, rate: float = 1e-2, lines: int = 8) -> list[float]:
    """Losses of steps of Adam on the trainable Parameters, on batches of 8 lines of a fixed text."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, 96, (64, 17), generator=generator)
    text[:, 1::2] = (text[:, :-1:2] * 7 + 3) % 96  # half of the tokens follow from those before them
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    model.train()
    for step in range(steps):
        begin = 8 * step % lines
        batch = text[begin : begin + 8]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adapted_layer(bias: bool) -> tuple[Any, Any]:
    """A model of one int4 layer whose adapters have a bias, and that layer."""
    base = Linear.from_linear(torch.nn.Linear(64, 32, bias=bias), group_size=32)
    config = LoraConfig(target_modules=["0"], r=2, lora_alpha=8, lora_bias=True, init_lora_weights=False)
    model = get_peft_model(torch.nn.Sequential(base), config)
    return model, model.base_model.model[0]


# --- get_peft_model ------------------------------------------------------------------------------------------------


def test_all_linear_layers_get_adapters_and_nothing_else_is_trained() -> None:
    model = get_peft_model(quantized(), lora())
    layers = {name for name, child in model.base_model.model.named_modules() if isinstance(child, LoraLinear)}
    projections = {"mlp.up_proj", "mlp.gate_proj", "mlp.down_proj", *(f"self_attn.{p}_proj" for p in "qkvo")}
    assert layers == {f"model.layers.{i}.{p}" for i in (0, 1) for p in projections}
    assert type(model.base_model.model.lm_head) is torch.nn.Linear
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" not in name}
    losses = train(model, 5)
    assert losses[-1] < losses[0]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


def test_all_linear_leaves_a_packed_output_embedding() -> None:
    base = wo.nn.quantize_model(llama(), group_size=32, only=["lm_head", "*.q_proj"])
    model = get_peft_model(base, lora())
    inside = model.base_model.model
    assert type(inside.lm_head) is Linear and isinstance(inside.model.layers[1].self_attn.q_proj, LoraLinear)


def test_layers_by_name_and_dense_ones_beside_them() -> None:
    model = get_peft_model(quantized(), lora(["q_proj", "lm_head"]))
    inside = model.base_model.model
    assert isinstance(inside.model.layers[0].self_attn.q_proj, LoraLinear)
    assert type(inside.model.layers[0].self_attn.k_proj) is Linear
    assert not isinstance(inside.lm_head, LoraLinear) and hasattr(inside.lm_head, "lora_A")


def test_conv1d_layers_and_a_second_adapter() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2, n_positions=64)
    base = wo.nn.quantize_model(transformers.GPT2LMHeadModel(config), group_size=32)
    model = get_peft_model(base, lora(["c_attn", "c_fc"], fan_in_fan_out=True))
    model.add_adapter("other", lora(["c_attn"], fan_in_fan_out=True, r=2))
    first = train(model, 3)
    model.set_adapter("other")
    second = train(model, 3)
    assert first[-1] < first[0] and second[-1] < second[0]
    with model.disable_adapter():
        plain = logits(model)
    assert not torch.equal(logits(model), plain)


@formats
def test_gradients_of_adapters_are_those_of_the_dense_model(arguments: dict[str, Any]) -> None:
    base = quantized(**arguments)
    dense = llama()
    for name, child in base.named_modules():
        if isinstance(child, Linear):
            dense.get_submodule(name).weight.data = child.dequantize().t().contiguous()
    gradients = []
    for model in (base, dense):
        adapted = get_peft_model(model, lora(init_lora_weights=False))
        torch.manual_seed(2)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.05)
        adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
        gradients.append({name: p.grad for name, p in adapted.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 28
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-6)


# --- saving, loading, merging --------------------------------------------------------------------------------------


def test_adapters_are_saved_and_loaded_without_further_arguments(tmp_path: Path) -> None:
    model = get_peft_model(quantized(), lora())
    train(model, 3)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(quantized(), tmp_path)
    assert torch.equal(logits(again), logits(model))
    trainable = PeftModel.from_pretrained(quantized(), tmp_path, is_trainable=True)
    assert train(trainable, 2)[0] == pytest.approx(train(model, 2)[0])


@formats
def test_merge_and_unload_quantizes_the_sum(arguments: dict[str, Any]) -> None:
    model = get_peft_model(quantized(**arguments), lora())
    train(model, 10, 1e-2)
    expected = logits(model)
    name = "model.layers.1.mlp.up_proj"
    layer = model.base_model.model.get_submodule(name)
    w = layer.base_layer.dequantize() + layer.get_delta_weight("default").t().detach()
    with pytest.warns(UserWarning, match=f"merged into {layer.base_layer.format}"):
        merged = model.merge_and_unload(safe_merge=True)
    got = merged.get_submodule(name)
    assert type(got) is Linear and not any("lora" in name for name, _ in merged.named_modules())
    dense = torch.nn.Linear(64, 128, bias=False)
    dense.weight.data = w.t()
    again = Linear.from_linear(dense, **arguments)
    assert torch.equal(got.qweight, again.qweight) and torch.equal(got.scales, again.scales)
    tolerance = 0.02 if got.format == "int8" else 0.35
    assert (logits(merged) - expected).norm() < tolerance * expected.norm()


def test_a_merge_keeps_the_order_of_the_rows_and_can_be_undone() -> None:
    perm = torch.randperm(64, generator=torch.Generator().manual_seed(0)).int()
    q, scales, zeros = wo.quantize(torch.randn(64, 32), 4, 32, False)
    inside = Linear.from_quantized(wo.preprocess(q), scales, zeros, torch.randn(32), perm=perm)
    model = get_peft_model(torch.nn.Sequential(inside), LoraConfig(target_modules=["0"], r=2, lora_bias=True))
    layer = model.base_model.model[0]
    x = torch.randn(5, 64)
    with torch.no_grad():
        for parameter in (layer.lora_B["default"].weight, layer.lora_B["default"].bias):
            parameter.normal_(std=0.02)
        before, adapted = layer.base_layer(x), layer(x)
        with pytest.warns(UserWarning, match="merged into int4"):
            layer.merge()
        assert (layer(x) - adapted).norm() < 0.2 * adapted.norm()
        assert not torch.equal(layer(x), before)
        layer.unmerge()
        assert torch.equal(layer.base_layer(x), before) and torch.equal(layer(x), adapted)


def test_adapters_that_are_merged_one_by_one_are_undone_at_once() -> None:
    model, layer = adapted_layer(bias=True)
    model.add_adapter("other", LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    before = copy.deepcopy(layer.base_layer.state_dict())
    for name in ("default", "other"):
        with pytest.warns(UserWarning, match="merged into int4"):
            model.merge_adapter([name])
    model.unmerge_adapter()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.base_layer.state_dict().items())


def test_the_weight_under_merged_adapters_is_not_updated() -> None:
    """`unmerge` would bring back the weight from before."""
    model, layer = adapted_layer(bias=True)
    base, other = layer.base_layer, torch.randn(*layer.base_layer.weight.shape)
    base.update_(other)  # adapters beside it stay adapters
    with pytest.warns(UserWarning, match="merged into int4"):
        model.merge_adapter()
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(RuntimeError, match="weight: expected a layer without merged adapters, got one with default"):
        base.update_(other * 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    model.unmerge_adapter()
    assert (base.weight - other).norm() < 0.2 * other.norm()
    base.update_(other * 2)
    with pytest.warns(UserWarning, match="merged into int4"):
        merged = model.merge_and_unload()
    merged[0].update_(other)
    assert (merged[0].weight - other).norm() < 0.2 * other.norm()


@pytest.mark.filterwarnings("ignore:adapters are merged")
def test_a_merge_that_failed_keeps_no_weight_to_go_back_to() -> None:
    _, layer = adapted_layer(bias=True)
    good = layer.lora_B["default"].weight.data.clone()
    layer.lora_B["default"].weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="expected finite values"):
        layer.merge()
    layer.base_layer.update_(torch.randn(*layer.base_layer.weight.shape))
    updated = copy.deepcopy(layer.base_layer.state_dict())
    layer.lora_B["default"].weight.data.copy_(good)
    layer.merge()
    layer.unmerge()
    assert all(torch.equal(tensor, updated[name]) for name, tensor in layer.base_layer.state_dict().items())


def test_a_merge_adds_the_bias_of_adapters() -> None:
    model, layer = adapted_layer(bias=True)
    expected = layer.base_layer.bias + 4 * layer.lora_B["default"].bias.detach()  # lora_alpha / r = 4
    with pytest.warns(UserWarning, match="merged into int4"):
        merged = model.merge_and_unload()
    torch.testing.assert_close(merged[0].bias, expected)


def test_a_merge_of_a_bias_without_a_place_is_refused() -> None:
    with pytest.warns(UserWarning, match="merging LoRA weights won't be possible"):
        model, layer = adapted_layer(bias=False)
    before = layer.base_layer.qweight.clone()
    with pytest.raises(ValueError, match="lora_bias: expected False for a layer without a bias, got True"):
        model.merge_adapter()
    assert torch.equal(layer.base_layer.qweight, before) and not layer.merged


def test_activated_adapters_are_not_merged() -> None:
    model = get_peft_model(quantized(), lora(["q_proj"], alora_invocation_tokens=[3, 5], init_lora_weights=False))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    before = layer.base_layer.qweight.clone()
    with pytest.raises(NotImplementedError, match="adapters: expected plain LoRA to merge, got aLoRA"):
        model.merge_adapter()
    assert torch.equal(layer.base_layer.qweight, before) and not layer.merged


@pytest.mark.filterwarnings("ignore:adapters are merged")
def test_a_merge_of_broken_adapters_is_refused_and_changes_nothing() -> None:
    model = get_peft_model(quantized(), lora(["q_proj"]))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_A["default"].weight.data[0, 0] = float("nan")
    before = layer.base_layer.qweight.clone()
    with pytest.raises(ValueError, match="adapters: expected finite merged weights, got NaN or Inf with default"):
        layer.merge(safe_merge=True)
    assert torch.equal(layer.base_layer.qweight, before) and not layer.merged


# --- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_prepare_model_for_kbit_training(dtype: torch.dtype, checkpointing: bool) -> None:
    model = quantized(dtype)
    scales = model.model.layers[0].mlp.up_proj.scales.clone()
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    if checkpointing:  # PEFT turns it on for the methods that it knows
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(2, 64)
    expected = wo.gemm(x.to(dtype), layer.packed, scales).float()
    assert layer(x).dtype == torch.float32 and torch.equal(layer(x), expected)
    model = get_peft_model(model, lora(["q_proj", "v_proj"]))
    losses = train(model, 4, 1e-2)
    assert losses[-1] < losses[0]


def test_compiled_training_step() -> None:
    torch.compiler.reset()
    model = get_peft_model(quantized(), lora())
    plain = model(input_ids=TOKENS, labels=TOKENS).loss
    plain.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    torch.testing.assert_close(loss, plain)
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_the_trainer(checkpointing: bool, tmp_path: Path) -> None:
    model = get_peft_model(quantized(), lora())
    lines = [{"input_ids": line, "labels": line} for line in TOKENS.repeat(8, 1).tolist()]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=6,
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=checkpointing,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=lines)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < 0.95 * losses[0]
    again = PeftModel.from_pretrained(quantized(), tmp_path / "checkpoint-6")
    assert torch.equal(logits(again), logits(model))


def bnb_model() -> Any:
    """The model with bitsandbytes' Linear4bit in place of the layers that quantize_model takes."""
    bnb = pytest.importorskip("bitsandbytes")
    model = llama()
    for name, child in list(model.named_modules()):
        if type(child) is torch.nn.Linear and name != "lm_head":
            layer = bnb.nn.Linear4bit(
                child.in_features,
                child.out_features,
                bias=False,
                compute_dtype=torch.float32,
                compress_statistics=False,
                quant_type="nf4",
            )
            layer.weight = bnb.nn.Params4bit(
                child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False, blocksize=64
            )
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, layer.to("cpu"))
    model.is_loaded_in_4bit = True
    return model


def test_loss_curve_beside_bitsandbytes() -> None:
    """100 steps of one model on one text: NF4 here, NF4 there."""
    curves = []
    for make in (quantized, bnb_model):
        model = get_peft_model(make(), lora())
        torch.manual_seed(3)
        for name, parameter in sorted(model.named_parameters()):
            if "lora_A" in name:
                parameter.data.normal_(std=0.1)
        curves.append(torch.tensor(train(model, 100, 3e-3, lines=64)))
    ours, theirs = curves
    print("step  weightonly  bitsandbytes")
    for step in (0, 9, 24, 49, 74, 99):
        print(f"{step + 1:4}  {ours[step]:10.4f}  {theirs[step]:12.4f}")
    assert ours[-8:].mean() < 0.92 * ours[:8].mean()
    assert ((ours - theirs).abs() / theirs).max() < 0.02


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora: expected False for weightonly.nn.Linear, got True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: expected one of True, False, 'gaussian'.*got 'pissa'"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "init_lora_weights: .*got 'loftq'"),
    ],
    ids=["DoRA", "PiSSA", "LoftQ"],
)
def test_what_needs_the_dense_weight_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_peft_model(quantized(), lora(["q_proj"], **options))


def test_layers_that_adapters_do_not_fit_are_refused() -> None:
    layer = Linear.from_linear(torch.nn.Linear(64, 64), group_size=32, activation="silu")
    with pytest.raises(ValueError, match="activation: expected None for a layer with adapters, got 'silu'"):
        get_peft_model(torch.nn.Sequential(layer), LoraConfig(target_modules=["0"]))
    weight = wo.preprocess(torch.zeros(64, 64, dtype=torch.int8), format="code4", code=[float(i) for i in range(16)])
    model = get_peft_model(
        torch.nn.Sequential(Linear.from_quantized(weight, torch.ones(1, 64))), LoraConfig(target_modules=["0"])
    )
    with pytest.raises(ValueError, match=r"packed: expected a codebook within -1 .. 1, .*, got \[0.0, 1.0"):
        model.merge_and_unload()


def test_weightonly_alone_imports_neither_peft_nor_transformers() -> None:
    program = """
import sys, weightonly
assert not {"peft", "transformers"} & set(sys.modules)
import weightonly.hf
from peft.tuners.lora.model import LoraModel
create = LoraModel._create_new_module
weightonly.hf._peft.register()
assert LoraModel._create_new_module is create
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
