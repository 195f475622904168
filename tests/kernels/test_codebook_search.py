"""The kernel's search for the nearest value of a codebook (kernels/convert/codebook_search.h), compiled for a CPU."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import ROOT

from weightonly.codebooks import BLOCK_FORMATS, CODEBOOKS


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"the host compiler {compiler[0]} was not found")
    output = tmp_path_factory.mktemp("search") / "codebook_search_host.so"
    options = ["-O1", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{ROOT}"]
    subprocess.run([*compiler, *options, ROOT / "tests/kernels/codebook_search_host.cpp", "-o", output], check=True)
    return ctypes.CDLL(str(output))


def check(library: ctypes.CDLL, codebook: list[float], x: torch.Tensor) -> int:
    """Compares the codes of x with those of PyTorch's bucketize; returns the most thresholds of a cell."""
    numbers = torch.tensor(codebook, dtype=torch.float32)
    codes = torch.full((x.numel(),), 255, dtype=torch.uint8)
    library.search_codes.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p]
    passes: int = library.search_codes(numbers.data_ptr(), x.data_ptr(), x.numel(), codes.data_ptr())
    order = numbers.argsort(stable=True)
    midpoints = (numbers[order[:-1]] + numbers[order[1:]]) / 2
    assert torch.equal(codes, order[torch.bucketize(x, midpoints)].to(torch.uint8))
    return passes


def around(codebook: list[float], g: torch.Generator) -> torch.Tensor:
    """Numbers of -1 to 1, and a rounding beyond: spread, at the borders of cells, and at its midpoints."""
    numbers = torch.tensor(codebook, dtype=torch.float32).sort().values
    borders = torch.cat([(numbers[:-1] + numbers[1:]) / 2, numbers, torch.arange(-16, 17) / 15.5, torch.zeros(1)])
    up, down = torch.tensor(2.0), torch.tensor(-2.0)
    near = torch.cat([borders, -borders, borders.nextafter(up), borders.nextafter(down)])
    spread = torch.rand(2000, generator=g) * 2 - 1
    tiny = torch.randn(100, generator=g) * 1e-42
    limit = torch.ones(1).nextafter(up)
    return torch.cat([near, spread, spread * 0.01, tiny, -limit, limit]).clamp(-limit, limit)


@pytest.mark.parametrize("quant_type", BLOCK_FORMATS)
def test_codebooks_of_the_library(library: ctypes.CDLL, generator: torch.Generator, quant_type: str) -> None:
    """They take one comparison of each element, which the kernel is quickest at."""
    codebook = list(CODEBOOKS[quant_type])
    assert check(library, codebook, around(codebook, generator)) == 1


TABLES = st.one_of(
    st.lists(st.floats(-1, 1, width=32), min_size=16, max_size=16),
    st.lists(st.sampled_from([-1.0, -0.5, -0.0, 0.0, 1e-30, 0.25, 0.25000003, 1.0]), min_size=16, max_size=16),
    st.lists(st.floats(-65504, 65504, width=32), min_size=16, max_size=16),
    st.lists(st.floats(-1, 1, width=32), min_size=16, max_size=16).map(lambda codebook: [x / 100 for x in codebook]),
)


@settings(max_examples=300, deadline=None)
@given(codebook=TABLES, seed=st.integers(0, 2**31))
def test_any_codebook(library: ctypes.CDLL, codebook: list[float], seed: int) -> None:
    assert check(library, codebook, around(codebook, torch.Generator().manual_seed(seed))) <= 15
