"""quantize_folder writes what quantizing in memory and save_pretrained write, a few tensors at a time."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import ROOT
from tests.hf_models import SIZES, VOCABULARY, gpt2, llama, logits, opt, phi3, quantized, qwen2, saved, seeded
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import weightonly as wo
from weightonly.hf import WeightOnlyConfig, load_model
from weightonly.hf import quantize_folder as module
from weightonly.hf.quantize_folder import quantize_folder


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def bert() -> PreTrainedModel:
    """Biases, and a tied head whose bias is tied, too."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "Llama": llama,
    "Llama, tied": lambda: llama(tie_word_embeddings=True),
    "Qwen2": qwen2,
    "Qwen3": qwen3,
    "Phi-3": phi3,
    "OPT": opt,
    "GPT-2": gpt2,
    "BERT": bert,
    "Mixtral": mixtral,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "int4": {},
    "int8 with zero points": {"format": "int8", "symmetric": False},
    "nf4 and int8": {"format": "nf4", "layers": {"*.0.*": {"format": "int8", "group_size": 64}}},
    "mixed": {
        "layers": {"down_proj": {"format": "int8"}, "q_proj": {"symmetric": False}, "*.1.*.v_proj": {"group_size": 32}}
    },
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_folder(folder: Path, other: Path) -> None:
    found, expected = tensors_of(folder), tensors_of(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    for name in ("config.json", "generation_config.json"):
        assert (folder / name).exists() == (other / name).exists()
        if (other / name).exists():
            assert json.loads((folder / name).read_text()) == json.loads((other / name).read_text())


def in_memory(folder: Path, out: Path, dtype: Any = "auto", **options: Any) -> Path:
    """What `from_pretrained` and `save_pretrained` make of a folder."""
    cls = type(load_model(folder))
    cls.from_pretrained(folder, quantization_config=WeightOnlyConfig(**options), dtype=dtype).save_pretrained(out)
    return out


@pytest.mark.parametrize("case", MODELS)
def test_the_folder_is_that_of_save_pretrained(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = saved(tmp_path / "dense", MODELS[case], torch.bfloat16)
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    quantize_folder(dense, tmp_path / "out", WeightOnlyConfig(group_size=64), shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_same_folder(tmp_path / "out", in_memory(dense, tmp_path / "expected", group_size=64))
    assert len(list(wo.load_checkpoint(tmp_path / "out", verify=True))) > 0
    model, other = load_model(tmp_path / "out"), load_model(tmp_path / "expected")
    assert torch.equal(logits(model), logits(other))


@pytest.mark.parametrize("case", OPTIONS)
def test_formats_of_single_layers(case: str, tmp_path: Path) -> None:
    make = mixtral if case == "mixed" else llama
    dense = saved(tmp_path / "dense", make)
    options = {"group_size": 64} | OPTIONS[case]
    quantize_folder(dense, tmp_path / "out", WeightOnlyConfig(**options))
    assert_same_folder(tmp_path / "out", in_memory(dense, tmp_path / "expected", **options))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(quantized(dense, **options)))
    assert torch.equal(logits(load_model(tmp_path / "out")), logits(again))
    shapes = wo.formats.open_checkpoint(tmp_path / "out").shapes
    if case == "mixed":
        shapes = {name.replace("block_sparse_moe", "mlp"): shape for name, shape in shapes.items()}
        found = {name: (s.format, s.group_size, s.symmetric) for name, s in shapes.items()}
        assert found["model.layers.1.mlp.experts.3.down_proj"] == ("int8", 64, True)
        assert found["model.layers.1.mlp.experts.3.gate_up_proj"] == ("int4", 64, True)
        assert found["model.layers.1.self_attn.q_proj"] == ("int4", 64, False)
        assert found["model.layers.1.self_attn.v_proj"] == ("int4", 32, True)


def test_dtype_and_shards(tmp_path: Path) -> None:
    """A dense model in several files, and in another dtype."""
    seeded(llama).save_pretrained(tmp_path / "dense", max_shard_size="200KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 2
    quantize_folder(tmp_path / "dense", tmp_path / "out", WeightOnlyConfig(group_size=32), dtype="float16")
    expected = in_memory(tmp_path / "dense", tmp_path / "expected", torch.float16, group_size=32)
    assert_same_folder(tmp_path / "out", expected)


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("head", ["the head alone", "both", "another head"])
def test_tied_weights_of_the_files(head: str, tmp_path: Path) -> None:
    dense = saved(tmp_path / "dense", MODELS["Llama, tied"])

    def change(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding * 2 if head == "another head" else embedding.clone()
        if head == "the head alone":
            del tensors["model.embed_tokens.weight"]

    rewritten(dense, change)
    quantize_folder(dense, tmp_path / "out", WeightOnlyConfig(group_size=64))
    assert ("lm_head.weight" in tensors_of(tmp_path / "out")) == (head == "another head")
    assert_same_folder(tmp_path / "out", in_memory(dense, tmp_path / "expected", group_size=64))


# --- which layers ------------------------------------------------------------------------------------------------


def packed_names(folder: Path) -> set[str]:
    return {*wo.formats.open_checkpoint(folder).layers}


def test_skip_and_only(tmp_path: Path) -> None:
    dense = saved(tmp_path / "dense", llama)
    config = WeightOnlyConfig(group_size=64)
    summary = quantize_folder(dense, tmp_path / "a", config, skip=["mlp.*", "model.layers.0.self_attn.q_proj"])
    left = {layer.names[0]: layer.left for layer in summary.left}
    assert left["model.layers.1.mlp.up_proj"] == left["model.layers.0.self_attn.q_proj"] == "skip"
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    attention = {f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in projections}
    assert packed_names(tmp_path / "a") == attention - {"model.layers.0.self_attn.q_proj"}
    quantize_folder(dense, tmp_path / "b", config, only=["model.layers.0.*", "down_proj"], skip=["self_attn.*"])
    expected = {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert packed_names(tmp_path / "b") == expected | {"model.layers.1.mlp.down_proj"}


def test_a_product_of_experts_stands_for_them(tmp_path: Path) -> None:
    dense = saved(tmp_path / "dense", mixtral)
    quantize_folder(dense, tmp_path / "a", WeightOnlyConfig(group_size=64), skip=["experts.down_proj", "0.*"])
    assert packed_names(tmp_path / "a") == {f"model.layers.1.self_attn.{n}_proj" for n in "qkvo"}
    quantize_folder(dense, tmp_path / "b", WeightOnlyConfig(group_size=64), only=["*.1.mlp.experts.down_proj"])
    assert {name.split(".experts.")[0] for name in packed_names(tmp_path / "b")} == {"model.layers.1.block_sparse_moe"}


def test_errors_of_kinds_of_layers(tmp_path: Path) -> None:
    """By the definition, from what is read back."""
    dense = saved(tmp_path / "dense", mixtral)
    options: dict[str, Any] = {"group_size": 64, "layers": {"k_proj": {"format": "int8"}}}
    summary = quantize_folder(dense, tmp_path / "out", WeightOnlyConfig(**options))
    original = dict(seeded(mixtral).named_parameters())
    found = dict(quantized(dense, **options).dequantize().named_parameters())
    for kind in summary.kinds:
        names = [name for name in original if name.removesuffix(".weight").endswith(f".{kind.name}")]
        assert len(names) == kind.layers == 2
        lost = sum(float((found[name] - original[name]).detach().square().sum()) for name in names)
        whole = sum(float(original[name].detach().square().sum()) for name in names)
        assert kind.error == pytest.approx((lost / whole) ** 0.5, rel=1e-3)
    by_name = {kind.name: kind for kind in summary.kinds}
    assert {"experts.gate_up_proj", "experts.down_proj", "q_proj"} <= by_name.keys()
    assert by_name["k_proj"].format == "int8" and by_name["k_proj"].error < 0.02 < by_name["q_proj"].error
    text = str(summary)
    assert "experts.down_proj" in text and f"error {100 * by_name['k_proj'].error:.2f}%" in text and "lm_head" in text
    size = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    assert (summary.bytes_before, summary.bytes_after) == (sum(t.nbytes for t in tensors_of(dense).values()), size)


# --- memory ------------------------------------------------------------------------------------------------------

MEMORY = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from weightonly.hf import WeightOnlyConfig
from weightonly.hf.quantize_folder import quantize_folder
sys.path.insert(0, {root!r})

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

folder, layers = Path(sys.argv[1]), int(sys.argv[2])
quantize_folder(folder / "small", folder / f"warm{{layers}}", WeightOnlyConfig(group_size=64), progress=False)
before = peak()
quantize_folder(folder / f"dense{{layers}}", folder / f"out{{layers}}", WeightOnlyConfig(), progress=False)
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_that_of_a_layer_however_many_there_are(tmp_path: Path) -> None:
    saved(tmp_path / "small", llama)
    peaks = []
    for layers in (2, 12):
        sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers}
        saved(tmp_path / f"dense{layers}", functools.partial(llama, **sizes), torch.bfloat16)
        words = [sys.executable, "-c", MEMORY.format(root=str(ROOT)), str(tmp_path), str(layers)]
        run = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
        assert run.returncode == 0, run.stderr
        peaks.append(float(run.stdout))
    size = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "dense12").values()) / 2**20
    assert peaks[1] < peaks[0] + size / 4, (peaks, size)
