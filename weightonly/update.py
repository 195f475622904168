"""Another dense weight in the memory of a quantized one: its columns, some at a time, quantized and packed in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .dense import WEIGHT_DTYPES, check_values, columns_at_once
from .layout import column_align, put_columns
from .least_squares import SearchFor
from .packed import PackedWeight
from .packing import padded_bytes
from .quantize import quantize_for
from .quantize_codes import check_code_groups
from .require import require_dtype, require_numbers, require_plain


class Weight(Protocol):
    """What is read of a `QuantizedWeight`, which has `update_`."""

    @property
    def packed(self) -> PackedWeight: ...
    @property
    def scales(self) -> torch.Tensor: ...
    @property
    def zeros(self) -> torch.Tensor | None: ...
    @property
    def perm(self) -> torch.Tensor | None: ...
    @property
    def groups(self) -> int: ...
    @property
    def group_rows(self) -> int: ...
    def expert(self, expert: int) -> Weight: ...


@dataclass(frozen=True)
class Update:
    """A dense weight that was checked, and the quantized weight w [K, N] that `write` makes of it.

    parts: [K', ...] side by side are [K', N]: the rows of w, in the order of x, with others before and after them that
        share groups with them.
    largest: the largest magnitude of the whole weight, of which `parts` may be a part.
    group_rows: rows of `parts` that share a scale. first: the row of `parts` that is the first one of w.
    order: int [K], the rows of `parts` in the order of those of w; None: they are in order.
    """

    w: Weight
    parts: Sequence[torch.Tensor]
    dtype: torch.dtype
    largest: float
    group_rows: int
    order: torch.Tensor | None
    first: int = 0

    @torch.no_grad()
    def write(self) -> None:
        """Bytes, scales and zeros, as `quantize` and `preprocess` make them of all columns at once."""
        w, packed = self.w, self.w.packed
        search: SearchFor = "whole" if _are_whole(w.zeros) else True
        size = packed.k_padded, packed.n_padded, packed.bits, packed.layout
        is_code = packed.is_code
        order = None if self.order is None else self.order.long()
        groups = (torch.arange(w.groups, device=packed.device) * w.group_rows + self.first) // self.group_rows
        step = columns_at_once(len(self.parts[0]), column_align(packed.bits, packed.layout))
        for begin in range(0, packed.n, step):
            columns = slice(begin, min(begin + step, packed.n))
            block = self._columns(columns.start, columns.stop)
            block = block if order is None else block[order]
            q, scales, zeros = quantize_for(
                block,
                self.dtype,
                packed.format,
                self.group_rows,
                w.zeros is None,
                search,
                code=packed.fields.get("code"),
                largest=self.largest,
            )
            q = q[self.first : self.first + packed.k]
            put_columns(packed.data, *size, begin, padded_bytes(q, packed.bits, packed.layout, is_code))
            w.scales[:, columns] = scales[groups]
            if w.zeros is not None and zeros is not None:
                w.zeros[:, columns] = zeros[groups]

    def _columns(self, begin: int, end: int) -> torch.Tensor:
        """Columns of the parts, on the device of w."""
        found, first = [], 0
        for part in self.parts:
            columns = part[:, max(begin - first, 0) : max(end - first, 0)]
            if columns.shape[1]:
                found.append(columns.to(self.w.packed.device))
            first += part.shape[1]
        return found[0] if len(found) == 1 else torch.cat(found, 1)


def _are_whole(zeros: torch.Tensor | None) -> bool:
    """Whether all zero points are whole numbers, as `search="whole"` makes them; a layer of zeros has none yet."""
    return zeros is not None and bool((zeros == zeros.round()).all() & zeros.any())


def checked(
    name: str, w: Weight, dense: torch.Tensor, dtype: torch.dtype | None = None, in_turns: bool = False
) -> list[Update]:
    """What makes w of dense [K, N], of stacked experts of [E, K, N]: an update for each; nothing is written yet.

    name: of the argument `dense` in errors. dtype: that scales and zeros are rounded to; None: theirs. in_turns:
    whether the even columns of `dense` are the first half of those of w.
    Raises what `QuantizedWeight.update_` raises.
    """
    check_dense(name, dense)
    packed, experts = w.packed, w.packed.experts
    shape = [*([] if experts is None else [experts]), packed.k, packed.n]
    if list(dense.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {list(dense.shape)}")
    check_target(w)
    dtype = w.scales.dtype if dtype is None else dtype
    each = [(name, w, dense)]
    if experts is not None:
        each = [(f"{name}: expert {e}", w.expert(e), dense[e]) for e in range(experts)]
    updates = []
    for title, one, matrix in each:
        parts = (matrix[:, ::2], matrix[:, 1::2]) if in_turns else (matrix,)
        updates.append(Update(one, parts, dtype, largest_of(title, matrix, dtype), one.group_rows, one.perm))
    return updates


def check_dense(name: str, dense: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless it is a plain tensor of floats with numbers."""
    require_dtype(name, dense, WEIGHT_DTYPES)
    require_plain(name, dense)
    require_numbers(name, dense)


def largest_of(name: str, dense: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest magnitude of [K, N]. Raises ValueError for NaN, Inf and numbers beyond `dtype`."""
    step = columns_at_once(len(dense), 1)
    return max(check_values(dense[:, n : n + step], dtype, name) for n in range(0, dense.shape[1], step))


def check_target(w: Weight) -> None:
    """Raises ValueError for a weight that nothing can be quantized into, or whose memory cannot be written."""
    packed = w.packed
    for name, tensor in (("packed", packed.data), ("scales", w.scales), ("zeros", w.zeros)):
        if tensor is None:
            continue
        require_plain(name, tensor)
        require_numbers(name, tensor)
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{name}: expected a tensor that can be written, got one of torch.inference_mode; "
                "update it in there, or make the weight outside"
            )
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in strides):
            raise ValueError(
                f"{name}: expected memory of its own for each number, got a view of strides "
                f"{tensor.stride()}; clone() it"
            )
    if packed.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("update_: expected no CUDA graph to be captured, as the host looks at the numbers")
    code = packed.code
    if code is not None:
        check_code_groups(packed.format, w.group_rows, packed.format == "code4")
        if packed.format == "code4" and max(map(abs, code)) > 1:
            raise ValueError(
                f"packed: expected a codebook within -1 .. 1, to which blocks are quantized, got {list(code)}"
            )
