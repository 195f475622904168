"""What `load_checkpoint` yields: quantized layers, packed for a GPU, and the tensors that are not quantized."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..dequantize import dequantize
from ..layout import TILED
from ..packed import PackedWeight, preprocess, unpack
from .plain import CodeWeight, IntWeight, unsort_rows


@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """A linear layer: y = x[..., perm] @ w + bias, with w as `weightonly.gemm` defines it.

    name: of the module, such as "model.layers.0.mlp.up_proj".
    weight: the packed [K, N] weight.
    scales, zeros: [groups, N] in the dtype of the file, fp32 for bitsandbytes; zeros None: symmetric, or a code table.
    bias: [N] in the dtype of the file, or None.
    perm: int32 [K], the act-order permutation of the columns of x, or None.
    """

    name: str
    weight: PackedWeight
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    perm: torch.Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [K, N], its rows in the order of x: computed in fp32 and rounded once."""
        zeros = None if self.zeros is None else self.zeros.float()
        return unsort_rows(dequantize(self.weight, self.scales.float(), zeros), self.perm).to(dtype)


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

    Code formats have one layout, whatever `arch` is: kernels of other GPUs do not read them, but they dequantize.
    """
    if isinstance(weight, CodeWeight):
        code = weight.table if weight.format == "code4" else None
        packed = preprocess(weight.codes, layout=TILED, format=weight.format, code=code)
        return QuantizedLayer(name, packed, weight.scales, bias=bias)
    packed = preprocess(weight.q, weight.bits, arch=arch)
    return QuantizedLayer(name, packed, weight.scales, weight.zeros, bias, weight.perm)


def repack(weight: PackedWeight, arch: str | int | None) -> PackedWeight:
    """`weight` in the byte order of `arch`; itself if it has that already or is a code format, or if `arch` is None."""
    if arch is None or weight.code is not None or weight.layout == target_layout(weight.bits, arch):
        return weight
    return preprocess(unpack(weight), weight.bits, arch=arch)


@functools.cache
def target_layout(bits: int, arch: str | int) -> str:
    """The layout that `preprocess` packs for `arch`. Raises ValueError for an unknown one."""
    return preprocess(torch.zeros(1, 1, dtype=torch.int8), bits, arch=arch).layout
