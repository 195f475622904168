"""transformers' tensor parallel models: processes over gloo load their parts, and compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch.distributed.tensor", reason="needs PyTorch with torch.distributed")
pytest.importorskip("transformers.distributed.parallel_utils", reason="needs transformers with DTensor parallelism")
pytest.importorskip("compressed_tensors")
pytest.importorskip("bitsandbytes")

from tests.parallel import parallel_ranks

MODULE = "parallel_hf"
RANKS = (2, 4)
BOUND = 1e-5
"""Of the greatest logit: everything here is fp32, and sums are in another order."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return parallel_ranks.run(MODULE, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, id=f"{ranks} ranks: {name}")
        for ranks in RANKS
        for name in parallel_ranks.names(MODULE, ranks)
    ],
)
def test_logits_and_files_like_one_process(ranks: int, name: str, results: dict[str, dict[str, Any]]) -> None:
    parallel_ranks.check(results[str(ranks)], name, BOUND)
