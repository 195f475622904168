"""Names of the layouts, the sizes that they pad to, and the checks that all passes share."""

from __future__ import annotations

import torch

from ..heuristics.problem import CODE_LAYOUTS as GPU_CODE_LAYOUTS
from ..heuristics.problem import FP8_LAYOUT, K_ALIGNMENT
from ..heuristics.problem import LAYOUTS as GPU_LAYOUTS
from ..require import require_dtype

ROW_MAJOR, INTERLEAVED, TILED = GPU_LAYOUTS

CPU = "cpu"

LAYOUTS = (*GPU_LAYOUTS, CPU)
"""Layouts of every integer format, for x in 16 bits."""

TILED_FP8 = FP8_LAYOUT
"""For x in E4M3: symmetric integers of 4 bits, and codes of E2M1."""

CODE_LAYOUTS = (*GPU_CODE_LAYOUTS, CPU)
"""Layouts that codes of numbers are packed in."""

SLICED_LAYOUTS = (TILED, TILED_FP8, CPU)
"""Layouts that `slice_n` and `slice_k` cut."""

K_ALIGN = K_ALIGNMENT
"""K is padded to a multiple of this: 64 activations of 16 bits are one 128-byte line."""

N_ALIGN = {4: 64, 8: 32}
"""Bits per weight -> N of row_major and interleaved is padded to a multiple of this (FasterTransformer's limits)."""

_PIECE_BYTES = 32
"""Of a row of K in `stored_shape`: it divides every padded row."""

TILE = 64
"""Rows of a k_block of "tiled", four times the K of a wgmma; columns of a panel, its M. N is padded to it."""

PANEL = 32
"""Columns of a panel of "cpu": two vectors of 16 fp32 numbers, which gives a product two independent sums."""


def padded_shape(k: int, n: int, bits: int, layout: str) -> tuple[int, int]:
    """The shape that the passes of `layout` work on: K and N rounded up to K_ALIGN and `column_align`."""
    align = column_align(bits, layout)
    return -(-k // K_ALIGN) * K_ALIGN, -(-n // align) * align


def column_align(bits: int, layout: str) -> int:
    """N is padded to a multiple of this. Raises ValueError for unknown `bits` or an unknown layout."""
    check_bits(bits)
    check_layout(layout)
    if layout == TILED_FP8 and bits != 4:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)} for {bits} bits, got {layout!r}")
    return TILE if layout in SLICED_LAYOUTS else N_ALIGN[bits]


def column_step(bits: int, layout: str) -> int:
    """`unpack_bytes(columns=...)` cuts at multiples of this: the weights in one 32-bit word, or a panel."""
    return {TILED: TILE, TILED_FP8: TILE, CPU: PANEL}.get(layout, 32 // bits)


def block_bytes(bits: int) -> int:
    """Bytes of a k_block of "tiled": 64 rows of one column panel."""
    return TILE * TILE * bits // 8


def stored_shape(k_padded: int, n_padded: int, bits: int, layout: str) -> tuple[int, ...]:
    """The shape that layers and files give the bytes of a weight: a view of what `pack_bytes` returns.

    tiled        [N / 64, K / 64 * block_bytes]    panels of columns: dim 0 is N, dim 1 is K
    tiled_fp8    [N / 64, K / 64, block_bytes]     the same
    cpu          [N / 32, K * 4 * bits]            the same with panels of 32 columns
    interleaved  [N / I, K * I * bits / 8]         lines of I = 16 / bits columns
    row_major    [K * (N * bits / 256), 32]        rows of K, cut into 32 bytes

    No two layouts have the same shape for one weight: 32 bytes are fewer than a line or a panel has.
    """
    if layout == TILED_FP8:
        return n_padded // TILE, k_padded // TILE, block_bytes(bits)
    if layout in SLICED_LAYOUTS:
        panel = column_step(bits, layout)
        return n_padded // panel, k_padded * panel * bits // 8
    total_bytes = k_padded * n_padded * bits // 8
    rows = total_bytes // _PIECE_BYTES if layout == ROW_MAJOR else n_padded * bits // 16
    return rows, total_bytes // rows


def check_bits(bits: int) -> None:
    """Raise ValueError unless `bits` is 4 or 8."""
    if type(bits) is not int or bits not in N_ALIGN:
        raise ValueError(f"bits: expected 4 or 8, got {bits!r}")


def check_layout(layout: str) -> None:
    """Raise ValueError unless `layout` is one of LAYOUTS, or TILED_FP8."""
    layouts = (*LAYOUTS, TILED_FP8)
    if layout not in layouts:
        raise ValueError(f"layout: expected one of {', '.join(layouts)}, got {layout!r}")


def check_range(q: torch.Tensor, bits: int) -> None:
    """Raise ValueError unless all of `q` fits into `bits` signed bits (the one host sync of packing)."""
    matrix_shape(q, bits)
    if bits == 8 or q.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(q)).tolist()
    limit = 1 << (bits - 1)
    if low < -limit or high >= limit:
        raise ValueError(f"q: expected values in {-limit}..{limit - 1} for bits={bits}, got {low}..{high}")


def check_code_layout(bits: int, layout: str) -> None:
    """Raise ValueError unless codes are packed like this: 4 or 8 bits, one of CODE_LAYOUTS."""
    check_bits(bits)
    if layout not in CODE_LAYOUTS:
        expected = " or ".join(map(repr, CODE_LAYOUTS))
        raise ValueError(f"layout: expected {expected} for codes of a codebook, got {layout!r}")


def check_codes(q: torch.Tensor, bits: int = 4) -> None:
    """Raise ValueError unless all of `q` is within 0..15 (the one host sync of packing); codes of 8 bits are any."""
    matrix_shape(q, bits)
    if bits == 8 or q.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(q)).tolist()
    if low < 0 or high > 15:
        raise ValueError(f"q: expected codes in 0..15, got {low}..{high}")


def matrix_shape(q: torch.Tensor, bits: int | None = None) -> tuple[int, int]:
    """The shape of `q`. Raises TypeError unless it is int8, ValueError unless it has two dimensions."""
    if bits is not None:
        check_bits(bits)
    require_dtype("q", q, (torch.int8,))
    if q.dim() != 2:
        raise ValueError(f"q: expected 2 dimensions, got shape {list(q.shape)}")
    return q.shape[0], q.shape[1]


def check_multiple(what: str, size: int, multiple: int) -> int:
    """`multiple`. Raises ValueError, naming `what`, unless it divides `size`."""
    if size % multiple:
        raise ValueError(f"{what}: expected a multiple of {multiple}, got {size}")
    return multiple
