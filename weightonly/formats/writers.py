"""What a layer is in the formats of other quantizers: its tensors, which their readers take back, and the config.

gptq.py, awq.py, compressed_tensors.py and ct_fp4.py say what the tensors are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..heuristics.problem import CODE_FORMATS, FORMAT_GROUPS, FORMATS
from .awq import pack_awq
from .ct_schemes import PACK_QUANTIZED
from .gptq import V1_ONES
from .layers import LayerShape
from .plain import CodeWeight, IntWeight
from .words import pack_words, to_unsigned

Shapes = Mapping[str, LayerShape]


@dataclass(frozen=True)
class Target:
    """A format to write.

    why_not: (shape of a layer, dtype of its scales) -> what it cannot hold of it, or None: "LAYER has ...".
    tensors: (weight, whether the folder has zero points) -> the tensors of a layer by their names inside of it. Raises
        ValueError for numbers that the format cannot hold.
    config: (shapes of all layers, names of dense layers) -> its quantization config. Raises ValueError for layers that
        it cannot describe together.
    """

    why_not: Callable[[LayerShape, torch.dtype], str | None]
    tensors: Callable[[IntWeight | CodeWeight, bool], dict[str, torch.Tensor]]
    config: Callable[[Shapes, Sequence[str]], dict[str, Any]]


def whole_zeros(w: IntWeight) -> torch.Tensor:
    """The zero points as the formats have them, uint8 [groups, N]. Raises ValueError for others."""
    middle = 1 << (w.bits - 1)
    if w.zeros is None:
        return torch.full(w.scales.shape, middle, dtype=torch.uint8, device=w.q.device)
    z = w.zeros.float()
    bad = (z != z.round()) | (z < -middle) | (z >= middle)
    if bool(bad.any()):
        raise ValueError(
            f"zeros: expected whole numbers in {-middle} .. {middle - 1}, got {z[bad][0].item():g}, which no target "
            "holds; quantize again with search='whole' (weightonly quantize --whole-zeros), or without zero points"
        )
    return to_unsigned(z.to(torch.int8), w.bits)


def _in_order(w: IntWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(q with its rows in the order of x, the group of each row; None: they follow each other)."""
    if w.perm is None:
        return w.q, None
    perm = w.perm.long()
    groups = torch.arange(len(w.q), device=perm.device) // (len(w.q) // len(w.scales))
    q, g_idx = torch.empty_like(w.q), torch.empty_like(groups)
    q[perm], g_idx[perm] = w.q, groups
    return q, None if len(w.scales) == 1 else g_idx.to(torch.int32)


def _only_integers(shape: LayerShape) -> str | None:
    return f"format {shape.format}" if shape.format in CODE_FORMATS else None


def _rows_of_all(shapes: Shapes) -> int:
    """The group size that a config without settings of layers has for all; -1: all of K.

    Raises ValueError, naming a layer, where they have several.
    """
    if all(shape.group_size == shape.k for shape in shapes.values()):
        return -1
    common = Counter(shape.group_size for shape in shapes.values() if shape.group_size != shape.k).most_common(1)[0][0]
    for name, shape in shapes.items():
        if shape.group_size != common:
            raise ValueError(
                f"{name}: group_size: expected {common}, as other layers have, got {shape.group_size}; gptq and "
                "compressed-tensors hold several"
            )
    return common


# --- GPTQ ---------------------------------------------------------------------------------------------------------


def _why_not_gptq(shape: LayerShape, dtype: torch.dtype) -> str | None:
    words = 32 // FORMATS[shape.format]
    if (problem := _only_integers(shape)) or (problem := _not_fp16(dtype)):
        return problem
    if shape.k % words or shape.n % words:
        return f"K, N = {shape.k}, {shape.n}, of which one is no multiple of {words}"
    return None


def _not_fp16(dtype: torch.dtype) -> str | None:
    return None if dtype == torch.float16 else f"scales in {dtype}, not torch.float16"


