"""Act-order: rows of a weight sorted by group, so that a group is a run of rows again.

GPTQ with `desc_act` quantizes the rows of K in the order of their activations, and `g_idx[k]` says whose scale row
k has. A kernel wants a group's rows side by side, so the rows are sorted once, and x is permuted at run time:

    x[:, perm] @ w[perm] = x @ w
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .expect import TensorError


@dataclass(frozen=True, eq=False)
class Grouping:
    """How the rows of a weight [K, N] come into equal runs that share a scale.

    perm: int32 [K], the row of the file that comes to each place; None: they stay.
    source: int64 [runs], the group of the file that each run takes its scale from; None: run i takes group i.
    rows: of a run; it divides K.
    """

    perm: torch.Tensor | None
    source: torch.Tensor | None
    rows: int

    def sort(self, q: torch.Tensor) -> torch.Tensor:
        """The rows of `q` [K, N] in their new order."""
        return q if self.perm is None else q.index_select(0, self.perm)

    def spread(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales or zeros [groups, N] of the file -> [runs, N]."""
        return scales if self.source is None else scales.index_select(0, self.source)


def group_rows(g_idx: torch.Tensor, groups: int, name: str = "g_idx") -> Grouping:
    """Sort rows by their group, stably, and cut them into equal runs.

    g_idx: int32 or int64 [K], values 0 .. groups - 1, any device. Groups of one size are one run each. Groups of
    several sizes (a last one that K leaves short, a `g_idx` of another tool) are cut into runs of their greatest
    common divisor, which repeats scales and changes no weight. Two host syncs.

    Raises TensorError naming `name` for a value out of range.
    """
    group = g_idx.long()
    low, high = torch.stack(torch.aminmax(group)).tolist()
    if low < 0 or high >= groups:
        raise TensorError(name, f"expected groups within 0..{groups - 1} as scales has, got {low}..{high}")
    is_sorted = bool((group[1:] >= group[:-1]).all())
    perm = None if is_sorted else torch.argsort(group, stable=True).to(torch.int32)
    counts = torch.bincount(group, minlength=groups)
    sizes = counts.tolist()
    rows = math.gcd(*sizes)
    if all(size == rows for size in sizes):
        return Grouping(perm, None, rows)
    return Grouping(perm, torch.arange(groups, device=g_idx.device).repeat_interleave(counts // rows), rows)


def even_groups(k: int, groups: int, group_size: int | None, device: torch.device) -> Grouping:
    """Groups of `group_size` neighbouring rows, the last one possibly short; -1 is all rows, None is K / groups.

    Raises TensorError naming scales if K, their number and the group size do not fit.
    """
    size = k if group_size == -1 else group_size
    if size is None:
        if k % groups:
            raise TensorError("scales", f"expected a number of groups that divides K = {k}, got {groups}")
        return Grouping(None, None, k // groups)
    if size < 1:
        raise TensorError("scales", f"group_size: expected -1 or at least 1, got {size} in the config")
    expected = -(-k // size)
    if groups != expected:
        raise TensorError("scales", f"expected {expected} groups of {size} rows for K = {k}, got {groups}")
    if k % size == 0:
        return Grouping(None, None, size)
    return group_rows(torch.arange(k, device=device) // size, groups)
