"""wo.Gate on the CPU, beside formulas that are written out in fp64; its checks, and what kernels get of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weightonly as wo
from weightonly.gate import Gate


def sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": lambda z: torch.where(z > 0, z, 0),
    "relu2": lambda z: torch.where(z > 0, z * z, 0),
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "silu": lambda z: z * sigmoid(z),
    "situ": lambda z: 4 * torch.tanh(z / 4) * sigmoid(z),
}
GATES: dict[str, tuple[Gate, Callable[[Tensor, Tensor], Tensor]]] = {
    "limit": (Gate("silu", limit=2.0), lambda g, u: ACTS["silu"](g.clamp(max=2)) * u.clamp(-2, 2)),
    "limit of gelu": (Gate("gelu", limit=3), lambda g, u: ACTS["gelu"](g.clamp(max=3)) * u.clamp(-3, 3)),
    "alpha": (Gate("silu", alpha=1.5), lambda g, u: g * sigmoid(1.5 * g) * u),
    "shift": (Gate("relu", shift=-0.5), lambda g, u: ACTS["relu"](g) * (u - 0.5)),
    "swigluoai": (Gate.of("swigluoai"), lambda g, u: (g := g.clamp(max=7)) * sigmoid(1.702 * g) * (u.clamp(-7, 7) + 1)),
    "situ": (
        Gate("situ", alpha=2.0, limit=3.0),
        lambda g, u: 2 * torch.tanh(g / 2) * sigmoid(g) * 3 * torch.tanh(u / 3),
    ),
    "situ and shift": (Gate("situ", shift=1.0), lambda g, u: ACTS["situ"](g) * (u + 1)),
}


def inputs(dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """[64, 32], beyond every limit, and zeros."""
    return (torch.randn(64, 32, generator=generator) * 6).to(dtype).index_fill_(0, torch.tensor([5]), 0)


def assert_rounded(y: Tensor, exact: Tensor, roundings: int) -> None:
    """Each element within so many roundings. In fp32, in which all is computed, functions are approximations."""
    eps = torch.finfo(y.dtype).eps / 2 * roundings
    assert ((y.double() - exact).abs() <= (1.1 * eps + 1e-6) * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTS)
def test_activations(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    z = inputs(dtype, generator)
    gate, up = z.double().chunk(2, dim=1)
    assert_rounded(Gate(name)(z), ACTS[name](gate) * up, 2)
    alone = Gate(name, has_gate=False)(z)
    assert alone.shape == z.shape and alone.dtype == dtype
    assert_rounded(alone, ACTS[name](z.double()), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GATES)
def test_gates(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    z = inputs(dtype, generator)
    gate, formula = GATES[name]
    y = gate(z)
    assert y.shape == (64, 16) and y.dtype == dtype
    assert_rounded(y, formula(*z.double().chunk(2, dim=1)), 2)


def test_nan_and_infinity_are_no_numbers_within_the_limit() -> None:
    z = torch.tensor([[math.nan, 1.0], [1.0, math.nan], [math.inf, math.inf], [-math.inf, 1.0]])
    y = Gate("relu", limit=2.0)(z)
    assert y[:2].isnan().all() and y[2:].flatten().tolist() == [4.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"activation": "swish"}, ValueError, r"activation: expected one of None, 'identity'.*, got 'swish'"),
        ({"activation": 3}, ValueError, "activation: expected one of .*, got 3"),
        ({"activation": ["silu"]}, ValueError, "activation: expected one of "),
        ({"activation": "swigluoai"}, ValueError, "activation: expected one of .*, got 'swigluoai'"),
        ({"limit": "7"}, TypeError, "limit: expected a number, got str"),
        ({"limit": True}, TypeError, "limit: expected a number, got bool"),
        ({"limit": 0}, ValueError, "limit: expected a finite number above 0, got 0"),
        ({"limit": math.inf}, ValueError, "limit: expected a finite number above 0, got inf"),
        ({"alpha": -1.0}, ValueError, r"alpha: expected a finite number above 0, got -1\.0"),
        ({"alpha": math.nan}, ValueError, "alpha: expected a finite number above 0, got nan"),
        ({"activation": "relu", "alpha": 1.0}, ValueError, r"alpha: expected None for relu, which has none, got 1\.0"),
        ({"activation": None, "alpha": 2.0}, ValueError, "alpha: expected None for identity"),
        ({"shift": None}, TypeError, "shift: expected a number, got NoneType"),
        ({"shift": math.inf}, ValueError, "shift: expected a finite number, got inf"),
        ({"has_gate": 1}, TypeError, "has_gate: expected True or False, got int"),
        ({"has_gate": False, "limit": 7.0}, ValueError, "limit, shift: expected none without a gate"),
        ({"has_gate": False, "shift": 1.0}, ValueError, "limit, shift: expected none without a gate"),
    ],
    ids=str,
)
def test_wrong_fields(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        Gate(**fields)


def test_the_gate_of_an_argument() -> None:
    for activation in ("silu", None, "relu2"):
        for has_gate in (True, False):
            assert Gate.of(activation, has_gate).key == Gate(activation, has_gate=has_gate).key
    mine = wo.Gate("gelu", limit=5.0)
    assert Gate.of(mine) is mine
    assert Gate.of("swigluoai").key == Gate("silu", limit=7.0, alpha=1.702, shift=1.0).key
    for wrong, got in (("swiglu", "'swiglu'"), (torch.relu, "<built-in method relu"), (["silu"], r"\['silu'\]")):
        with pytest.raises(ValueError, match=f"^activation: expected one of None, .*'swigluoai', or a Gate, got {got}"):
            Gate.of(wrong)
    for gated in (mine, "swigluoai"):
        with pytest.raises(ValueError, match=r"^activation: Gate\(.* is for a first product of 2 I columns, gate and"):
            Gate.of(gated, has_gate=False)
    with pytest.raises(ValueError, match=r"^activation: Gate\(.* is for a first product of I columns, w13 has others"):
        Gate.of(Gate("relu2", has_gate=False), has_gate=True)


def test_gates_that_compute_otherwise_have_other_keys() -> None:
    others: list[dict[str, Any]] = [{}, {"activation": "relu"}, {"limit": 7.0}, {"alpha": 2.0}, {"shift": 1.0}]
    assert len({Gate(**fields).key for fields in [*others, {"has_gate": False}]}) == 6


def test_numbers_of_kernels() -> None:
    """struct Gate: function, alpha, limit, shift. What is left out changes nothing."""
    assert Gate.of("swigluoai").numbers == (3, 1.702, 7.0, 1.0)
    assert Gate("situ", limit=2).numbers == (6, 4.0, 2.0, 0.0)
    assert Gate(None).numbers == Gate("identity").numbers == (0, 1.0, math.inf, 0.0)
