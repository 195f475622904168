"""What `load_checkpoint` yields: quantized layers, packed for a GPU, and the tensors that are not quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from .. import packing
from ..args import check_single
from ..gemm import gemm
from ..heuristics.arch import Arch
from ..heuristics.legal import check_kernel_group_size
from ..nn.linear import Linear
from ..ops.dequantize import dequantize
from ..packed import PackedWeight
from ..packing import preprocess
from ..quantize_codes import check_scales_as
from .expect import FLOATS, dtype_name
from .plain import CodeWeight, IntWeight, unsort_rows


@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """A linear layer: y = x[..., perm] @ w + bias, with w as `weightonly.gemm` defines it.

    name: of the module, such as "model.layers.0.mlp.up_proj".
    weight: the packed [K, N] weight; of gpt-oss those of all experts, stacked, and then all below has a dimension [E]
        before its own, and `weightonly.grouped_gemm` multiplies.
    scales, zeros: [groups, N] in the dtype of the file; fp32 for bitsandbytes and nvfp4, bfloat16 for mxfp4. zeros:
        None if symmetric or for codes.
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
        """The weight [K, N], or [E, K, N], its rows in the order of x: computed in fp32 and rounded once."""
        zeros = None if self.zeros is None else self.zeros.float()
        return unsort_rows(dequantize(self.weight, self.scales.float(), zeros), self.perm).to(dtype)

    def to_linear(self, dtype: torch.dtype | None = None, arch: Arch | None = None) -> Linear:
        """This layer as a `weightonly.nn.Linear`, on the same memory where nothing is converted.

        dtype: of scales, zeros, bias and x: float16, bfloat16 or float32; None: that of the scales.
        arch: the GPU to pack for; None: the layout that the weight has.

        Raises ValueError, naming the layer, for groups that `gemm` does not take, codes and an arch whose GPU does not
        read them, another dtype, one that scales of mxfp4 do not fit exactly, and stacked experts.
        """
        if dtype not in (None, *FLOATS):
            raise ValueError(f"dtype: expected {', '.join(map(dtype_name, FLOATS))} or None, got {dtype_name(dtype)}")
        try:
            weight = self.weight
            if arch not in (None, "cpu"):
                check_kernel_group_size(weight.k // self.scales.shape[-2], weight.k, arch)
            weight = weight if arch is None else packing.repack(weight, arch)
            check_single("weight", weight)
            layer = Linear.from_quantized(weight, *self.operands(dtype or self.scales.dtype), perm=self.perm)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        layer.layer_name = self.name
        return layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> y [..., N], scales and bias rounded to the dtype of x. Raises what `gemm` raises."""
        scales, zeros, bias = self.operands(x.dtype)
        return gemm(x, self.weight, scales, zeros=zeros, bias=bias, perm=self.perm)

    def operands(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(scales, zeros, bias) in `dtype`. Raises ValueError for scales that do not fit into it."""
        check_scales_as(self.scales, dtype, self.weight.format)
        zeros, bias = (None if t is None else t.to(dtype) for t in (self.zeros, self.bias))
        return self.scales.to(dtype), zeros, bias


@dataclass(frozen=True, eq=False)
class PlainTensor:
    """A tensor that is not part of a quantized layer (embedding, norm, lm_head), as the file has it."""

    name: str
    tensor: torch.Tensor


Record: TypeAlias = QuantizedLayer | PlainTensor


def pack(name: str, weight: IntWeight | CodeWeight, bias: torch.Tensor | None, arch: Arch | None) -> QuantizedLayer:
    """A layer, packed for `arch` (see `weightonly.preprocess`).

    Codes are packed as `record_code_layout` says: GPUs without kernels for them can still `dequantize` them.
    """
    if isinstance(weight, CodeWeight):
        code = weight.table if weight.format == "code4" else None
        packed = preprocess(
            weight.codes,
            layout=packing.record_code_layout(arch),
            format=weight.format,
            code=code,
            group_size=weight.codes.shape[-2] // weight.scales.shape[-2],
            zeros=False,
            perm=False,
        )
        return QuantizedLayer(name, packed, weight.scales, bias=bias)
    packed = preprocess(
        weight.q,
        weight.bits,
        arch=arch,
        group_size=len(weight.q) // len(weight.scales),
        zeros=weight.zeros is not None,
        perm=weight.perm is not None,
    )
    return QuantizedLayer(name, packed, weight.scales, weight.zeros, bias, weight.perm)


def repack(weight: PackedWeight, arch: Arch | None) -> PackedWeight:
    """`weight` in the layout of `arch`, for codes as `pack` has them. Returns `weight` where that is its layout."""
    if arch is None:
        return weight
    if weight.code is None:
        return packing.repack(weight, arch)
    return packing.relayout(weight, packing.record_code_layout(arch))
