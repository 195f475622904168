"""Tensors that are not what their type says: subclasses, wrappers, memory that is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map


class Plain(torch.Tensor):
    """A subclass with memory of its own."""


class Wrapper(torch.Tensor):
    """One without: its numbers are in another tensor."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        like: dict[str, Any] = {"strides": inner.stride(), "dtype": inner.dtype, "device": inner.device}
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **like)
        wrapper.numbers = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(lambda t: t.numbers if isinstance(t, Wrapper) else t, (args, kwargs or {}))
        return func(*args, **kwargs)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def freed_columns(tensor: torch.Tensor) -> torch.Tensor:
    """Its address is not null."""
    memory = torch.cat([tensor.flatten(), tensor.flatten()])
    view = memory[tensor.numel() :].view(tensor.shape)
    memory.untyped_storage().resize_(0)
    return view


def cut(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(tensor.nbytes - 1)
    return copy


SUBCLASSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "subclass": lambda t: t.as_subclass(Plain),
    "wrapper": Wrapper,
    "of a collective": AsyncCollectiveTensor,
    "functional": torch._to_functional_tensor,
}
"""What the operator computes with."""

GONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"freed": freed, "freed view": freed_columns, "cut": cut}


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that one of SUBCLASSES stands for."""
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        return torch._from_functional_tensor(tensor)
    return tensor.as_subclass(torch.Tensor)
