"""The batch-invariant mode, as it was before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import weightonly as wo


@pytest.fixture(autouse=True)
def mode_as_before() -> Iterator[None]:
    before = wo.batch_invariant()
    wo.set_batch_invariant(False)
    yield
    wo.set_batch_invariant(before)
