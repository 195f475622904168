"""from_pretrained(FOLDER, quantization_config=WeightOnlyConfig()) of folders that other quantizers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.formats.fp4_cases import options
from tests.formats_llama import CONFIG, LINEARS, plain_tensors
from tests.formats_llama import MODELS as QUANTIZED
from tests.formats_reference import write_checkpoint
from tests.hf_models import TOKENS, logits, packed_layers, same_state, write_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.quantizers import AutoHfQuantizer
from transformers.utils.quantization_config import AwqConfig

import weightonly as wo
from weightonly.hf import WeightOnlyConfig, load_model


@pytest.mark.parametrize("case", QUANTIZED)
def test_it_reads_what_load_model_reads(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    """The config of the call says for which GPU; what the layers are is in the folder."""
    folder = write_model(tmp_path / "model", case, generator)
    for arch in (None, "sm90"):
        config = WeightOnlyConfig(arch=arch)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
        expected = load_model(folder, torch.float32, arch=arch)
        assert same_state(model, expected)
        layouts = [{layer.layout for layer in packed_layers(each).values()} for each in (model, expected)]
        assert layouts[0] == layouts[1]
    tokens = TOKENS % model.config.vocab_size
    assert torch.equal(logits(model, tokens), logits(expected, tokens))
    model.save_pretrained(tmp_path / "saved")
    assert same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32))


def test_offload(tmp_path: Path, generator: torch.Generator) -> None:
    folder = write_model(tmp_path / "model", "gptq-4bit-v1-act_order", generator)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=WeightOnlyConfig(),
        device_map=places | {"model.layers": "disk"},
        offload_folder=tmp_path / "offload",
    )
    assert all(layer.qweight.is_meta for layer in packed_layers(model).values())
    tokens = TOKENS % model.config.vocab_size
    assert torch.equal(logits(model, tokens), logits(load_model(folder), tokens))


def test_a_method_that_is_not_read(tmp_path: Path, generator: torch.Generator) -> None:
    folder = write_model(tmp_path / "model", "awq", generator)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quant_method: expected one of awq, gptq, .*got 'aqlm'"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=WeightOnlyConfig())


def test_a_gpu_without_a_kernel(tmp_path: Path, generator: torch.Generator) -> None:
    folder = write_model(tmp_path / "model", "bitsandbytes-nf4", generator)
    with pytest.raises(ValueError, match=r"arch: .*nf4.*Leave arch away"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=WeightOnlyConfig(arch="sm70"))


def test_scales_that_the_dtype_does_not_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """2^-37: transformers logs the error, and raises one of its own."""
    tensors = plain_tensors(torch.Generator())
    for name, (k, n) in LINEARS.items():
        tensors[f"{name}.weight_packed"] = torch.zeros(n, k // 2, dtype=torch.uint8)
        tensors[f"{name}.weight_scale"] = torch.full((n, k // 32), 90, dtype=torch.uint8)
    folder = write_checkpoint(tmp_path / "model", tensors, CONFIG | {"quantization_config": options("mxfp4")})
    with pytest.raises(RuntimeError, match="conversion"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=WeightOnlyConfig(), dtype=torch.float16)
    assert "scales: expected powers of two in 2^-23 .. 2^13 for mxfp4 in torch.float16" in caplog.text
    packed = tmp_path / "packed"
    wo.formats.convert(folder, packed, arch="cpu", progress=False)
    with pytest.raises(ValueError, match=r"proj: scales: expected powers of two in 2\^-23 .. 2\^13 for mxfp4"):
        AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float16)
    AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16)


def test_without_our_config_the_method_of_the_folder_stays(tmp_path: Path, generator: torch.Generator) -> None:
    """The import changes nothing for others: transformers wants the quantizer's own library, or loads with it."""
    found = {"quant_method": "awq", "bits": 4, "group_size": 64}
    assert type(AutoHfQuantizer.merge_quantization_configs(found, None)) is AwqConfig
    other = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ValueError, match="quantized with AwqConfig but you are passing a BitsAndBytesConfig"):
        AutoHfQuantizer.merge_quantization_configs(found, other)
