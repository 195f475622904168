"""WeightView: what `layer.weight` of a packed layer is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..weight import QuantizedWeight


class WeightView(torch.Tensor):
    """A packed weight as the dense one that it stands for: shape, strides, dtype and device at no cost.

    What reads its numbers gets them dequantized, each time anew; views of it, such as `.t()`, are read when their
    numbers are. Multiplied by a number in place, its scales are. All else that writes is an error that names the layer.
    """

    _is_hf_initialized = True  # transformers would fill it with random numbers
    operand: QuantizedWeight
    title: str
    tensors: tuple[torch.Tensor | None, ...]
    """Those of the layer, while it has this view."""
    _read: Callable[[], torch.Tensor]
    _is_whole: bool

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, operand: QuantizedWeight, title: str, shape: tuple[int, ...], is_transposed: bool) -> WeightView:
        """is_transposed: whether the shape is that of torch.nn.Linear, [N, K]."""
        like = torch.empty(shape, dtype=operand.dtype, device="meta")

        def read() -> torch.Tensor:
            w = operand.dequantize()
            return w.mT.contiguous() if is_transposed else w

        return cls._make(operand, title, like, read, True)

    @classmethod
    def _make(
        cls,
        operand: QuantizedWeight,
        title: str,
        like: torch.Tensor,
        read: Callable[[], torch.Tensor],
        is_whole: bool,
    ) -> WeightView:
        new: Any = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=operand.device
        )
        new.operand, new.title, new._read, new._is_whole = operand, title, read, is_whole
        found: WeightView = new
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            view = args[0]
            return cls._make(view.operand, view.title, view._like(), view._read, view._is_whole)
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for value in tree_flatten(named.get(argument.name))[0]:
                    if isinstance(value, WeightView):
                        return value._write(func, args)
        if isinstance(args[0], WeightView) and any(r.alias_info is not None for r in func._schema.returns):
            return args[0]._view(func, args, kwargs)
        args, kwargs = tree_map(_dense, (args, kwargs))
        return func(*args, **kwargs)

    def _like(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that shares memory with its first argument."""
        likes, spec = tree_flatten(func(self._like(), *args[1:], **kwargs))

        def read(index: int) -> torch.Tensor:
            found: torch.Tensor = tree_flatten(func(self._read(), *args[1:], **kwargs))[0][index]
            return found

        parts = [
            self._make(self.operand, self.title, like, lambda index=index: read(index), False)  # type: ignore[misc]
            for index, like in enumerate(likes)
        ]
        return tree_unflatten(parts, spec)

    def _write(self, func: Any, args: Any) -> WeightView:
        """Multiplies the scales by a number. Raises RuntimeError for all else."""
        name = func.overloadpacket.__name__
        factor = args[1] if len(args) == 2 else None
        is_number = isinstance(factor, int | float) or (isinstance(factor, torch.Tensor) and factor.dim() == 0)
        if args[0] is not self or not (self._is_whole and name in ("mul_", "div_") and is_number):
            self._refuse(name)
        with torch.no_grad():
            getattr(self.operand.scales, name)(factor)
        return self

    def _refuse(self, what: str) -> None:
        raise RuntimeError(f"{self.title}: weight: {refusal(self.operand.format)}, got {what}")

    # --- what does not come through operators -----------------------------------------------------------------

    @property
    def data(self) -> WeightView:
        return self

    @data.setter
    def data(self, value: object) -> None:
        if value is not self:  # of `weight.data *= 2`
            self._refuse("another .data")

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> WeightView:
        if requires_grad:
            self._refuse("requires_grad=True")
        return self

    def data_ptr(self) -> int:
        raise RuntimeError(
            f"{self.title}: weight: expected operators of PyTorch, as no memory holds the dense weight, got a call "
            "that asks for its address; weight.clone() is a dense tensor"
        )

    def untyped_storage(self) -> Any:
        return self.data_ptr()

    def numpy(self, **kwargs: Any) -> Any:
        return self._read().numpy(**kwargs)

    def tolist(self) -> Any:
        return self._read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._read()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightView({list(self.shape)}, {self.dtype} on {self.device}, of {self.operand!r})"


def refusal(format: str) -> str:
    """What errors say is expected instead of writing to a weight."""
    return f"expected a packed {format} weight to be read alone, or another one for layer.update_(dense)"


def _dense(value: Any) -> Any:
    return value._read() if isinstance(value, WeightView) else value
