"""Adapters of packed mixtures trained under DDP and FSDP2, over gloo: what one process trains with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import tests.hf_version  # noqa: F401
from tests.parallel import parallel_ranks

MODULE = "parallel_train"
BOUND = 1e-3
"""Of the change of a tensor: everything here is fp32, and gradients are means in another order."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return parallel_ranks.run(MODULE, (2,), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", parallel_ranks.names(MODULE, 2))
def test_adapters_like_those_of_one_process(name: str, results: dict[str, dict[str, Any]]) -> None:
    parallel_ranks.check(results["2"], name, BOUND)
