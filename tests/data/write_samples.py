"""Writes the folders beside this file with the quantizers' own packages, on a CPU:

    pip install --no-deps --target PEERS hqq==0.2.8.post1 termcolor torchao==0.18.0
    PYTHONPATH=PEERS:. python tests/data/write_samples.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
from safetensors.torch import save_file
from tests.data import HERE, LOGITS, TOKENS
from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig

Dequantize = Callable[[torch.nn.Module], torch.Tensor]


def model(dtype: torch.dtype) -> LlamaForCausalLM:
    """K of down_proj is 96: groups of 64 run over the ends of its rows."""
    torch.manual_seed(46)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attention_bias=True,
            dtype=dtype,
        )
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
            parameter.copy_(parameter.to(dtype))
    return made.eval()


@torch.no_grad()
def logits(quantized: torch.nn.Module, kind: type, dequantize: Dequantize, dtype: torch.dtype) -> torch.Tensor:
    """Of the dense fp32 model with the weights of the modules of `kind` in `quantized`."""
    dense = model(dtype)
    for name, module in quantized.named_modules():
        if isinstance(module, kind) and name != "lm_head":
            dense.get_submodule(name).weight.copy_(dequantize(module))
    return dense(TOKENS).logits


def hqq(folder: Path, **settings: Any) -> torch.Tensor:
    """As `from_pretrained(.., quantization_config=HqqConfig(..))` and `save_pretrained` of transformers 4 do; those of
    5.24 do not quantize with HQQ."""
    made, config = model(torch.float16).half(), BaseQuantizeConfig(**settings)
    for name, layer in list(made.model.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            made.model.set_submodule(name, HQQLinear(layer, config, compute_dtype=torch.float16, device="cpu"))
    made.config.architectures = ["LlamaForCausalLM"]
    made.config.save_pretrained(folder)
    options = {"quant_config": config, "quant_method": "hqq", "skip_modules": ["lm_head"]}
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"quantization_config": options}, indent=2))
    save_file({name: tensor.contiguous() for name, tensor in made.state_dict().items()}, folder / "model.safetensors")

    def dequantize(layer: torch.nn.Module) -> torch.Tensor:
        floats = {key: layer.meta[key].float() for key in ("scale", "zero")}
        return Quantizer.dequantize(layer.W_q, layer.meta | floats | {"compute_dtype": torch.float32})

    return logits(made, HQQLinear, dequantize, torch.float16)


def main() -> None:
    found = {}
    for name, make in {
        "hqq_int4": lambda folder: hqq(folder, nbits=4, group_size=64, axis=1),
        "hqq_int8": lambda folder: hqq(folder, nbits=8, group_size=32, axis=1, view_as_float=True),
        "hqq_axis0": lambda folder: hqq(folder, nbits=4, group_size=64, axis=0),
    }.items():
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        found[name] = make(HERE / name)
    save_file(found, LOGITS)


if __name__ == "__main__":
    main()
