"""Quantized linear layers as checkpoints store them, and what they have to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import weightonly as wo

METHODS = [
    pytest.param("gptq", 4, False, id="gptq-4bit"),
    pytest.param("gptq", 8, False, id="gptq-8bit"),
    pytest.param("awq", 4, True, id="awq-4bit-zeros"),
    pytest.param("compressed-tensors", 4, False, id="ct-4bit"),
    pytest.param("compressed-tensors", 8, False, id="ct-8bit"),
    pytest.param("compressed-tensors", 4, True, id="ct-4bit-zeros"),
    pytest.param("compressed-tensors", 8, True, id="ct-8bit-zeros"),
]
"""Parameters of tests: quantization method of the server, bits, zero points."""


def pack_words(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unsigned values [R, C] -> int32, 32 / bits of them in a word along `dim`, lowest bits first, padded with 0."""
    count = 32 // bits
    rows = values.long() if dim == 1 else values.long().t()
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % count)).unflatten(1, (-1, count))
    words = (rows << torch.arange(0, 32, bits)).sum(2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return words.contiguous() if dim == 1 else words.t().contiguous()


@dataclass
class Weight:
    """u [K, N] unsigned, scales [groups, N], z [groups, N] unsigned or None (the middle), g_idx [K]."""

    bits: int
    u: torch.Tensor
    scales: torch.Tensor
    z: torch.Tensor | None
    g_idx: torch.Tensor

    @property
    def dense(self) -> torch.Tensor:
        """[K, N] in fp64"""
        z = torch.full_like(self.scales, 1 << (self.bits - 1)) if self.z is None else self.z
        return self.scales.double()[self.g_idx] * (self.u.double() - z.double()[self.g_idx])

    def gemm(self, x: torch.Tensor, bias: torch.Tensor | None = None, arch: str | None = None) -> torch.Tensor:
        """The library's own product, of rows sorted by group."""
        middle = 1 << (self.bits - 1)
        perm = torch.argsort(self.g_idx, stable=True).int()
        q = (self.u[perm] - middle).to(torch.int8)
        zeros = None if self.z is None else (self.z - middle).to(x.dtype)
        is_sorted = bool((perm == torch.arange(len(perm))).all())
        packed = wo.preprocess(q, self.bits, arch=arch)
        return wo.gemm(x, packed, self.scales, zeros=zeros, bias=bias, perm=None if is_sorted else perm)


def weight(
    g: torch.Generator,
    k: int,
    n: int,
    *,
    bits: int,
    group: int,
    zeros: bool,
    dtype: torch.dtype,
    act_order: bool = False,
) -> Weight:
    group = k if group == -1 else group
    groups = k // group
    u = torch.randint(0, 1 << bits, (k, n), generator=g)
    scales = ((0.5 + torch.rand(groups, n, generator=g)) / (8 << bits)).to(dtype)
    z = torch.randint(1, 1 << bits, (groups, n), generator=g) if zeros else None
    g_idx = torch.arange(k) // group
    return Weight(bits, u, scales, z, g_idx[torch.randperm(k, generator=g)] if act_order else g_idx)


def beside(*parts: Weight) -> Weight:
    """Weights of one K and one grouping as one, their columns side by side."""
    first = parts[0]
    z = None if first.z is None else torch.cat([w.z for w in parts if w.z is not None], 1)
    u, scales = (torch.cat([getattr(w, name) for w in parts], 1) for name in ("u", "scales"))
    return Weight(first.bits, u, scales, z, first.g_idx)


_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The column of each nibble of an AWQ word, lowest first."""


def _awq_words(values: torch.Tensor) -> torch.Tensor:
    return pack_words(values.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1), 4, 1)


def tensors(method: str, w: Weight) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of `method` for one layer."""
    groups, n = w.scales.shape
    k = len(w.u)
    if method == "awq":
        assert w.z is not None
        return {"qweight": _awq_words(w.u), "qzeros": _awq_words(w.z), "scales": w.scales}
    if method == "gptq":
        z = torch.full((groups, n), 1 << (w.bits - 1)) if w.z is None else w.z
        stored = {
            "qweight": pack_words(w.u, w.bits, 0),
            "qzeros": pack_words(z - 1, w.bits, 1),
            "scales": w.scales,
        }
        return stored | {"g_idx": w.g_idx.int()}
    assert method == "compressed-tensors"
    stored = {
        "weight_packed": pack_words(w.u.t(), w.bits, 1),
        "weight_scale": w.scales.t().contiguous(),
        "weight_shape": torch.tensor([n, k]),
    }
    return stored if w.z is None else stored | {"weight_zero_point": pack_words(w.z.t(), w.bits, 0)}


def config(method: str, bits: int, group: int, zeros: bool, act_order: bool = False) -> dict[str, Any]:
    """`quantization_config` of such a checkpoint."""
    if method == "awq":
        return {"quant_method": "awq", "bits": bits, "group_size": group, "zero_point": zeros, "version": "gemm"}
    if method == "gptq":
        options = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": not zeros}
        return options | {"modules_in_block_to_quantize": ["mlp.up_proj"]}
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": not zeros,
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
