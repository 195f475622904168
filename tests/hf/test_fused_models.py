"""Models of transformers with fused layers, and with packed output embeddings: loaded, saved, adapted, compiled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tests.hf_version  # noqa: F401
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import weightonly as wo
from tools.models_tried import try_one
from tools.tiny_models import architectures, tiny_model
from weightonly.__main__ import main
from weightonly.hf import WeightOnlyConfig, load_model

QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
TOKENS = torch.arange(24).view(2, 12)


def llama(tied: bool = False, bias: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    return LlamaForCausalLM(config).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def fused_names(model: torch.nn.Module) -> set[str]:
    return {
        name for name, layer in model.named_modules() if isinstance(layer, wo.nn.Linear) and layer._fused is not None
    }


EXPECTED = {f"model.layers.{layer}.{name}" for layer in range(2) for name in (*QKV, "mlp.gate_proj", "mlp.up_proj")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A packed folder that was saved without fusing, and the dense one that it is of, "dense"."""
    model = llama(bias=True)
    model.save_pretrained(tmp_path / "dense")
    wo.nn.quantize_model(model, group_size=32)
    model.save_pretrained(tmp_path / "packed")
    return tmp_path


def test_each_way_to_load_fuses_and_saves_the_same_files(folder: Path) -> None:
    expected = load_model(folder / "packed", fuse=False)
    config = WeightOnlyConfig(group_size=32)
    models = {
        "load_model": load_model(folder / "packed"),
        "packed": LlamaForCausalLM.from_pretrained(folder / "packed"),
        "config": LlamaForCausalLM.from_pretrained(folder / "dense", quantization_config=config),
        "both": LlamaForCausalLM.from_pretrained(folder / "packed", quantization_config=WeightOnlyConfig(fuse=True)),
        "quantize_model": wo.nn.quantize_model(llama(bias=True), group_size=32, fuse=True),
    }
    for name, model in models.items():
        assert fused_names(model) == EXPECTED, name
        assert torch.equal(logits(model), logits(expected)), name
        model.save_pretrained(folder / f"again_{name}")
        again = load_model(folder / f"again_{name}", fuse=False)
        assert fused_names(again) == set(), name
        for key, tensor in expected.state_dict().items():
            assert torch.equal(again.state_dict()[key], tensor), (name, key)
        written = (folder / f"again_{name}" / "config.json").read_text()
        assert "fuse" not in written.replace("fusion_config", ""), name
    for beside in ("dense", "packed"):
        single = WeightOnlyConfig(group_size=32, fuse=False)
        model = LlamaForCausalLM.from_pretrained(folder / beside, quantization_config=single)
        assert fused_names(model) == set()
        save_file(model.state_dict(), folder / "state.safetensors")
    assert fused_names(wo.nn.quantize_model(llama(bias=True), group_size=32)) == fused_names(expected) == set()


def test_a_fused_model_becomes_dense_and_generates(folder: Path) -> None:
    model, expected = (load_model(folder / "packed", fuse=fuse) for fuse in (True, False))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(TOKENS, **options), expected.generate(TOKENS, **options))
    dense = model.dequantize()
    assert torch.equal(logits(dense), logits(expected.dequantize()))
    assert not any(key == "q_proj, k_proj, v_proj" for m in dense.modules() for key in m._forward_hooks)


def test_lora_on_one_of_the_layers_trains_merges_and_unmerges(folder: Path) -> None:
    models = []
    for fuse in (False, True):
        model = load_model(folder / "packed", fuse=fuse)
        config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        models.append(get_peft_model(model, config).train())
    results = []
    for adapted in models:
        adapted(TOKENS, labels=TOKENS).loss.backward()
        grads = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
        assert len(grads) == 8 and all(grad is not None for grad in grads.values())
        results.append((logits(adapted), grads))
    (expected, expected_grads), (found, grads) = results
    assert torch.equal(found, expected)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-3, atol=1e-5)
    for adapted in models:
        with pytest.warns(UserWarning, match="merged"):
            adapted.merge_adapter()
    merged, found = (logits(adapted) for adapted in models)
    assert torch.equal(found, merged) and not torch.equal(merged, expected)
    for adapted in models:
        adapted.unmerge_adapter()
    assert torch.equal(logits(models[1]), expected)


def test_fusing_after_the_adapters_fuses_the_base_layers() -> None:
    model = wo.nn.quantize_model(llama(), group_size=32)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    expected = logits(adapted)
    assert len(wo.nn.fuse_model(adapted)) == 4
    assert torch.equal(logits(adapted), expected)


def test_gradients_flow_through_checkpointing(folder: Path) -> None:
    losses = []
    for fuse in (False, True):
        model = load_model(folder / "packed", fuse=fuse).train()
        model.gradient_checkpointing_enable()
        x = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
        model(inputs_embeds=x, labels=TOKENS).loss.backward()
        losses.append(x.grad)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-7)


