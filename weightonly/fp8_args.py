"""Fp8Args and Fp8GroupedArgs: the arguments of products of activations in 8 bits, and what each of them must be."""

from __future__ import annotations

from typing import Any

import torch

from .args import CUDA_DTYPES, OP_SCHEMA, GemmArgs, GroupedArgs
from .heuristics import KernelConfig
from .layout import TILED_FP8
from .packed import PackedWeight
from .plain import PLAIN
from .require import require_dtype, require_tensor
from .weight import NO_PLAN, LooseWeight, QuantizedWeight, check_device, check_dtype

FP8_OP_SCHEMA = OP_SCHEMA.replace(") ->", ", Tensor x_scales) ->")
"""The operator `weightonly::gemm_fp8`: see `GemmArgs.to_op`."""


def check_fp8_layout(x: torch.Tensor, layout: str) -> None:
    """Raises ValueError for a layout that no kernel of a GPU reads for x in E4M3; x: on the device that computes."""
    if x.is_cuda and layout != TILED_FP8:
        raise ValueError(
            f"qweight: packed in layout {layout!r}, but x is float8_e4m3fn; repack(qweight, layout={TILED_FP8!r})"
        )


class _WithXScales(GemmArgs):
    """What a call with x_scales changes. The result, bias and `out` have the dtype of the scales."""

    __slots__ = ()

    x_scales: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def new_result(self) -> torch.Tensor:
        return self.weight._scales.new_empty(self.result_shape())

    def key(self) -> tuple[object, ...]:
        s = self.x_scales
        if type(s) not in PLAIN or s.is_neg():
            raise TypeError(NO_PLAN)
        return *super().key(), s.shape, s.is_contiguous() or s.stride(), s.dtype, s.device

    def to_op(self) -> tuple[Any, ...]:
        """The arguments of the operator: all but `out` and `config`."""
        return *super().to_op(), self.x_scales

    def tensors(self) -> dict[str, torch.Tensor]:
        return super().tensors() | {"x_scales": self.x_scales}

    def is_plain(self) -> bool:
        return super().is_plain() and type(self.x_scales) in PLAIN

    def check(self) -> None:
        super().check()
        x, scales, layout = self.x, self.x_scales, self.weight.packed.layout
        require_dtype("x_scales", scales, (torch.float32,))
        check_device("x_scales", scales, "x", x)
        if scales.shape != x.shape[:-1]:
            raise ValueError(
                f"x_scales: expected shape {list(x.shape[:-1])}, a scale for each row, got {list(scales.shape)}"
            )
        check_fp8_layout(x, layout)

    def check_no_gradient(self) -> None:
        """Raises ValueError where a gradient is asked for."""
        for name, tensor in self.tensors().items():
            if getattr(tensor, "requires_grad", False):
                raise ValueError(
                    f"{name}: expected a tensor that requires no gradient beside x_scales, got one that does; detach it"
                )

    def check_x(self) -> None:
        if self.x.dtype != torch.float8_e4m3fn:
            raise TypeError(f"x: expected dtype torch.float8_e4m3fn beside x_scales, got {self.x.dtype}")

    def check_weight(self) -> None:
        w, x = self.weight, self.x
        require_tensor("qweight", w.packed.data)
        check_device("qweight", w.packed.data, "x", x)
        w.check("qweight")
        if x.is_cuda:
            require_dtype("scales", w.scales, CUDA_DTYPES)

    def check_like(self, name: str, tensor: torch.Tensor) -> None:
        check_dtype(name, tensor, self.dtype, "scales have")
        check_device(name, tensor, "x", self.x)


class Fp8Args(_WithXScales):
    """The arguments of one call of `gemm` with x_scales."""

    __slots__ = ("x_scales",)

    def __init__(
        self,
        x: torch.Tensor,
        weight: QuantizedWeight,
        x_scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        out: torch.Tensor | None = None,
        config: KernelConfig | None = None,
    ) -> None:
        super().__init__(x, weight, bias, activation, out, config)
        self.x_scales = x_scales

    @classmethod
    def from_op(cls, x: torch.Tensor, *rest: Any) -> Fp8Args:
        """The inverse of `to_op`."""
        *weight, scales, zeros, bias, activation, perm, invariant, x_scales = rest
        args = cls(x, LooseWeight(PackedWeight(*weight), scales, zeros, perm), x_scales, bias, activation)
        args.invariant = invariant
        return args


class Fp8GroupedArgs(_WithXScales, GroupedArgs):
    """The arguments of one call of `grouped_gemm` with x_scales."""

    __slots__ = ("x_scales",)

    def __init__(self, x: torch.Tensor, weight: QuantizedWeight, x_scales: torch.Tensor, *rest: Any, **named: Any):
        """rest, named: as for GroupedArgs, from `offs` on."""
        super().__init__(x, weight, *rest, **named)
        self.x_scales = x_scales

    @classmethod
    def from_op(cls, x: torch.Tensor, *rest: Any) -> Fp8GroupedArgs:
        """The inverse of `to_op`."""
        *rest_of_16_bits, x_scales = rest
        of_16 = GroupedArgs.from_op(x, *rest_of_16_bits)
        args = cls(x, of_16.weight, x_scales, of_16.offs, of_16.bias, of_16.activation, has_rest=of_16.has_rest)
        args.invariant = of_16.invariant
        return args

    def of_each_call(self) -> tuple[torch.Tensor, ...]:
        return self.offs, self.x_scales

    def of_expert(self, expert: int, begin: int, end: int) -> Fp8Args:
        of_16 = super().of_expert(expert, begin, end)
        args = Fp8Args(of_16.x, of_16.weight, self.x_scales[begin:end], of_16.bias, of_16.activation, of_16.out)
        args.invariant = self.invariant
        return args
