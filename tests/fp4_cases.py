"""Layers of 4-bit floats as compressed-tensors and ModelOpt store them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import weightonly as wo
from weightonly.codebooks import codebook

ROWS = {"nvfp4": 16, "mxfp4": 32}


@dataclass
class Fp4Weight:
    """codes uint8 [K, N]; raw: scales of the file [groups, N]; factor: of nvfp4, what they are multiplied with."""

    format: str
    codes: torch.Tensor
    raw: torch.Tensor
    factor: float

    @property
    def scales(self) -> torch.Tensor:
        """fp32 [groups, N]"""
        if self.format == "mxfp4":
            return torch.exp2(self.raw.float() - 127)
        return self.raw.float() * self.factor

    @property
    def dense(self) -> torch.Tensor:
        """[K, N] in fp64"""
        rows = self.scales.double().repeat_interleave(ROWS[self.format], 0)
        return rows * codebook(self.format).double()[self.codes.long()]

    def gemm(self, x: torch.Tensor, bias: torch.Tensor | None = None, arch: str | None = None) -> torch.Tensor:
        packed = wo.preprocess(self.codes, 4, arch=arch, format=self.format)
        return wo.gemm(x, packed, self.scales.to(x.dtype), bias=bias)


def weight(g: torch.Generator, format: str, k: int, n: int, factor: float = 1.0 / 512) -> Fp4Weight:
    codes = torch.randint(0, 16, (k, n), generator=g).to(torch.uint8)
    groups = k // ROWS[format]
    if format == "mxfp4":
        return Fp4Weight(format, codes, torch.randint(118, 122, (groups, n), generator=g).to(torch.uint8), 1.0)
    raw = (torch.rand(groups, n, generator=g) * 8 + 4).to(torch.float8_e4m3fn)
    return Fp4Weight(format, codes, raw, factor)


def tensors(method: str, w: Fp4Weight) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of `method` for one layer."""
    rows, raw = w.codes.t(), w.raw.t().contiguous()
    data = (rows[:, ::2] | rows[:, 1::2] << 4).contiguous()
    if method == "compressed-tensors":
        stored = {"weight_packed": data, "weight_scale": raw}
        extra = {"weight_global_scale": torch.tensor([1 / w.factor]), "input_global_scale": torch.tensor([448.0])}
    else:
        stored = {"weight": data, "weight_scale": raw}
        extra = {"weight_scale_2": torch.tensor(w.factor), "input_scale": torch.tensor(0.5)}
    return stored | extra if w.format == "nvfp4" else stored


def config(method: str, format: str, is_a16: bool = True) -> dict[str, Any]:
    """`quantization_config` of such a checkpoint. is_a16: activations are not quantized."""
    if method == "modelopt_fp4":
        algorithm = "W4A16_NVFP4" if is_a16 else "NVFP4"
        return {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "ignore": []}
    if method != "compressed-tensors":
        return {"quant_method": "mxfp4"}
    strategy = "tensor_group" if format == "nvfp4" else "group"
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": ROWS[format]}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": args | {"dynamic": False}}
    if not is_a16:
        group["input_activations"] = args | {"dynamic": "local" if format == "nvfp4" else True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{format}-pack-quantized",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {"group_0": group},
    }
