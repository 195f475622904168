"""GroupedArgs: the arguments of one call of `grouped_gemm`, and what each of them must be."""

from __future__ import annotations

from typing import Any

import torch

from .args import GemmArgs
from .heuristics import KernelConfig
from .packed import PackedWeight
from .plain import PLAIN
from .require import require_dtype, require_tensor
from .weight import LooseWeight, QuantizedWeight, check_device


class GroupedArgs(GemmArgs):
    """The arguments of one call of `grouped_gemm`, which says what each of them is.

    has_rest: whether rows may follow those of the last expert: they are of no expert here, and their results are zeros.
    """

    __slots__ = ("has_rest", "offs")

    def __init__(
        self,
        x: torch.Tensor,
        weight: QuantizedWeight,
        offs: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        out: torch.Tensor | None = None,
        config: KernelConfig | None = None,
        has_rest: bool = False,
    ) -> None:
        super().__init__(x, weight, bias, activation, out, config)
        self.offs = offs
        self.has_rest = has_rest

    def key(self) -> tuple[object, ...]:
        offs = self.offs
        return *super().key(), self.has_rest, offs.shape, offs.dtype, offs.device

    def to_op(self) -> tuple[Any, ...]:
        """The arguments of the operator `weightonly::grouped_gemm`: all but `out`."""
        return *super().to_op(), self.weight.experts, self.offs, self.has_rest

    @classmethod
    def from_op(cls, x: torch.Tensor, *rest: Any) -> GroupedArgs:
        """The inverse of `to_op`."""
        *fields, scales, zeros, bias, activation, perm, experts, offs, has_rest = rest
        weight = LooseWeight(PackedWeight(*fields, experts=experts), scales, zeros, perm)
        return cls(x, weight, offs, bias, activation, has_rest=has_rest)

    def tensors(self) -> dict[str, torch.Tensor]:
        return super().tensors() | {"offs": self.offs}

    def is_plain(self) -> bool:
        return super().is_plain() and type(self.offs) in PLAIN

    def check(self) -> None:
        """Checks everything but `out` and the numbers in `offs` and `perm`."""
        super().check()
        x, offs, experts = self.x, self.offs, self.weight.experts
        if x.dim() != 2:
            raise ValueError(f"x: expected shape [T, K], rows sorted by expert, got {list(x.shape)}")
        if self.out is not None:
            require_tensor("out", self.out)
            if self.out.dim() != 2:
                raise ValueError(f"out: expected shape [T, N], got {list(self.out.shape)}")
        require_dtype("offs", offs, (torch.int32,))
        if tuple(offs.shape) != (experts,):
            raise ValueError(f"offs: expected shape [E] = [{experts}], got {list(offs.shape)}")
        check_device("offs", offs, "x", x)

    def check_stack(self, packed: PackedWeight) -> None:
        if packed.experts is None:
            raise ValueError(
                f"qweight: expected stacked experts, packed from q [E, K, N], got one weight {packed!r}; "
                f"gemm multiplies by it"
            )

    def of_expert(self, expert: int, begin: int, end: int) -> GemmArgs:
        """The product of rows begin..end, which are those of one expert."""
        bias = None if self.bias is None else self.bias[expert]
        out = None if self.out is None else self.out[begin:end]
        return GemmArgs(self.x[begin:end], self.weight.expert(expert), bias, self.activation, out)
