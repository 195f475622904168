"""What the C interface of the conversions (kernels/convert/conversions.h) refuses, before it asks for a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from weightonly.kernels import _C, cuda_built

pytestmark = pytest.mark.skipif(not cuda_built(), reason="the CUDA kernels are not built")

AWQ: dict[str, int] = {
    "device": 0,
    "type": 0,
    "path": 0,
    "k": 16,
    "n": 8,
    "groups": 2,
    "qweight": 256,
    "scales": 256,
    "qzeros": 256,
    "w": 256,
    "stream": 0,
}

BLOCKS: dict[str, Any] = {
    "device": 0,
    "type": 0,
    "count": 100,
    "blocksize": 64,
    "codebook": [0.0] * 16,
    "w": 256,
    "packed": 256,
    "absmax": 256,
    "stream": 0,
}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("qweight", 2, "a 4-byte aligned address"),
        ("qweight", 0, "a 4-byte aligned address"),
        ("scales", 8, "a 16-byte aligned address"),
        ("qzeros", 0, "a 4-byte aligned address"),
        ("w", 8, "a 16-byte aligned address"),
        ("k", 0, "at least 1"),
        ("n", 12, "a multiple of 8"),
        ("n", 0, "a multiple of 8"),
        ("groups", 3, "a divisor of k"),
        ("groups", 0, "a divisor of k"),
        ("type", 2, "0 or 1"),
        ("path", 3, "0 to 2"),
    ],
)
def test_awq_dequantize_refuses(name: str, value: int, expected: str) -> None:
    with pytest.raises(RuntimeError, match=f"^awq_dequantize: {name} must be {expected}, got {value}$"):
        _C.awq_dequantize(**AWQ | {name: value})


@pytest.mark.parametrize("function", ["quantize_4bit", "dequantize_4bit"])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("w", 8, "a 16-byte aligned address"),
        ("packed", 2, "a 4-byte aligned address"),
        ("absmax", 0, "a 4-byte aligned address"),
        ("count", 0, "1 to 2^42"),
        ("blocksize", 48, "a power of two from 32 to 4096"),
        ("blocksize", 16, "a power of two from 32 to 4096"),
        ("blocksize", 8192, "a power of two from 32 to 4096"),
        ("type", 3, "0 to 2"),
    ],
)
def test_4bit_blocks_refuse(function: str, name: str, value: int, expected: str) -> None:
    message = re.escape(f"{function}: {name} must be {expected}, got {value}")
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        getattr(_C, function)(**BLOCKS | {name: value})
