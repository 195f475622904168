"""from_pretrained with WeightOnlyConfig: configs and folders that are refused, and folders without the import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf_models import TOKENS, VOCABULARY, llama, quantized, seeded
from transformers import AutoModelForCausalLM

from weightonly.hf import WeightOnlyConfig

# --- without the import -------------------------------------------------------------------------------------


def in_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("before", ["", "import weightonly; "])
@pytest.mark.parametrize("cls", ["AutoModelForCausalLM", "AutoModel", "LlamaForCausalLM"])
def test_transformers_refuses_the_folder_without_the_import(
    cls: str, before: str, folders: tuple[Path, Path, torch.Tensor]
) -> None:
    run = in_process(f"{before}import transformers; transformers.{cls}.from_pretrained({str(folders[1])!r})")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].endswith("`import weightonly.hf` before from_pretrained)")


def test_the_import_is_all_that_it_takes(folders: tuple[Path, Path, torch.Tensor]) -> None:
    run = in_process(
        "import weightonly.hf, transformers; "
        f"m = transformers.AutoModelForCausalLM.from_pretrained({str(folders[1])!r}); "
        "print(type(m.model.layers[0].mlp.up_proj).__module__)"
    )
    assert run.stdout == "weightonly.nn.linear\n", run.stderr


def test_import_weightonly_imports_no_framework() -> None:
    run = in_process(
        "import sys, weightonly; print([m for m in ('transformers', 'peft', 'accelerate') if m in sys.modules])"
    )
    assert run.stdout == "[]\n", run.stderr


# --- bad input ----------------------------------------------------------------------------------------------

WRONG_CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "format": ({"format": "int3"}, ValueError, "format: expected one of int4, int8, nf4, fp4.*got 'int3'"),
    "code4": ({"format": "code4"}, ValueError, "format: expected one of int4, int8, nf4, fp4.*got 'code4'"),
    "group size": ({"group_size": 48}, ValueError, "group_size must be .*got 48"),
    "group size 0": ({"group_size": 0}, ValueError, "group_size: .*got 0"),
    "group size text": ({"group_size": "64"}, TypeError, "group_size: expected an int, got str"),
    "zeros of codes": ({"format": "nf4", "symmetric": False}, ValueError, "symmetric: expected True for nf4"),
    "nf4 on sm70": ({"format": "nf4", "arch": "sm70"}, ValueError, "arch: expected .*sm90.* for nf4.*got 'sm70'"),
    "arch": ({"arch": "sm91"}, ValueError, "arch: .*'sm91'"),
    "skip": ({"modules_to_not_convert": "lm_head"}, TypeError, "modules_to_not_convert: expected a list.*'lm_head'"),
    "unknown": ({"bits": 4}, ValueError, "quantization_config: unknown entries 'bits'"),
    "method": ({"quant_method": "gptq"}, ValueError, "quant_method: expected 'weightonly', got 'gptq'"),
    "version": ({"format_version": 9}, ValueError, "format_version: expected 3, got 9"),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_wrong_configs(case: str) -> None:
    options, error, message = WRONG_CONFIGS[case]
    with pytest.raises(error, match=message):
        WeightOnlyConfig(**options)


def test_wrong_dtype(folders: tuple[Path, Path, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="dtype: expected one of float16, bfloat16, float32, got float64"):
        quantized(folders[0], torch.float64)


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_devices_without_kernels(device: str, folders: tuple[Path, Path, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=f"device_map: expected cpu and cuda devices.*got '{device}'"):
        AutoModelForCausalLM.from_pretrained(folders[1], device_map={"": device})


def test_a_model_without_layers_to_quantize(folders: tuple[Path, Path, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM: expected a linear layer to quantize, got none"):
        quantized(folders[0], modules_to_not_convert=["model"])


UP = "model.layers.1.mlp.up_proj"
WRONG_WEIGHTS: dict[str, tuple[torch.Tensor, str]] = {
    "not finite": (torch.full((192, 128), float("nan")), f"ValueError: {UP}: w: expected finite values"),
    "transposed": (torch.zeros(128, 192), rf"ValueError: {UP}\.weight: expected \[192, 128\], got \[128, 192\]"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_that_cannot_be_quantized_are_named(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight, message = WRONG_WEIGHTS[case]
    model = seeded(llama)
    model.get_submodule(UP).weight.data = weight
    model.save_pretrained(tmp_path)
    # transformers collects errors of conversions, logs them and raises one of its own.
    with pytest.raises(RuntimeError, match="conversion"):
        quantized(tmp_path)
    assert re.search(message, caplog.text)


EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"format_version": 7}, "format_version: expected 3, got 7"),
    "format": ({"format": "int8"}, r"qweight: expected uint8 \[\d+, \d+\], got uint8"),
    "layout": ({"layout": "tiled"}, r"qweight: expected uint8 \[\d+, \d+\], got uint8"),
    "no layout": ({"layout": None}, r"layout of model\.layers\.0\S+: expected one of row_major.*got None"),
    "group size": ({"group_size": 32}, r"qweight: expected uint8 \[\d+, \d+\], got uint8"),
    "zeros": ({"symmetric": False}, r"zeros: expected what the config says \(symmetric: False\), got none"),
    "perm": ({"act_order": True}, r"perm: expected what the config says \(act_order: True\), got none"),
    "a packed layer as dense": (
        {"modules_to_not_convert": ["model.layers.0.mlp.up_proj"]},
        r"modules_to_not_convert: expected layers that are not packed, got model\.layers\.0\.mlp\.up_proj",
    ),
    "type": ({"group_size": "64"}, r"group_size: expected int, got '64'"),
}


@pytest.mark.parametrize("case", EDITS)
def test_configs_that_contradict_the_tensors(case: str, folders: tuple[Path, Path, torch.Tensor]) -> None:
    edit, message = EDITS[case]
    path = folders[1] / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= edit
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folders[1])


def test_a_model_of_another_shape(folders: tuple[Path, Path, torch.Tensor]) -> None:
    path = folders[1] / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 192', '"intermediate_size": 256'))
    with pytest.raises(
        ValueError, match=r"down_proj: expected K x N = 256 x 128 as the model's config says, got 192 x 128"
    ):
        AutoModelForCausalLM.from_pretrained(folders[1])


def test_a_model_with_more_layers(folders: tuple[Path, Path, torch.Tensor]) -> None:
    path = folders[1] / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ValueError, match=r"expected model\.layers\.2\.self_attn\.q_proj\.qweight or .*got neither"):
        AutoModelForCausalLM.from_pretrained(folders[1])


def test_another_method_for_a_packed_folder(folders: tuple[Path, Path, torch.Tensor]) -> None:
    from transformers import BitsAndBytesConfig

    with pytest.raises(ValueError, match="quantized with WeightOnlyConfig but you are passing a BitsAndBytesConfig"):
        AutoModelForCausalLM.from_pretrained(
            folders[1], quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        )


def test_vocabulary_of_the_tests() -> None:
    assert int(TOKENS.max()) < VOCABULARY
