"""GroupedLinear: the same linear layer of each expert of a mixture, with packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..activation_dtype import FP8, activations_of, check_fp8_format, check_fp8_groups, check_layer_layout
from ..experts import Multiply
from ..fp8_product import RoundingProduct
from ..grouped import Product
from ..heuristics.arch import Arch
from ..layout import TILED_FP8
from ..packed import PackedWeight
from ..packing import format_of
from ..quantize_codes import check_scales_as
from ..update import checked
from ..weight import LooseWeight, QuantizedWeight, check_packed, weight_of
from .base import PackedLayer, check_bias, zero_weight


class OneLayer(Protocol):
    """The layer of one expert: a `Product`, or a `weightonly.formats.QuantizedLayer`."""

    @property
    def operand(self) -> QuantizedWeight: ...
    @property
    def bias(self) -> torch.Tensor | None: ...


class GroupedLinear(PackedLayer):
    """`y[t] = x[t, perm[e]] @ w[e] + bias[e]`, e being the expert of row t: see `weightonly.grouped_gemm`.

    All Parameters are frozen. Plain attributes are num_experts, in_features (K), out_features (N), format, layout,
    group_size (-1: all of K), symmetric and activations. The state dict holds the tensors alone and loads into a layer
    that was made with the same arguments, for a GPU of the same layout. Conversions of dtype, moves and activations
    "fp8" are those of `Linear`.

    Attributes:
        qweight: Parameter, uint8 [E, ...], the bytes of each expert as a matrix, which is that of `Linear.qweight`.
        scales: Parameter, [E, K / g, N].
        zeros: Parameter, like scales, or None.
        bias: Parameter, [E, N], or None.
        perm: buffer, int32 or int64 [E, K], the act-order permutations, or None.
        codebook: buffer, int32 [16], the bits of the fp32 numbers of a "code4" weight; None for other formats.

    Examples:
        >>> layer = wo.nn.GroupedLinear(4, 512, 768, group_size=64)
        >>> layer(torch.randn(10, 512).half(), torch.tensor([3, 3, 7, 10], dtype=torch.int32)).shape
        torch.Size([10, 768])
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        format: str = "int4",
        group_size: int | None = None,
        symmetric: bool = True,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
        arch: Arch | None = None,
        act_order: bool = False,
        activations: str | None = None,
    ) -> None:
        """A layer of zeros, to load a state dict into.

        Raises what `Linear` raises.

        Args:
            num_experts: E.
            in_features: as for `Linear`.
            out_features: as for `Linear`.
            bias: as for `Linear`.
            format: as for `Linear`.
            group_size: as for `Linear`.
            symmetric: as for `Linear`.
            dtype: as for `Linear`.
            device: as for `Linear`.
            arch: as for `Linear`.
            act_order: as for `Linear`.
            activations: as for `Linear`.
        """
        activations = activations_of(activations)
        if activations is not None:
            check_fp8_format(format_of(None, format), symmetric)
        w = zero_weight(
            format_of(None, format),
            in_features,
            out_features,
            group_size,
            symmetric,
            dtype,
            device,
            arch,
            act_order,
            num_experts,
            activations,
        )
        bias_zeros = torch.zeros(num_experts, out_features, dtype=dtype, device=device) if bias else None
        self._adopt(w, bias_zeros, activations)

    def _adopt(self, w: QuantizedWeight, bias: torch.Tensor | None, activations: str | None) -> None:
        super().__init__()
        if activations is not None:
            check_fp8_format(w.format, w.zeros is None)
            check_fp8_groups(w.group_rows, w.k)
        check_layer_layout("weight", w.packed.layout, activations)
        self.activations = activations
        self.num_experts = w.experts or 0
        self._set_operand(w, bias)

    @property
    def _experts(self) -> int:
        return self.num_experts

    @classmethod
    def from_quantized(
        cls,
        weight: PackedWeight | QuantizedWeight,
        scales: torch.Tensor | None = None,
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        perm: torch.Tensor | None = None,
        activations: str | None = None,
    ) -> GroupedLinear:
        """A layer on tensors that exist already, as `grouped_gemm` takes them. They are used without a copy.

        Raises what `grouped_gemm` raises for them. activations: as for `Linear.from_quantized`.
        """
        activations = activations_of(activations)
        w = weight_of(weight, scales, zeros, perm)
        check_packed("weight", w.packed)
        if w.experts is None:
            raise ValueError(f"weight: expected stacked experts, packed from q [E, K, N], got one weight {w.packed!r}")
        w.check("weight")
        check_bias(bias, w)
        layer = cls.__new__(cls)
        layer._adopt(w, bias, FP8 if w.packed.layout == TILED_FP8 else activations)
        return layer

    @classmethod
    def from_parts(
        cls, parts: Sequence[OneLayer], dtype: torch.dtype | None = None, activations: str | None = None
    ) -> GroupedLinear:
        """The layers of all experts, one after another, stacked: a copy.

        Raises what `from_quantized` raises.

        Args:
            parts: one `QuantizedLayer` for each expert.
            dtype: of scales, zeros and bias; None: that of the scales.
            activations: as for `from_quantized`.

        Raises:
            ValueError: naming the expert, unless all are of one shape, format, layout and group size, with the same of
                zeros, bias and perm.
        """
        if not parts:
            raise ValueError("parts: expected at least one expert, got none")
        operands = [part.operand for part in parts]
        first = operands[0]
        dtype = first.dtype if dtype is None else dtype
        expected = _description(first, parts[0].bias)
        for expert, (w, part) in enumerate(zip(operands, parts, strict=True)):
            got = _description(w, part.bias)
            if got != expected:
                name = next(name for name in expected if got[name] != expected[name])
                raise ValueError(f"expert {expert}: {name}: expected {expected[name]} as expert 0 has, got {got[name]}")
        data = torch.cat([w.packed.data for w in operands])
        packed = PackedWeight(data, **first.packed.fields | {"experts": len(parts)})
        zeros, perm = _stack([w.zeros for w in operands]), _stack([w.perm for w in operands])
        stacked = LooseWeight(packed, torch.stack([w.scales for w in operands]), zeros, perm)
        check_scales_as(stacked.scales, dtype, first.format)
        bias = _stack([part.bias for part in parts])
        bias = None if bias is None else bias.to(dtype)
        return cls.from_quantized(stacked.with_dtype(dtype), bias=bias, activations=activations)

    @property
    def multiply(self) -> Multiply:
        """For `run_experts`: the operands, for which it may choose other launches; the layer, if its call does more
        than multiply: it has hooks, or a `forward` of its own, as accelerate gives it where weights are offloaded."""
        hooks = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        if any(hooks) or "forward" in vars(self) or type(self) is not GroupedLinear:
            return self
        return self._product

    @property
    def _product(self) -> Product | RoundingProduct:
        w, dtype, bias = self.operand, self.compute_dtype, self.bias
        if dtype != w.dtype:
            w = w.with_dtype(dtype)
        product = Product(w, None if bias is None else bias.to(dtype))
        return product if self.activations is None else RoundingProduct(product)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """x [T, K] sorted by expert, offs int32 [E] -> y [T, N]. Rows after those of the last expert give zeros.

        Raises what `grouped_gemm` raises.
        """
        if (dtype := self.compute_dtype) != self.scales.dtype:
            return self._product(x.to(dtype), offs).to(x.dtype)
        return self._product(x, offs)

    @torch.no_grad()
    def requantize(self, expert: int, w: torch.Tensor) -> None:
        """`update_` of one expert's w [K, N] alone."""
        for update in checked(f"expert {expert}", self.operand.expert(expert), w, self.compute_dtype):
            update.write()

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, {super().extra_repr()}"

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        self._check_layout(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._packed = self._operand = self._view = None


def _stack(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(given) if given else None


def _description(w: QuantizedWeight, bias: torch.Tensor | None) -> dict[str, Any]:
    """What the layers of all experts have in common: name -> value."""
    tensors = {"scales": w.scales, "zeros": w.zeros, "bias": bias, "perm": w.perm}
    shapes = {name: None if tensor is None else list(tensor.shape) for name, tensor in tensors.items()}
    return {"weight": w.packed.fields} | shapes
