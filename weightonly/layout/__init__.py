"""The byte orders of packed weights: how each is made of passes, and how a pass is undone.

The input is always `q`, int8 [K, N], one signed value (or one code of a codebook) per byte. A pass re-orders elements;
the last one also packs them. A layout is a composition of passes (pack.py):

    row_major     add_bias_and_interleave                      words run along N, rows of K follow each other
    interleaved   permute_rows -> transpose -> interleave_columns -> add_bias_and_interleave    (interleaved.py)
    tiled         tile_fragments -> add_bias_and_interleave    64 x 64 blocks in the order of MMA fragments (tiled.py)
    ..., codes    ... -> pack_codes                            the same for the codes of NF4, FP4, other codebooks, FP8
    cpu           pack_panels                                  panels of 32 columns, words along K (cpu.py)

Each pass is a few strided copies on the device of its input. It needs no index tensor and no loop over elements, and
never more than two int8 copies of the weight are alive.
"""

from .cut import Blocks, Range, blocks_of, can_cut, cut_bytes, put_columns
from .pack import pack_bytes, unpack_bytes
from .shapes import (
    CODE_LAYOUTS,
    CPU,
    INTERLEAVED,
    K_ALIGN,
    LAYOUTS,
    PANEL,
    ROW_MAJOR,
    SLICED_LAYOUTS,
    TILE,
    TILED,
    block_bytes,
    check_bits,
    check_code_layout,
    check_layout,
    column_align,
    column_step,
    matrix_shape,
    padded_shape,
    stored_shape,
)

__all__ = [
    "CODE_LAYOUTS",
    "CPU",
    "INTERLEAVED",
    "K_ALIGN",
    "LAYOUTS",
    "PANEL",
    "ROW_MAJOR",
    "SLICED_LAYOUTS",
    "TILE",
    "TILED",
    "Blocks",
    "Range",
    "block_bytes",
    "blocks_of",
    "can_cut",
    "check_bits",
    "check_code_layout",
    "check_layout",
    "column_align",
    "column_step",
    "cut_bytes",
    "matrix_shape",
    "pack_bytes",
    "padded_shape",
    "put_columns",
    "stored_shape",
    "unpack_bytes",
]
