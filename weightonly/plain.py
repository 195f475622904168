"""Plain tensors, which kernels may read by their addresses: contiguous and aligned, copied where they are not.

All others are left to PyTorch's dispatcher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types of tensors with memory of their own: a subclass may be a wrapper without any."""


def is_watched() -> bool:
    """Whether something is to see each operator: torch.compile, torch.jit.trace, or a mode, as make_fx has them."""
    if is_compiling() or dispatch_modes() or torch._C._is_tracing():
        return True
    # torch.set_default_device is a mode, too, and sees nothing but new tensors.
    return function_modes() > 0 and not all(isinstance(m, DeviceContext) for m in _get_current_function_mode_stack())


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Inside, sizes are numbers: torch.jit.trace makes tensors of them, and warns where they are compared."""
    tracing: Any = torch._C
    state = tracing._get_tracing_state()
    tracing._set_tracing_state(None)
    try:
        yield
    finally:
        tracing._set_tracing_state(state)


def are_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether kernels may read all of these by their addresses, here and now."""
    return not is_watched() and all(t is None or (type(t) in PLAIN and has_memory(t)) for t in tensors)


def is_virtual(tensor: object) -> bool:
    """Whether it has the type of plain tensors and no memory: a zero tensor, a functional one, one of torch.func."""
    return isinstance(tensor, torch.Tensor) and (
        tensor._is_zerotensor() or torch._is_functional_tensor(tensor) or is_functorch_wrapped_tensor(tensor)
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage is as long as the tensor says: one that was freed or cut (`resize_`) is not."""
    try:
        memory = tensor.untyped_storage()
        return memory.data_ptr() + memory.nbytes() - tensor.data_ptr() >= span_bytes(tensor)
    except RuntimeError:  # there is none: a wrapper
        return False


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


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
