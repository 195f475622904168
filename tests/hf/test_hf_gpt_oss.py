"""gpt-oss in MXFP4 as a running model: its experts stay packed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.hf.gpt_oss_models import SIZES, TOKENS, logits, write
from tests.hf_models import same_state
from transformers import AutoModel, AutoModelForCausalLM, GptOssForCausalLM, Mxfp4Config

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import convert, open_checkpoint
from weightonly.hf import WeightOnlyConfig, load_model
from weightonly.hf.checkpoint import CheckpointWeights
from weightonly.nn import Experts

EXPERTS = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
PRODUCTS = ("gate_up_proj", "down_proj")


def experts_of(model: torch.nn.Module) -> dict[str, Experts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Experts)}


def with_our_config(folder: Path, dtype: torch.dtype | str = "auto", arch: Any = None, **options: Any) -> Any:
    config = WeightOnlyConfig(arch=arch)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype, **options)


def dequantized(folder: Path, dtype: torch.dtype | str = "auto") -> Any:
    """As transformers itself loads it on a CPU."""
    config = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype, device_map="cpu")


def check(model: Any, exact: GptOssForCausalLM) -> None:
    """The model is packed, and computes what the dense one computes."""
    assert type(model) is GptOssForCausalLM and not model.training
    assert list(experts_of(model)) == EXPERTS
    for name, experts in experts_of(model).items():
        dense: Any = exact.get_submodule(name)
        again: Any = experts.to_dense(torch.float32)
        for product in PRODUCTS:
            layer = getattr(experts, product)
            assert (layer.format, layer.qweight.dtype) == ("mxfp4", torch.uint8)
            assert layer.scales.shape == (layer.num_experts, layer.in_features // 32, layer.out_features)
            for tensor in (product, f"{product}_bias"):
                assert torch.equal(getattr(again, tensor), getattr(dense, tensor))
    expected = logits(exact)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("shards", "sizes"),
    [
        (1, {}),
        (3, {"hidden_size": 64, "intermediate_size": 96, "num_experts_per_tok": 1}),
        (1, {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 1, "num_experts_per_tok": 1}),
        (2, {"hidden_size": 128, "num_local_experts": 4, "num_experts_per_tok": 4, "swiglu_limit": 7.0}),
    ],
)
def test_logits_are_those_of_transformers(
    shards: int, sizes: dict[str, Any], tmp_path: Path, generator: torch.Generator
) -> None:
    exact = write(tmp_path, generator, shards, **sizes)
    check(load_model(tmp_path, torch.float32), exact)
    check(with_our_config(tmp_path, torch.float32), exact)
    theirs = dequantized(tmp_path, torch.float32)
    assert same_state(theirs, exact)
    assert torch.equal(logits(theirs), logits(exact))


def test_the_clamp_is_that_of_the_config(tmp_path: Path, generator: torch.Generator) -> None:
    exact = logits(write(tmp_path, generator))
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"swiglu_limit": 0.5', '"swiglu_limit": 7.0'))
    assert (logits(load_model(tmp_path, torch.float32)) - exact).abs().max() > 1e-3 * exact.abs().max()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 4e-3), (torch.bfloat16, 4e-2)], ids=str)
def test_in_16_bits(dtype: torch.dtype, bound: float, tmp_path: Path, generator: torch.Generator) -> None:
    """Every token goes to every expert: rounded logits of the router would choose others."""
    exact = logits(write(tmp_path, generator, num_experts_per_tok=SIZES["num_local_experts"]))
    model = load_model(tmp_path, dtype)
    theirs = dequantized(tmp_path, dtype)
    packed = {name for name, _ in model.named_parameters() if ".experts." in name}
    dense = {name for name, _ in theirs.named_parameters() if ".experts." in name}
    others = {name: p.dtype for name, p in model.named_parameters() if name not in packed}
    assert others == {name: p.dtype for name, p in theirs.named_parameters() if name not in dense}
    assert {model.get_parameter(name).dtype for name in packed} == {torch.uint8, dtype}
    torch.testing.assert_close(logits(model), exact, rtol=0, atol=bound * float(exact.abs().max()))


def test_without_dtype_it_is_that_of_the_files(tmp_path: Path, generator: torch.Generator) -> None:
    """config.json of openai/gpt-oss names none. Half of the memory of fp32, and what a GPU computes in."""
    write(tmp_path, generator)
    theirs = dequantized(tmp_path)
    for model in (
        load_model(tmp_path),
        load_model(tmp_path, "auto"),
        with_our_config(tmp_path),
    ):
        assert model.dtype == theirs.dtype == torch.bfloat16
        assert model.model.layers[0].mlp.experts.down_proj.scales.dtype == torch.bfloat16


def test_biases_keep_their_bits(tmp_path: Path, generator: torch.Generator) -> None:
    """Scales are bfloat16 in a record; biases that are fp32 in the file are not cast to it."""
    exact: Any = write(tmp_path, generator)
    tensors = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for name in EXPERTS:
            bias = exact.get_parameter(f"{name}.down_proj_bias")
            bias.normal_(generator=generator)
            tensors[f"{name}.down_proj_bias"] = bias.detach().clone()
    save_file(tensors, tmp_path / "model.safetensors")
    check(load_model(tmp_path, torch.float32), exact)
    check(with_our_config(tmp_path, torch.float32), exact)


@pytest.mark.parametrize(
    ("arch", "layout"), [(None, "cpu"), ("cpu", "cpu"), ("sm90", "tiled"), ("sm80", "interleaved")]
)
def test_packed_for(arch: str | None, layout: str, tmp_path: Path, generator: torch.Generator) -> None:
    if arch is None and torch.cuda.is_available():
        pytest.skip("arch=None means the GPU")
    exact = write(tmp_path / "model", generator)
    convert(tmp_path / "model", tmp_path / "converted", arch=arch, shard_bytes=1 << 14, progress=False)
    assert len(list((tmp_path / "converted").glob("*.safetensors"))) > 2
    model = load_model(tmp_path / "model", torch.float32, arch=arch)
    assert {getattr(e, product).layout for e in experts_of(model).values() for product in PRODUCTS} == {layout}
    for other in (
        with_our_config(tmp_path / "model", torch.float32, arch),
        load_model(tmp_path / "converted", torch.float32),
        load_model(tmp_path / "converted", torch.float32, arch=arch),
        AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32),
    ):
        assert same_state(model, other)
        check(other, exact)
    again = load_model(tmp_path / "converted", torch.float32, arch="sm90")
    assert again.model.layers[0].mlp.experts.down_proj.layout == "tiled"
    check(again, exact)


def test_saved(tmp_path: Path, generator: torch.Generator) -> None:
    """A layer for each expert, as other mixtures are saved; read, packed for another GPU, and dense again."""
    exact = write(tmp_path / "model", generator)
    convert(tmp_path / "model", tmp_path / "converted", progress=False)
    for number, source in enumerate(("model", "converted")):
        saved = tmp_path / f"saved {number}"
        model = load_model(tmp_path / source, torch.float32)
        model.save_pretrained(saved, max_shard_size="60KB")
        names = set(open_checkpoint(saved).layers)
        assert names == {f"{e}.{i}.{product}" for e in EXPERTS for i in range(5) for product in PRODUCTS}
        again = AutoModelForCausalLM.from_pretrained(saved)
        assert same_state(again, model)
        check(again, exact)
        check(load_model(saved, arch="sm90"), exact)
        convert(saved, saved / "hopper", arch="sm90", progress=False)
        check(AutoModelForCausalLM.from_pretrained(saved / "hopper"), exact)
    dense = model.dequantize()
    assert same_state(dense, exact)
    dense.save_pretrained(tmp_path / "dense")
    assert same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), exact)


def test_the_rest_is_quantized_later(tmp_path: Path, generator: torch.Generator) -> None:
    write(tmp_path / "model", generator, hidden_size=64)
    model: Any = wo.nn.quantize_model(load_model(tmp_path / "model", torch.float32), group_size=32, skip=["lm_head"])
    attention = model.model.layers[1].self_attn
    assert (attention.q_proj.format, attention.o_proj.format) == ("int4", "int4") and list(experts_of(model)) == EXPERTS
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert same_state(again, model)
    assert torch.equal(logits(again), logits(model))


def test_offload_and_the_base_model(tmp_path: Path, generator: torch.Generator) -> None:
    exact = write(tmp_path / "model", generator)
    convert(tmp_path / "model", tmp_path / "converted", progress=False)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "disk", "model.layers.1": "cpu"}
    options: dict[str, Any] = {"device_map": places, "offload_folder": tmp_path / "offload", "dtype": torch.float32}
    expected = logits(exact)
    for model in (
        load_model(tmp_path / "model", **options),
        with_our_config(tmp_path / "model", **options),
        AutoModelForCausalLM.from_pretrained(tmp_path / "converted", **options),
    ):
        assert model.model.layers[0].mlp.experts.down_proj.qweight.is_meta
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    whole = load_model(tmp_path / "model", torch.float32)
    check(load_model(tmp_path / "model", torch.float32, device_map="auto", max_memory={"cpu": "1GiB"}), exact)
    for base in (
        AutoModel.from_pretrained(tmp_path / "model", quantization_config=WeightOnlyConfig(), dtype=torch.float32),
        AutoModel.from_pretrained(tmp_path / "converted", dtype=torch.float32),
    ):
        assert same_state(base, whole.model)


def test_generate(tmp_path: Path, generator: torch.Generator) -> None:
    exact = write(tmp_path, generator)
    options: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    expected = exact.generate(TOKENS, **options)
    assert expected.shape == (2, 32)
    assert torch.equal(load_model(tmp_path, torch.float32).generate(TOKENS, **options), expected)


def test_inspect(tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, generator)
    assert command.main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "mxfp4 (from config.json)\n4 quantized layers" in text
    assert re.search(r"2 +mxfp4 +32 +none +no +5 x 96 x 320 ", text)
    assert re.search(r"2 +mxfp4 +32 +none +no +5 x 160 x 96 ", text)


# --- errors -------------------------------------------------------------------------------------------------

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], Any]
FIRST = f"{EXPERTS[0]}.gate_up_proj"
SECOND = f"{EXPERTS[1]}.down_proj"


def fails(load: Callable[[], Any], message: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where a converter raises, transformers logs the error, and raises another."""
    caplog.clear()
    with pytest.raises((ValueError, RuntimeError)) as error:
        load()
    assert re.search(message, f"{error.value}\n{caplog.text}")