def test_a_compiled_model_is_one_graph(folder: Path) -> None:
    model = load_model(folder / "packed", fuse=True)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(TOKENS).logits, logits(model))
    (graph,) = graphs
    products = [n for n in graph.graph.nodes if n.op == "call_function" and "weightonly" in str(n.target)]
    assert len(products) == 2 * 4  # q k v, o, gate up, down
    torch.compiler.reset()


def test_wrong_options_are_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"^fuse: expected True or False, got "):
        load_model(folder / "packed", fuse="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^fuse: expected True or False, got "):
        WeightOnlyConfig(fuse=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^format: expected one of "):
        WeightOnlyConfig(quantize_head="int5")
    with pytest.raises(ValueError, match=r"^format: expected one of "):
        load_model(folder / "packed", quantize_head="int5")


# --- output embeddings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_way_packs_the_same_head(tied: bool, format: str, tmp_path: Path) -> None:
    dense = llama(tied)
    dense.save_pretrained(tmp_path / "dense")
    without = logits(wo.nn.quantize_model(copy.deepcopy(dense), group_size=32))
    model: Any = wo.nn.quantize_model(copy.deepcopy(dense), group_size=32, quantize_head=format)
    head, embedding = model.lm_head, model.get_input_embeddings()
    assert head.format == format and torch.equal(embedding.weight, dense.get_input_embeddings().weight)
    expected = logits(model)
    error = (expected.log_softmax(-1) - without.log_softmax(-1)).abs().max()
    assert 0 < error < {"int8": 0.01, "fp8": 0.05}[format]
    model.save_pretrained(tmp_path / "saved")
    config = WeightOnlyConfig(group_size=32, quantize_head=format)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    loaded.save_pretrained(tmp_path / "loaded")
    line = f"quantize {tmp_path / 'dense'} {tmp_path / 'command'} --group-size 32 --head {format}"
    main(line.split())
    assert torch.equal(logits(loaded), expected)
    for name in ("saved", "loaded", "command"):
        again = load_model(tmp_path / name)
        assert again.config.tie_word_embeddings is False, name
        assert torch.equal(logits(again), expected), name
        assert torch.equal(again.get_input_embeddings().weight, embedding.weight), name
        for key, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], tensor), (name, key)


def test_a_folder_with_a_dense_head_is_loaded_with_a_packed_one(folder: Path) -> None:
    expected = wo.nn.quantize_model(llama(bias=True), group_size=32, quantize_head="int8")
    assert torch.equal(logits(load_model(folder / "packed", quantize_head="int8")), logits(expected))
    options = WeightOnlyConfig(quantize_head="int8")
    again = LlamaForCausalLM.from_pretrained(folder / "packed", quantization_config=options)
    assert torch.equal(logits(again), logits(expected))
    again.save_pretrained(folder / "head")
    with pytest.raises(ValueError, match=r"^quantize_head: expected dense output embeddings, got lm_head in int8"):
        load_model(folder / "head", quantize_head="int8")


def test_heads_that_cannot_be_packed_are_refused_before_any_layer_is() -> None:
    switch = tiny_model(
        next(a for a in architectures() if a.class_name == "SwitchTransformersForConditionalGeneration")
    )
    bert = tiny_model(next(a for a in architectures() if a.class_name == "BertLMHeadModel"))
    cases = {
        r"computes the same with a head of its own, got SwitchTransformers": switch,
        r"share a weight alone, got .*bias": bert,
        r"output embeddings, got a Linear": torch.nn.Linear(64, 64),
        r"output embeddings, got a LlamaModel": llama().model,
    }
    for message, model in cases.items():
        with pytest.raises(ValueError, match=rf"^quantize_head: expected .*{message}"):
            wo.nn.quantize_model(model, group_size=32, quantize_head="int8")
        assert not any(isinstance(module, wo.nn.Linear) for module in model.modules())


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BartForCausalLM", "T5ForConditionalGeneration", "BertModel"])
def test_tiny_models_of_the_page_are_right_when_fused(name: str, tmp_path: Path) -> None:
    result = try_one(next(a for a in architectures() if a.class_name == name), tmp_path)
    assert result.fused and "fuse" not in result.failed and not any("other bits" in note for note in result.notes)


@pytest.mark.gpu
def test_generate_with_kernels_that_start_early(cuda_device: torch.device) -> None:
    """The tokens that torch.compile's own choice of options gives."""
    dense = llama().bfloat16().to(cuda_device)
    model: Any = wo.nn.quantize_model(dense, group_size=64, fuse=True, quantize_head="int8")
    tokens = torch.arange(24, device=cuda_device).view(2, 12)

    def written(config: CompileConfig) -> torch.Tensor:
        torch.compiler.reset()
        found: torch.Tensor = model.generate(
            tokens, max_new_tokens=20, do_sample=False, cache_implementation="static", compile_config=config
        )
        return found

    options: Any = {"mode": None, "options": wo.compile_options(cudagraphs=True)}
    assert torch.equal(written(CompileConfig(**options)), written(CompileConfig()))
