"""What a single argument has to be, whatever function it is of. An error names it, what was expected and what came."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.compiler import is_compiling

from .plain import PLAIN, has_memory, is_virtual


def is_set(variable: str, default: bool = False) -> bool:
    """Whether an environment variable is 1; default: where it is empty or not set. Raises ValueError for another value
    than 0 and 1."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable}: expected 0 or 1, got {value!r}")
    return value == "1" if value else default


def require_tensor(name: str, value: object, in_memory: bool = True) -> None:
    """Raises TypeError unless `value` is a dense tensor.

    Raises ValueError for one that PyTorch negates when it is read, and, with `in_memory`, what `require_memory` does.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one with layout {value.layout}")
    if is_compiling():
        return  # it traces none of what follows; the operator checks it again
    if value.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got a nested one")
    if value.is_neg():  # as the imaginary part of a conjugate is: its memory holds the numbers with the other sign
        raise ValueError(f"{name}: expected a tensor as it is in memory, got a negated view; resolve_neg() copies it")
    if in_memory:
        require_memory(name, value)


def require_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a plain tensor on a CPU or a GPU with a storage shorter than the tensor."""
    if type(tensor) not in PLAIN or tensor.device.type not in ("cpu", "cuda") or is_virtual(tensor):
        return
    if not has_memory(tensor):
        got = tensor.untyped_storage().nbytes()
        raise ValueError(f"{name}: expected memory for shape {list(tensor.shape)}, got {got} bytes: freed, or cut")


def require_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for a subclass of torch.Tensor, ValueError for a tensor without memory of its own."""
    if type(tensor) not in PLAIN:
        raise TypeError(f"{name}: expected a plain torch.Tensor, got {type(tensor).__name__}")
    require_memory(name, tensor)
    if is_virtual(tensor):
        raise ValueError(f"{name}: expected a tensor in memory, got a zero, functional or wrapped one")


def require_dtype(name: str, value: object, dtypes: Sequence[torch.dtype], in_memory: bool = True) -> None:
    """Raises what `require_tensor` does, and TypeError for another dtype than these."""
    require_tensor(name, value, in_memory)
    assert isinstance(value, torch.Tensor)
    if value.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise TypeError(f"{name}: expected dtype {expected}, got {value.dtype}")


def require_numbers(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor on meta, which has a shape alone."""
    if tensor.is_meta:
        raise ValueError(f"{name}: expected a tensor with numbers, got one on meta")


def require_int(name: str, value: object, least: int | None = None) -> None:
    """Raises TypeError unless `value` is an int and no bool, ValueError for one below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def require_bool(name: str, value: object, or_none: bool = False) -> None:
    """Raises TypeError unless `value` is True or False. or_none: None, too, where nobody said so."""
    if not isinstance(value, bool) and not (or_none and value is None):
        expected = "True, False or None" if or_none else "True or False"
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def require_path(name: str, value: object) -> Path:
    """A str, or a path of one, as a Path. Raises TypeError for anything else."""
    if isinstance(value, str | os.PathLike) and isinstance(text := os.fspath(value), str):
        return Path(text)
    raise TypeError(f"{name}: expected a path, got {type(value).__name__}")


def require_device(device: object) -> torch.device:
    """A device as callers name it; an int is the number of a GPU.

    Raises TypeError for anything else, and ValueError for a name that PyTorch does not know.
    """
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"device: expected a torch.device, its name or the number of a GPU, got {device!r}")
    if isinstance(device, int):
        return torch.device("cuda", device)
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected the name of a device, such as 'cpu' or 'cuda:0', got {device!r}") from error
