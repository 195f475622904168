"""LoRA on packed experts of a mixture: beside dense experts with the same adapters, and what is refused."""

# mypy: disable-error-code="arg-type, index, operator, union-attr"

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tests.hf_version  # noqa: F401
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from tests.expert_models import TOKENS, densified, logits, make

import weightonly as wo
import weightonly.hf
from weightonly.hf.lora_experts import LoraExperts
from weightonly.nn import Experts

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
TARGETS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "both products": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "one product": {"target_parameters": EXPERTS[1:]},
}
mixtures = pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
FIRST = "model.layers.0.mlp.experts"


def config(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_parameters": EXPERTS} | options)


def packed(name: str = "qwen3-moe", dtype: torch.dtype = torch.float32) -> Any:
    return wo.nn.quantize_model(make(name).to(dtype), group_size=32)


def dense(name: str = "qwen3-moe", dtype: torch.dtype = torch.float32) -> Any:
    """Of the dequantized weights of `packed`."""
    return densified(packed(name, dtype), make(name).to(dtype))


def factors(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


def fill(model: Any, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in factors(model).values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def adapted(base: Any, **options: Any) -> Any:
    return fill(get_peft_model(base, config(**options)))


def experts_of(model: Any) -> Any:
    return model.base_model.model.get_submodule(FIRST)


def near(got: torch.Tensor, expected: torch.Tensor, bound: float = 1e-5) -> bool:
    return bool((got - expected).norm() <= bound * expected.norm())


# --- beside dense experts ------------------------------------------------------------------------------------------


@mixtures
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_adapters_are_those_of_dense_experts(name: str, targets: dict[str, Any], tmp_path: Path) -> None:
    """Names, shapes, results and gradients; and files of one load into the other."""
    if name == "gpt-oss" and targets == TARGETS["all-linear"]:
        # PEFT leaves its experts, and its router
        targets = {"target_modules": "all-linear", "target_parameters": [*EXPERTS, "router.weight"]}
    bases = packed(name), dense(name)
    ours, theirs = (get_peft_model(base, LoraConfig(r=4, **copy.deepcopy(targets))) for base in bases)
    shapes = [{key: (p.shape, p.dtype) for key, p in factors(model).items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1] and list(shapes[0]) == list(shapes[1])
    assert isinstance(experts_of(ours), LoraExperts)
    assert all("lora_" in key for key, p in ours.named_parameters() if p.requires_grad)
    before = logits(ours)
    expected = logits(fill(theirs))
    assert near(before, logits(get_peft_model(packed(name), LoraConfig(target_modules=["q_proj"]))))  # B is zeros
    assert near(logits(fill(ours)), expected) and not near(before, expected, 0.02)
    for model in (ours, theirs):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(near(p.grad, factors(theirs)[key].grad, 1e-4) for key, p in factors(ours).items())
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert near(logits(PeftModel.from_pretrained(dense(name), tmp_path / "ours")), expected)
    assert torch.equal(logits(PeftModel.from_pretrained(packed(name), tmp_path / "theirs")), logits(ours))


def test_several_adapters() -> None:
    models = []
    for base in (packed(), dense()):
        model = get_peft_model(base, config())
        model.add_adapter("other", config(r=2, use_rslora=True))
        models.append(fill(model))
    ours, theirs = models
    found = []
    for names in (["default"], ["other"], ["default", "other"]):
        for model in models:
            model.base_model.set_adapter(names)
        found.append(logits(ours))
        assert near(found[-1], logits(theirs))
    assert not near(found[0], found[1], 0.01) and not near(found[0], found[2], 0.01)
    with ours.disable_adapter():
        assert near(logits(ours), logits(packed()))
    ours.delete_adapter("other")
    assert torch.equal(logits(ours), found[0])


def test_an_adapter_of_a_packed_mixture_that_is_not_nested(tmp_path: Path) -> None:
    """A model that is saved with its experts and loaded again takes the adapter."""
    model = adapted(packed())
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model)
    model.unload().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert isinstance(base.get_submodule(FIRST), Experts)
    assert near(logits(PeftModel.from_pretrained(base, tmp_path / "adapter")), expected)


def test_rows_of_no_expert_are_left_alone() -> None:
    """Those of other ranks of expert parallelism."""
    layer = experts_of(adapted(packed()))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.tensor([[0, 3], [-1, 2], [6, -1], [5, 1], [6, 6]])
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = layer(x, ids, weights)
    y.square().sum().backward()
    assert not y[2].any() and not y[4].any() and not x.grad[2].any() and not weights.grad[2].any()
    alone = layer(x[1:2], ids[1:2, 1:], weights[1:2, 1:])
    torch.testing.assert_close(y[1:2], alone)


# --- merging ---------------------------------------------------------------------------------------------------------


@mixtures
@pytest.mark.filterwarnings("ignore:adapters are merged")
def test_a_merge_quantizes_the_sum_and_can_be_undone(name: str) -> None:
    model, same = adapted(packed(name)), adapted(dense(name))
    inside = model.base_model.model
    before, bits = logits(model), copy.deepcopy(inside.state_dict())
    same.merge_adapter()
    merged_dense = same.base_model.model.get_submodule(FIRST).get_base_layer()
    model.merge_adapter()
    got = experts_of(model).get_base_layer()
    again = packed(name).get_submodule(FIRST)
    again.update_(merged_dense.gate_up_proj, merged_dense.down_proj)
    for product in ("gate_up_proj", "down_proj"):
        # The sum is in another order: a few numbers are rounded to a neighbour.
        difference = (getattr(got, product).dequantize() - getattr(again, product).dequantize()).norm()
        assert difference < 0.01 * getattr(again, product).dequantize().norm()
        with pytest.raises(RuntimeError, match="expected a layer without merged adapters, got one with default"):
            getattr(got, product).update_(torch.zeros(getattr(got, product).weight.shape))
    assert not torch.equal(logits(model), before)
    model.unmerge_adapter()
    assert torch.equal(logits(model), before)
    assert all(torch.equal(tensor, bits[key]) for key, tensor in inside.state_dict().items())
    model.merge_adapter()
    expected = logits(model)
    plain = model.merge_and_unload()
    assert type(plain.get_submodule(FIRST)) is Experts and torch.equal(logits(plain), expected)
    plain.get_submodule(FIRST).down_proj.update_(torch.zeros(got.down_proj.weight.shape))


@pytest.mark.filterwarnings("ignore:adapters are merged")
def test_a_merge_of_broken_adapters_changes_nothing() -> None:
    model = adapted(packed())
    layer = experts_of(model)
    before = copy.deepcopy(layer.get_base_layer().state_dict())
    layer.lora_A["default"].weight.data[4 * 3] = float("nan")  # of expert 3; those before it are written first
    with pytest.raises(ValueError, match="adapters: default: down_proj: expert 3: expected finite values"):
        layer.merge()
    assert not layer.merged and layer.product.locked is None
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer.get_base_layer().state_dict().items())


# --- training --------------------------------------------------------------------------------------------------------


def gradients(model: Any, run: Any = None, **forward: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (run or model)(input_ids=TOKENS, labels=TOKENS, **forward).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    model = adapted(packed(), target_modules=["q_proj"]).train()
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    got = gradients(model, use_cache=False)
    assert got.keys() == expected.keys() and all(torch.equal(grad, expected[name]) for name, grad in got.items())


def test_gradients_are_the_same_from_run_to_run() -> None:
    model = adapted(packed("gpt-oss"))
    first, second = gradients(model), gradients(model)
    assert len(first) == 8 and all(torch.equal(grad, second[name]) for name, grad in first.items())


def check_autocast(device: torch.device | str) -> None:
    """x and adapters in fp32, products in bf16: as near to fp32 as dense experts under autocast are."""
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    ids = torch.stack([torch.arange(12) % 6, (torch.arange(12) + 2) % 6], 1).to(device)
    weights = torch.rand(12, 2, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    ours = wo.nn.quantize_model(make("qwen3-moe").to(device, torch.bfloat16), group_size=32)
    theirs = densified(ours, make("qwen3-moe").to(device, torch.bfloat16))
    found = []
    for base, is_on in ((copy.deepcopy(theirs).float(), False), (theirs, True), (ours, True)):
        layer = experts_of(adapted(base))
        with torch.autocast(x.device.type, torch.bfloat16, enabled=is_on):
            y = layer(x, ids, weights)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [x, weights, *factors(layer).values()])])
    assert found[2][0].dtype == torch.bfloat16
    for exact, dense_one, got in zip(*found, strict=True):
        assert (got - exact).norm() <= 2 * (dense_one - exact).norm() + 1e-3 * exact.norm()


def test_autocast() -> None:
    check_autocast("cpu")


@pytest.mark.gpu
def test_autocast_on_a_gpu(cuda_device: torch.device) -> None:
    check_autocast(cuda_device)


@pytest.mark.parametrize(
    ("backend", "dtype", "bound"), [("aot_eager", torch.float32, 1e-5), ("inductor", torch.bfloat16, 2e-2)]
)
def test_compiled_without_a_graph_break(backend: str, dtype: torch.dtype, bound: float) -> None:
    torch.compiler.reset()
    layer = experts_of(adapted(packed(dtype=dtype)))
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    ids = torch.tensor([[0, 3], [4, 2], [1, 5], [5, 1], [2, 3], [0, 1]])
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        y = run(x, ids, weights)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [x, weights, *factors(layer).values()])])
    assert all(near(got, expected, bound) for expected, got in zip(*found, strict=True))


