"""Every tensor of a quantizer's folder finds its place in the model, or its reason, on every route."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.expert_models import MODELS, SMALL, make
from tests.formats_llama import gptq
from tests.hf_models import llama, packed_layers, same_state, seeded
from tests.placed_folders import GPTQ, Tensors, write
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import convert
from weightonly.hf import WeightOnlyConfig, load_model
from weightonly.nn import Experts

TOKENS = torch.arange(24).view(2, 12)
DEEPSEEK = {
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {"intermediate_size": 64, "num_experts": 6}),
    "phimoe": ("Phimoe", {"intermediate_size": 64, "num_local_experts": 4}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK),
    "llama4": ("Llama4", {"intermediate_size": 64, "intermediate_size_mlp": 64, "num_local_experts": 4}),
}


def model_of(name: str) -> Any:
    """A random model, in which experts do not outdo all else."""
    if name in MODELS:
        model = make(name)
    else:
        stem, sizes = OTHERS[name]
        config = getattr(transformers, f"{stem}{'TextConfig' if stem == 'Llama4' else 'Config'}")(**SMALL | sizes)
        model = seeded(lambda: getattr(transformers, f"{stem}ForCausalLM")(config))
    for parameter in model.parameters():
        parameter.data.mul_(0.2 if parameter.dim() == 3 and name in MODELS else 1)
    return model


def linear(layer: str) -> bool:
    return layer.endswith("_proj")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.float()


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=WeightOnlyConfig(), dtype=dtype)


def converted(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    convert(folder, folder.parent / "converted", progress=False)
    return AutoModelForCausalLM.from_pretrained(folder.parent / "converted", dtype=dtype)


ROUTES: dict[str, Callable[..., Any]] = {"load_model": load_model, "from_pretrained": ours, "convert": converted}
routes = pytest.mark.parametrize("route", ROUTES)


def check(folder: Path, expected: Any, route: str) -> Any:
    """The model, whose logits are those of `expected`; so are they when it was saved."""
    model, exact = ROUTES[route](folder), logits(expected)
    torch.testing.assert_close(logits(model), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))
    model.save_pretrained(folder.parent / "saved")
    again = AutoModelForCausalLM.from_pretrained(folder.parent / "saved", dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))
    assert command.main(["inspect", str(folder)]) == 0
    return model


def experts_of(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Experts)]


# --- routers ------------------------------------------------------------------------------------------------

ROUTERS = {
    "mixtral": "mlp.gate",
    "qwen2-moe": "mlp.gate",
    "olmoe": "mlp.gate",
    "phimoe": "mlp.router",
    "deepseek-v3": "mlp.gate",
    "gpt-oss": "mlp.router",
}


@routes
@pytest.mark.parametrize("name", ROUTERS)
def test_quantized_routers(
    name: str, route: str, tmp_path: Path, generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """They are dequantized, and a line says so. gpt-oss has biases there, and phimoe a subclass of torch.nn.Linear."""
    expected = model_of(name)
    folder = write(
        tmp_path / "model", expected, lambda layer: linear(layer) or layer.endswith(ROUTERS[name]), generator, shards=3
    )
    model = check(folder, expected, route)
    [line] = {record.message for record in caplog.records if "dequantized" in record.message}
    assert re.search(rf"\d\.{ROUTERS[name]}\.weight.* stay dense, dequantized: \w+outer is no linear layer", line)
    assert experts_of(model)
    assert f"model.layers.1.{ROUTERS[name]}" in model.config.quantization_config.modules_to_not_convert


@routes
def test_the_dtype_of_a_router(route: str, tmp_path: Path, generator: torch.Generator) -> None:
    """DeepSeek's stays in fp32, as transformers keeps it."""
    folder = write(tmp_path / "model", model_of("deepseek-v3"), lambda layer: layer.endswith("mlp.gate"), generator)
    model = ROUTES[route](folder, dtype=torch.bfloat16)
    assert (model.dtype, model.model.layers[1].mlp.gate.weight.dtype) == (torch.bfloat16, torch.float32)


@routes
def test_a_quantized_embedding(route: str, tmp_path: Path, generator: torch.Generator) -> None:
    """Its head, which is tied to it and quantized, too, is used."""
    expected = seeded(llama)
    names = ("lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj")
    folder = write(tmp_path / "model", expected, names.__contains__, generator, config={"tie_word_embeddings": True})
    assert set(packed_layers(check(folder, expected, route))) == {names[0], names[2]}


