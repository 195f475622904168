"""quantize_model: which layers of real models it takes, what it leaves, formats, models on meta, and its summary."""

# mypy: disable-error-code="arg-type, import-untyped, misc, return-value, union-attr"

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import tests.hf_version  # noqa: F401
import torch
import transformers
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import save_file

import weightonly as wo
from weightonly.nn import Linear, quantize_model

SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"group_size": 32},
    "int4, zero points": {"format": "int4", "group_size": 32, "symmetric": False},
    "int8": {"format": "int8", "group_size": -1},
    "bits": {"bits": 8, "group_size": 64},
    "nf4": {"format": "nf4"},
    "fp4": {"format": "fp4", "group_size": 32},
}
formats = pytest.mark.parametrize("arguments", FORMATS.values(), ids=FORMATS)


def llama(**config: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    kwargs: dict[str, Any] = SMALL | {"intermediate_size": 128, "num_key_value_heads": 2} | config
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**kwargs)).eval()


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=2, n_positions=64)
    return transformers.GPT2LMHeadModel(config).eval()


def mixtral() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SMALL, intermediate_size=128, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config).eval()


TOKENS = torch.arange(12).view(2, 6)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.float()


def densified(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with dense layers of the dequantized weights."""
    model = copy.deepcopy(model)
    for name, child in list(model.named_modules()):
        if isinstance(child, Linear):
            dense = torch.nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
            dense.weight.data = child.dequantize().t().contiguous()
            if child.bias is not None:
                dense.bias.data = child.bias.data
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, dense)
    return model


@formats
@pytest.mark.parametrize("make", [llama, gpt2, mixtral], ids=["llama", "gpt2 (Conv1D)", "mixtral"])
def test_logits_are_those_of_the_dequantized_weights(make: Any, arguments: dict[str, Any]) -> None:
    original = make()
    model = quantize_model(copy.deepcopy(original), **arguments)
    layers = [child for child in model.modules() if isinstance(child, Linear)]
    assert len(layers) == {"llama": 14, "gpt2": 8, "mixtral": 8}[make.__name__]
    torch.testing.assert_close(logits(model), logits(densified(model)), rtol=1e-4, atol=1e-5)
    exact = logits(original)
    assert (logits(model) - exact).norm() < 0.3 * exact.norm()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_output_embeddings_are_left_unless_they_are_named(make: Any, tied: bool) -> None:
    model = make() if make is gpt2 else make(tie_word_embeddings=tied)
    head = model.lm_head
    quantize_model(model, group_size=32)
    assert model.lm_head is head
    [left] = model.weightonly_summary.left
    assert left.names == ("lm_head",) and "output embeddings" in left.left
    model = make()
    quantize_model(model, group_size=32, only=["lm_head"])
    assert isinstance(model.lm_head, Linear)
    assert [layer.names for layer in model.weightonly_summary.quantized] == [("lm_head",)]


def test_a_weight_shared_with_an_embedding_is_left() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(96, 64), "head": torch.nn.Linear(64, 96, bias=False)})
    model["head"].weight = model["embed"].weight
    with pytest.raises(ValueError, match="layer 'head': output embeddings: its weight is that of 'embed'"):
        quantize_model(model, group_size=32)
    assert type(model["head"]) is torch.nn.Linear


def test_experts_gates_and_what_does_not_fit_are_left_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.ModuleDict(
        {
            "moe": mixtral(),
            "gate": torch.nn.Linear(64, 1),
            "odd": torch.nn.Linear(40, 64),
            "attention": torch.nn.MultiheadAttention(64, 2),
            "fits": torch.nn.Linear(64, 8),
            "stack": torch.nn.ParameterList([torch.zeros(2, 64, 64)]),
        }
    )
    before = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    with caplog.at_level(logging.INFO, logger="weightonly"):
        quantize_model(model, group_size=32)
    summary = model.weightonly_summary
    left = {name: layer.left for layer in summary.left for name in layer.names}
    assert isinstance(model["fits"], Linear) and type(model["odd"]) is torch.nn.Linear
    assert left["gate"] == "N = 1: a gate"
    assert "group_size: expected -1 or a divisor of K=40" in left["odd"]
    assert "NonDynamicallyQuantizableLinear is a subclass" in left["attention.out_proj"]
    assert left["moe.lm_head"] == "output embeddings"
    assert left["stack"].startswith("weights of three dimensions, and it has not the attributes")
    text = str(summary)
    for part in ("11 layers quantized", "5 left", "moe.lm_head", "left", "K=40", "experts"):
        assert part in text
    assert text in caplog.text
    assert summary.bytes_before == before
    assert summary.bytes_after == sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert summary.bytes_after < summary.bytes_before
    fits = next(layer for layer in summary.quantized if layer.names == ("fits",))
    assert (fits.kind, fits.shape, fits.bytes_before) == ("Linear", (64, 8), 4 * 64 * 8 + 4 * 8)
    assert fits.bytes_after == sum(p.nbytes for p in model["fits"].parameters())
    assert str(pickle.loads(pickle.dumps(summary))) == text


def test_functions_choose_layers() -> None:
    model = quantize_model(llama(), group_size=32, only=lambda name, child: "mlp" in name)
    kinds = {name: type(model.get_submodule(name)) for name in ("model.layers.0.mlp.up_proj", "lm_head")}
    assert kinds == {"model.layers.0.mlp.up_proj": Linear, "lm_head": torch.nn.Linear}
    assert type(model.get_submodule("model.layers.0.self_attn.q_proj")) is torch.nn.Linear
    model = quantize_model(llama(), group_size=32, skip=lambda _, child: child.out_features == 128)
    assert type(model.get_submodule("model.layers.0.mlp.up_proj")) is torch.nn.Linear
    assert type(model.get_submodule("model.layers.0.mlp.down_proj")) is Linear
    reasons = {layer.left for layer in model.weightonly_summary.left}
    assert reasons == {"skip", "output embeddings"}


def test_patterns_choose_layers() -> None:
    model = quantize_model(llama(), group_size=32, only=["*.mlp.*", "lm_head"], skip=["*.1.mlp.up_proj"])
    found = {name for name, child in model.named_modules() if isinstance(child, Linear)}
    assert found == {"lm_head"} | {f"model.layers.{i}.mlp.{p}_proj" for i in (0, 1) for p in ("up", "gate", "down")} - {
        "model.layers.1.mlp.up_proj"
    }


REJECTED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "only that does not fit": (
        {"only": ["1"]},
        ValueError,
        r"only: expected layers that can be quantized, got layer '1': group_size: expected -1 or a divisor of K=40",
    ),
    "only of a gate": ({"only": ["2"]}, ValueError, "only: .*layer '2': N = 1"),
    "only that matches none": ({"only": ["x.*"]}, ValueError, r"only: expected names of layers, got 'x.\*'"),
    "only of a str": ({"only": "0"}, TypeError, "only: expected a collection of names, got the str '0'"),
    "only of a number": ({"only": 3}, TypeError, "only: expected names or a function, got int"),
    "skip of a number": ({"skip": [3]}, TypeError, "skip: expected names, got int"),
    "format": ({"format": "int3"}, ValueError, "format: expected one of .*got 'int3'"),
    "code4": ({"format": "code4"}, ValueError, "format: expected one of int4, int8, nf4, fp4.* to quantize to"),
    "bits of a format": ({"format": "nf4", "bits": 8}, ValueError, "bits: expected 4 for nf4, got 8"),
    "zeros of codes": ({"format": "nf4", "symmetric": False}, ValueError, "symmetric: expected True for nf4"),
    "arch of codes": ({"format": "nf4", "arch": "sm70"}, ValueError, "arch: expected sm75 .*for nf4"),
    "arch": ({"arch": "sm60"}, ValueError, "arch: expected one of"),
    "dtype": ({"dtype": torch.float64}, TypeError, "dtype: expected one of .*got torch.float64"),
    "group of codes": ({"format": "nf4", "group_size": 192, "only": ["0"]}, ValueError, "group_size"),
    "nothing fits": ({"group_size": 448}, ValueError, "module: expected layers that can be quantized, got none: .*'0'"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_nothing_is_replaced_where_arguments_are_wrong(case: str) -> None:
    arguments, error, message = REJECTED[case]
    model = torch.nn.Sequential(torch.nn.Linear(384, 8), torch.nn.Linear(40, 8), torch.nn.Linear(384, 1))
    with pytest.raises(error, match=message):
        quantize_model(model, **{"group_size": 64} | arguments)
    assert all(type(child) is torch.nn.Linear for child in model)


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("group_size", [64, 128, -1])
def test_codes_are_those_of_bitsandbytes(format: str, group_size: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 72)
    layer = Linear.from_linear(linear, format=format, group_size=group_size, search=False)
    blocksize = 256 if group_size == -1 else group_size
    packed, state = functional.quantize_4bit(linear.weight.data, blocksize=blocksize, quant_type=format)
    codes = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], 1).view(72, 256)
    assert torch.equal(wo.unpack(layer.packed), codes.t().to(torch.int8))
    assert torch.equal(layer.scales, state.absmax.view(72, -1).t())
    assert (layer.packed.group_size, layer.packed.has_zeros) == (group_size, False)


def test_codes_of_values_beyond_the_dtype_are_refused() -> None:
    linear = torch.nn.Linear(64, 8)
    torch.nn.init.constant_(linear.weight, 1e5)
    with pytest.raises(ValueError, match=r"layer '0': w: expected values within \+-65504"):
        quantize_model(torch.nn.Sequential(linear), format="nf4", dtype=torch.float16)


# --- from meta -----------------------------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_from_meta_with_accelerate(make: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    source = quantize_model(make(), dtype=torch.bfloat16, **arguments)
    state = {name: tensor.contiguous().clone() for name, tensor in source.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with init_empty_weights():
        model = make()
    model.tie_weights()
    quantize_model(model, dtype=torch.bfloat16, **arguments)
    summary = model.weightonly_summary
    assert summary.bytes_after == source.weightonly_summary.bytes_after
    model = load_checkpoint_and_dispatch(model, str(tmp_path / "model.safetensors"), device_map={"": "cpu"})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(model.eval()), logits(source))


# --- formats of single layers --------------------------------------------------------------------------------------


def test_layers_of_other_formats() -> None:
    own = {"down": {"format": "nf4"}, "0.*": {"format": "int8", "group_size": 32}, "0.down": {"symmetric": False}}
    blocks = [torch.nn.ModuleDict({"up": torch.nn.Linear(128, 64), "down": torch.nn.Linear(128, 64)}) for _ in range(2)]
    model = quantize_model(torch.nn.ModuleList(blocks), group_size=64, layers=own)
    kinds = {name: (m.format, m.group_size, m.symmetric) for name, m in model.named_modules() if isinstance(m, Linear)}
    assert kinds == {
        "0.up": ("int8", 32, True),
        "0.down": ("int4", 64, False),
        "1.up": ("int4", 64, True),
        "1.down": ("nf4", 64, True),
    }
    expected = (
        "int8, groups of 32: 1 layer quantized; int4, groups of 64: 2 layers quantized; nf4, groups of 64: 1 layer"
    )
    assert str(model.weightonly_summary).startswith(f"{expected} quantized, 0 left; ")


WRONG_LAYERS: dict[str, tuple[Any, type[Exception], str]] = {
    "no mapping": ([], TypeError, "layers: expected patterns of names and what these layers have, got list"),
    "a format alone": (
        {"0": "int8"},
        TypeError,
        "layers: expected a pattern and what its layers have, got '0': 'int8'",
    ),
    "another entry": ({"0": {"bits": 8}}, ValueError, r"layers\['0'\]: expected .* and activations, got 'bits'"),
    "a format": ({"0": {"format": "int3"}}, ValueError, r"layers\['0'\]: format: expected one of int4"),
    "a group size": ({"0": {"group_size": 48}}, ValueError, r"layers\['0'\]: group_size"),
    "no layer": (
        {"1": {"format": "int8"}},
        ValueError,
        "layers: expected names of layers, got '1', which matches none",
    ),
}


@pytest.mark.parametrize("case", WRONG_LAYERS)
def test_wrong_layers(case: str) -> None:
    layers, error, message = WRONG_LAYERS[case]
    model = torch.nn.Sequential(torch.nn.Linear(128, 64))
    with pytest.raises(error, match=message):
        quantize_model(model, layers=layers)
    assert type(model[0]) is torch.nn.Linear


def test_the_end_of_a_name_is_a_pattern_where_no_name_is_that() -> None:
    block = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 64), "down": torch.nn.Linear(64, 64)})
    model = torch.nn.ModuleDict({"block": block, "up": torch.nn.Linear(64, 64)})
    quantize_model(model, group_size=64, skip=["up"], only=["up", "down"])
    assert {layer.names[0]: layer.left for layer in model.weightonly_summary.layers} == {
        "block.up": "not in only",
        "block.down": None,
        "up": "skip",
    }
