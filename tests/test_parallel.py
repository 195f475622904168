"""Tensor parallel layers: processes over gloo compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch.distributed.tensor", reason="needs PyTorch with torch.distributed")

import parallel_ranks

pytestmark = pytest.mark.skipif(not parallel_ranks.has_loopback(), reason="no network, not even 127.0.0.1")

RANKS = (1, 2, 4, 8)
BOUND = 1e-5
"""Of the greatest number of y: everything here is fp32, and sums are in another order."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return parallel_ranks.run("parallel_linear", RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, id=f"{ranks} ranks: {name}")
        for ranks in RANKS
        for name in parallel_ranks.names("parallel_linear", ranks)
    ],
)
def test_like_one_process(ranks: int, name: str, results: dict[str, dict[str, Any]]) -> None:
    parallel_ranks.check(results[str(ranks)], name, BOUND)
