"""The activations of `gemm`: each has one entry, with its number in the kernels and its functions in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

aten = torch.ops.aten

Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Gradient:
    """How a gradient passes an activation y = act(z)."""

    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """grad_y, and y or z, all fp32 -> grad_z."""

    of_output: bool
    """Whether it takes y; else z."""


@dataclass(frozen=True)
class Activation:
    """One activation of `gemm`."""

    number: int
    """enum Activation of cutlass_ext/epilogue/activation.h."""

    function: Function
    """fp32 tensor -> fp32 tensor."""

    in_place: Function | None
    """The same function, which overwrites a tensor of any float dtype. None: there is nothing to do."""

    gradient: Gradient | None
    """None: it passes as it is."""


ACTIVATIONS = {
    "identity": Activation(0, lambda y: y, None, None),
    "relu": Activation(
        1, torch.nn.functional.relu, torch.relu_, Gradient(lambda grad, y: aten.threshold_backward(grad, y, 0), True)
    ),
    "gelu": Activation(  # the erf form
        2, torch.nn.functional.gelu, aten.gelu_.default, Gradient(aten.gelu_backward.default, False)
    ),
    "silu": Activation(3, torch.nn.functional.silu, aten.silu_.default, Gradient(aten.silu_backward.default, False)),
}


PIECE = 1 << 13
"""Elements that `in_pieces` computes at a time: whole registers of any CPU, and too few for a second thread."""


def in_pieces(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """function(*tensors), of each element alone, so that its bits do not depend on where it is.

    PyTorch computes what is left of an array behind whole registers, and where threads share it, by other formulas.
    tensors: of one shape. function: of tensors of any shape.
    """
    first = tensors[0]
    count, pieces = first.numel(), -(-first.numel() // PIECE)
    padded = [torch.nn.functional.pad(t.reshape(-1), (0, pieces * PIECE - count)).view(pieces, PIECE) for t in tensors]
    results = [function(*piece) for piece in zip(*padded, strict=True)]
    return torch.cat(results)[:count].view(first.shape) if results else function(*tensors)


def activation_of(name: str | None) -> Activation:
    """The activation of a name. None is "identity"."""
    return ACTIVATIONS["identity" if name is None else name]


def check_activation(name: object) -> None:
    """Raises ValueError unless `name` is None or the name of an activation."""
    if name is not None and not (isinstance(name, str) and name in ACTIVATIONS):
        names = ", ".join(repr(known) for known in (None, *ACTIVATIONS))
        raise ValueError(f"activation: expected one of {names}, got {name!r}")
