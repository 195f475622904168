"""What `load_checkpoint` yields: quantized layers, packed for a GPU, and the tensors that are not quantized."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..packed import PackedWeight, preprocess, unpack
from .plain import CodeWeight, IntWeight, scale_rows, unsort_rows


@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """A linear layer: y = x[:, perm] @ w + bias, with w as `weightonly.gemm` defines it.

    name: of the module, such as "model.layers.0.mlp.up_proj".
    weight: the packed [K, N] weight. A CodeWeight (NF4, FP4, own tables), which holds its own scales: no kernel
        reads these yet, so they come unpacked.
    scales, zeros: [groups, N] in the dtype of the file; zeros None: symmetric; both None for a CodeWeight.
    bias: [N] in the dtype of the file, or None.
    perm: int32 [K], the act-order permutation of the columns of x, or None.
    """

    name: str
    weight: PackedWeight | CodeWeight
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    perm: torch.Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [K, N], its rows in the order of x: computed in fp32 and rounded once."""
        if isinstance(self.weight, CodeWeight):
            return self.weight.dequantize(dtype)
        assert self.scales is not None
        return unsort_rows(scale_rows(unpack(self.weight), self.scales, self.zeros), self.perm).to(dtype)


@dataclass(frozen=True, eq=False)
class PlainTensor:
    """A tensor that is not part of a quantized layer (embedding, norm, lm_head), as the file has it."""

    name: str
    tensor: torch.Tensor


Record: TypeAlias = QuantizedLayer | PlainTensor


def pack(
    name: str, weight: IntWeight | CodeWeight, bias: torch.Tensor | None, arch: str | int | None
) -> QuantizedLayer:
    """A layer in the byte order of `arch` (see `weightonly.preprocess`), from its plain form.

    Code tables pass through as they are: this is the place to pack them, once a layout for them exists.
    """
    if isinstance(weight, CodeWeight):
        return QuantizedLayer(name, weight, bias=bias)
    packed = preprocess(weight.q, weight.bits, arch=arch)
    return QuantizedLayer(name, packed, weight.scales, weight.zeros, bias, weight.perm)


def repack(weight: PackedWeight, arch: str | int | None) -> PackedWeight:
    """`weight` in the byte order of `arch`; itself if it has that already, or if `arch` is None."""
    if arch is None or weight.layout == target_layout(weight.bits, arch):
        return weight
    return preprocess(unpack(weight), weight.bits, arch=arch)


@functools.cache
def target_layout(bits: int, arch: str | int) -> str:
    """The layout that `preprocess` packs for `arch`. Raises ValueError for an unknown one."""
    return preprocess(torch.zeros(1, 1, dtype=torch.int8), bits, arch=arch).layout
