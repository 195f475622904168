"""AutoRound's folders ("auto-round"): their tensors are those of GPTQ or AWQ, as `packing_format` says.

auto_round:auto_gptq                     GPTQ's, with zero points of version 1, without g_idx
auto_round, auto_round:gptqmodel         GPTQ's, with zero points of version 2; the latter with a g_idx in order
auto_round:auto_awq                      AWQ's

Names of kernels may follow, or stand in the place of "gptqmodel". bits, group_size and sym are those of all layers;
`extra_config` has others of some. Which layers are quantized, the tensors tell, not `block_name_to_quantize`.
https://github.com/intel/auto-round has the definition (auto_round/inference).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .awq import awq_format
from .expect import option
from .gptq import gptq_format
from .layer_settings import extra_settings
from .layers import LayerFormat

METHODS = ("auto-round", "intel/auto-round")
"""`quant_method` of folders, today and of older versions."""

_LAYOUTS = {
    "": "gptq_v2",
    "gptqmodel": "gptq_v2",
    "exllamav2": "gptq_v2",
    "triton": "gptq_v2",
    "tritonv2": "gptq_v2",
    "auto_gptq": "gptq",
    "gptq": "gptq",
    "auto_awq": "awq",
    "awq": "awq",
}
"""The second word of `packing_format` -> whose tensors these are."""

_ROTATIONS = ("rotation_config", "spinquant_config", "transform_config")


def auto_round_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format that a quantization config describes.

    Raises ValueError for other packing formats, for activations that are quantized or rotated, for floats, and for
    bits other than 4 and 8.
    """
    backend = option(options, "backend", str, "auto")  # of older versions
    default = backend if backend.startswith("auto_round") else "auto"
    packing = option(options, "packing_format", str, default)
    family, _, layout = "auto_round:auto_gptq".partition(":") if packing == "auto" else packing.partition(":")
    stored = _LAYOUTS.get(layout.partition(":")[0])
    if family != "auto_round" or stored is None:
        expected = ", ".join("auto_round" + f":{name}" * bool(name) for name in _LAYOUTS)
        raise ValueError(f"packing_format: expected one of {expected}, got {packing!r}")
    bits_of_x = option(options, "act_bits", int, 16)
    if bits_of_x < 16:
        raise ValueError(f"act_bits: expected 16, of weights alone, got {bits_of_x}")
    kind = option(options, "data_type", str, "int")
    if not kind.startswith("int"):
        raise ValueError(f"data_type: expected int, got {kind!r}")
    for key in _ROTATIONS:  # of x, at run time
        if options.get(key):
            raise ValueError(f"{key}: expected none, got {options[key]!r:.200}")
    common = {key: options.get(key) for key in ("bits", "group_size", "sym")}
    settings = extra_settings(option(options, "extra_config", dict, {}))
    if stored == "awq":
        return dataclasses.replace(awq_format(common, settings), name=METHODS[0])
    return dataclasses.replace(gptq_format(common | {"checkpoint_format": stored}, settings), name=METHODS[0])
