"""GroupedArgs: the arguments of one call of `grouped_gemm`, and what each of them must be."""

from __future__ import annotations

from typing import Any

import torch

from .args import GemmArgs, HasKind, check_device
from .heuristics import KernelConfig
from .packed import PackedWeight
from .plain import PLAIN
from .require import require_dtype, require_tensor


class GroupedArgs(GemmArgs):
    """The arguments of one call of `grouped_gemm`, which says what each of them is.

    has_rest: whether rows may follow those of the last expert: they are of no expert here, and their results are zeros.
    """

    __slots__ = ("has_rest", "offs")

    def __init__(
        self,
        x: torch.Tensor,
        qweight: PackedWeight,
        scales: torch.Tensor,
        offs: torch.Tensor,
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        out: torch.Tensor | None = None,
        perm: torch.Tensor | None = None,
        has_rest: bool = False,
        config: KernelConfig | None = None,
        weight: HasKind | None = None,
    ) -> None:
        super().__init__(x, qweight, scales, zeros, bias, activation, out, config, perm, weight)
        self.offs = offs
        self.has_rest = has_rest

    def to_op(self) -> tuple[Any, ...]:
        """The arguments of the operator `weightonly::grouped_gemm`: all but `out`."""
        return *super().to_op(), self.qweight.experts, self.offs, self.has_rest

    @classmethod
    def from_op(cls, x: torch.Tensor, *rest: Any) -> GroupedArgs:
        """The inverse of `to_op`."""
        *weight, scales, zeros, bias, activation, perm, experts, offs, has_rest = rest
        qweight = PackedWeight(*weight, experts=experts)
        return cls(x, qweight, scales, offs, zeros, bias, activation, None, perm, has_rest)

    def tensors(self) -> dict[str, torch.Tensor]:
        return super().tensors() | {"offs": self.offs}

    def is_plain(self) -> bool:
        return super().is_plain() and type(self.offs) in PLAIN

    def check(self) -> None:
        """Checks everything but `out` and the numbers in `offs` and `perm`."""
        x, qweight, offs = self.x, self.qweight, self.offs
        if not isinstance(qweight, PackedWeight):
            raise TypeError(
                f"qweight: expected the PackedWeight that weightonly.preprocess(q) returns for q [E, K, N], "
                f"got {type(qweight).__name__}"
            )
        experts = qweight.experts
        if experts is None:
            raise ValueError(
                f"qweight: expected stacked experts, packed from q [E, K, N], got one weight {qweight!r}; "
                f"gemm multiplies by it"
            )
        require_tensor("qweight", qweight.data)
        require_tensor("x", x)
        if self.out is not None:
            require_tensor("out", self.out)
            if self.out.dim() != 2:
                raise ValueError(f"out: expected shape [T, N], got {list(self.out.shape)}")
        if x.dim() != 2:
            raise ValueError(f"x: expected shape [T, K], rows sorted by expert, got {list(x.shape)}")
        shapes = {"scales": "K / g, N", "zeros": "K / g, N", "bias": "N", "perm": "K"}
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is None and name != "scales":
                continue
            require_tensor(name, tensor)
            if tensor.dim() != shape.count(",") + 2 or tensor.shape[0] != experts:
                raise ValueError(f"{name}: expected shape [E = {experts}, {shape}], got {list(tensor.shape)}")
        self.of_expert(0, 0, x.shape[0]).check()
        require_dtype("offs", offs, (torch.int32,))
        if tuple(offs.shape) != (experts,):
            raise ValueError(f"offs: expected shape [E] = [{experts}], got {list(offs.shape)}")
        check_device("offs", offs, x)

    def of_expert(self, expert: int, begin: int, end: int) -> GemmArgs:
        """The product of rows begin..end, which are those of one expert."""
        zeros, bias, perm = (None if t is None else t[expert] for t in (self.zeros, self.bias, self.perm))
        return GemmArgs(
            self.x[begin:end],
            self.qweight[expert],
            self.scales[expert],
            zeros,
            bias,
            self.activation,
            None if self.out is None else self.out[begin:end],
            None,
            perm,
        )