def loads(folder: Path) -> list[Callable[[], Any]]:
    return [
        lambda: load_model(folder, torch.float32),
        lambda: with_our_config(folder, torch.float32),
    ]


def cut(name: str, index: Any) -> Edit:
    return lambda tensors: tensors.update({name: tensors[name][index].contiguous()})


def without(*names: str) -> Edit:
    return lambda tensors: [tensors.pop(name) for name in names]


def with_scale(exponent: int) -> Edit:
    return lambda tensors: tensors[f"{SECOND}_scales"][1, 2].fill_(exponent)


ERRORS: dict[str, tuple[Edit, str]] = {
    "blocks of 3 dimensions": (
        lambda t: t.update({f"{FIRST}_blocks": t[f"{FIRST}_blocks"].flatten(2)}),
        rf"model.safetensors: {FIRST}_blocks: expected uint8 \[E, N, K / 32, 16\], got uint8 \[5, 320, 48\]",
    ),
    "scales of another shape": (
        cut(f"{SECOND}_scales", (slice(None), slice(0, 95))),
        rf"{SECOND}_scales: expected uint8 \[5, 96, 5\], got uint8 \[5, 95, 5\]",
    ),
    "no scales": (without(f"{SECOND}_scales"), rf"{SECOND}_blocks needs {SECOND}_scales, which is not"),
    "no blocks": (without(f"{SECOND}_blocks"), rf"{SECOND}_scales needs {SECOND}_blocks, which is not"),
    "a bias of another shape": (
        cut(f"{SECOND}_bias", (slice(None), slice(0, 95))),
        rf"{SECOND}_bias: expected .* \[5, 96\], got bfloat16 \[5, 95\]",
    ),
    "no bias": (
        without(f"{SECOND}_bias"),
        rf"{SECOND}: expected a bias, as the model says, got none in the",
    ),
    "a scale that is NaN": (
        with_scale(255),
        rf"{SECOND}_scales: expected exponents 0..252 .*, got 255, which is NaN",
    ),
    "one product alone": (
        without(*(f"{SECOND}_{part}" for part in ("blocks", "scales", "bias"))),
        rf"{EXPERTS[1]}.gate_up_proj: expected packed layers for all products of its experts, but the checkpoint has",
    ),
    "experts of a layer that are not there": (
        without(*(f"{EXPERTS[1]}.{p}_{part}" for p in PRODUCTS for part in ("blocks", "scales", "bias"))),
        rf"expected the experts of {EXPERTS[1]}.gate_up_proj, as the model has this layer, got none",
    ),
    "a linear layer that is not there": (
        without("model.layers.1.self_attn.k_proj.weight"),
        r"expected model.layers.1.self_attn.k_proj.qweight or model.layers.1.self_attn.k_proj.weight",
    ),
    "fewer experts in one product": (
        lambda t: [cut(f"{SECOND}_{part}", slice(0, 4))(t) for part in ("blocks", "scales", "bias")],
        rf"{SECOND}: expected 5 experts as the model's config says, got 4 in the checkpoint",
    ),
    "other columns": (
        lambda t: [cut(f"{SECOND}_{part}", (slice(None), slice(0, 64)))(t) for part in ("blocks", "scales", "bias")],
        rf"{SECOND}: expected K x N = 160 x 96 as the model's config says, got 160 x 64 in the checkpoint",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_tensors_that_do_not_fit(
    case: str, tmp_path: Path, generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    edit, message = ERRORS[case]
    write(tmp_path, generator)
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    for load in loads(tmp_path):
        fails(load, message, caplog)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        (
            "num_local_experts",
            6,
            rf"{EXPERTS[0]}.\w+: expected 6 experts as the model's config says, got 5 in",
        ),
        ("intermediate_size", 96, rf"{FIRST}: expected K x N = 96 x 192 as the model's config says, got 96 x 320"),
        ("num_hidden_layers", 3, r"expected model.layers.2|expected the experts of model.layers.2"),
    ],
)
def test_a_config_that_does_not_fit(
    entry: str, value: int, message: str, tmp_path: Path, generator: torch.Generator
) -> None:
    write(tmp_path / "model", generator)
    path = tmp_path / "model" / "config.json"
    options = json.loads(path.read_text()) | {entry: value}
    options.pop("layer_types")
    path.write_text(json.dumps(options))
    convert(tmp_path / "model", tmp_path / "converted", progress=False)
    for load in (*loads(tmp_path / "model"), lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "converted")):
        with pytest.raises(ValueError, match=message):
            load()


