"""Folders of tiny models, of whose layers any are quantized, under any names, by any packer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tests.hf_version  # noqa: F401
import torch
from tests import formats_reference as ref
from tests.formats_llama import GROUP, Packer, gptq

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
INT4 = gptq(4, 1, symmetric=False, act_order=False)

Tensors = dict[str, torch.Tensor]


def apart(model: torch.nn.Module) -> Tensors:
    """The state dict of a model, views, in which each expert has layers of its own: gate_proj, up_proj, down_proj."""
    tensors: Tensors = {}
    for name, tensor in model.state_dict().items():
        owner, _, product = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        if not hasattr(module, "_apply_gate") and not hasattr(module, "gate_up_proj"):
            tensors[name] = tensor
            continue
        inside = "bias" if product.endswith("_bias") else "weight"
        # [E, N, K] or [E, N]
        stack = tensor.transpose(1, 2) if inside == "weight" and getattr(module, "is_transposed", True) else tensor
        layers = {product.removesuffix("_bias"): stack}
        if "gate_up_proj" in layers:
            half = stack.shape[1] // 2
            turns = not getattr(module, "is_concatenated", True)
            gate, up = (stack[:, 0::2], stack[:, 1::2]) if turns else (stack[:, :half], stack[:, half:])
            layers = {"gate_proj": gate, "up_proj": up}
        for layer, of_all in layers.items():
            tensors |= {f"{owner}.{expert}.{layer}.{inside}": value for expert, value in enumerate(of_all)}
    return tensors


def write(
    folder: Path,
    model: Any,
    quantized: Callable[[str], bool],
    g: torch.Generator,
    rename: Callable[[str], str] = lambda name: name,
    packer: Callable[[str], Packer] = lambda name: INT4,
    options: Mapping[str, Any] = GPTQ,
    edit: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of a quantizer. `model` gets the numbers of its layers.

    quantized: of a layer, named as in the model, where each expert has layers of its own. rename: a layer or tensor
    there -> its name in the files. packer: of a layer. edit: of the tensors. config: entries of config.json.
    """
    found: Tensors = {}
    for name, tensor in apart(model).items():
        layer, _, inside = name.rpartition(".")
        if inside != "weight" or tensor.dim() != 2 or not quantized(layer):
            found[rename(name)] = tensor
            continue
        packed, w = packer(layer)(tensor.shape[1], tensor.shape[0], g)
        tensor.copy_(w.t())
        found |= {rename(f"{layer}.{part}"): stored for part, stored in packed.items()}
    options = {"quantization_config": dict(options), "architectures": [type(model).__name__], **(config or {})}
    return ref.write_checkpoint(folder, edit(found), json.loads(model.config.to_json_string()) | options, shards)
