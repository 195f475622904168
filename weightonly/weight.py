"""QuantizedWeight: a packed weight with all that it is multiplied with, as one operand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .args import check_perm, check_perm_expected
from .dense import check_weight_dtype
from .formats.plain import unsort_rows
from .ops.dequantize import check_operands, dequantize
from .packed import PackedWeight
from .plan.cache import kind_of_operands
from .require import require_tensor


class QuantizedWeight:
    """w[k, n] = scales[k // g, n] * (q[k, n] - zeros[k // g, n]), the one operand of `gemm(x, w)`.

    packed: the PackedWeight of q [K, N], or of stacked experts [E, K, N]: what `preprocess` returns.
    scales: [K / g, N], of stacked experts [E, K / g, N]: float16, bfloat16 or float32, for `gemm` the dtype of x; g is
        any divisor of K, for `gemm` one that it takes.
    zeros: None (symmetric) or like scales, in units of q. None for a codebook.
    perm: int32 or int64 [K], of stacked experts [E, K]: act-order, as `gemm` has it; None: the rows are in order.

    All are on one device and stay the caller's tensors, without a copy. What they have to be is checked here, once.
    Attributes: packed, scales, zeros, perm, which cannot be replaced, and what is read of them: format, group_size (-1:
    all of K), k, n, experts (None: a single weight), dtype (of the scales), device.

    Raises TypeError for a `packed` that is none and for wrong types and dtypes; ValueError for shapes that do not fit,
    tensors on different devices, zeros of codes, and what `packed` was not packed for.
    """

    __slots__ = ("_kind", "_packed", "_perm", "_scales", "_zeros")

    def __init__(
        self,
        packed: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        perm: torch.Tensor | None = None,
    ) -> None:
        check_operands(packed, scales, zeros, "packed")
        if perm is not None:
            require_tensor("perm", perm)
            if packed.experts is not None and (perm.dim() != 2 or len(perm) != packed.experts):
                raise ValueError(f"perm: expected shape [E, K] = {[packed.experts, packed.k]}, got {list(perm.shape)}")
            check_perm(perm if packed.experts is None else perm[0], packed.k)
            if perm.device != packed.device:
                raise ValueError(f"perm: expected on {packed.device} as packed is, got {perm.device}")
        check_perm_expected(packed, perm)
        self._packed = packed
        self._scales = scales
        self._zeros = zeros
        self._perm = perm
        self._kind: object | None = None

    @property
    def packed(self) -> PackedWeight:
        return self._packed

    @property
    def scales(self) -> torch.Tensor:
        return self._scales

    @property
    def zeros(self) -> torch.Tensor | None:
        return self._zeros

    @property
    def perm(self) -> torch.Tensor | None:
        return self._perm

    @property
    def format(self) -> str:
        return self._packed.format

    @property
    def group_size(self) -> int:
        groups = self._scales.shape[-2]
        return -1 if groups == 1 else self.k // groups

    @property
    def k(self) -> int:
        return self._packed.k

    @property
    def n(self) -> int:
        return self._packed.n

    @property
    def experts(self) -> int | None:
        return self._packed.experts

    @property
    def dtype(self) -> torch.dtype:
        return self._scales.dtype

    @property
    def device(self) -> torch.device:
        return self._packed.device

    @property
    def kind(self) -> object:
        """What a plan of `gemm` depends on: weights of one kind have the same one, compared by identity; cached."""
        return self._kind or self.look_again()

    def look_again(self) -> object:
        """`kind` of the tensors as they are now: `tensor.data = ...` changes them under this weight.

        Raises TypeError for subclasses of torch.Tensor and negated views, which have none.
        """
        self._kind = None
        self._kind = kind = kind_of_operands(self._packed, self._scales, self._zeros, self._perm)
        return kind

    def to(self, device: torch.device | str | int) -> QuantizedWeight:
        """The same numbers on `device`; `self` if all are there already."""
        packed = self._packed.to(device)
        if packed is self._packed:
            return self
        zeros, perm = (None if t is None else t.to(packed.device) for t in (self._zeros, self._perm))
        return QuantizedWeight(packed, self._scales.to(packed.device), zeros, perm)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """w [K, N], of stacked experts [E, K, N], its rows in the order of x: computed in fp32 and rounded once.

        dtype: float16, bfloat16 or float32; None: that of the scales. Raises TypeError for another one.
        """
        scales, zeros, perm = self._scales, self._zeros, self._perm
        dtype = scales.dtype if dtype is None else dtype
        check_weight_dtype(dtype)
        if dtype != scales.dtype:
            scales, zeros = scales.float(), None if zeros is None else zeros.float()
        w = dequantize(self._packed, scales, zeros)
        if perm is not None and perm.dim() == 2:
            w = torch.stack([unsort_rows(*of_expert) for of_expert in zip(w, perm, strict=True)])
        else:
            w = unsort_rows(w, perm)
        return w.to(dtype)

    def __getitem__(self, expert: int) -> QuantizedWeight:
        """One of stacked experts, on the same memory. Raises what `PackedWeight` does for its index."""
        packed = self._packed[expert]
        zeros, perm = (None if t is None else t[expert] for t in (self._zeros, self._perm))
        return QuantizedWeight(packed, self._scales[expert], zeros, perm)

    def __iter__(self) -> Iterator[QuantizedWeight]:
        if self.experts is None:
            raise TypeError(f"expected stacked experts, got one weight {self!r}")
        return map(self.__getitem__, range(self.experts))

    def __repr__(self) -> str:
        size = [*([self.experts] if self.experts else []), self.k, self.n]
        return (
            f"QuantizedWeight({self.format} {size}, group_size={self.group_size}, zeros={self._zeros is not None}, "
            f"perm={self._perm is not None}, {self.dtype} on {self.device})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return QuantizedWeight, (self._packed, self._scales, self._zeros, self._perm)


def parts_of(
    weight: PackedWeight | QuantizedWeight,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
) -> tuple[Any, Any, torch.Tensor | None, torch.Tensor | None]:
    """(packed, scales, zeros, perm) of a QuantizedWeight, or as they are given: unchecked then.

    Raises what `check_alone` raises.
    """
    if not isinstance(weight, QuantizedWeight):
        return weight, scales, zeros, perm
    check_alone(scales=scales, zeros=zeros, perm=perm)
    return weight.packed, weight.scales, weight.zeros, weight.perm


def check_alone(**operands: torch.Tensor | None) -> None:
    """Raises TypeError for operands beside a QuantizedWeight."""
    for name, operand in operands.items():
        if operand is not None:
            got = type(operand).__name__
            raise TypeError(f"{name}: expected None beside a QuantizedWeight, which has its own, got {got}")
