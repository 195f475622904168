"""Which tokens go to which experts: evenly, or skewed as a router that has favourites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROUTINGS = ("even", "skewed")

SKEW = 1.0
"""The expert of rank r is as likely as r ** -SKEW."""


@dataclass(frozen=True, eq=False)  # hashable, so that what a library makes of one can be kept
class Routing:
    """The experts of M tokens, and the same sorted by expert.

    ids: int32 [M, top_k]. weights: fp32 [M, top_k], rows sum to 1. order: int64 [T = M * top_k], the (token, expert)
    pairs by expert. inverse: int64 [T], the sorted row of each pair. offs: int32 [E], where the rows of each expert
    end. counts: the rows of each expert.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor
    offs: torch.Tensor
    counts: Sequence[int]

    @classmethod
    def of(cls, ids: torch.Tensor, experts: int) -> Routing:
        """ids: int32 [M, top_k]."""
        flat = ids.flatten().long()
        counts = torch.bincount(flat, minlength=experts)
        order = torch.sort(flat, stable=True).indices
        generator = torch.Generator(ids.device).manual_seed(1)
        weights = torch.rand(ids.shape, generator=generator, device=ids.device) + 0.5
        weights /= weights.sum(1, keepdim=True)
        return cls(ids, weights, order, order.argsort(), counts.cumsum(0).int(), counts.tolist())

    @property
    def rows(self) -> int:
        """T, of all experts."""
        return self.ids.numel()

    @property
    def with_rows(self) -> int:
        """How many experts have rows."""
        return sum(count > 0 for count in self.counts)


def topk_ids(
    name: str, tokens: int, experts: int, top_k: int, device: torch.device, skew: float = SKEW, seed: int = 0
) -> torch.Tensor:
    """int32 [tokens, top_k]: different experts for each token. Fewer tokens are the first ones of more.

    name: of `ROUTINGS`. even: the experts in turns, in a random order, so that counts differ by one at most. skewed:
    drawn without replacement, with chances r ** -skew for the expert of rank r; ranks are random.
    """
    generator = torch.Generator().manual_seed(seed)
    by_rank = torch.randperm(experts, generator=generator)
    if name == "even":
        found = by_rank[torch.arange(tokens * top_k).view(tokens, top_k) % experts]
    else:
        logits = -skew * torch.arange(1, experts + 1).double().log()
        noise = -torch.empty(tokens, experts, dtype=torch.float64).exponential_(generator=generator).log()
        found = by_rank[(logits + noise).topk(top_k, dim=1).indices]  # Gumbel's: draws without replacement
    return found.int().to(device)