def _gptq_tensors(w: IntWeight | CodeWeight, has_zeros: bool) -> dict[str, torch.Tensor]:
    assert isinstance(w, IntWeight)
    q, g_idx = _in_order(w)
    qzeros = pack_words(whole_zeros(w), w.bits, dim=1)
    if g_idx is None:
        g_idx = (torch.arange(len(q), device=q.device) // (len(q) // len(w.scales))).to(torch.int32)
    return {
        "qweight": pack_words(to_unsigned(q, w.bits), w.bits, dim=0),
        "qzeros": qzeros if has_zeros else qzeros - V1_ONES[w.bits],
        "scales": w.scales,
        "g_idx": g_idx,
    }


def _gptq_config(shapes: Shapes, dense: Sequence[str]) -> dict[str, Any]:
    """Version 1, which every reader knows, unless there are zero points: its readers differ in what a 0 is."""

    def settings(shape: LayerShape) -> tuple[int, int]:
        return FORMATS[shape.format], -1 if shape.group_size == shape.k else shape.group_size

    (bits, rows), _ = Counter(map(settings, shapes.values())).most_common(1)[0]
    dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in dense if name != "lm_head"}
    for name, shape in shapes.items():
        own_bits, own_rows = settings(shape)
        if own_bits != bits or (own_rows != rows and shape.group_size != rows):
            dynamic[f"+:^{re.escape(name)}$"] = {"bits": own_bits, "group_size": own_rows}
    is_symmetric = all(shape.symmetric is not False for shape in shapes.values())
    version = "gptq" if is_symmetric else "gptq_v2"
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": rows,
        "desc_act": any(shape.act_order for shape in shapes.values()),
        "sym": is_symmetric,
        "lm_head": "lm_head" in shapes,
        "checkpoint_format": version,
        "pack_dtype": "int32",
        **({"dynamic": dynamic} if dynamic else {}),
    }


# --- AWQ ----------------------------------------------------------------------------------------------------------


def _why_not_awq(shape: LayerShape, dtype: torch.dtype) -> str | None:
    if (problem := _only_integers(shape)) or (problem := _not_fp16(dtype)):
        return problem
    if shape.format != "int4":
        return f"format {shape.format}"
    if shape.act_order:
        return "its rows in act-order"
    return f"N = {shape.n}, which is no multiple of 8" if shape.n % 8 else None


def _awq_tensors(w: IntWeight | CodeWeight, has_zeros: bool) -> dict[str, torch.Tensor]:
    assert isinstance(w, IntWeight)
    return {"qweight": pack_awq(to_unsigned(w.q, 4)), "qzeros": pack_awq(whole_zeros(w)), "scales": w.scales}


def _awq_config(shapes: Shapes, dense: Sequence[str]) -> dict[str, Any]:
    for name in dense:
        if (hidden := next((layer for layer in shapes if name in layer), None)) is not None:
            raise ValueError(
                f"{hidden}: expected a name without that of the dense layer {name}, as readers of awq look for a part "
                "of the name; gptq and compressed-tensors hold it"
            )
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": _rows_of_all(shapes),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(dense),
    }


# --- compressed-tensors -------------------------------------------------------------------------------------------


def _why_not_compressed(shape: LayerShape, dtype: torch.dtype) -> str | None:
    return f"format {shape.format}" if shape.format in CODE_FORMATS and shape.format not in FORMAT_GROUPS else None


def _compressed_tensors(w: IntWeight | CodeWeight, has_zeros: bool) -> dict[str, torch.Tensor]:
    if isinstance(w, CodeWeight):
        codes, scales = w.codes.view(torch.uint8).t(), w.scales.float().t().contiguous()
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
        if w.format == "mxfp4":
            return {"weight_packed": packed, "weight_scale": _e8m0(scales)}
        exact, divisor = _e4m3(scales)
        return {"weight_packed": packed, "weight_scale": exact, "weight_global_scale": divisor}
    q, g_idx = _in_order(w)
    k, n = q.shape
    tensors = {
        "weight_packed": pack_words(to_unsigned(q, w.bits).t(), w.bits, dim=1),
        "weight_scale": w.scales.t().contiguous(),
        "weight_shape": torch.tensor([n, k]),
    }
    if w.zeros is not None:
        tensors["weight_zero_point"] = pack_words(whole_zeros(w).t(), w.bits, dim=0)
    return tensors if g_idx is None else tensors | {"weight_g_idx": g_idx}