def test_a_router_of_another_size(tmp_path: Path, generator: torch.Generator) -> None:
    def edit(tensors: Tensors) -> Tensors:
        others = {name: tensor for name, tensor in tensors.items() if "mlp.gate." not in name}
        return {name.replace("self_attn.q_proj", "mlp.gate"): tensor for name, tensor in others.items()}

    folder = write(tmp_path / "model", model_of("mixtral"), lambda name: name.endswith("q_proj"), generator, edit=edit)
    with pytest.raises(ValueError, match=r"mlp\.gate: expected K x N = 64 x 5 as the model's config says, got 64 x 64"):
        load_model(folder)


# --- heads --------------------------------------------------------------------------------------------------


@routes
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_head_of_its_own_beside_a_tied_config(
    is_packed: bool, route: str, tmp_path: Path, generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    expected = seeded(llama)
    quantized = linear if not is_packed else lambda layer: linear(layer) or layer == "lm_head"
    folder = write(tmp_path / "model", expected, quantized, generator, config={"tie_word_embeddings": True})
    model = check(folder, expected, route)
    assert ("lm_head" in packed_layers(model)) is is_packed
    if is_packed:
        assert "lm_head has a weight of its own, though config.json says tie_word_embeddings" in caplog.text
        assert not model.config.tie_word_embeddings
        model.tie_weights()
        assert torch.equal(logits(model), logits(ROUTES["load_model"](tmp_path / "saved")))


@routes
def test_a_tied_head_that_is_the_only_embedding(route: str, tmp_path: Path, generator: torch.Generator) -> None:
    expected = seeded(lambda: llama(tie_word_embeddings=True))
    folder = write(
        tmp_path / "model",
        expected,
        lambda layer: linear(layer) or layer == "lm_head",
        generator,
        edit=lambda tensors: {name: t for name, t in tensors.items() if "embed_tokens" not in name},
    )
    model = check(folder, expected, route)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_other_ties_stay(tmp_path: Path, generator: torch.Generator) -> None:
    """T5's, of its embeddings."""
    config = T5Config(vocab_size=96, d_model=64, d_ff=128, d_kv=16, num_layers=1, num_heads=4)
    expected = seeded(lambda: T5ForConditionalGeneration(config))
    expected.lm_head.weight = torch.nn.Parameter(expected.lm_head.weight.detach().clone())
    drop = lambda tensors: {name: t for name, t in tensors.items() if "embed_tokens" not in name}  # noqa: E731
    folder = write(tmp_path / "model", expected, lambda layer: layer == "lm_head", generator, edit=drop)
    model = load_model(folder, torch.float32)
    assert model.config.tie_word_embeddings and model.encoder.embed_tokens.weight is model.shared.weight
    tokens = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    torch.testing.assert_close(model(**tokens).logits, expected(**tokens).logits)


@pytest.mark.parametrize("quantized", [True, False])
def test_a_head_that_is_not_there(quantized: bool, tmp_path: Path, generator: torch.Generator) -> None:
    drop = lambda tensors: {name: t for name, t in tensors.items() if not name.startswith("lm_head")}  # noqa: E731
    is_quantized = lambda layer: linear(layer) or (quantized and layer == "lm_head")  # noqa: E731
    folder = write(tmp_path / "model", seeded(llama), is_quantized, generator, edit=drop)
    with pytest.raises(ValueError, match=r"got none for lm_head\.weight"):
        load_model(folder)


# --- experts ------------------------------------------------------------------------------------------------


def replaced(*pairs: tuple[str, str]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        for pattern, text in pairs:
            name = re.sub(pattern, text, name)
        return name

    return rename


W123 = (
    (r"(experts\.\d+)\.gate_proj", r"\1.w1"),
    (r"(experts\.\d+)\.up_proj", r"\1.w3"),
    (r"(\d)\.down_proj", r"\1.w2"),
)
BLOCK = (r"\.mlp\.", ".block_sparse_moe.")
NAMES: dict[str, Callable[[str], str]] = {
    "mixtral": replaced(),
    "mixtral, as transformers saves it": replaced(BLOCK),
    "mixtral, w1 in mlp": replaced(*W123),
    "qwen3-moe, w1": replaced(*W123),
    "phimoe": replaced((r"\.mlp\.router", ".mlp.gate"), BLOCK),
    "gpt-oss": replaced(),
    "gpt-oss, lists": replaced((r"experts\.(\d+)\.(\w+_proj)", r"experts.\2s.\1")),
}
"""llm-compressor, GPTQModel and AutoRound take experts apart to gate_proj, up_proj, down_proj; Unsloth makes lists."""


@routes
@pytest.mark.parametrize("case", NAMES)
def test_names_of_experts(case: str, route: str, tmp_path: Path, generator: torch.Generator) -> None:
    expected = model_of(case.partition(",")[0])
    model = check(write(tmp_path / "model", expected, linear, generator, NAMES[case]), expected, route)
    assert len(experts_of(model)) == 2 and not model.hf_quantizer.plan.densified


DENSE = {
    "one product of one expert": r"layers\.1\.mlp\.experts\.1\.down_proj",
    "one expert": r"layers\.1\.mlp\.experts\.1\.",
    "one product of all": r"layers\.1\.mlp\.experts\.\d\.(gate|up)_proj",
    "all of a layer": r"layers\.1\.mlp\.experts",
}


@routes
@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_experts_some_of_which_are_dense(
    name: str, case: str, route: str, tmp_path: Path, generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """In the names of llm-compressor, which transformers does not know of Mixtral and gpt-oss."""
    expected = model_of(name)
    is_quantized = lambda layer: linear(layer) and not re.search(DENSE[case], layer)  # noqa: E731
    folder = write(tmp_path / "model", expected, is_quantized, generator, replaced(BLOCK) if name == "mixtral" else str)
    model = check(folder, expected, route)
    assert experts_of(model) == ["model.layers.0.mlp.experts"]
    says = "layers.1.mlp.experts.gate_up_proj and 1 others stay dense, dequantized: model.layers.1" in caplog.text
    assert says is not (name == "qwen3-moe" and case == "all of a layer")  # which transformers reads itself


@routes
def test_experts_that_no_packed_ones_replace(route: str, tmp_path: Path, generator: torch.Generator) -> None:
    """Llama4's, which llm-compressor takes apart like others."""
    expected = model_of("llama4")
    model = check(write(tmp_path / "model", expected, linear, generator), expected, route)
    reasons = {dense.reason for dense in model.hf_quantizer.plan.densified.values()}
    assert reasons == {"it has not the attributes of transformers' use_experts_implementation"}


@routes
def test_experts_of_several_kinds(route: str, tmp_path: Path, generator: torch.Generator) -> None:
    """One product of one of gpt-oss, whose biases stay, has 8 bits."""
    expected, pattern = model_of("gpt-oss"), r"layers\.0\.mlp\.experts\.1\.down"
    folder = write(
        tmp_path / "model",
        expected,
        linear,
        generator,
        packer=lambda layer: gptq(8 if re.search(pattern, layer) else 4, 1, False, False),
        options=GPTQ | {"dynamic": {rf".*{pattern}": {"bits": 8}}},
    )
    assert experts_of(check(folder, expected, route)) == ["model.layers.1.mlp.experts"]


def with_biases(value: float) -> Callable[[Tensors], Tensors]:
    """Of experts, and of o_proj."""

    def edit(tensors: Tensors) -> Tensors:
        words = {name.removesuffix("qweight"): t for name, t in tensors.items() if name.endswith("qweight")}
        return tensors | {
            f"{name}bias": torch.full(t.shape[1:], float(value)) for name, t in words.items() if "q_" not in name
        }

    return edit


@routes
@pytest.mark.parametrize("dense", ["none", r"experts\.1\.down"])
def test_biases_of_zeros(dense: str, route: str, tmp_path: Path, generator: torch.Generator) -> None:
    """Old versions of AutoGPTQ write them for every layer."""
    expected = model_of("qwen3-moe")
    is_quantized = lambda layer: linear(layer) and not re.search(dense, layer)  # noqa: E731
    folder = write(tmp_path / "model", expected, is_quantized, generator, edit=with_biases(0))
    assert len(experts_of(check(folder, expected, route))) == (2 if dense == "none" else 0)


def without(pattern: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if not re.search(pattern, name)}


def half_of(pattern: str) -> Callable[[Tensors], Tensors]:
    """Half of the columns of layers."""
    return lambda tensors: {
        name: t[:, : t.shape[1] // 2].contiguous() if re.search(pattern, name) and t.dim() == 2 else t
        for name, t in tensors.items()
    }


WRONG: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "biases of experts": ("qwen3-moe", with_biases(1), r"experts\.0\.gate_proj\.bias: expected none or zeros"),
    "a bias of a layer": (
        "qwen3-moe",
        lambda tensors: without(r"experts.*bias")(with_biases(1)(tensors)),
        r"(k|o|v)_proj\.bias: expected none or zeros, as the model has no bias here, got others",
    ),
    "no biases": ("gpt-oss", without(r"experts\.1\.down_proj\.bias"), r"experts\.1\.down_proj\.bias: expected a bias"),
    "columns": (
        "mixtral",
        half_of(r"experts\.1\.up_proj"),
        r"experts\.1\.up_proj: expected K x N = 64 x 128 .*64 x 64",
    ),
    "an expert too much": (
        "mixtral",
        lambda tensors: tensors | {name.replace("s.4.", "s.5."): t.clone() for name, t in tensors.items()},
        r"expected 5 experts as the model's config says, got model\.layers\.\d\.mlp\.experts\.5\.",
    ),
    "two of one": (
        "mixtral",
        lambda tensors: tensors | {name.replace("gate_proj", "w1"): t.clone() for name, t in tensors.items()},
        r"experts\.\d\.(w1|gate_proj): expected one layer for expert \d of .*gate_up_proj, got model.*, too",
    ),
    "a dense one is missing": (
        "mixtral",
        without(r"layers\.1\.mlp\.experts\.1\.down_proj"),
        r"layers\.1\.mlp\.experts\.down_proj: expected 5 experts, got none for expert 1 beside such as",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("route", ["load_model", "from_pretrained"])
def test_experts_that_do_not_fit(case: str, route: str, tmp_path: Path, generator: torch.Generator) -> None:
    name, edit, message = WRONG[case]
    folder = write(tmp_path / "model", model_of(name), linear, generator, edit=edit)
    with pytest.raises(ValueError, match=message):
        ROUTES[route](folder)


# --- layers that transformers takes apart --------------------------------------------------------------------


def nomic() -> Any:
    """Its files have one tensor for q_proj, k_proj and v_proj."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    return transformers.NomicBertModel(transformers.NomicBertConfig(**sizes, num_attention_heads=4))


def hrm() -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
    config = transformers.HrmTextConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    return transformers.HrmTextForCausalLM(config)


@pytest.mark.parametrize("skip", [[], ["q_proj", "gate_proj"]], ids=["all", "some"])
@pytest.mark.parametrize("kind", [nomic, hrm])
def test_tensors_that_are_several_layers(kind: Callable[[], Any], skip: list[str], tmp_path: Path) -> None:
    dense = seeded(kind)
    dense.save_pretrained(tmp_path / "dense")
    config = WeightOnlyConfig(group_size=32, modules_to_not_convert=skip)
    model = type(dense).from_pretrained(tmp_path / "dense", quantization_config=config, dtype=torch.float32)
    left = [name for name, _ in dense.named_modules() if name.endswith(tuple(skip) or "nothing")]
    expected: Any = wo.nn.quantize_model(dense, group_size=32, skip=left)
    assert packed_layers(model).keys() == packed_layers(expected).keys() - {"lm_head"}
    model.save_pretrained(tmp_path / "packed")
    again = type(dense).from_pretrained(tmp_path / "packed", dtype=torch.float32)
    for name, layer in packed_layers(model).items():
        assert torch.equal(layer.dequantize(), expected.get_submodule(name).dequantize())
        assert torch.equal(layer.dequantize(), again.get_submodule(name).dequantize())
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_a_quantized_layer_that_is_several(tmp_path: Path, generator: torch.Generator) -> None:
    """load_model makes them dense; the other route says so."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    expected = seeded(lambda: transformers.GteModel(transformers.GteConfig(**sizes, num_attention_heads=4)))
    parts = [f"layers.0.self_attn.{x}_proj" for x in "qkv"]

    def together(tensors: Tensors) -> Tensors:
        whole = {n: t for n, t in tensors.items() if not n.startswith(tuple(parts))}
        for inside in ("qweight", "qzeros", "scales", "bias"):
            whole[f"encoder.layer.0.attention.qkv_proj.{inside}"] = torch.cat(
                [tensors[f"{part}.{inside}"] for part in parts], -1
            )
        return whole

    folder = write(tmp_path / "model", expected, parts.__contains__, generator, edit=together)
    model = load_model(folder, torch.float32)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)
    model.save_pretrained(tmp_path / "saved")  # nothing is packed, and the config says nothing of it
    assert same_state(transformers.AutoModel.from_pretrained(tmp_path / "saved"), model)
    with pytest.raises(ValueError, match=r"expected a layer for .*_proj.*load_model makes them dense"):
        transformers.AutoModel.from_pretrained(folder, quantization_config=WeightOnlyConfig())
