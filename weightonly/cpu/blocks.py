"""How a block of 64 x 64 of a GPU's layout becomes one of "cpu": the order of its elements, asked of the layouts."""

from __future__ import annotations

import functools

import torch

from ..layout import CPU, INTERLEAVED, TILE, TILED, block_bytes, pack_bytes
from ..packed import PackedWeight

FIELDS = ("block_order", "block_stride_k", "block_stride_n", "segment_stride", "segments", "segment_bytes")
"""Of GemmParams (kernels/cpu/params.h): where the blocks of a weight are."""


def blocks_of(w: PackedWeight) -> tuple[int, ...]:
    """FIELDS of a weight in another layout than "cpu", with a padded N that is a multiple of 64."""
    bits, k, n = w.bits, w.k_padded, w.n_padded
    order = order_of(bits, w.layout, w.is_code).data_ptr()
    if w.layout == TILED:  # a block is contiguous
        size = block_bytes(bits)
        return order, size, k // TILE * size, 0, 1, size
    row_bytes = TILE * bits // 8
    if w.layout == INTERLEAVED:  # lines of 16 / bits columns, in each 64 rows of every column: 128 bytes
        columns = 16 // bits
        return order, columns * row_bytes, TILE * k * bits // 8, columns * k * bits // 8, TILE // columns, 128
    return order, TILE * n * bits // 8, row_bytes, n * bits // 8, TILE, row_bytes


@functools.cache
def order_of(bits: int, layout: str, codes: bool) -> torch.Tensor:
    """int16 [64 * 64]: element of a block of "cpu" -> which one it is in the pieces of the weight's block.

    A matrix of one block is packed with the digits of each element's number, one at a time.
    """
    with torch.device("cpu"):
        numbers = torch.arange(TILE * TILE, dtype=torch.int32)
        of_elements = torch.zeros_like(numbers)  # number in the GPU's block -> element of the matrix
        for shift in range(0, 12, bits):
            q = (numbers >> shift & (1 << bits) - 1).view(TILE, TILE).to(torch.int16)
            q = (q if codes else q - (1 << bits - 1)).to(torch.int8)
            of_elements += _elements(pack_bytes(q, bits, layout, codes), bits).to(torch.int32) << shift
        place = torch.empty_like(numbers)
        place[of_elements.long()] = numbers  # element of the matrix -> number in the GPU's block
        digits = [(place >> shift & (1 << bits) - 1).to(torch.uint8) for shift in range(0, 12, bits)]
        order = torch.zeros_like(numbers)
        for number, digit in enumerate(digits):
            q = digit.view(TILE, TILE).to(torch.int16) - (1 << bits - 1)
            packed = _elements(pack_bytes(q.to(torch.int8), bits, CPU), bits)
            order += packed.to(torch.int32) << (number * bits)
        return order.to(torch.int16)


def _elements(data: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 bytes -> the unsigned elements in them, the lower nibble first."""
    return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten()
