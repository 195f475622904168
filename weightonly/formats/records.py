"""What `load_checkpoint` yields: quantized layers, packed for a GPU, and the tensors that are not quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from .. import packing
from ..gemm import gemm
from ..grouped import Product
from ..heuristics.arch import Arch
from ..heuristics.legal import check_kernel_group_size
from ..nn.linear import Linear
from ..packed import PackedWeight
from ..packing import preprocess
from ..quantize_codes import check_scales_as
from ..weight import LooseWeight, QuantizedWeight
from .expect import FLOATS, dtype_name
from .plain import CodeWeight, IntWeight


@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """A linear layer: y = x[..., perm] @ w + bias, with w as `weightonly.gemm` defines it.

    Args:
        name: of the module, such as "model.layers.0.mlp.up_proj".
        weight: the packed [K, N] weight; of gpt-oss those of all experts, stacked, and then all below has a dimension
            [E] before its own, and `weightonly.grouped_gemm` multiplies.
        scales: [groups, N] in the dtype of the file; fp32 for bitsandbytes and nvfp4, bfloat16 for mxfp4.
        zeros: like scales; None if symmetric or for codes.
        bias: [N] in the dtype of the file, or None.
        perm: int32 [K], the act-order permutation of the columns of x, or None.

    Examples:
        >>> records = {record.name: record for record in wo.load_checkpoint("Llama-GPTQ", progress=False)}
        >>> linear = records["model.layers.0.mlp.up_proj"].to_linear(torch.float16)
        >>> linear(torch.randn(4, 128).half()).shape
        torch.Size([4, 256])
    """

    name: str
    weight: PackedWeight
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    perm: torch.Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [K, N], or [E, K, N], its rows in the order of x: computed in fp32 and rounded once."""
        return self.operand.dequantize(torch.float32).to(dtype)

    @property
    def operand(self) -> QuantizedWeight:
        """What x is multiplied by, unchecked; zeros may have another dtype than scales, as in the file."""
        return LooseWeight(self.weight, self.scales, self.zeros, self.perm)

    @classmethod
    def of(cls, name: str, product: Product) -> QuantizedLayer:
        """The layer of a weight and a bias."""
        w = product.operand
        return cls(name, w.packed, w.scales, w.zeros, product.bias, w.perm)

    def to_linear(self, dtype: torch.dtype | None = None, arch: Arch | None = None) -> Linear:
        """This layer as a `weightonly.nn.Linear`, on the same memory where nothing is converted.

        Args:
            dtype: of scales, zeros, bias and x: float16, bfloat16 or float32; None: that of the scales.
            arch: the GPU to pack for; None: the layout that the weight has.

        Raises:
            ValueError: naming the layer, for groups that `gemm` does not take, codes and an arch whose GPU does not
                read them, another dtype, one that scales of mxfp4 do not fit exactly, and stacked experts.
        """
        if dtype not in (None, *FLOATS):
            raise ValueError(f"dtype: expected {', '.join(map(dtype_name, FLOATS))} or None, got {dtype_name(dtype)}")
        try:
            weight = self.weight
            if arch not in (None, "cpu"):
                check_kernel_group_size(weight.k // self.scales.shape[-2], weight.k, arch)
            weight = weight if arch is None else packing.repack(weight, arch)
            product = self.product(dtype or self.scales.dtype)
            w = product.operand
            layer = Linear.from_quantized(weight, w.scales, w.zeros, product.bias, perm=w.perm)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        layer.layer_name = self.name
        return layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> y [..., N], scales and bias rounded to the dtype of x. Raises what `gemm` raises."""
        product = self.product(x.dtype)
        return gemm(x, product.operand, bias=product.bias)

    def product(self, dtype: torch.dtype) -> Product:
        """Weight and bias, with scales, zeros and bias in `dtype`.

        Raises:
            ValueError: scales that do not fit.
        """
        check_scales_as(self.scales, dtype, self.weight.format)
        return Product(self.operand.with_dtype(dtype), None if self.bias is None else self.bias.to(dtype))


@dataclass(frozen=True, eq=False)
class PlainTensor:
    """A tensor that is not part of a quantized layer (embedding, norm, lm_head), as the file has it.

    Args:
        name: of the tensor in the file.
        tensor: on the device that was asked for.

    Examples:
        >>> plain = [r for r in wo.load_checkpoint("Llama-GPTQ", progress=False) if isinstance(r, PlainTensor)]
        >>> next(record.tensor.shape for record in plain if record.name == "model.norm.weight")
        torch.Size([128])
    """

    name: str
    tensor: torch.Tensor


Record: TypeAlias = QuantizedLayer | PlainTensor


def pack(
    name: str,
    weight: IntWeight | CodeWeight,
    bias: torch.Tensor | None,
    arch: Arch | None,
    activations: str | None = None,
) -> QuantizedLayer:
    """A layer, packed for `arch` (see `weightonly.preprocess`), and for x in E4M3 with activations "fp8".

    Codes are packed as `record_code_layout` says: GPUs without kernels for them can still `dequantize` them.
    """
    if isinstance(weight, CodeWeight):
        code = weight.table if weight.format == "code4" else None
        packed = preprocess(
            weight.codes,
            layout=packing.record_code_layout(arch, activations=activations),
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
        layout=packing.default_layout(weight.q.device, arch, activations),
        group_size=len(weight.q) // len(weight.scales),
        zeros=weight.zeros is not None,
        perm=weight.perm is not None,
    )
    return QuantizedLayer(name, packed, weight.scales, weight.zeros, bias, weight.perm)


def repack(weight: PackedWeight, arch: Arch | None, activations: str | None = None) -> PackedWeight:
    """`weight` in the layout that `pack` has for `arch`. Returns `weight` where that is its layout, or arch is None."""
    if arch is None:
        return weight
    if not weight.is_code:
        return packing.repack(weight, layout=packing.layout_for_arch(arch, activations))
    return packing.relayout(weight, packing.record_code_layout(arch, activations=activations))
