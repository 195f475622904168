"""A model of transformers' own class with random weights, made on meta and then layer by layer.

Each decoder layer is made dense on the device, quantized, and kept: one dense layer is in memory at a time. Embeddings
and output embeddings stay dense.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from weightonly.nn.summary import module_bytes

from ..kept import DoesNotFit
from ..shapes import LlamaSizes, MixtureModelSizes
from ..timing import wait
from .providers import ModelProvider

_STD = 0.02  # of random weights, as in Llama's own initialization
_MAX_POSITIONS = 8192
_ROPE_THETA = 500000.0  # of Llama 3


@dataclass(frozen=True)
class Built:
    """A model and what it cost.

    weight_bytes: what it holds, see `_held_bytes`. load_s: to quantize and pack its layers; without making the random
    weights, and nothing is read from a disk.
    """

    model: Any
    weight_bytes: int
    load_s: float


def share_keys(device: torch.device) -> None:
    """Lets attention of transformers read keys and values once for all heads that share them, in this process, unless
    the environment says otherwise. Compiled steps copy them for each head by default. Only on Hopper and later PyTorch
    has a kernel (cuDNN's) that takes a mask, too."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")


def transformers_config(sizes: LlamaSizes, layers: int) -> Any:
    """The config of a model of these sizes: of Llama, or of a mixture, every layer of which attends to all tokens."""
    from transformers import AutoConfig, LlamaConfig

    if isinstance(sizes, MixtureModelSizes):
        experts = "num_experts" if sizes.kind == "qwen3_moe" else "num_local_experts"
        return AutoConfig.for_model(
            sizes.kind,
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            moe_intermediate_size=sizes.intermediate,
            num_hidden_layers=layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            num_experts_per_tok=sizes.top_k,
            max_position_embeddings=_MAX_POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
            layer_types=["full_attention"] * layers,
            sliding_window=_MAX_POSITIONS if sizes.kind == "gpt_oss" else None,
            attn_implementation="eager" if sizes.kind == "gpt_oss" else "sdpa",  # attention sinks
            **{experts: sizes.experts},
        )

    return LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=_MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        attn_implementation="sdpa",
    )


def build(
    sizes: LlamaSizes,
    layers: int,
    provider: ModelProvider,
    dtype: torch.dtype,
    device: torch.device,
    *,
    cut: Callable[[torch.nn.Module], None] | None = None,
    progress: bool = False,
) -> Built:
    """A model of transformers in eval mode; `provider` has quantized its decoder layers.

    cut: called with each of them then; what it leaves of the layer is kept.

    The weights of a layer depend on its place alone: all providers quantize the same. Raises DoesNotFit, after the
    first layer, where all of them and the embeddings are larger than the free memory of the device. Raises what the
    provider raises.
    """
    from transformers import AutoModelForCausalLM

    config = transformers_config(sizes, layers)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    free_bytes = free_memory(device)
    begin_bytes = _allocated_bytes(device)
    load_s = 0.0
    for place, layer in enumerate(tqdm(model.model.layers, disable=not progress, unit="layer", leave=False)):
        fill(layer, device, seed=place)
        wait(device)
        start = time.perf_counter()
        provider.quantize(layer)
        if cut is not None:
            cut(layer)
        wait(device)
        load_s += time.perf_counter() - start
        if place == 0:
            rest_bytes = sum(module_bytes(part) for part in (model.model.embed_tokens, model.lm_head))
            _check_fits(_held_bytes(layer, begin_bytes, device), layers, rest_bytes, free_bytes)
    for place, part in enumerate((model.model.embed_tokens, model.model.norm, model.lm_head)):
        fill(part, device, seed=layers + place)
    provider.finish(model)
    return Built(model, _held_bytes(model, begin_bytes, device), load_s)


def fill(module: torch.nn.Module, device: torch.device, seed: int) -> None:
    """Random matrices and norms of 1, on the device, in the place of tensors on meta."""
    generator = torch.Generator(device).manual_seed(seed)
    module.to_empty(device=device)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1)
        else:
            parameter.data.normal_(std=_STD, generator=generator)


def _held_bytes(module: torch.nn.Module, begin_bytes: int, device: torch.device) -> int:
    """Bytes of a module: on a GPU what was allocated since `begin_bytes`, as the tensors of others do not tell their
    size (torchao's tell the size of the dense weight, bitsandbytes keeps scales outside of Parameters and buffers)."""
    return _allocated_bytes(device) - begin_bytes if device.type == "cuda" else module_bytes(module)


def _allocated_bytes(device: torch.device) -> int:
    """Of PyTorch's allocator; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def _check_fits(layer_bytes: int, layers: int, rest_bytes: int, free_bytes: int) -> None:
    needed = layers * layer_bytes + rest_bytes
    if needed > free_bytes:
        raise DoesNotFit(
            f"{layers} layers of {layer_bytes / 1e9:.2f} GB and embeddings of {rest_bytes / 1e9:.2f} GB are "
            f"{needed / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB are free"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
