"""Checks of a checkpoint's tensors and JSON values. Each message has the name, what was expected and what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..shown import shown

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of scales and biases."""

INTEGERS = (torch.int32, torch.int64)


class TensorError(ValueError):
    """A tensor that does not fit its format. tensor: its name inside the layer ("qweight")."""

    def __init__(self, tensor: str, problem: str) -> None:
        super().__init__(f"{tensor}: {shown(problem)}")
        self.tensor = tensor


def expect(
    name: str, tensor: torch.Tensor, dtypes: torch.dtype | Sequence[torch.dtype], shape: Sequence[int | str]
) -> None:
    """Raise TensorError unless `tensor` has one of `dtypes` and `shape`; a str in `shape` stands for any size from 1.

    Only dtype and shape are looked at, so a tensor on the meta device can be checked before its data is read.
    """
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    fits = tensor.dim() == len(shape) and all(
        size >= 1 if isinstance(wanted, str) else size == wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype not in allowed or not fits:
        kinds = " or ".join(dtype_name(dtype) for dtype in allowed)
        sizes = ", ".join(map(str, shape))
        raise TensorError(name, f"expected {kinds} [{sizes}], got {dtype_name(tensor.dtype)} {list(tensor.shape)}")


def dtype_name(dtype: torch.dtype) -> str:
    """ "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")


def option(options: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """`options[key]`, or `default` where it is missing or null. Raises ValueError for a value of another kind."""
    value = options.get(key)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    # In Python a bool is an int; in JSON it is not.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{key}: expected {' or '.join(k.__name__ for k in kinds)}, got {value!r:.200}")
    return value