def test_the_first_layers_of_a_model(tmp_path: Path, generator: torch.Generator) -> None:
    """As of other folders: what the model does not have is not read."""
    write(tmp_path, generator)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1, "layer_types": None}))
    for load in loads(tmp_path):
        assert list(experts_of(load())) == EXPERTS[:1]


def test_a_parameter_that_is_not_of_experts(tmp_path: Path, generator: torch.Generator) -> None:
    """Three dimensions where the model has a linear layer of K x N."""
    write(tmp_path, generator)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    n, k = tensors.pop(f"{name}.weight").shape
    tensors[f"{name}_blocks"] = torch.zeros(5, n, k // 32, 16, dtype=torch.uint8)
    tensors[f"{name}_scales"] = torch.zeros(5, n, k // 32, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    message = rf"{name}: expected a parameter of experts .* the checkpoint has 5 stacked ones, got another in the model"
    for load in loads(tmp_path):
        with pytest.raises(ValueError, match=message):
            load()


def test_scales_that_float16_does_not_hold(
    tmp_path: Path, generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """A scale of 2^-47, of the folder and of what is saved of it: rounding it to 0 would be silent."""
    write(tmp_path / "model", generator)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    with_scale(80)(tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    convert(tmp_path / "model", tmp_path / "converted", progress=False)
    load_model(tmp_path / "model", torch.bfloat16).save_pretrained(tmp_path / "saved")
    message = r"layers.1.mlp.experts.(1.)?down_proj.*scales: expected powers of two in 2\^-23 .. 2\^13 for mxfp4"
    for load in (
        lambda: load_model(tmp_path / "model", torch.float16),
        lambda: load_model(tmp_path / "converted", torch.float16),
        lambda: load_model(tmp_path / "saved", torch.float16),
        lambda: load_model(tmp_path / "saved", torch.float16, arch="sm90"),
        lambda: with_our_config(tmp_path / "model", torch.float16),
    ):
        fails(load, message, caplog)


def test_volta(tmp_path: Path, generator: torch.Generator) -> None:
    write(tmp_path, generator)
    for load in (
        lambda: load_model(tmp_path, arch="sm70"),
        lambda: with_our_config(tmp_path, arch="sm70"),
    ):
        with pytest.raises(ValueError, match=rf"{EXPERTS[0]}.*mxfp4.*Leave arch away"):
            load()


def test_tensor_parallel_is_refused(tmp_path: Path, generator: torch.Generator) -> None:
    model = write(tmp_path, generator)
    weights = CheckpointWeights(open_checkpoint(tmp_path), None)
    with pytest.raises(ValueError, match=rf"tp_plan: expected none for {EXPERTS[0]}.\w+ of 5 stacked experts"):
        weights.plan(model, stacks=False)


# --- GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("converted", [False, True])
def test_on_a_gpu(
    converted: bool, dtype: torch.dtype, tmp_path: Path, generator: torch.Generator, cuda_device: torch.device
) -> None:
    """Every token goes to every expert: rounded logits of the router would choose others."""
    exact = write(tmp_path / "model", generator, num_experts_per_tok=SIZES["num_local_experts"])
    if converted:
        convert(tmp_path / "model", tmp_path / "converted", progress=False)
    model = load_model(tmp_path / ("converted" if converted else "model"), dtype, device_map=cuda_device)
    assert {p.device for p in model.parameters()} == {cuda_device}
    for name, experts in experts_of(model).items():
        dense = experts.to_dense(torch.float32)
        for product in PRODUCTS:
            assert torch.equal(getattr(dense, product).cpu(), getattr(exact.get_submodule(name), product))
    expected = logits(exact)
    bound = {torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype] * float(expected.abs().max())
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=bound)
    tokens = model.generate(TOKENS.to(cuda_device), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert tokens.shape == (2, 20)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype, device_map=cuda_device)
    assert same_state(again, model)
