"""QuantizedWeight: a packed weight with all that it is multiplied with, as one operand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .dense import WEIGHT_DTYPES, check_weight_dtype
from .formats.plain import unsort_rows
from .layout import TILED_FP8
from .ops.dequantize import dense
from .packed import PackedWeight, kind_of
from .plain import PLAIN
from .require import require_dtype, require_tensor
from .update import checked

NO_PLAN = "a subclass of torch.Tensor has no plan, nor has a negated view"


class QuantizedWeight:
    """`w[k, n] = scales[k // g, n] * (q[k, n] - zeros[k // g, n])`, the one operand of `gemm(x, w)`.

    All are on one device and stay the caller's tensors, without a copy. What they have to be is checked here, once. Its
    attributes are these four, which cannot be replaced, and what is read of them: format, group_size (-1: all of K),
    group_rows (g), groups (K / g), k, n, experts (None: a single weight), dtype (of the scales), device.

    Args:
        packed: the PackedWeight of q [K, N], or of stacked experts [E, K, N]: what `preprocess` returns.
        scales: [K / g, N], of stacked experts [E, K / g, N]: float16, bfloat16 or float32, for `gemm` the dtype of x; g
            is any divisor of K, for `gemm` one that it takes.
        zeros: None (symmetric) or like scales, in units of q. None for a codebook.
        perm: int32 or int64 [K], of stacked experts [E, K]: act-order, as `gemm` has it; None: the rows are in order.

    Raises:
        TypeError: a `packed` that is none and for wrong types and dtypes.
        ValueError: shapes that do not fit, tensors on different devices, zeros of codes, and what `packed` was not
            packed for.

    Examples:
        >>> q, scales, zeros = wo.quantize(torch.randn(512, 768), symmetric=False)
        >>> w = wo.QuantizedWeight(wo.preprocess(q), scales, zeros)
        >>> wo.gemm(torch.randn(4, 512), w).shape
        torch.Size([4, 768])
    """

    __slots__ = ("_kind", "_packed", "_perm", "_scales", "_zeros")

    def __init__(
        self,
        packed: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        perm: torch.Tensor | None = None,
    ) -> None:
        self._packed = packed
        self._scales = scales
        self._zeros = zeros
        self._perm = perm
        self._kind: object | None = None
        self.check("packed")

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
        return -1 if self.groups == 1 else self.group_rows

    @property
    def groups(self) -> int:
        return self._scales.shape[-2]

    @property
    def group_rows(self) -> int:
        return self.k // self.groups

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

        Raises:
            TypeError: subclasses of torch.Tensor and negated views, which have none.
        """
        self._kind = None
        tensors = (self._scales, self._zeros, self._perm)
        if any(t is not None and (type(t) not in PLAIN or t.is_neg()) for t in tensors):
            raise TypeError(NO_PLAN)
        described = (None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        self._kind = kind = kind_of(self._packed.kind, *described)
        return kind

    def check(self, name: str, x: torch.Tensor | None = None) -> None:
        """Checks all but the numbers.

        Raises what `QuantizedWeight` raises.

        Args:
            name: what errors call `packed`.
            x: all must have its dtype and device.
        """
        self.check_groups(name, x)
        packed, perm = self._packed, self._perm
        if packed.has_perm is not None and packed.has_perm != (perm is not None):
            expected = "the act-order permutation" if packed.has_perm else "None"
            got = "None" if perm is None else "a permutation"
            raise ValueError(f"perm: expected {expected}, as qweight was packed for, got {got}")
        if perm is not None:
            check_perm(perm, packed)
            of, like = (name, packed.data) if x is None else ("x", x)
            check_device("perm", perm, of, like)

    def check_groups(self, name: str, x: torch.Tensor | None = None) -> None:
        """`check` of all but the permutation."""
        packed, scales, zeros = self._packed, self._scales, self._zeros
        check_packed(name, packed)
        require_tensor(name, packed.data)
        of, like = (name, packed.data) if x is None else ("x", x)
        check_device(name, packed.data, of, like)
        if x is None:
            require_dtype("scales", scales, WEIGHT_DTYPES)
        else:
            check_dtype("scales", scales, x.dtype, "x has")
        self._check_rows("scales", scales, of, like)
        if zeros is not None:
            if packed.layout == TILED_FP8:
                raise ValueError(f"zeros: expected None in layout {packed.layout!r}, got {type(zeros).__name__}")
            if packed.is_code:
                raise ValueError(
                    f"zeros: expected None for a weight of format {packed.format}, got {type(zeros).__name__}"
                )
            check_dtype("zeros", zeros, scales.dtype, "scales have" if x is None else "x has")
            self._check_rows("zeros", zeros, of, like)
            if zeros.shape != scales.shape:
                raise ValueError(f"zeros: expected shape {list(scales.shape)} as scales, got {list(zeros.shape)}")
        if packed.group_size is not None:
            rows = packed.k if packed.group_size == -1 else packed.group_size
            if self.groups != packed.k // rows:
                raise ValueError(
                    f"scales: expected {packed.k // rows} rows for groups of {rows}, as qweight was packed for, "
                    f"got shape {list(scales.shape)}"
                )
        if packed.has_zeros is not None and packed.has_zeros != (zeros is not None):
            expected = f"shape {list(scales.shape)}" if packed.has_zeros else "None"
            got = "None" if zeros is None else f"shape {list(zeros.shape)}"
            cure = "; zeros= takes those of quantize" if zeros is None else ""
            raise ValueError(f"zeros: expected {expected}, as qweight was packed for, got {got}{cure}")

    def _check_rows(self, name: str, rows: torch.Tensor, of: str, like: torch.Tensor) -> None:
        """Device and shape of scales or zeros."""
        w = self._packed
        check_device(name, rows, of, like)
        stack = [] if w.experts is None else [w.experts]
        if rows.dim() != len(stack) + 2 or rows.shape[-1] != w.n or list(rows.shape[:-2]) != stack:
            experts = "" if w.experts is None else f"E = {w.experts}, "
            raise ValueError(f"{name}: expected shape [{experts}K / group_size, N = {w.n}], got {list(rows.shape)}")
        if rows.shape[-2] < 1 or w.k % rows.shape[-2]:
            raise ValueError(
                f"{name}: expected K / group_size rows, a divisor of K = {w.k}, got shape {list(rows.shape)}"
            )

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

        Args:
            dtype: float16, bfloat16 or float32; None: the dtype of the scales.

        Raises:
            TypeError: another dtype.
        """
        dtype = self.dtype if dtype is None else dtype
        check_weight_dtype(dtype)
        return self._dense(dtype)

    def update_(self, w: torch.Tensor) -> QuantizedWeight:
        """Quantizes another weight into the memory of this one: the bits of a fresh `quantize` and `preprocess`.

        Format, group size, zero points or none, perm, layout and dtype stay as they are, and so do the addresses: what
        holds the tensors, captured CUDA graphs and compiled functions sees the new numbers. Where all zero points are
        whole numbers, the new ones are, too, as with `search="whole"`. Columns are quantized some at a time: beside `w`
        no more than those is in memory. Versions of the tensors go up, so that a backward pass
        over the old numbers is an error. All weights on the same bytes change, and have to share the scales, too.

        Args:
            w: [K, N], of stacked experts [E, K, N], as `quantize` takes it: its rows in the order of x, on any device.
                Of a weight in act-order the rows are brought into the order that `perm` has.

        Returns:
            This weight. All is checked before anything is written; an allocation that fails later leaves a part of the
            new columns.

        Raises:
            TypeError: another dtype, and a subclass of torch.Tensor.
            ValueError: another shape, NaN, Inf and numbers beyond the dtype of the scales, a weight on meta, tensors of
                torch.inference_mode outside of it and views with a stride of 0, and codes that nothing is quantized to:
                other groups than `quantize` makes, and a codebook ("code4") beyond -1 .. 1.
            RuntimeError: while a CUDA graph is captured.

        Examples:
            >>> q, scales, _ = wo.quantize(torch.randn(512, 768))
            >>> w = wo.QuantizedWeight(wo.preprocess(q), scales).update_(torch.randn(512, 768))
        """
        for update in checked("w", self, w):
            update.write()
        return self

    def with_dtype(self, dtype: torch.dtype) -> QuantizedWeight:
        """The same bytes with scales and zeros in `dtype`, unchecked; `self` if they have it."""
        zeros = self._zeros
        if dtype == self.dtype and (zeros is None or zeros.dtype == dtype):
            return self
        zeros = None if zeros is None else zeros.to(dtype)
        return LooseWeight(self._packed, self._scales.to(dtype), zeros, self._perm)

    def _dense(self, dtype: torch.dtype) -> torch.Tensor:
        if self.experts is not None:  # one at a time is in fp32
            stack = self._scales.new_empty(self.experts, self.k, self.n, dtype=dtype)
            for expert in range(self.experts):
                stack[expert] = self.expert(expert)._dense(dtype)
            return stack
        w = self if dtype == self.dtype else self.with_dtype(torch.float32)
        return unsort_rows(dense(w._packed, w._scales, w._zeros), w._perm).to(dtype)

    def __getitem__(self, expert: int) -> QuantizedWeight:
        """One of stacked experts, on the same memory. Raises what `PackedWeight` does for its index."""
        w = self.expert(expert)
        return QuantizedWeight(w._packed, w._scales, w._zeros, w._perm)

    def expert(self, expert: int) -> LooseWeight:
        """The same, which is not checked again."""
        packed = self._packed[expert]
        zeros, perm = (None if t is None else t[expert] for t in (self._zeros, self._perm))
        return LooseWeight(packed, self._scales[expert], zeros, perm)

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


class LooseWeight(QuantizedWeight):
    """The tensors that a caller of `gemm` gave one by one, for this call: unchecked until a plan of it is made."""

    __slots__ = ()

    def __init__(
        self,
        packed: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        perm: torch.Tensor | None = None,
    ) -> None:
        self._packed = packed
        self._scales = scales
        self._zeros = zeros
        self._perm = perm
        self._kind = None


def weight_of(
    weight: PackedWeight | QuantizedWeight,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
) -> QuantizedWeight:
    """The weight, or the one of these tensors, unchecked. Raises TypeError for operands beside a QuantizedWeight."""
    if not isinstance(weight, QuantizedWeight):
        return LooseWeight(weight, scales, zeros, perm)  # type: ignore[arg-type]
    if scales is not None or zeros is not None or perm is not None:
        named = {"scales": scales, "zeros": zeros, "perm": perm}
        name, got = next((name, type(operand).__name__) for name, operand in named.items() if operand is not None)
        raise TypeError(f"{name}: expected None beside a QuantizedWeight, which has its own, got {got}")
    return weight


def dequantize(qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
    """`w[k, n] = scales[k // g, n] * (q[k, n] - zeros[k // g, n])`; for codes `scales[k // g, n] * codebook[q[k, n]]`.

    Of "fp8" q are the numbers.

    All are on one device.

    On a GPU a kernel does it. PyTorch's operators do it more slowly, with the same bits, where there is no kernel
    (layout "row_major", fp32, groups that `gemm` does not take, a GPU that the build leaves out), under torch.compile,
    torch.jit.trace and modes, for subclasses of torch.Tensor, and where a gradient is asked for.

    Args:
        qweight: a packed [K, N] weight, or E of them, stacked.
        scales: [K / g, N], of stacked experts [E, K / g, N]: float16, bfloat16 or float32; g is any divisor of K.
        zeros: None, or like scales, in units of q; fractions are allowed. None for codes.

    Returns:
        [K, N], of stacked experts [E, K, N], in the dtype of scales: computed in fp32 and rounded once.

    Raises:
        TypeError: a qweight that is not packed or a wrong dtype.
        ValueError: shapes that do not fit, tensors on different devices, and zeros of codes.

    Examples:
        >>> w = torch.randn(512, 768)
        >>> q, scales, zeros = wo.quantize(w, group_size=32, symmetric=False)
        >>> bool((wo.dequantize(wo.preprocess(q), scales, zeros) - w).norm() < 0.09 * w.norm())
        True
    """
    w = LooseWeight(qweight, scales, zeros)
    w.check_groups("qweight")
    return w._dense(scales.dtype)


def check_perm(perm: torch.Tensor, packed: PackedWeight) -> None:
    """Checks dtype and shape of a permutation of K, not its numbers."""
    require_dtype("perm", perm, (torch.int32, torch.int64))
    shape, sizes = ("[K]", [packed.k]) if packed.experts is None else ("[E, K]", [packed.experts, packed.k])
    if list(perm.shape) != sizes:
        raise ValueError(f"perm: expected shape {shape} = {sizes}, got {list(perm.shape)}")


def check_packed(name: str, packed: object) -> None:
    """Raises TypeError for anything but a PackedWeight."""
    if not isinstance(packed, PackedWeight):
        raise TypeError(
            f"{name}: expected the PackedWeight that weightonly.preprocess(q, bits) returns, "
            f"got {type(packed).__name__}; call preprocess once, before deployment"
        )


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype, as_what: str) -> None:
    """Raises TypeError for no tensor and one of another dtype, which the text names "as x has"."""
    require_tensor(name, tensor)
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype} as {as_what}, got {tensor.dtype}")


def check_device(name: str, tensor: torch.Tensor, of: str, other: torch.Tensor) -> None:
    """Raises ValueError for a tensor that is not where the other is, which the text calls `of`."""
    if tensor.device != other.device:
        raise ValueError(f"{name}: expected on {other.device} as {of} is, got {tensor.device}")
