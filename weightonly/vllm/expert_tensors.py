"""How a checkpoint stores the projections of its experts, as vLLM's own configs say, and how they become our rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override, override_config

from ..formats.awq import unpack_awq
from ..formats.words import to_signed, unpack_words
from .blocks import expect_bytes
from .rows import pack_rows

Read = Callable[[torch.Tensor], torch.Tensor]
"""A tensor of the file, of one projection -> rows uint8 [N, K * bits / 8], or scales or zeros [N, groups]. N and K may
come with the padding of the last word."""


@dataclass(frozen=True)
class ExpertTensors:
    """The tensors of one projection (gate, up or down) of one expert.

    format: "int4", "int8", "nf4" or "fp4".
    first_group, down_group: rows that share a scale, in gate and up, and in down; -1: all of K.
    qweight, scales, zeros: the names of the tensors; zeros: None where there are none.
    read: name -> how it is read.
    unread: names of tensors that may be there and say nothing more.
    """

    format: str
    first_group: int
    down_group: int
    qweight: str
    scales: str
    zeros: str | None
    read: Mapping[str, Read]
    unread: tuple[str, ...] = ()


def of_rows(format: str, first_group: int, down_group: int, has_zeros: bool) -> ExpertTensors:
    """As our own loader brings them (see folders.py)."""
    names = ("scales", "zeros") if has_zeros else ("scales",)
    read = dict[str, Read]({"qweight": expect_bytes}) | {name: lambda t: t for name in names}
    return ExpertTensors(format, first_group, down_group, "qweight", "scales", "zeros" if has_zeros else None, read)


def of_config(config: QuantizationConfig, layer: Any, prefix: str) -> ExpertTensors | str | None:
    """As a config of vLLM says for experts; None: they are not quantized; a str: why they are not for us."""
    if isinstance(config, AutoGPTQConfig):
        return _gptq(config, prefix)
    if isinstance(config, AutoAWQConfig):
        return _awq(config, prefix)
    assert isinstance(config, CompressedTensorsConfig)
    return _compressed_tensors(config, layer, prefix)


def _gptq(config: AutoGPTQConfig, prefix: str) -> ExpertTensors | str | None:
    if get_dynamic_override(config, prefix) is False:
        return None
    config = copy.deepcopy(config)
    override_config(config, prefix)
    if config.desc_act and config.group_size != -1:
        return "act-order"
    if not config.is_sym:
        return "GPTQ without symmetry"
    bits = config.weight_bits
    read: dict[str, Read] = {
        "qweight": lambda t: pack_rows(unpack_words(t, bits, 0).t(), f"int{bits}"),
        "scales": lambda t: t.t(),
    }
    group = config.group_size
    return ExpertTensors(f"int{bits}", group, group, "qweight", "scales", None, read, ("qzeros", "g_idx"))


def _awq(config: AutoAWQConfig, prefix: str) -> ExpertTensors | str | None:
    if any(name in prefix for name in config.modules_to_not_convert):
        return None
    read: dict[str, Read] = {
        "qweight": lambda t: pack_rows(unpack_awq(t).t(), "int4"),
        "qzeros": lambda t: to_signed(unpack_awq(t).t(), 4),
        "scales": lambda t: t.t(),
    }
    return ExpertTensors("int4", config.group_size, config.group_size, "qweight", "scales", "qzeros", read)


def _compressed_tensors(config: CompressedTensorsConfig, layer: Any, prefix: str) -> ExpertTensors | str | None:
    config._add_fused_moe_to_target_scheme_map()
    projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    # Experts without a gate have no name for up: their one first projection has that of gate.
    schemes = [config.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in projections if name is not None]
    scheme, weights = schemes[0], (schemes[0] or {}).get("weights")
    if weights is None:
        return None
    if scheme.get("format") != "pack-quantized" or not config._is_wNa16_group_channel(
        weights, scheme.get("input_activations")
    ):
        return f"the format {scheme.get('format')}"
    if any(other != scheme for other in schemes):
        return "projections that are quantized in several ways"
    if weights.num_bits not in (4, 8) or weights.actorder == "group":
        return f"{weights.num_bits} bits with actorder {weights.actorder}"
    bits = weights.num_bits
    read: dict[str, Read] = {
        "weight_packed": lambda t: pack_rows(unpack_words(t, bits, 1), f"int{bits}"),
        "weight_scale": lambda t: t,
    }
    if not weights.symmetric:
        read["weight_zero_point"] = lambda t: to_signed(unpack_words(t, bits, 0), bits)
    group = weights.group_size or -1
    zeros = None if weights.symmetric else "weight_zero_point"
    unread = ("weight_shape", "weight_g_idx")
    return ExpertTensors(f"int{bits}", group, group, "weight_packed", "weight_scale", zeros, read, unread)