def test_prepare_model_for_kbit_training() -> None:
    """It makes scales fp32; products stay in the dtype from before."""
    base = packed(dtype=torch.bfloat16)
    x, ids = torch.randn(4, 64), torch.tensor([[0, 1], [2, 3], [4, 5], [1, 0]])
    weights = torch.full((4, 2), 0.5)
    expected = base.get_submodule(FIRST)(x.bfloat16(), ids, weights)
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    experts = base.get_submodule(FIRST)
    assert experts.down_proj.scales.dtype == torch.float32
    got = experts(x, ids, weights)
    assert got.dtype == torch.float32 and torch.equal(got, expected.float())
    model = adapted(base)
    losses = curve(model, 4)
    assert losses[-1] < losses[0]


def curve(model: Any, steps: int, rate: float = 3e-3) -> torch.Tensor:
    """Losses of steps of Adam on the trainable Parameters, on batches of a text of which half can be learnt."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, 96, (64, 17), generator=generator)
    text[:, 1::2] = (text[:, :-1:2] * 7 + 3) % 96
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    model.train()
    for step in range(steps):
        batch = text[8 * step % 64 : 8 * step % 64 + 8]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


@mixtures
def test_loss_curve_beside_dense_experts(name: str) -> None:
    """100 steps in bf16, routers trained, too: packed experts, and dense ones with their dequantized weights.

    A choice of experts that rounding turns makes losses of single steps noisy: means of a pass over the text are
    compared.
    """
    curves = []
    for base in (packed(name, torch.bfloat16), dense(name, torch.bfloat16)):
        model = get_peft_model(base, config(target_modules=["q_proj", "v_proj"], r=8))
        generator = torch.Generator().manual_seed(3)
        for key, parameter in factors(model).items():
            if "lora_A" in key:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for key, parameter in model.named_parameters():
            if key.endswith((".gate.weight", ".router.weight")):
                parameter.requires_grad_()
        curves.append(curve(model, 100))
    ours, theirs = (losses[:96].view(12, 8).mean(1) for losses in curves)
    print(f"\n{name}\nsteps    packed  dense")
    for i in (0, 3, 7, 11):
        print(f"{8 * i + 1:2} to {8 * i + 8:2} {ours[i]:7.4f} {theirs[i]:6.4f}")
    assert ours[-1] < 0.95 * ours[0]
    assert ((ours - theirs).abs() / theirs).max() < 0.01


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_the_trainer(checkpointing: bool, tmp_path: Path) -> None:
    model = get_peft_model(packed("mixtral"), config(target_modules=["q_proj"]))
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
    again = PeftModel.from_pretrained(packed("mixtral"), tmp_path / "checkpoint-6")
    assert torch.equal(logits(again), logits(model))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora: expected False for weightonly.nn.Experts, got True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: .* for weightonly.nn.Experts, got 'pissa'"),
        ({"lora_dropout": 0.1}, "does not work with lora_dropout"),
        (
            {"target_modules": ["experts.down_proj"], "target_parameters": None},
            "target_modules: expected no model.layers.0.mlp.experts.down_proj, which is a layer of all experts",
        ),
    ],
    ids=["DoRA", "PiSSA", "dropout", "target_modules"],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_peft_model(packed("gpt-oss"), config(**options))
