"""The pass of "cpu" and its inverse.

"cpu" is the order in which a CPU multiplies: a vector of columns takes the same row of the weight in each of its lanes.
From the outside in:

    weight   panel 0 | panel 1 | ...      a panel: 32 columns n; panels follow each other along n
    panel    step 0 | step 1 | ...        a step: 32 / bits rows k, one 32-bit word for each column of the panel
    word     int4, codes  bits  31..28  27..24  23..20  19..16 | 15..12  11..8   7..4    3..0
                          k       7       5       3       1    |   6       4       2       0
             int8         bits      31..24          23..16     |     15..8           7..0
                          k           3               1        |       2               0

Even rows are in the lower half of a word, odd ones in the upper half: a shift and a look-up by 16 bits give a pair of
neighbouring rows, which is what matrix instructions of 16-bit numbers take; a shift and a look-up by 32 bits give one
row. Integers are stored with the bias 2^(bits - 1), codes as they are.

A slice of the panels is a slice of the columns, and a slice of the steps in every panel one of the rows.
"""

from __future__ import annotations

import torch

from .shapes import PANEL, check_multiple


def pack_panels(q: torch.Tensor, bits: int, bias: int) -> torch.Tensor:
    """int8 or uint8 [K, N], values with `bias` added unsigned -> uint8 [N / 32, K * 4 * bits], a panel in each row."""
    k, n = q.shape
    count = 32 // bits
    steps, panels = k // check_multiple("rows of q", k, count), n // check_multiple("columns of q", n, PANEL)
    rows = q.contiguous().view(steps, count, n)
    words = torch.full(
        (steps, n), _signed(sum(bias << shift for shift in _shifts(bits))), dtype=torch.int32, device=q.device
    )
    for row, shift in enumerate(_shifts(bits)):
        words.add_(rows[:, row], alpha=1 << shift)  # modulo 2^32: negative values borrow from the bias above them
    words = words.view(steps, panels, PANEL).transpose(0, 1).contiguous()  # (panel, step, column)
    return words.view(torch.uint8).view(panels, k * PANEL * bits // 8)


def unpack_panels(data: torch.Tensor, bits: int, bias: int) -> torch.Tensor:
    """The inverse of `pack_panels`: uint8 [panels, bytes] -> int8 [K, 32 * panels]."""
    panels, length_bytes = data.shape
    count = 32 // bits
    steps = length_bytes // check_multiple("bytes of a row", length_bytes, 4 * PANEL)
    words = data.contiguous().view(torch.int32).view(panels, steps, PANEL).transpose(0, 1).reshape(steps, -1)
    q = torch.empty(steps, count, panels * PANEL, dtype=torch.int8, device=data.device)
    for row, shift in enumerate(_shifts(bits)):
        q[:, row] = (words >> shift).bitwise_and_((1 << bits) - 1).sub_(bias)
    return q.view(steps * count, panels * PANEL)


def _shifts(bits: int) -> list[int]:
    """Row of a step -> where its bits are in the word."""
    return [bits * (row // 2) + 16 * (row % 2) for row in range(32 // bits)]


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned 32-bit word."""
    return word - (1 << 32) if word >> 31 else word
