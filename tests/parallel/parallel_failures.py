"""Cases that fail, for tests of parallel_ranks.py itself."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh


def passes(mesh: DeviceMesh) -> float:
    term = torch.ones(3)
    distributed.all_reduce(term, group=mesh.get_group())
    return float(term.sum()) - 3 * mesh.size()


def fails_on_one_rank(mesh: DeviceMesh) -> None:
    """The other one waits for it."""
    assert mesh.get_local_rank() != 1, "no such luck"
    distributed.all_reduce(torch.ones(1), group=mesh.get_group())


def dies(mesh: DeviceMesh) -> None:
    os._exit(3)


CASES: dict[str, Callable[[DeviceMesh], float | None]] = {
    "passes": passes,
    "fails": fails_on_one_rank,
    "passes after it": passes,
    "dies": dies,
    "passes at last": passes,
}
RANKS = dict.fromkeys(CASES, (2,))
