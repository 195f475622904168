"""Target "invalid": calls with one argument that is wrong, which have to be refused by a TypeError or ValueError.

The message names the argument. A refused call has written nothing to `out`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch

import weightonly as wo

from .loop import Outcome, Target

K, N, GROUP, M = 128, 64, 64, 3

Change = Callable[[random.Random, torch.Tensor], Any]


def _freed(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The same, in memory that is gone or shorter than it says."""
    memory = torch.cat([tensor.flatten(), tensor.flatten()])
    view = memory[draw.choice([0, tensor.numel()]) :][: tensor.numel()].view(tensor.shape)
    memory.untyped_storage().resize_(draw.choice([0, tensor.nbytes - 1]))
    return view


# What can be wrong with any tensor.
_TENSOR: dict[str, Change] = {
    "no tensor": lambda draw, t: draw.choice(["x", 3, 0.5, [1.0], object(), {}]),
    "dtype": lambda draw, t: t.to(draw.choice([torch.float64, torch.int16, torch.bool, torch.complex64])),
    "rank": lambda draw, t: draw.choice([t[None, None, None], t.reshape(-1)[:0].sum()]),
    "sparse": lambda draw, t: t.to_sparse(),
    "meta": lambda draw, t: t.to("meta"),
    "a row or column more": lambda draw, t: torch.cat([t, t[..., -1:]], -1),
    "empty": lambda draw, t: t[..., :0],
    "freed": _freed,
}

_ARGUMENTS: dict[str, list[Any]] = {
    "activation": ["RELU", "tanh", "", 3, b"relu"],
    "qweight": [None, 3, "w", torch.zeros(4)],
    "scales": [None],
    "x": [None],
}


class InvalidCalls(Target):
    """A right call of `gemm`, `quantize` or `preprocess` with one argument replaced."""

    name = "invalid"
    covers = "kinds of cases"

    def to_cover(self) -> set[str]:
        tensors = {f"{name}: {kind}" for name in ("x", "scales", "zeros", "bias", "perm", "out") for kind in _TENSOR}
        return tensors | {f"{name}: value" for name in _ARGUMENTS} | {"quantize", "preprocess"}

    def run(self, seed: int, index: int) -> Outcome:
        draw = random.Random(f"invalid:{seed}:{index}")
        g = torch.Generator().manual_seed(draw.getrandbits(40))
        dtype = draw.choice([torch.float16, torch.bfloat16])
        outcome = Outcome()
        w = torch.randn(K, N, generator=g)
        q, scales, zeros = wo.quantize(w, 4, GROUP, symmetric=False)
        assert zeros is not None
        right: dict[str, Any] = {
            "x": torch.randn(M, K, generator=g).to(dtype),
            "qweight": wo.preprocess(q, 4),
            "scales": scales.to(dtype),
            "zeros": zeros.to(dtype),
            "bias": torch.randn(N, generator=g).to(dtype),
            "perm": torch.randperm(K, generator=g),
            "activation": "relu",
        }
        right = {name: value.to(self.device) if hasattr(value, "to") else value for name, value in right.items()}
        right["out"] = torch.full((M, N), 7.0, dtype=dtype, device=self.device)
        for _ in range(40):
            name = draw.choice([*right, "quantize", "preprocess"])
            outcome.calls += 1
            if name in ("quantize", "preprocess"):
                self._convert(draw, name, w, q, outcome)
                continue
            is_tensor = isinstance(right[name], torch.Tensor)
            if not is_tensor or (name in _ARGUMENTS and draw.random() < 0.2):
                kind, value = "value", draw.choice(_ARGUMENTS[name])
            else:
                kind = draw.choice(list(_TENSOR))
                value = _TENSOR[kind](draw, right[name])
            outcome.covered.add(f"{name}: {kind}")
            call = functools.partial(wo.gemm, **right | {name: value})
            self._refused(f"gemm({name}: {kind})", (name, *_MEANT.get(name, ())), call, outcome)
            if not bool((right["out"] == 7).all()):
                outcome.failures.append(f"gemm({name}: {kind}) was refused after it wrote to out")
                right["out"].fill_(7)
        return outcome

    def _convert(self, draw: random.Random, name: str, w: torch.Tensor, q: torch.Tensor, outcome: Outcome) -> None:
        outcome.covered.add(name)
        if name == "quantize":
            wrong: tuple[str, tuple[Any, Any, Any]] = draw.choice(
                [
                    ("w", (torch.full((K, N), float("nan")), 4, GROUP)),
                    ("w", (w.to(torch.int32), 4, GROUP)),
                    ("w", (w[0], 4, GROUP)),
                    ("w", ("w", 4, GROUP)),
                    ("bits", (w, draw.choice([0, 2, 3, 5, 16, -4]), GROUP)),
                    ("group_size", (w, 4, draw.choice([0, -2, 7, 129, 1 << 70]))),
                    ("group_size", (w, 4, draw.choice([64.0, "64", True]))),
                ]
            )
            self._refused(f"quantize({wrong[0]})", (wrong[0],), lambda: wo.quantize(*wrong[1]), outcome)
            return
        other = draw.choice(
            [
                ("q", (q + 100, 4)),
                ("q", (q.float(), 4)),
                ("q", (q[0], 4)),
                ("bits", (q, draw.choice([0, 3, 16]))),
            ]
        )
        self._refused(f"preprocess({other[0]})", (other[0],), lambda: wo.preprocess(*other[1]), outcome)

    def _refused(self, what: str, names: tuple[str, ...], call: Callable[[], object], outcome: Outcome) -> None:
        try:
            call()
        except (TypeError, ValueError) as error:
            if not str(error).startswith(names):
                outcome.failures.append(f"{what}: a message that does not name it: {error}")
        except Exception as error:
            outcome.failures.append(f"{what}: {type(error).__name__}: {error}")
        else:
            outcome.failures.append(f"{what}: accepted")


# Arguments that a check of another one may name first, as the two do not fit together.
_MEANT = {"x": ("qweight", "scales", "perm", "out"), "scales": ("zeros",), "qweight": ("x",)}
