"""Models with activations="fp8": quantized, saved, loaded from other quantizers' folders, trained beside adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.hf import gpt_oss_models
from tests.hf.test_hf_load_model import CHECKPOINTS, needs_checkpoints
from tests.hf_models import SIZES, TOKENS, llama, logits, packed_layers, quantized, saved, seeded
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import weightonly as wo
from weightonly.__main__ import main
from weightonly.formats import open_checkpoint
from weightonly.formats.convert import convert
from weightonly.formats.describe import describe
from weightonly.hf import WeightOnlyConfig, load_model
from weightonly.hf.quantize_folder import quantize_folder
from weightonly.nn import Experts, GroupedLinear


def activations(model: Any) -> set[str | None]:
    return {layer.activations for layer in packed_layers(model).values()}


def options(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def of_experts(model: Any) -> set[str | None]:
    return {layer.activations for layer in model.modules() if isinstance(layer, GroupedLinear)}


def explicit(model: Any, without: Collection[str] = ()) -> torch.Tensor:
    """The logits, each packed layer being `gemm` of `quantize_activations`, but those `without`; so are experts."""

    def product(layer: Any, inputs: tuple[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        x8, x_scales = wo.quantize_activations(inputs[0])
        return wo.gemm(x8, layer.operand, x_scales=x_scales, bias=layer.bias)

    def experts(layer: Any, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
        x8, x_scales = wo.quantize_activations(inputs[0])
        w13, w2 = ((product.operand, product.bias) for product in (layer.gate_up_proj, layer.down_proj))
        _, ids, weights = inputs
        return wo.fused_experts(x8, w13, w2, ids, weights, layer.between.gate, x_scales=x_scales)

    layers = packed_layers(model)
    hooks = [layers[name].register_forward_hook(product) for name in layers.keys() - without]
    hooks += [layer.register_forward_hook(experts) for layer in model.modules() if isinstance(layer, Experts)]
    found = logits(model)
    for hook in hooks:
        hook.remove()
    return found


def test_quantized_saved_and_loaded_again(tmp_path: Path) -> None:
    dense = saved(tmp_path / "dense", llama)
    model = quantized(dense, activations="fp8", arch="cpu")
    assert activations(model) == {"fp8"}
    expected = logits(model)
    assert torch.equal(explicit(model), expected)
    of_16_bits = quantized(dense, arch="cpu")
    other = logits(of_16_bits)
    assert 0 < (other - expected).norm() < 0.1 * other.norm()
    again = wo.nn.quantize_model(seeded(llama), group_size=64, activations="fp8", arch="cpu")
    assert torch.equal(logits(again), expected)
    for number, each in enumerate((model, again)):
        folder = tmp_path / f"packed{number}"
        each.save_pretrained(folder)
        assert options(folder)["activations"] == "fp8" and options(folder)["layers"] == {}
        for loaded in (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load_model(folder)):
            assert activations(loaded) == {"fp8"} and torch.equal(logits(loaded), expected)
        assert torch.equal(logits(load_model(folder, activations="16bit", arch="cpu")), other)
    of_16_bits.save_pretrained(tmp_path / "packed16")
    assert "activations" not in options(tmp_path / "packed16")
    assert torch.equal(logits(load_model(tmp_path / "packed16", activations="fp8", arch="cpu")), expected)
    with pytest.raises(
        ValueError, match=r"activations: expected '16bit', as .*packed16 has it, or nothing, got 'fp8'; loa"
    ):
        quantized(tmp_path / "packed16", activations="fp8")
    assert torch.equal(logits(quantized(tmp_path / "packed0", activations="fp8")), expected)


def test_packed_for_hopper(tmp_path: Path) -> None:
    dense = saved(tmp_path / "dense", llama, torch.bfloat16)
    model = quantized(dense, torch.bfloat16, activations="fp8", arch="sm90")
    assert {layer.layout for layer in packed_layers(model).values()} == {"tiled_fp8"}
    expected = logits(model)
    folder = tmp_path / "packed"
    quantize_folder(dense, folder, WeightOnlyConfig(group_size=64, activations="fp8", arch="sm90"), progress=False)
    assert options(folder)["layout"] == "tiled_fp8"
    for arch, layout in ((None, "tiled_fp8"), ("cpu", "cpu")):
        loaded = load_model(folder, arch=arch)
        assert {layer.layout for layer in packed_layers(loaded).values()} == {layout}
        assert torch.equal(logits(loaded), expected)
    other = load_model(folder, arch="sm80", activations="16bit")
    assert {layer.layout for layer in packed_layers(other).values()} == {"interleaved"}
    with pytest.raises(ValueError, match=r"layers\.0\.\S+: activations: expected None for sm80, as sm90 or cpu alone"):
        load_model(folder, arch="sm80")
    convert(folder, tmp_path / "converted", "cpu", progress=False)
    assert (options(tmp_path / "converted")["layout"], options(tmp_path / "converted")["activations"]) == ("cpu", "fp8")
    assert torch.equal(logits(load_model(tmp_path / "converted")), expected)


def test_some_layers_in_16_bits(tmp_path: Path) -> None:
    layers = {"down_proj": {"format": "int8", "activations": "16bit"}}
    model = quantized(saved(tmp_path / "dense", llama), activations="fp8", layers=layers, arch="cpu")
    found = {name.rpartition(".")[2]: (layer.format, layer.activations) for name, layer in packed_layers(model).items()}
    assert found.pop("down_proj") == ("int8", None) and set(found.values()) == {("int4", "fp8")}
    model.save_pretrained(tmp_path / "packed")
    loaded: Any = load_model(tmp_path / "packed")
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.config.quantization_config.to_dict()["activations"] == "fp8"
    with pytest.raises(ValueError, match=r"down_proj: activations: expected None for int8, got 'fp8'"):
        load_model(tmp_path / "packed", activations="fp8", arch="cpu")


def test_a_quantized_head_keeps_x_as_it_is(tmp_path: Path) -> None:
    only, layers = ["lm_head", "*_proj"], {"lm_head": {"format": "int8"}}
    whole: Any = wo.nn.quantize_model(seeded(llama), group_size=64, only=only, layers=layers)
    whole.save_pretrained(tmp_path)
    model = load_model(tmp_path, activations="fp8", arch="cpu")
    found = {name: layer.activations for name, layer in packed_layers(model).items()}
    assert found.pop("lm_head") is None and set(found.values()) == {"fp8"}
    assert torch.equal(logits(model), explicit(model, without=("lm_head",)))


def test_a_mixture(tmp_path: Path) -> None:
    config = Qwen2MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    dense = saved(tmp_path / "dense", lambda: Qwen2MoeForCausalLM(config))
    model = quantized(dense, activations="fp8", arch="cpu")
    assert activations(model) == of_experts(model) == {"fp8"}
    expected = logits(model)
    assert torch.equal(explicit(model), expected)
    model.save_pretrained(tmp_path / "packed")
    assert options(tmp_path / "packed")["activations"] == "fp8" and options(tmp_path / "packed")["layers"] == {}
    for asked in (None, "fp8"):
        loaded = load_model(tmp_path / "packed", activations=asked, arch="cpu")
        assert activations(loaded) == of_experts(loaded) == {"fp8"} and torch.equal(logits(loaded), expected)
    in_16_bits = load_model(tmp_path / "packed", activations="16bit", arch="cpu")
    assert of_experts(in_16_bits) == {None} and not torch.equal(logits(in_16_bits), expected)
    own = quantized(dense, activations="fp8", arch="cpu", layers={"experts": {"activations": "16bit"}})
    assert (activations(own), of_experts(own)) == ({"fp8"}, {None})
    own.save_pretrained(tmp_path / "own")
    loaded = load_model(tmp_path / "own")
    assert (activations(loaded), of_experts(loaded)) == ({"fp8"}, {None})
    assert torch.equal(logits(loaded), logits(own))
    assert torch.equal(logits(load_model(tmp_path / "own", activations="fp8", arch="cpu")), expected)


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_a_mixture_packed_for_hopper(format: str, tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    dense = saved(tmp_path / "dense", lambda: MixtralForCausalLM(config), torch.bfloat16)
    given: dict[str, Any] = {"format": format, "group_size": 32, "activations": "fp8", "arch": "sm90"}
    model = quantized(dense, torch.bfloat16, **given)
    assert {layer.layout for layer in packed_layers(model).values()} == {"tiled_fp8"}
    assert {layer.layout for layer in model.modules() if isinstance(layer, GroupedLinear)} == {"tiled_fp8"}
    expected = logits(model)
    packed = tmp_path / "packed"
    quantize_folder(dense, packed, WeightOnlyConfig(**given), progress=False)
    assert (options(packed)["layout"], options(packed)["layers"]) == ("tiled_fp8", {})
    again = WeightOnlyConfig(**given)
    from_pretrained = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16, quantization_config=again)
    for loaded in (load_model(packed), load_model(packed, arch="cpu"), from_pretrained):
        assert of_experts(loaded) == {"fp8"} and torch.equal(logits(loaded), expected)
    other = load_model(packed, arch="sm80", activations="16bit")
    assert of_experts(other) == {None} and not torch.equal(logits(other), expected)
    with pytest.raises(ValueError, match=r"experts\S+: activations: expected None for sm80, as sm90 or cpu alone"):
        load_model(packed, arch="sm80")
    convert(packed, tmp_path / "converted", "cpu", progress=False)
    assert (options(tmp_path / "converted")["layout"], options(tmp_path / "converted")["activations"]) == ("cpu", "fp8")
    assert torch.equal(logits(load_model(tmp_path / "converted")), expected)


def test_gpt_oss(tmp_path: Path, generator: torch.Generator) -> None:
    """Its experts are MXFP4; all else is dense."""
    gpt_oss_models.write(tmp_path / "gpt-oss", generator)
    tokens = gpt_oss_models.TOKENS
    other = logits(load_model(tmp_path / "gpt-oss", arch="sm90"), tokens)
    for arch in ("sm90", "cpu"):
        model = load_model(tmp_path / "gpt-oss", activations="fp8", arch=arch)
        assert of_experts(model) == {"fp8"}
        expected = logits(model, tokens)
        assert 0 < (expected - other).norm() < 0.2 * other.norm()
        model.save_pretrained(tmp_path / arch)
        assert torch.equal(logits(load_model(tmp_path / arch), tokens), expected)
    given = WeightOnlyConfig(activations="fp8", arch="sm90")
    asked = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt-oss", quantization_config=given, dtype="auto")
    assert of_experts(asked) == {"fp8"} and torch.equal(logits(asked, tokens), expected)


def asking(folder: Path) -> Path:
    """A folder of llm-compressor whose config asks for x in FP8."""
    shutil.copytree(CHECKPOINTS / "ct_w4a16", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@needs_checkpoints
def test_a_folder_that_asks_for_it(tmp_path: Path) -> None:
    folder = asking(tmp_path / "w4afp8")
    text = describe(open_checkpoint(folder))
    assert "activations in fp8, a scale for each row: 14 layers; load_model computes in 16 bits unless" in text
    assert "activations" not in describe(open_checkpoint(CHECKPOINTS / "ct_w4a16"))
    plain = load_model(folder)
    assert activations(plain) == {None}
    assert torch.equal(logits(plain), logits(load_model(CHECKPOINTS / "ct_w4a16")))
    model = load_model(folder, activations="fp8")
    assert activations(model) == {"fp8"} and torch.equal(explicit(model), logits(model))
    asked = AutoModelForCausalLM.from_pretrained(folder, quantization_config=WeightOnlyConfig(activations="fp8"))
    assert torch.equal(logits(asked), logits(model))
    convert(folder, tmp_path / "converted", progress=False)
    assert "activations" not in options(tmp_path / "converted")


@needs_checkpoints
@pytest.mark.parametrize("name", ["gptq4", "ct_w4a16", "ct_moe", "ct_mxfp4"])
def test_folders_of_other_quantizers(name: str, tmp_path: Path) -> None:
    """Act-order among them."""
    model = load_model(CHECKPOINTS / name, activations="fp8")
    assert activations(model) | of_experts(model) == {"fp8"} and torch.equal(explicit(model), logits(model))
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(load_model(tmp_path / "packed")), logits(model))


@needs_checkpoints
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("awq", r"q_proj: activations: expected None for int4 with zero points, got 'fp8'"),
        ("bnb_nf4", r"_proj: activations: expected None for nf4, got 'fp8'"),
        ("gptq4_g16", r"q_proj: activations 'fp8': group_size must be -1 \(per channel\), 32, a multiple of 64"),
    ],
)
def test_layers_that_no_kernel_takes(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(CHECKPOINTS / name, activations="fp8")


def test_wrong_arguments(tmp_path: Path) -> None:
    dense = saved(tmp_path / "dense", llama)
    with pytest.raises(ValueError, match=r"activations: expected None, as .*dense is not quantized, got 'fp8'"):
        load_model(dense, activations="fp8")
    with pytest.raises(ValueError, match="activations: expected None, '16bit' or 'fp8', got 'int8'"):
        load_model(dense, activations="int8")
    for wrong, message in (
        ({"format": "nf4"}, "activations: expected None for nf4, got 'fp8'"),
        ({"symmetric": False}, "activations: expected None for int4 with zero points"),
        ({"group_size": 16}, "activations 'fp8': group_size must be"),
        ({"arch": "sm100"}, "activations: expected None for sm100, as sm90 or cpu alone take fp8"),
        ({"layers": {"up_proj": {"format": "int8"}}}, r"layers\['up_proj'\]: activations: expected None for int8"),
    ):
        with pytest.raises(ValueError, match=message):
            WeightOnlyConfig(**{"activations": "fp8"} | wrong)
    with pytest.raises(ValueError, match="activations: expected scales in float16 or bfloat16 for 'fp8' on a GPU"):
        quantized(dense, activations="fp8", arch="sm90")


def test_a_config_that_was_edited(tmp_path: Path) -> None:
    model = quantized(saved(tmp_path / "dense", llama, torch.bfloat16), torch.bfloat16, arch="sm90")
    folder = tmp_path / "packed"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for wrong, message in (
        ({"activations": "fp8"}, "expected layout 'tiled_fp8' or 'cpu' for activations='fp8', got 'tiled'"),
        ({"layout": "tiled_fp8"}, "expected a layout for x in 16 bits, got 'tiled_fp8'"),
        ({"activations": "int8"}, "activations of .*: expected one of 16bit, fp8, got 'int8'"),
    ):
        edited = config | {"quantization_config": config["quantization_config"] | wrong}
        (folder / "config.json").write_text(json.dumps(edited))
        with pytest.raises(ValueError, match=message):
            load_model(folder)


def test_adapters_are_trained_beside_it() -> None:
    model: Any = get_peft_model(
        wo.nn.quantize_model(seeded(llama), group_size=64, activations="fp8", arch="cpu"),
        LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM"),
    )
    inside = model.base_model.model.model.layers[0].mlp.up_proj
    assert inside.get_base_layer().activations == "fp8"
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    before = logits(model.eval())
    merged = model.merge_and_unload()
    assert activations(merged) == {"fp8"}
    assert (logits(merged) - before).norm() < 0.2 * before.norm()


def test_adapters_beside_experts() -> None:
    """Of attention they are trained, through experts; experts have none."""
    mixture = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    packed = wo.nn.quantize_model(mixture, group_size=32, activations="fp8", arch="cpu")
    for product in ("gate_up_proj", "down_proj"):
        with pytest.raises(
            ValueError, match=f"target_parameters: expected experts that take x in 16 bits, got {product}"
        ):
            get_peft_model(packed, LoraConfig(target_parameters=[f"experts.{product}"], r=4))
    model: Any = get_peft_model(packed, LoraConfig(target_modules=["v_proj"], r=4, task_type="CAUSAL_LM"))
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    first = model.base_model.model.model.layers[0].self_attn.v_proj.lora_B.default.weight
    assert bool(first.grad.any())


def test_compiled_and_generating(tmp_path: Path) -> None:
    model: Any = quantized(saved(tmp_path, llama), activations="fp8", arch="cpu")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled), logits(model), rtol=1e-4, atol=1e-5)
    tokens = model.generate(TOKENS[:1, :4], max_new_tokens=3, do_sample=False)
    assert tokens.shape == (1, 7)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, packed = saved(tmp_path / "dense", llama), tmp_path / "packed"
    main(["quantize", str(dense), str(packed), "--group-size", "64", "--activations", "fp8", "--arch", "cpu"])
    assert "int4, groups of 64, x in fp8  error" in capsys.readouterr().out
    assert options(packed)["activations"] == "fp8"
    main(["inspect", str(packed)])
    assert "activations in fp8, a scale for each row: 14 layers\n" in capsys.readouterr().out
    main(["run", str(packed), "--tokens", "1,2,3", "--max-new-tokens", "2", "--device", "cpu"])
    assert "14 layers int4, groups of 64, x in fp8" in capsys.readouterr().out
    main(["run", str(packed), "--tokens", "1,2", "--max-new-tokens", "2", "--device", "cpu", "--activations", "16bit"])
    assert "x in fp8" not in capsys.readouterr().out
