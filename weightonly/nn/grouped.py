"""GroupedLinear: the same linear layer of each expert of a mixture, with packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..experts import Multiply
from ..formats.plain import unsort_rows
from ..grouped import Product
from ..grouped_args import GroupedArgs
from ..heuristics.arch import Arch
from ..ops.dequantize import dequantize
from ..packed import PackedWeight
from ..packing import format_of
from ..quantize_codes import check_scales_as
from ..weight import QuantizedWeight, parts_of
from .base import PackedLayer, zero_operands


class Part(Protocol):
    """The layer of one expert, as `weightonly.formats.QuantizedLayer` is one."""

    @property
    def weight(self) -> PackedWeight: ...
    @property
    def scales(self) -> torch.Tensor: ...
    @property
    def zeros(self) -> torch.Tensor | None: ...
    @property
    def bias(self) -> torch.Tensor | None: ...
    @property
    def perm(self) -> torch.Tensor | None: ...


class GroupedLinear(PackedLayer):
    """y[t] = x[t, perm[e]] @ w[e] + bias[e], e being the expert of row t: see `weightonly.grouped_gemm`.

    Parameters, all frozen:
        qweight  uint8 [E, ...], the bytes of each expert as a matrix, which is that of `Linear.qweight`
        scales   [E, K / g, N]
        zeros    like scales, or None
        bias     [E, N], or None
    Buffers:
        perm      int32 or int64 [E, K], the act-order permutations, or None
        codebook  int32 [16], the bits of the fp32 numbers of a "code4" weight; None for other formats
    Plain attributes: num_experts, in_features (K), out_features (N), format, layout, group_size (-1: all of K),
    symmetric.

    The state dict holds the tensors alone and loads into a layer that was made with the same arguments, for a GPU of
    the same layout. Conversions of dtype and moves are those of `Linear`.
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
    ) -> None:
        """A layer of zeros, to load a state dict into; arguments are those of `Linear`.

        Raises what `Linear` raises.
        """
        weight, scales, zeros = zero_operands(
            format_of(None, format), in_features, out_features, group_size, symmetric, dtype, device, arch, num_experts
        )
        order = torch.arange(in_features, dtype=torch.int32, device=device)
        self._adopt(
            weight,
            scales,
            zeros,
            torch.zeros(num_experts, out_features, dtype=dtype, device=device) if bias else None,
            order.repeat(num_experts, 1) if act_order else None,
        )

    def _adopt(
        self,
        weight: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        perm: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.num_experts = weight.experts or 0
        self._set_operands(weight, scales, zeros, bias, perm)

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
    ) -> GroupedLinear:
        """A layer on tensors that exist already, as `grouped_gemm` takes them. They are used without a copy.

        Raises what `grouped_gemm` raises for them.
        """
        packed, of_groups, zeros, perm = parts_of(weight, scales, zeros, perm)
        device = getattr(of_groups, "device", None)
        offs = torch.zeros(getattr(packed, "experts", None) or 0, dtype=torch.int32, device=device)
        x = torch.empty(0, getattr(packed, "k", 0), dtype=getattr(of_groups, "dtype", None), device=device)
        GroupedArgs(x, packed, of_groups, offs, zeros, bias, perm=perm).check()
        layer = cls.__new__(cls)
        layer._adopt(packed, of_groups, zeros, bias, perm)
        return layer

    @classmethod
    def from_parts(cls, parts: Sequence[Part], dtype: torch.dtype | None = None) -> GroupedLinear:
        """The layers of all experts, one after another, stacked: a copy.

        parts: one `QuantizedLayer` for each expert: weight, scales, zeros, bias, perm. dtype: of scales, zeros and
        bias; None: that of the scales.

        Raises ValueError, naming the expert, unless all are of one shape, format, layout and group size, with the same
        of zeros, bias and perm; and what `from_quantized` raises.
        """
        if not parts:
            raise ValueError("parts: expected at least one expert, got none")
        first = parts[0]
        dtype = first.scales.dtype if dtype is None else dtype
        expected = _description(first)
        for expert, part in enumerate(parts):
            got = _description(part)
            if got != expected:
                name = next(name for name in expected if got[name] != expected[name])
                raise ValueError(f"expert {expert}: {name}: expected {expected[name]} as expert 0 has, got {got[name]}")
        weight = PackedWeight(
            torch.cat([part.weight.data for part in parts]), **first.weight.fields | {"experts": len(parts)}
        )
        stacked: dict[str, torch.Tensor | None] = {}
        for name in ("scales", "zeros", "bias", "perm"):
            tensors = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
            stack = torch.stack(tensors) if tensors else None
            if name == "scales" and stack is not None:
                check_scales_as(stack, dtype, first.weight.format)
            stacked[name] = stack.to(dtype) if stack is not None and name != "perm" else stack
        scales = stacked.pop("scales")
        assert scales is not None
        return cls.from_quantized(weight, scales, **stacked)

    @property
    def multiply(self) -> Multiply:
        """For `run_experts`: the operands, for which it may choose other launches; the layer, if its call does more
        than multiply: it has hooks, or a `forward` of its own, as accelerate gives it where weights are offloaded."""
        hooks = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        if any(hooks) or "forward" in vars(self) or type(self) is not GroupedLinear:
            return self
        return self._product

    @property
    def _product(self) -> Product:
        return Product(self.packed, self.scales, self.zeros, self.bias, self.perm)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """x [T, K] sorted by expert, offs int32 [E] -> y [T, N]. Rows after those of the last expert give zeros.

        Raises what `grouped_gemm` raises.
        """
        return self._product(x, offs)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weights w [E, K, N], their rows in the order of x: computed in fp32 and rounded once to `dtype`.

        dtype: None: that of the scales.
        """
        dtype = self.scales.dtype if dtype is None else dtype
        scales, zeros = self._operands_in(dtype)
        w = torch.empty(self.num_experts, self.in_features, self.out_features, dtype=dtype, device=scales.device)
        for expert, weight in enumerate(self.packed):
            matrix = dequantize(weight, scales[expert], None if zeros is None else zeros[expert])
            w[expert] = unsort_rows(matrix, None if self.perm is None else self.perm[expert])
        return w

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, {super().extra_repr()}"

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        self._check_layout(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._packed = None


def _description(part: Part) -> dict[str, Any]:
    """What the layers of all experts have in common: name -> value."""
    tensors = {name: getattr(part, name) for name in ("scales", "zeros", "bias", "perm")}
    shapes = {name: None if tensor is None else list(tensor.shape) for name, tensor in tensors.items()}
    return {"weight": part.weight.fields} | shapes
