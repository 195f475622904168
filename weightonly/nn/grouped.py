"""GroupedLinear: the same linear layer of each expert of a mixture, with packed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.compiler import is_compiling

from ..experts import product
from ..formats.plain import unsort_rows
from ..grouped import GroupedArgs
from ..heuristics.arch import Arch
from ..heuristics.problem import CODE_FORMATS, FORMAT_GROUPS, check_group_size
from ..layout import LAYOUTS, padded_shape, stored_shape
from ..ops.dequantize import dequantize
from ..packed import PackedWeight, format_bits
from ..packing import code_layout, default_layout, format_of, repack
from ..quantize import resolve_group_size
from ..quantize_codes import check_scales_as
from .linear import _codebook_bits, frozen


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


class GroupedLinear(torch.nn.Module):
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

    qweight: torch.nn.Parameter
    scales: torch.nn.Parameter
    zeros: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None
    perm: torch.Tensor | None
    codebook: torch.Tensor | None

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
        format = format_of(None, format)
        bits, is_code = format_bits(format), format in CODE_FORMATS
        if is_code and not symmetric:
            raise ValueError(f"symmetric: expected True for {format}, got False")
        layout = code_layout(format, arch, None, device) if is_code else default_layout(device, arch)
        k_padded, n_padded = padded_shape(in_features, out_features, bits, layout)
        if group_size is None:
            group_size = FORMAT_GROUPS.get(format, 128)
        groups = in_features // resolve_group_size(group_size, in_features)
        data = torch.zeros(num_experts * k_padded * n_padded * bits // 8, dtype=torch.uint8, device=device)
        code = (0.0,) * 16 if format == "code4" else None
        weight = PackedWeight(data, in_features, out_features, format, layout, code, experts=num_experts)
        scales = torch.zeros(num_experts, groups, out_features, dtype=dtype, device=device)
        order = torch.arange(in_features, dtype=torch.int32, device=device)
        self._adopt(
            weight,
            scales,
            None if symmetric else torch.zeros_like(scales),
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
        group_size = weight.k // scales.shape[1]
        check_group_size(group_size, weight.k)
        weight = weight.expecting(group_size, zeros is not None, perm is not None)
        self.num_experts = weight.experts or 0
        self.in_features = weight.k
        self.out_features = weight.n
        self.format = weight.format
        self.layout = weight.layout
        self.group_size = weight.group_size
        self.symmetric = zeros is None
        self.qweight = frozen(weight.data.view(self._stored_shape(self.layout)))
        self.scales = frozen(scales)
        self.register_parameter("zeros", None if zeros is None else frozen(zeros))
        self.register_parameter("bias", None if bias is None else frozen(bias))
        self.register_buffer("perm", perm)
        self.register_buffer("codebook", _codebook_bits(weight) if self.format == "code4" else None)
        self._packed: PackedWeight | None = weight
        self._packed_from = (self.qweight, self.codebook)

    @classmethod
    def from_quantized(
        cls,
        weight: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        perm: torch.Tensor | None = None,
    ) -> GroupedLinear:
        """A layer on tensors that exist already, as `grouped_gemm` takes them. They are used without a copy.

        Raises what `grouped_gemm` raises for them.
        """
        device = getattr(scales, "device", None)
        offs = torch.zeros(getattr(weight, "experts", None) or 0, dtype=torch.int32, device=device)
        x = torch.empty(0, getattr(weight, "k", 0), dtype=getattr(scales, "dtype", None), device=device)
        GroupedArgs(x, weight, scales, offs, zeros, bias, perm=perm).check()
        layer = cls.__new__(cls)
        layer._adopt(weight, scales, zeros, bias, perm)
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
    def packed(self) -> PackedWeight:
        """The Parameter `qweight` with its metadata, as `grouped_gemm` takes it: on the same memory."""
        qweight, codebook = self._packed_from
        packed = self._packed
        if packed is None or qweight is not self.qweight or codebook is not self.codebook:
            packed = self._pack()
            if not is_compiling():
                self._packed = packed
                self._packed_from = (self.qweight, self.codebook)
        return packed

    def _pack(self) -> PackedWeight:
        code = None
        if self.codebook is not None:
            is_meta = self.codebook.is_meta
            code = (0.0,) * 16 if is_meta else self.codebook.view(torch.float32).tolist()
        return PackedWeight(
            self.qweight.detach().view(-1),
            self.in_features,
            self.out_features,
            self.format,
            self.layout,
            code,
            self.group_size,
            self.zeros is not None,
            self.perm is not None,
            experts=self.num_experts,
        )

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """x [T, K] sorted by expert, offs int32 [E] -> y [T, N]. Rows after those of the last expert give zeros.

        Raises what `grouped_gemm` raises.
        """
        return product(self.packed, self.scales, self.zeros, self.bias, self.perm)(x, offs)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weights w [E, K, N], their rows in the order of x: computed in fp32 and rounded once to `dtype`.

        dtype: None: that of the scales.
        """
        dtype = self.scales.dtype if dtype is None else dtype
        scales, zeros = self.scales.detach(), None if self.zeros is None else self.zeros.detach()
        if dtype != scales.dtype:
            scales, zeros = scales.float(), None if zeros is None else zeros.float()
        w = torch.empty(self.num_experts, self.in_features, self.out_features, dtype=dtype, device=scales.device)
        for expert, weight in enumerate(self.packed):
            matrix = dequantize(weight, scales[expert], None if zeros is None else zeros[expert])
            w[expert] = unsort_rows(matrix, None if self.perm is None else self.perm[expert])
        return w

    def repack(self, arch: Arch | None = None) -> GroupedLinear:
        """Brings the weights, in place, into the byte order of another GPU's kernels; see `weightonly.repack`.

        arch: the GPU to pack for; None: that of the device of the weights. Returns this layer.
        """
        weight = repack(self.packed, arch)
        if weight is not self.packed:
            self.layout = weight.layout
            self.qweight = frozen(weight.data.view(self._stored_shape(self.layout)))
            self._packed, self._packed_from = weight, (self.qweight, self.codebook)
        return self

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.format}, "
            f"group_size={self.in_features // self.scales.shape[1]}, "
            f"symmetric={self.zeros is None}, act_order={self.perm is not None}, layout={self.layout}"
        )

    def _stored_shape(self, layout: str) -> tuple[int, int, int]:
        bits = format_bits(self.format)
        padded = padded_shape(self.in_features, self.out_features, bits, layout)
        return self.num_experts, *stored_shape(*padded, bits, layout)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        shape = tuple(getattr(state_dict.get(f"{prefix}qweight"), "shape", self.qweight.shape))
        for layout in LAYOUTS:
            if shape == self._stored_shape(layout) != tuple(self.qweight.shape):
                raise ValueError(
                    f"state dict: {prefix}qweight: expected {list(self.qweight.shape)} for layout {self.layout!r}, got "
                    f"{list(shape)}, the shape of layout {layout!r}; make the layer for a GPU of that layout (arch=), "
                    "load the state, and call repack"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._packed = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GroupedLinear:
        dtype = fn(self.scales[:0]).dtype
        if dtype == torch.float64:
            raise TypeError("GroupedLinear: expected float16, bfloat16 or float32, got float64 to convert to")
        check_scales_as(self.scales, dtype, self.format)
        super()._apply(fn, recurse)
        self._packed = None  # its bytes are those from before: they would stay alive, and stay in use
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles hold the bytes once: as a Parameter.
        return self.__dict__ | {"_packed": None, "_packed_from": (None, None)}


def _description(part: Part) -> dict[str, Any]:
    """What the layers of all experts have in common: name -> value."""
    tensors = {name: getattr(part, name) for name in ("scales", "zeros", "bias", "perm")}
    shapes = {name: None if tensor is None else list(tensor.shape) for name, tensor in tensors.items()}
    return {"weight": part.weight.fields} | shapes
