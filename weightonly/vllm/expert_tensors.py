"""How a checkpoint stores the projections of its experts, as vLLM's own configs say, and how they become our rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override, override_config

from ..formats.awq import unpack_awq
from ..formats.ct_fp4 import E8M0_DTYPES
from ..formats.ct_schemes import activations_asked
from ..formats.e2m1 import e8m0_scales
from ..formats.expect import expect
from ..formats.words import to_signed, unpack_words
from ..heuristics.problem import FORMAT_GROUPS
from .blocks import expect_bytes
from .rows import EXACT_SCALES, pack_rows
from .support import finite_scales, multiplies_fp4

Read = Callable[[torch.Tensor], torch.Tensor]
"""A tensor of the file, of one projection -> rows uint8 [N, K * bits / 8], or scales or zeros [N, groups]. N and K may
come with the padding of the last word."""

_ON_BLACKWELL = "4-bit floats on a GPU that multiplies them itself"


@dataclass(frozen=True)
class ExpertTensors:
    """The tensors of one projection (gate, up or down) of one expert.

    format: "int4", "int8", "nf4", "fp4", "mxfp4" or "nvfp4".
    first_group, down_group: rows that share a scale, in gate and up, and in down; -1: all of K.
    qweight, scales, zeros: the names of the tensors; zeros: None where there are none.
    read: name -> how it is read.
    unread: names of tensors that may be there and say nothing more.
    factor: the name of a number that belongs to all scales of a projection; None where there is none.
    scales_dtype: in which scales [E, N, groups] are loaded; None: that of x.
    scales_of: (scales as loaded, factors [E, N, 1] or None) -> scales, exactly.
    alternates: the tensors are those of all experts, and columns of gate and up alternate in them, as gpt-oss has it.
    activations: "fp8": x is rounded to E4M3, and so is what is between the products.
    """

    format: str
    first_group: int
    down_group: int
    qweight: str
    scales: str
    zeros: str | None
    read: Mapping[str, Read]
    unread: tuple[str, ...] = ()
    factor: str | None = None
    scales_dtype: torch.dtype | None = None
    scales_of: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] = lambda scales, _: scales
    alternates: bool = False
    activations: str | None = None

    def inner(self, moe: Any) -> int:
        """Rows of the second product on this rank. gpt-oss's loader cuts between groups, and the last rank has fewer.

        moe: the FusedMoEConfig of the layer.
        """
        inner, group = int(moe.intermediate_size_per_partition), self.down_group
        return -(-inner // group) * group if self.alternates else inner


def of_rows(
    format: str, first_group: int, down_group: int, has_zeros: bool, activations: str | None = None
) -> ExpertTensors:
    """As our own loader brings them (see folders.py)."""
    names = ("scales", "zeros") if has_zeros else ("scales",)
    read = dict[str, Read]({"qweight": expect_bytes}) | {name: lambda t: t for name in names}
    zeros = "zeros" if has_zeros else None
    exact = EXACT_SCALES.get(format)
    return ExpertTensors(
        format,
        first_group,
        down_group,
        "qweight",
        "scales",
        zeros,
        read,
        scales_dtype=exact,
        activations=activations,
    )


def _gptq(config: Any, layer: Any, prefix: str) -> ExpertTensors | str | None:
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


def _awq(config: Any, layer: Any, prefix: str) -> ExpertTensors | str | None:
    if any(name in prefix for name in config.modules_to_not_convert):
        return None
    read: dict[str, Read] = {
        "qweight": lambda t: pack_rows(unpack_awq(t).t(), "int4"),
        "qzeros": lambda t: to_signed(unpack_awq(t).t(), 4),
        "scales": lambda t: t.t(),
    }
    return ExpertTensors("int4", config.group_size, config.group_size, "qweight", "scales", "qzeros", read)


def _compressed_tensors(config: Any, layer: Any, prefix: str) -> ExpertTensors | str | None:
    config._add_fused_moe_to_target_scheme_map()
    projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    # Experts without a gate have no name for up: their one first projection has that of gate.
    schemes = [config.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in projections if name is not None]
    scheme, weights = schemes[0], (schemes[0] or {}).get("weights")
    if weights is None:
        return None
    if any(other != scheme for other in schemes):
        return "projections that are quantized in several ways"
    inputs = scheme.get("input_activations")
    if weights.type == "float" and weights.num_bits == 4:
        if (weights.strategy, weights.group_size) == ("tensor_group", FORMAT_GROUPS["nvfp4"]):
            return _nvfp4("weight_packed", "weight_global_scale", torch.div, ("input_global_scale",), inputs is None)
        if (weights.strategy, weights.group_size) == ("group", FORMAT_GROUPS["mxfp4"]):
            eight_bits = inputs is not None and inputs.num_bits == 8
            return "activations of 8 bits" if eight_bits else _mxfp4("weight_packed")
    activations = None if inputs is None else activations_asked(inputs.model_dump(mode="json"))
    inputs = inputs if activations is None else None
    if scheme.get("format") != "pack-quantized" or not config._is_wNa16_group_channel(weights, inputs):
        return f"the format {scheme.get('format')}"
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
    names = "weight_packed", "weight_scale", zeros
    return ExpertTensors(f"int{bits}", group, group, *names, read, unread, activations=activations)


def _modelopt(config: Any, layer: Any, prefix: str) -> ExpertTensors | str | None:
    if config.is_layer_excluded(prefix):
        return None
    if not config.is_checkpoint_nvfp4_serialized or config.group_size != FORMAT_GROUPS["nvfp4"]:
        return "weights that are quantized while they are loaded, or groups of another size than 16"
    is_a16 = config.quant_method == "W4A16_NVFP4"
    return _nvfp4("weight", "weight_scale_2", torch.mul, ("input_scale",), is_a16)


def _modelopt_mixed(config: Any, layer: Any, prefix: str) -> ExpertTensors | str | None:
    configs = {"NVFP4": config.nvfp4_config, "W4A16_NVFP4": config.w4a16_nvfp4_config}
    mine = None if config.is_layer_excluded(prefix) else configs.get(config._resolve_quant_algo(prefix))
    return None if mine is None else _modelopt(mine, layer, prefix)


def _experts_of_mxfp4(config: Any, layer: Any, prefix: str) -> ExpertTensors | str | None:
    return _mxfp4("weight")


def _gpt_oss(config: Any, layer: Any, prefix: str) -> ExpertTensors | str | None:
    return _mxfp4("weight", alternates=True)


def _nvfp4(
    qweight: str,
    factor: str,
    apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    unread: tuple[str, ...],
    is_a16: bool,
) -> ExpertTensors | str:
    """apply: (scales, factor) -> scales. is_a16: activations are not quantized."""
    if not is_a16 and multiplies_fp4():
        return _ON_BLACKWELL
    rows = FORMAT_GROUPS["nvfp4"]

    def scales_of(scales: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        assert factors is not None
        return finite_scales(apply(scales.view(torch.float8_e4m3fn).float(), factors))

    read = {qweight: _raw(qweight, torch.uint8), "weight_scale": _raw("weight_scale", torch.float8_e4m3fn)}
    return ExpertTensors(
        "nvfp4", rows, rows, qweight, "weight_scale", None, read, unread, factor, torch.uint8, scales_of
    )


def _mxfp4(qweight: str, alternates: bool = False) -> ExpertTensors | str:
    if multiplies_fp4():
        return _ON_BLACKWELL
    rows = FORMAT_GROUPS["mxfp4"]
    return ExpertTensors(
        "mxfp4",
        rows,
        rows,
        qweight,
        "weight_scale",
        None,
        {qweight: _raw(qweight, torch.uint8), "weight_scale": _raw("weight_scale", *E8M0_DTYPES)},
        scales_dtype=torch.uint8,
        scales_of=lambda scales, _: e8m0_scales("weight_scale", scales),
        alternates=alternates,
    )


def _raw(name: str, *dtypes: torch.dtype) -> Read:
    """Bytes as the file has them, of one expert or of all."""

    def read(tensor: torch.Tensor) -> torch.Tensor:
        expect(name, tensor, dtypes, tensor.shape)
        return tensor.view(torch.uint8)

    return read


TensorsOf = Callable[[Any, Any, str], ExpertTensors | str | None]
"""(config, layer, prefix) -> how a layer's experts are stored; None: not quantized; a str: why they are not for us."""

CONFIGS: dict[str, tuple[tuple[str, ...], TensorsOf]] = {
    "auto_gptq.AutoGPTQConfig": (("gptq", "gptq_marlin", "auto_gptq"), _gptq),
    "auto_awq.AutoAWQConfig": (("awq", "awq_marlin", "auto_awq"), _awq),
    "compressed_tensors.compressed_tensors.CompressedTensorsConfig": (("compressed-tensors",), _compressed_tensors),
    "modelopt.ModelOptNvFp4Config": (("modelopt_fp4",), _modelopt),
    "modelopt.ModelOptMixedPrecisionConfig": (("modelopt_mixed",), _modelopt_mixed),
    "mxfp4.Mxfp4Config": (("mxfp4",), _experts_of_mxfp4),
    "mxfp4.GptOssMxfp4Config": (("gpt_oss_mxfp4",), _gpt_oss),
}
"""vLLM's configs whose experts we take -> the names of methods that it has for each, and what reads it."""
