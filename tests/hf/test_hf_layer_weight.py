"""Models of transformers whose code looks at `weight` of their linear layers, and layers that they keep in fp32."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf_models import SIZES, VOCABULARY, gpt2, logits, packed_layers, quantized, saved, seeded
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import weightonly as wo
from tools.tiny_models import architectures, tiny_model
from weightonly.hf import WeightOnlyConfig, load_model

INPUTS = {"input_ids": torch.arange(8).view(1, 8) + 4, "decoder_input_ids": torch.arange(4).view(1, 4) + 4}


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=64, d_ff=128, d_kv=16, num_layers=1, num_heads=4)
    )


def mamba(**options: Any) -> PreTrainedModel:
    return MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8, **options)
    )


def dense_of(model: Any) -> PreTrainedModel:
    """The dense model with the numbers of a packed one."""
    dense: PreTrainedModel = copy.deepcopy(model).dequantize()
    return dense


@torch.no_grad()
def run_t5(model: PreTrainedModel) -> torch.Tensor:
    return model(**INPUTS).logits


def test_wo_of_t5_is_left_on_every_way_and_packed_where_only_names_it(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dense", t5)
    model = wo.nn.quantize_model(seeded(t5), group_size=32)
    read = T5ForConditionalGeneration.from_pretrained(folder, quantization_config=WeightOnlyConfig(group_size=32))
    assert packed_layers(model).keys() == packed_layers(read).keys() and torch.equal(run_t5(model), run_t5(read))
    summary: Any = model.weightonly_summary
    left = {name: layer.left for layer in summary.left for name in layer.names}
    assert left["decoder.block.0.layer.2.DenseReluDense.wo"] == "T5ForConditionalGeneration keeps it in fp32"
    only = wo.nn.quantize_model(seeded(t5), group_size=32, only=["*.wo"])
    assert {name.rpartition(".")[2] for name in packed_layers(only)} == {"wo"}


@pytest.mark.parametrize(("arch", "dtype"), [("cpu", torch.float32), (90, torch.float16)])
@pytest.mark.parametrize("read", [load_model, T5ForConditionalGeneration.from_pretrained], ids=["load", "from"])
def test_a_folder_with_packed_wo_runs_in_fp16(tmp_path: Path, arch: Any, dtype: torch.dtype, read: Any) -> None:
    """In fp32, as T5 keeps it, by the layout of CPUs; in fp16 by those of GPUs, which have no kernels for fp32."""
    model = seeded(t5).half()
    wo.nn.quantize_model(model, group_size=32, only=["*.wo", "*.q"], arch=arch)
    model.save_pretrained(tmp_path)
    again = read(tmp_path, dtype=torch.float16).eval()
    block = again.encoder.block[0].layer
    assert (block[1].DenseReluDense.wo.weight.dtype, block[0].SelfAttention.q.weight.dtype) == (dtype, torch.float16)
    torch.testing.assert_close(run_t5(again), run_t5(dense_of(again)), rtol=0.02, atol=0.02)


def test_adapters_of_peft_show_the_weight_of_their_layer() -> None:
    """PEFT would show qweight, whose uint8 T5 casts x to."""
    peft = pytest.importorskip("peft")
    model = wo.nn.quantize_model(seeded(t5), group_size=32, only=["*.wo", "*.v"])
    expected = run_t5(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["wo", "v"]))
    layer = adapted.base_model.model.encoder.block[0].layer[1].DenseReluDense.wo
    assert layer.weight is layer.get_base_layer().weight and layer.lora_A["default"].weight.dtype == torch.float32
    assert torch.equal(run_t5(adapted), expected)


@pytest.mark.parametrize("rescale", [False, True])
def test_mamba_loads_and_what_it_loads_is_not_filled(tmp_path: Path, rescale: bool) -> None:
    """Its _init_weights divides out_proj by a number, which transformers stops for no tensor."""
    folder = saved(tmp_path, lambda: mamba(rescale_prenorm_residual=rescale))
    expected = wo.nn.quantize_model(seeded(lambda: mamba(rescale_prenorm_residual=rescale)), group_size=64)
    model = quantized(folder)
    assert torch.equal(logits(model), logits(expected))
    torch.testing.assert_close(logits(model), logits(dense_of(model)), rtol=1e-4, atol=1e-4)


def test_rwkv_divides_weights_by_a_number_before_it_runs(tmp_path: Path) -> None:
    config = RwkvConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, rescale_every=1)
    dense = saved(tmp_path / "dense", lambda: RwkvForCausalLM(config))
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=WeightOnlyConfig(group_size=64))
    reference = dense_of(model)  # not divided yet
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(dense_of(model).train()), logits(reference.train()), rtol=1e-4, atol=1e-4)


def test_bloom_in_slow_mode_multiplies_by_parts_of_weights() -> None:
    config = BloomConfig(**SIZES | {"hidden_size": 64, "slow_but_exact": True, "pretraining_tp": 2})
    model = wo.nn.quantize_model(seeded(lambda: BloomForCausalLM(config)), group_size=32)
    torch.testing.assert_close(logits(model), logits(dense_of(model)), rtol=1e-5, atol=1e-5)


def test_the_weight_in_the_place_of_a_conv1d_is_its_transpose(tmp_path: Path) -> None:
    dense = saved(tmp_path / "dense", gpt2)
    model = quantized(dense)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    for found in (model, again, wo.nn.quantize_model(seeded(gpt2), group_size=64), copy.deepcopy(model)):
        layer: Any = found.get_submodule("transformer.h.0.attn.c_attn")
        assert layer.weight.shape == (128, 384) and torch.equal(layer.weight + 0, layer.dequantize())


def test_tied_weights_are_not_given_to_a_packed_layer() -> None:
    model = seeded(gpt2)
    head: Any = wo.nn.Linear.from_linear(model.lm_head, group_size=32)
    with pytest.raises(RuntimeError, match="weight: expected a packed int4 weight to be read alone"):
        head.weight = model.transformer.wte.weight


def test_offloaded_layers_show_a_weight_on_meta(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dense", t5)
    config = WeightOnlyConfig(group_size=32, modules_to_not_convert=["encoder"])
    options = {"quantization_config": config, "offload_folder": tmp_path / "disk"}
    read = T5ForConditionalGeneration.from_pretrained
    device_map = dict.fromkeys(
        ("shared", "encoder", "decoder.embed_tokens", "decoder.final_layer_norm", "lm_head"), "cpu"
    )
    offloaded = read(folder, device_map=device_map | {"decoder.block": "disk"}, **options)
    layer = offloaded.decoder.block[0].layer[0].SelfAttention.q
    assert layer.weight.is_meta and layer.weight.shape == (64, 64)
    torch.testing.assert_close(run_t5(offloaded), run_t5(read(folder, **options)))
    assert layer.weight.is_meta


def test_a_head_that_the_files_lack_is_dense_and_new(tmp_path: Path) -> None:
    """It was packed from memory that nobody had written to."""
    config = RobertaConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 128})
    folder = saved(tmp_path / "dense", lambda: RobertaModel(config))
    make = RobertaForSequenceClassification.from_pretrained
    model = make(folder, quantization_config=WeightOnlyConfig(group_size=32))
    head = model.classifier
    assert type(head.dense) is type(head.out_proj) is torch.nn.Linear and head.dense.weight.requires_grad
    assert 0.01 < float(head.dense.weight.detach().std()) < 0.03 and not head.dense.bias.any()
    model.save_pretrained(tmp_path / "packed")
    again = make(tmp_path / "packed")
    assert torch.equal(again.classifier.dense.weight, head.dense.weight)
    assert packed_layers(again).keys() == packed_layers(model).keys() != set()


def test_layers_that_share_a_weight_are_left_and_load_where_only_names_them(tmp_path: Path) -> None:
    zamba = next(a for a in architectures() if a.class_name == "ZambaForCausalLM")
    model = tiny_model(zamba)
    shared = "model.layers.3.shared_transf.self_attn.q_proj"
    wo.nn.quantize_model(model, group_size=32)
    summary: Any = model.weightonly_summary
    left = {name: layer.left for layer in summary.left for name in layer.names}
    assert left[shared] == "its weight is that of 'model.layers.1.shared_transf.self_attn.q_proj', too"
    dense: Any = wo.nn.quantize_model(tiny_model(zamba), group_size=32, only=["*.shared_transf.*_proj", "*.in_proj"])
    dense.save_pretrained(tmp_path)
    # Fused, PyTorch's attention behind them rounds other bits.
    again = type(model).from_pretrained(tmp_path, quantization_config=WeightOnlyConfig(fuse=False)).eval()
    assert shared in packed_layers(again) and torch.equal(logits(again), logits(dense))
