"""The packed bytes of a converted folder as parameters of vLLM, which cuts them for a rank where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.parameter import ModelWeightParameter, PackedvLLMParameter

from ..formats.layers import LayerShape
from ..heuristics.problem import FORMATS
from ..layout import K_ALIGN, blocks_of, column_align, padded_shape
from ..packed import PackedWeight


class PackedRows(ModelWeightParameter):
    """qweight [N, K * bits / 8], which our own loader alone brings in this form: see rows.py."""

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        super().load_column_parallel_weight(self._expected(loaded_weight))

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        super().load_row_parallel_weight(self._expected(loaded_weight))

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        super().load_merged_column_weight(self._expected(loaded_weight), **kwargs)

    def load_qkv_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        super().load_qkv_weight(self._expected(loaded_weight), **kwargs)

    def _expected(self, loaded_weight: torch.Tensor) -> torch.Tensor:
        return expect_bytes(loaded_weight, self.data.dim())


def expect_bytes(loaded_weight: torch.Tensor, dims: int = 2) -> torch.Tensor:
    """`loaded_weight`, in rows (`dims` 2) or blocks (3). Raises ValueError for what another loader brings."""
    if loaded_weight.dtype != torch.uint8 or loaded_weight.dim() != dims:
        form = "[N, K * bits / 8]" if dims == 2 else "in blocks of a packed weight"
        raise ValueError(
            f"qweight: expected uint8 {form}, got {loaded_weight.dtype} {list(loaded_weight.shape)}; "
            "the method weightonly reads a folder with --load-format weightonly"
        )
    return loaded_weight


class PackedBlocks(PackedRows, PackedvLLMParameter):
    """qweight in the blocks of its layout, in three dimensions: one of them is K, one is N (see layout/cut.py). Our own
    loader alone brings them, too."""


def cuts_bytes(shape: LayerShape, k: int, parts: Sequence[int], whole: tuple[int, int]) -> bool:
    """Whether a rank's part of a layer of `shape` is cut out of its bytes: k rows, and columns in `parts`, one after
    another. whole: K and N of all ranks. Each part lies in whole blocks of the layout, unless nothing is cut.
    """
    if shape.layout is None:
        return False
    align = column_align(FORMATS[shape.format], shape.layout)
    has_columns = list(parts) == [whole[1]] or all(part % align == 0 for part in parts)
    return has_columns and (k == whole[0] or k % K_ALIGN == 0)


def packed_blocks(shape: LayerShape, k: int, n: int, loader: Any) -> PackedBlocks:
    """An empty parameter for [k, n] of a layer of `shape`."""
    assert shape.layout is not None
    bits = FORMATS[shape.format]
    blocks = blocks_of(*padded_shape(k, n, bits, shape.layout), bits, shape.layout)
    return PackedBlocks(
        data=torch.empty(blocks.shape, dtype=torch.uint8),
        input_dim=blocks.row_dim,
        output_dim=blocks.column_dim,
        packed_dim=blocks.column_dim,
        packed_factor=blocks.columns,
        weight_loader=loader,
    )


def in_blocks(weight: PackedWeight) -> torch.Tensor:
    """The bytes of a weight in the form of `PackedBlocks`, on the same memory."""
    return weight.data.view(blocks_of(weight.k_padded, weight.n_padded, weight.bits, weight.layout).shape)
