"""Arguments of `gemm` for the tests of its checks, and ways to change one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import weightonly as wo

K, N, M = 192, 40, 3
GROUPS = 3

Arguments = dict[str, Any]
Change = Callable[[Arguments], object]


def good(device: torch.device | str = "cpu", layout: str = "interleaved") -> Arguments:
    """Arguments that `gemm` takes: [3, 192] @ int4 [192, 40], groups of 64; the result is exact in fp32."""
    g = torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (K, N), generator=g, dtype=torch.int8)
    return {
        "x": integers(M, K).to(device),
        "qweight": wo.preprocess(q, bits=4, layout=layout).to(device),
        "scales": torch.exp2(torch.randint(-2, 2, (GROUPS, N), generator=g).float()).half().to(device),
        "zeros": torch.randint(-4, 5, (GROUPS, N), generator=g).half().to(device),
        "bias": torch.randint(-8, 9, (N,), generator=g).half().to(device),
        "activation": "relu",
        "out": torch.full((M, N), float("nan"), dtype=torch.float16, device=device),
    }


def integers(*shape: int) -> torch.Tensor:
    """-3..3 in fp16."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(1)).half()


def expected(x: torch.Tensor, a: Arguments) -> torch.Tensor:
    """`gemm` of x and the other arguments of `good`, in fp64 and rounded once."""
    w = wo.dequantize(a["qweight"], a["scales"], a["zeros"]).double()
    return torch.relu(x.double() @ w + a["bias"].double()).to(x.dtype)


def setting(**values: object) -> Change:
    return lambda a: a.update(values)


def convert(name: str, *to: Any) -> Change:
    """`.to(*to)` of one argument."""
    return lambda a: a.update({name: a[name].to(*to)})


def zeros_of(name: str, *shape: int) -> Change:
    """Another shape for one argument."""
    return lambda a: a.update({name: a["x"].new_zeros(shape)})


def groups_of(size: int) -> Change:
    return lambda a: a.update(scales=a["x"].new_ones(K // size, N), zeros=None)


def overlapping(name: str) -> Change:
    """`out` ends where an input begins, but for one element."""

    def change(a: Arguments) -> None:
        memory = a["x"].new_zeros(M * N + a[name].numel() - 1)
        a.update({name: memory[-a[name].numel() :].view(a[name].shape), "out": memory[: M * N].view(M, N)})

    return change
