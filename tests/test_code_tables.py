"""The tables of NF4 and FP4 and tables of one's own: values, copies on a device, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from code_cases import DTYPES, OWN, dtypes, random_codes

import weightonly as wo
from weightonly.code_tables import CODE_TABLES, code_table, table_on, table_values


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_tables_are_those_of_bitsandbytes(format: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.get_4bit_type(format, device="cpu")
    assert torch.equal(code_table(format), theirs)
    assert torch.equal(code_table(format).signbit(), theirs.signbit())
    assert code_table(format).double().tolist() == list(CODE_TABLES[format])  # exact in fp32


def test_own_tables_are_rounded_to_fp32() -> None:
    values = table_values([0.1 * i for i in range(16)])
    assert list(values) == torch.tensor([0.1 * i for i in range(16)]).double().tolist()
    assert table_values(torch.tensor(values, dtype=torch.float64)) == values
    assert table_values(torch.arange(16).half()) == tuple(map(float, range(16)))


@dtypes
def test_a_device_has_one_copy_of_a_table(dtype: torch.dtype) -> None:
    table = table_on(OWN, torch.device("cpu"), dtype)
    assert table_on(table_values(OWN), torch.device("cpu"), dtype) is table
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
def test_bad_tables(case: str, generator: torch.Generator) -> None:
    code, error, message = BAD_TABLES[case]
    with pytest.raises(error, match=message):
        wo.preprocess(random_codes(64, 64, generator), format="code4", code=code)


@pytest.mark.gpu
def test_tables_are_there_before_a_graph_is_captured(cuda_device: torch.device, generator: torch.Generator) -> None:
    """Whoever first multiplies inside of a capture finds a table that no capture has to make."""
    values = tuple(torch.randn(16, generator=generator).tolist())
    weight = wo.preprocess(random_codes(64, 64, generator), format="code4", code=values).to(cuda_device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=cuda_device)
        tables = [table_on(weight.code, weight.device, dtype) for dtype in DTYPES] if weight.code else []
    assert [table.cpu().tolist() for table in tables] == [torch.tensor(values).to(d).tolist() for d in DTYPES]
