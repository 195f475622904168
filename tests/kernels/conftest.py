"""What the kernels are compared with, what of them is built, and the programs that build them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from tests import ROOT

sys.path.insert(0, str(ROOT / "kernels"))  # weightonly_build is not installed


@pytest.fixture
def compiled_groups_of_16(groups_of_16: None) -> None:
    """`groups_of_16` on a GPU; skips where the build is without these kernels (WEIGHTONLY_UNVERIFIED=on)."""
    from weightonly.kernels import dequantizes_groups_of_16

    if not dequantizes_groups_of_16():
        pytest.skip("the kernels for groups of 16 are not built")


@pytest.fixture
def fp32_sums() -> Iterator[None]:
    """cuBLAS may add the parts of a split K in 16 bits, unless it is told not to: then sums are exact on the grid."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(matmul, name, value)
