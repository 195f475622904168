"""Sums over GPUs of one host: what they share memory for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("torch.distributed.tensor", reason="needs PyTorch with torch.distributed")

from tests.parallel import parallel_ranks

MODULE = "parallel_sums_gpu"
BOUND = 1e-5
"""Of the greatest number of y; of bf16 in units of its rounding."""

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Ranks -> the results of the cases, for as many as there are GPUs."""
    ranks = [number for number in (2, 4) if number <= torch.cuda.device_count()]
    return parallel_ranks.run(MODULE, ranks, tmp_path_factory.mktemp("ranks"), "cuda") if ranks else {}


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, id=f"{ranks} ranks: {name}")
        for ranks in (2, 4)
        for name in parallel_ranks.names(MODULE, ranks)
    ],
)
def test_sums(ranks: int, name: str, results: dict[str, dict[str, Any]]) -> None:
    if str(ranks) not in results:
        pytest.skip(f"{torch.cuda.device_count()} GPUs")
    parallel_ranks.check(results[str(ranks)], name, BOUND)
