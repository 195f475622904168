"""Memory goes back to the system while layers are packed: glibc keeps what many threads free, for them alone."""

from __future__ import annotations

import ctypes

import torch

_TRIM_BYTES = 1 << 27
"""Of packed layers between two trims, which cost time: pages that come again are new ones."""

_packed_bytes = 0


def after_packing(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a layer that was packed just now. Without trims as much as the model would stay with threads."""
    global _packed_bytes
    _packed_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if _packed_bytes >= _TRIM_BYTES:
        _packed_bytes = 0
        _trim()
    return tensors


def _trim() -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
