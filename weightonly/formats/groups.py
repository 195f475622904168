"""Act-order: rows of a weight sorted by group, so that the rows of a group are neighbours.

GPTQ with `desc_act` quantizes the rows of K in the order of their activations; `g_idx[k]` is the group of row k.
Kernels need the rows of a group side by side. So the rows are sorted once, and x is permuted at run time:

    x[:, perm] @ w[perm] = x @ w
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .expect import TensorError
from .plain import IntWeight
from .words import to_signed


@dataclass(frozen=True, eq=False)
class Grouping:
    """How the rows of a weight [K, N] become equal groups: `rows` neighbours that share a scale.

    perm: int32 [K], the row of the file that comes to each place; None: rows stay where they are.
    source: int64 [K / rows], the group of the file whose scale each group takes; None: its own number.
    rows: of a group; it divides K.
    """

    perm: torch.Tensor | None
    source: torch.Tensor | None
    rows: int

    def sort(self, q: torch.Tensor) -> torch.Tensor:
        """The rows of `q` [K, N] in their new order."""
        return q if self.perm is None else q.index_select(0, self.perm)

    def spread(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales or zeros of the file [groups of the file, N] -> [K / rows, N]."""
        return scales if self.source is None else scales.index_select(0, self.source)

    def weight(self, u: torch.Tensor, bits: int, scales: torch.Tensor, zeros: torch.Tensor | None) -> IntWeight:
        """u: uint8 [K, N], unsigned values of `bits` bits. zeros: signed ones, of any dtype."""
        spread = None if zeros is None else self.spread(zeros.to(scales))
        return IntWeight(self.sort(to_signed(u, bits)), bits, self.spread(scales), spread, self.perm)


def group_rows(g_idx: torch.Tensor, groups: int, name: str = "g_idx") -> Grouping:
    """Sort rows by their group, stably, and cut them into groups of one size.

    g_idx: int32 or int64 [K], values 0 .. groups - 1, on any device. Groups of several sizes (a short last one, a
    `g_idx` of another tool) are cut to the greatest common divisor of their sizes: scales are repeated, and no weight
    changes. Two host syncs.

    Raises TensorError, naming `name`, for a value out of range.
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


def is_in_order(g_idx: torch.Tensor, rows: int | None) -> bool:
    """Whether each group is the next `rows` rows; None: as many as the first one has."""
    rows = int((g_idx == 0).sum()) if rows is None else rows
    return torch.equal(g_idx.long(), torch.arange(len(g_idx), device=g_idx.device) // max(rows, 1))


def even_groups(k: int, groups: int, group_size: int | None, device: torch.device, name: str = "scales") -> Grouping:
    """Groups of `group_size` neighbouring rows; the last one may be short. -1: all rows; None: see `rows_by_count`.

    Raises TensorError, naming `name`, if K, the number of groups and the group size do not fit.
    """
    if group_size is None:
        return Grouping(None, None, rows_by_count(k, groups, name))
    size = k if group_size == -1 else group_size
    if size < 1:
        raise TensorError(name, f"group_size: expected -1 or at least 1, got {size} in the config")
    expected = -(-k // size)
    if groups != expected:
        raise TensorError(name, f"expected {expected} groups of {size} rows for K = {k}, got {groups}")
    if k % size == 0:
        return Grouping(None, None, size)
    return group_rows(torch.arange(k, device=device) // size, groups)


def rows_by_count(k: int, groups: int, name: str = "scales") -> int:
    """The group size where nothing says it: all of K, or a power of two that divides K.

    A count alone may also be of larger groups with a short last one: two groups of 768 rows may be 512 and 256.
    Raises TensorError, naming `name`, for a count that does not give a power of two.
    """
    rows, rest = divmod(k, groups)
    if rest or (groups > 1 and rows & (rows - 1)):
        problem = f"expected a number of groups that gives K = {k} a power of two rows in each, or a config"
        raise TensorError(name, f"{problem} with the group_size, got {groups}")
    return rows
