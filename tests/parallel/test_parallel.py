"""Tensor parallel layers: processes over gloo compute what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch.distributed.tensor", reason="needs PyTorch with torch.distributed")

from tests.parallel import parallel_ranks

Results = Callable[[str, int], dict[str, Any]]

BOUND = 1e-5
"""Of the greatest number of y: everything here is fp32, and sums are in another order."""

RANKS = {"parallel_linear": (2, 1, 4, 8), "parallel_more": (2, 4), "parallel_sums": (2, 4)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """(module, ranks) -> the results of its cases; each module is run once, when its first case is asked for."""
    found: dict[tuple[str, int], dict[str, Any]] = {}

    def of(module: str, ranks: int) -> dict[str, Any]:
        if (module, ranks) not in found:
            runs = parallel_ranks.run(module, RANKS[module], tmp_path_factory.mktemp("ranks"))
            found.update({(module, int(number)): run for number, run in runs.items()})
        return found[module, ranks]

    return of


@pytest.mark.parametrize(
    ("module", "ranks", "name"),
    [
        pytest.param(module, ranks, name, id=f"{ranks} ranks: {name}")
        for module, numbers in RANKS.items()
        for ranks in numbers
        for name in parallel_ranks.names(module, ranks)
    ],
)
def test_like_one_process(module: str, ranks: int, name: str, results: Results) -> None:
    parallel_ranks.check(results(module, ranks), name, BOUND)
