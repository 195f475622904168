"""Gate: what experts compute between their two products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from . import invariance
from .activations import in_pieces
from .plain import is_watched

Function = Callable[[torch.Tensor], torch.Tensor]

_FUNCTIONS: dict[str, tuple[int, Function | None]] = {
    "identity": (0, lambda z: z),
    "relu": (1, F.relu),
    "gelu": (2, F.gelu),
    "silu": (3, F.silu),
    "gelu_tanh": (4, lambda z: F.gelu(z, approximate="tanh")),
    "relu2": (5, lambda z: F.relu(z).square()),
    "situ": (6, None),
}
"""Name -> enum GateFunction of cutlass_ext/grouped_params.h, and the function where it has no alpha."""

_NAMED: dict[str, dict[str, Any]] = {"swigluoai": {"activation": "silu", "alpha": 1.702, "limit": 7.0, "shift": 1.0}}
"""Gates that have a name of their own in vLLM: the gate of gpt-oss."""


@dataclass(eq=False)  # PyTorch 2.8 does not trace frozen ones
class Gate:
    """`act(gate) * (up + shift)`, gate and up being the halves of the first product's columns; or `act(z)` of all
    columns.

    act is rounded to the dtype of the products, and so is the result.

    Args:
        activation: None or "identity", "relu", "gelu" (the erf form), "gelu_tanh", "relu2" (the square of relu);
            "silu", `z * sigmoid(alpha * z)`; or "situ", `alpha * tanh(z / alpha) * sigmoid(z)`, which Kimi-K3 has.
        limit: gate is at most this before act, and up is within -limit .. limit (`swiglu_limit`); of "situ" up is
            `limit * tanh(up / limit)` instead, and gate has no limit. None: there is none.
        alpha: of "silu" (default 1) and "situ" (default 4).
        shift: added to up; gpt-oss has 1.
        has_gate: False: there is no gate, as in experts of Nemotron; `limit` and `shift` are for gates alone.

    Raises:
        TypeError | ValueError: naming the field.

    Examples:
        >>> wo.Gate("silu", limit=7.0, alpha=1.702, shift=1.0).has_gate  # gpt-oss
        True
    """

    activation: str | None = "silu"
    limit: float | None = None
    alpha: float | None = None
    shift: float = 0.0
    has_gate: bool = True

    def __post_init__(self) -> None:
        if self.activation is not None and not (isinstance(self.activation, str) and self.activation in _FUNCTIONS):
            names = ", ".join(repr(name) for name in (None, *_FUNCTIONS))
            raise ValueError(f"activation: expected one of {names}, got {self.activation!r}")
        name = self.activation or "identity"
        if not isinstance(self.has_gate, bool):
            raise TypeError(f"has_gate: expected True or False, got {type(self.has_gate).__name__}")
        for field, least in (("limit", 0.0), ("alpha", 0.0), ("shift", -math.inf)):
            value = getattr(self, field)
            if value is None and field != "shift":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{field}: expected a number, got {type(value).__name__}")
            if not (math.isfinite(value) and value > least):
                raise ValueError(f"{field}: expected a finite number{'' if least else ' above 0'}, got {value}")
        if self.alpha is not None and name not in ("silu", "situ"):
            raise ValueError(f"alpha: expected None for {name}, which has none, got {self.alpha}")
        if not self.has_gate and (self.limit is not None or self.shift):
            raise ValueError("limit, shift: expected none without a gate")

    @classmethod
    def of(cls, activation: object, has_gate: bool = True) -> Gate:
        """The gate of an argument `activation`: a Gate, the name of its activation, or "swigluoai".

        Raises:
            TypeError | ValueError: naming the argument, and where it has a gate and the experts none, or the other way
                round.
        """
        if isinstance(activation, str) and activation in _NAMED:
            activation = cls(**_NAMED[activation])
        if isinstance(activation, Gate):
            if activation.has_gate != has_gate:
                columns = "2 I columns, gate and up" if activation.has_gate else "I columns"
                raise ValueError(f"activation: {activation} is for a first product of {columns}, w13 has others")
            return activation
        if activation is not None and not (isinstance(activation, str) and activation in _FUNCTIONS):
            names = ", ".join(repr(name) for name in (None, *_FUNCTIONS, *_NAMED))
            raise ValueError(f"activation: expected one of {names}, or a Gate, got {activation!r}")
        return cls(activation, has_gate=has_gate)

    @property
    def key(self) -> tuple[object, ...]:
        """What a plan depends on."""
        return self.activation, self.limit, self.alpha, self.shift, self.has_gate

    @property
    def numbers(self) -> tuple[int, float, float, float]:
        """struct Gate of cutlass_ext/grouped_params.h."""
        number, _ = _FUNCTIONS[self.activation or "identity"]
        return number, self._alpha, math.inf if self.limit is None else float(self.limit), float(self.shift)

    @property
    def _alpha(self) -> float:
        return float((4.0 if self.activation == "situ" else 1.0) if self.alpha is None else self.alpha)

    def act(self, z: torch.Tensor) -> torch.Tensor:
        """act(z), in fp32 and rounded to the dtype of z."""
        _, function = _FUNCTIONS[self.activation or "identity"]
        if function is not None and self._alpha == 1.0:
            return function(z)
        wide = z.float()
        if self.activation == "situ":
            return (self._alpha * torch.tanh(wide / self._alpha) * torch.sigmoid(wide)).to(z.dtype)
        return (wide * torch.sigmoid(self._alpha * wide)).to(z.dtype)

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        """The first product, (T, 2 I) -> (T, I); without a gate (T, I) -> (T, I)."""
        parts = z.chunk(2, dim=-1) if self.has_gate else (z,)  # (T, I) each
        if z.device.type == "cpu" and invariance._on and not is_watched():
            return in_pieces(self._combined, *parts)
        return self._combined(*parts)

    def _combined(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """gate, up: of one shape; without a gate there is no `up`."""
        if up is None:
            return self.act(gate)
        if self.activation == "situ":
            wide = up.float() if self.limit is None else self.limit * torch.tanh(up.float() / self.limit)
            return (self.act(gate).float() * (wide + self.shift)).to(gate.dtype)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.shift:
            return (self.act(gate).float() * (up.float() + self.shift)).to(gate.dtype)
        return self.act(gate) * up
