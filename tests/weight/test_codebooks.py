"""The codebooks of NF4 and FP4 and those of callers: values, copies on a device, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.code_cases import DTYPES, OWN, dtypes, random_codes

import weightonly as wo
from weightonly.codebooks import CODEBOOKS, codebook, codebook_on, codebook_values


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_codebooks_are_those_of_bitsandbytes(format: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.get_4bit_type(format, device="cpu")
    assert torch.equal(codebook(format), theirs)
    assert torch.equal(codebook(format).signbit(), theirs.signbit())
    assert codebook(format).double().tolist() == list(CODEBOOKS[format])  # exact in fp32


def test_the_largest_numbers_of_fp16_may_be_in_a_codebook() -> None:
    code = (-65504.0, *[0.0] * 14, 65504.0)
    assert codebook_values(code) == code
    with pytest.raises(ValueError, match="code: expected finite values within"):
        codebook_values((*code[:15], 65536.0))


def test_own_codebooks_are_rounded_to_fp32() -> None:
    values = codebook_values([0.1 * i for i in range(16)])
    assert list(values) == torch.tensor([0.1 * i for i in range(16)]).double().tolist()
    assert codebook_values(torch.tensor(values, dtype=torch.float64)) == values
    assert codebook_values(torch.arange(16).half()) == tuple(map(float, range(16)))


@dtypes
def test_a_device_has_one_copy_of_a_codebook(dtype: torch.dtype) -> None:
    table = codebook_on(OWN, torch.device("cpu"), dtype)
    assert codebook_on(codebook_values(OWN), torch.device("cpu"), dtype) is table
    assert torch.equal(table, torch.tensor(OWN).to(dtype))


BAD_TABLES: dict[str, tuple[Any, type[Exception], str]] = {
    "length": ([0.0] * 15, ValueError, r"code: expected 16 numbers, got shape \[15\]"),
    "rank": (torch.zeros(16, 1), ValueError, r"code: expected 16 numbers, got shape \[16, 1\]"),
    "nan": ([float("nan")] * 16, ValueError, r"code: expected finite values within \+-65504, got \[nan"),
    "beyond fp16": ([0.0] * 15 + [65505.0], ValueError, "code: expected finite values .*65505"),
    "beyond fp32": ([0.0] * 15 + [1e300], ValueError, "code: expected finite values .*inf"),
    "integers": (torch.arange(16), TypeError, "code: expected floats, got torch.int64"),
    "text": ("nf4", TypeError, "code: expected 16 numbers, got str"),
    "text in a list": (["nf4"], TypeError, "code: expected 16 numbers, got list"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_codebooks(case: str, generator: torch.Generator) -> None:
    code, error, message = BAD_TABLES[case]
    with pytest.raises(error, match=message):
        wo.preprocess(random_codes(64, 64, generator), format="code4", code=code)


@pytest.mark.gpu
def test_codebooks_are_there_before_a_graph_is_captured(cuda_device: torch.device, generator: torch.Generator) -> None:
    """A first `gemm` inside of a capture finds the codebook on the device and copies nothing."""
    values = tuple(torch.randn(16, generator=generator).tolist())
    weight = wo.preprocess(random_codes(64, 64, generator), format="code4", code=values).to(cuda_device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=cuda_device)
        codebooks = [codebook_on(weight.code, weight.device, dtype) for dtype in DTYPES] if weight.code else []
    assert [table.cpu().tolist() for table in codebooks] == [torch.tensor(values).to(d).tolist() for d in DTYPES]
