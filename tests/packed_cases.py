"""What the tests of layouts, packing and files share."""

from __future__ import annotations

import pytest
import torch

LAYOUTS = ["row_major", "interleaved", "tiled", "cpu"]

bits_4_and_8 = pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])


def random_q(k: int, n: int, bits: int, generator: torch.Generator) -> torch.Tensor:
    """int8 [k, n], all values of `bits` signed bits."""
    limit = 1 << (bits - 1)
    return torch.randint(-limit, limit, (k, n), dtype=torch.int8, generator=generator)
