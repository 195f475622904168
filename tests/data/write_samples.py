"""Writes the folders beside this file with the quantizers' own packages:

    pip install --no-deps --target PEERS hqq==0.2.8.post1 termcolor torchao==0.18.0 amd-quark==0.13
    PYTHONPATH=PEERS:. python tests/data/write_samples.py [NAME ...]

Quark also imports onnx and others, which it does not need here: any package of these names does, or a mock.

torchao_int4 needs mslk, whose wheels are for GPUs: its functions that quantize, in mslk/quantize/shuffle.py, run on a
CPU. tinygemm.safetensors is of an H100: PyTorch's `_convert_weight_to_int4pack` and `_weight_int4pack_mm` of the unit
matrix, called as tests/formats/test_torchao.py says.
"""

# mypy: ignore-errors
# (the packages that it calls are not installed)

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
from safetensors.torch import load_file, save_file
from tests.data import HERE, LOGITS, TOKENS
from torchao.core.config import AOBaseConfig
from torchao.quantization import (
    Int4Tensor,
    Int4TilePackedTo4dTensor,
    Int4WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
)
from torchao.quantization.quant_primitives import dequantize_affine
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


def torchao(folder: Path, config: AOBaseConfig, dense: Sequence[str] = ()) -> torch.Tensor:
    """By `from_pretrained` and `save_pretrained` of transformers. dense: names of modules that stay so."""
    with tempfile.TemporaryDirectory() as original:
        model(torch.bfloat16).to(torch.bfloat16).save_pretrained(original)
        options = TorchAoConfig(config, modules_to_not_convert=["lm_head", *dense])
        made = LlamaForCausalLM.from_pretrained(original, quantization_config=options, dtype=torch.bfloat16)
    made.save_pretrained(folder)
    return logits(made, torch.nn.Linear, dequantize_torchao, torch.bfloat16)


def quark(folder: Path, spec: str, pack_method: str = "reorder", **settings: Any) -> torch.Tensor:
    """By its ModelQuantizer and `export_safetensors`. spec: the class that describes weights."""
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config

    def quantized_tensor(name: str, **settings: Any) -> Any:
        return getattr(config, name)(**settings).to_quantization_spec()

    static = {"observer_method": "min_max", "is_dynamic": False}
    x = quantized_tensor("FP8E4M3PerTensorSpec", **static) if spec == "FP8E4M3PerTensorSpec" else None
    settings = (static if x is not None else {"is_dynamic": False}) | settings
    layer = config.QLayerConfig(weight=quantized_tensor(spec, **settings), input_tensors=x)
    cache = {"*k_proj": layer, "*v_proj": layer} if x is not None else {}
    for name in cache:
        cache[name] = config.QLayerConfig(weight=layer.weight, input_tensors=x, output_tensors=x)
    options = config.QConfig(global_quant_config=layer, exclude=["lm_head"], layer_quant_config=cache)
    quantizer = ModelQuantizer(options)
    made = quantizer.freeze(quantizer.quantize_model(model(torch.bfloat16).to(torch.bfloat16), [TOKENS]))
    with torch.no_grad():
        export_safetensors(made, str(folder), custom_mode="quark", pack_method=pack_method)
    kind = type(made.model.layers[0].mlp.up_proj)
    return logits(made, kind, lambda layer: layer._get_qweight(layer.weight).float(), torch.bfloat16)


def dequantize_torchao(layer: torch.nn.Module) -> torch.Tensor:
    """In fp32. The int4 classes have no such function, and their products need a GPU: by the formulas of their kernels.
    tests/formats/test_torchao.py compares those of tiles with what an H100 made."""
    weight = layer.weight.data
    if type(weight) is torch.Tensor:
        return weight
    if isinstance(weight, Int4Tensor):
        q = torch.stack((weight.qdata << 4 >> 4, weight.qdata >> 4), dim=-1).flatten(1)
        scale, shift = weight.scale, weight.zero_point
    elif isinstance(weight, Int4TilePackedTo4dTensor):
        q = UNPACKED[weight.qdata.data_ptr()] - 8
        scale, shift = weight.scale_and_zero.unbind(-1)
    else:
        return dequantize_affine(
            weight.qdata, weight.block_size, weight.scale.float(), weight.zero_point, torch.int8, -128, 127
        )
    scale, shift = (x.float().repeat_interleave(weight.block_size[1], 0).t() for x in (scale, shift))
    return (q * scale + shift)[: weight.shape[0], : weight.shape[1]]


UNPACKED: dict[int, torch.Tensor] = {}
"""Address of the words -> the numbers in them."""


def tiles(packed: torch.Tensor, inner_k_tiles: int) -> torch.Tensor:
    """`aten._convert_weight_to_int4pack`, for GPUs alone: uint8 [N, K / 2] -> int32 [N / 8, K / 128, 32, 4]."""
    assert inner_k_tiles == 8
    u = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1).to(torch.int32)
    n, k = u.shape
    parts = u.view(n // 8, 8, k // 128, 4, 2, 2, 4, 2)  # tile, n, tile, 32 rows, 16 rows, 8 rows, 2 rows, odd
    parts = parts.permute(0, 2, 1, 6, 3, 7, 4, 5).reshape(n // 8, k // 128, 32, 4, 8)
    words = sum(parts[..., i] << (4 * i) for i in range(8))
    UNPACKED[words.data_ptr()] = u
    return words


ROUNDED = {"scale_type": "float", "round_method": "half_even"}

SAMPLES: dict[str, Callable[[Path], torch.Tensor]] = {
    "hqq_int4": lambda folder: hqq(folder, nbits=4, group_size=64, axis=1),
    "hqq_int8": lambda folder: hqq(folder, nbits=8, group_size=32, axis=1, view_as_float=True),
    "torchao_int4": lambda folder: torchao(folder, Int4WeightOnlyConfig(group_size=32)),
    "torchao_int8": lambda folder: torchao(folder, Int8WeightOnlyConfig()),
    "torchao_intx4": lambda folder: torchao(
        folder,
        IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC),
    ),
    "torchao_tiles": lambda folder: torchao(
        folder,
        Int4WeightOnlyConfig(group_size=32, int4_packing_format="tile_packed_to_4d"),
        (".*(o|gate|up)_proj", "model.layers.1"),  # K is padded to 1024
    ),
    "quark_fp8": lambda folder: quark(folder, "FP8E4M3PerTensorSpec"),
    "quark_mxfp4": lambda folder: quark(folder, "OCP_MXFP4Spec", ch_axis=-1),
    "quark_uint4": lambda folder: quark(folder, "Uint4PerGroupSpec", ch_axis=-1, group_size=32),
    "quark_int4": lambda folder: quark(folder, "Int4PerChannelSpec", "order", ch_axis=0, **ROUNDED, symmetric=True),
    "quark_uint8": lambda folder: quark(folder, "Uint8PerChannelSpec", ch_axis=0, **ROUNDED, symmetric=False),
}


def main(names: Sequence[str]) -> None:
    torch.cuda.get_device_capability = lambda: (8, 0)
    torch.library.impl("aten::_convert_weight_to_int4pack", "CPU", tiles)
    found = load_file(LOGITS) if LOGITS.exists() else {}
    for name in names:
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        found[name] = SAMPLES[name](HERE / name)
    save_file(found, LOGITS)


if __name__ == "__main__":
    main(sys.argv[1:] or list(SAMPLES))
