"""What runs cases on several processes: each case has a result of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.tensor", reason="needs PyTorch with torch.distributed")

from tests.parallel import parallel_ranks


def test_cases_after_one_that_fails_run(tmp_path: Path) -> None:
    results = parallel_ranks.run("parallel_failures", (2,), tmp_path)["2"]
    assert list(results) == parallel_ranks.names("parallel_failures", 2)
    assert all(results[name] == 0 for name in results if name.startswith("passes"))
    assert "rank 1: Traceback" in results["fails"] and "no such luck" in results["fails"]
    assert results["dies"] == "0 of 2 ranks came to the end of this case"