def _e8m0(scales: torch.Tensor) -> torch.Tensor:
    """The exponents of powers of two, uint8. Raises ValueError for other numbers."""
    mantissa, exponent = torch.frexp(scales)
    exponent = exponent + 126
    bad = (mantissa != 0.5) | (exponent < 0) | (exponent > 254)
    if bool(bad.any()):
        raise ValueError(f"scales: expected powers of two for mxfp4, got {scales[bad][0].item():g}")
    return exponent.to(torch.uint8)


def _e4m3(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers of E4M3, fp32 [1]) with the quotients `scales`, bit for bit.

    The largest scale stands for some number of E4M3, which gives the divisor but for its last bit. Raises ValueError
    where none gives all scales.
    """
    found = scales.unique()
    numbers = torch.arange(0x7E, 0, -1, dtype=torch.uint8, device=scales.device).view(torch.float8_e4m3fn).float()
    if len(found) <= len(numbers) + 1:
        for first in numbers / found[-1] if found[-1] > 0 else numbers[-1:] * 0 + 1:
            for divisor in (first, *(torch.nextafter(first, first * by) for by in (2, 0))):
                if torch.equal((found * divisor).to(torch.float8_e4m3fn).float() / divisor, found):
                    return (scales * divisor).to(torch.float8_e4m3fn), divisor.view(1)
    raise ValueError(
        "scales: expected numbers of E4M3 times one factor for nvfp4, as quantize and convert write them, got others"
    )


def _compressed_config(shapes: Shapes, dense: Sequence[str]) -> dict[str, Any]:
    kinds: dict[tuple[Any, ...], list[str]] = {}
    sizes = {shape.group_size for shape in shapes.values() if shape.group_size != shape.k}
    for name, shape in shapes.items():
        is_whole = shape.group_size == shape.k and shape.format not in FORMAT_GROUPS
        rows = -1 if is_whole and shape.k not in sizes else shape.group_size
        kinds.setdefault((shape.format, rows, shape.symmetric is not False, shape.act_order), []).append(name)
    groups = {}
    for number, ((format, rows, symmetric, act_order), names) in enumerate(kinds.items()):
        is_float = format in FORMAT_GROUPS
        groups[f"group_{number}"] = {
            # One class of modules would go before the names of layers that a reader fuses.
            "targets": ["Linear"] if len(kinds) == 1 else names,
            "weights": {
                "num_bits": FORMATS[format],
                "type": "float" if is_float else "int",
                "symmetric": symmetric,
                "strategy": "channel" if rows == -1 else "tensor_group" if format == "nvfp4" else "group",
                "group_size": None if rows == -1 else rows,
                "actorder": "group" if act_order and rows != -1 else None,
                "dynamic": False,
                "scale_dtype": {"mxfp4": "torch.uint8", "nvfp4": "torch.float8_e4m3fn"}.get(format),
            },
            "input_activations": None,
            "output_activations": None,
            "format": f"{format}-{PACK_QUANTIZED}" if is_float else PACK_QUANTIZED,
        }
    formats = {str(group["format"]) for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(dense),
        "kv_cache_scheme": None,
    }


TARGETS = {
    "compressed-tensors": Target(_why_not_compressed, _compressed_tensors, _compressed_config),
    "gptq": Target(_why_not_gptq, _gptq_tensors, _gptq_config),
    "awq": Target(_why_not_awq, _awq_tensors, _awq_config),
}
