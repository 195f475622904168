"""The random weights of all experts, quantized, and what products and layers of them must give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from weightonly.heuristics.problem import FORMATS

from ..shapes import MixtureSizes
from ..weights import Weights
from .routing import Routing

PRODUCTS = ("w13", "w2")
"""Gate and up side by side, and down."""


@dataclass
class ExpertWeights:
    """One product of all experts. q: int8 [E, K, N]. scales: [E, K / g, N]. dense: [E, K, N], the values of q."""

    format: str
    q: torch.Tensor
    scales: torch.Tensor
    dense: torch.Tensor

    @classmethod
    def random(
        cls,
        sizes: MixtureSizes,
        product: str,
        format: str,
        group_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ExpertWeights:
        """Each expert as `Weights.random` makes it, of its own seed."""
        k, n = sizes.shape(product)
        groups = 1 if group_size == -1 else k // group_size
        q = torch.empty(sizes.experts, k, n, dtype=torch.int8, device=device)
        scales = torch.empty(sizes.experts, groups, n, dtype=dtype, device=device)
        dense = torch.empty(sizes.experts, k, n, dtype=dtype, device=device)
        for expert in range(sizes.experts):
            w = Weights.random(
                k,
                n,
                bits=FORMATS[format],
                format=format,
                group_size=group_size,
                symmetric=True,
                dtype=dtype,
                device=device,
                seed=2 * expert + PRODUCTS.index(product),
            )
            q[expert], scales[expert], dense[expert] = w.q, w.scales, w.dense
        return cls(format, q, scales, dense)

    def expected(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The products of rows x [T, K], sorted by expert: [T, N]."""
        y = x.new_empty(x.shape[0], self.dense.shape[2])
        begin = 0
        for expert, count in enumerate(routing.counts):
            torch.matmul(x[begin : begin + count], self.dense[expert], out=y[begin : begin + count])
            begin += count
        return y


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 I]."""
    gate, up = gate_up.chunk(2, dim=-1)  # (T, I) each
    return functional.silu(gate) * up


def combined(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The weighted sum over the experts of each token: rows y [T, H], sorted by expert -> [M, H]."""
    return summed(y[routing.inverse], routing)


def summed(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """`combined` of rows [T, H] that are in the order of tokens."""
    by_token = y.view(*routing.ids.shape, y.shape[-1])  # (M, top_k, H)
    return torch.bmm(routing.weights[:, None].to(y.dtype), by_token)[:, 0]
