"""Tensors as kernels read them: contiguous and aligned; copied where they are not."""

from __future__ import annotations

import torch


def aligned(tensor: torch.Tensor, alignment_bytes: int) -> torch.Tensor:
    """The tensor if it is contiguous and begins at a multiple of `alignment_bytes`, else such a copy."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % alignment_bytes == 0 else tensor.clone()


def aligned_rows(rows: torch.Tensor, n_padded: int) -> torch.Tensor:
    """Scales or zeros [..., groups, N] as kernels read them: [..., groups, n_padded], contiguous, 16-byte aligned.

    Returns `rows` itself where it is so already, else a copy.
    """
    if rows.shape[-1] == n_padded and rows.is_contiguous() and rows.data_ptr() % 16 == 0:
        return rows
    copy = rows.new_zeros((*rows.shape[:-1], n_padded))
    copy[..., : rows.shape[-1]] = rows
    return copy
