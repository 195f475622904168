"""Every number of E4M3, by every kernel and dtype of x; where a process flushes subnormal numbers, too."""

from __future__ import annotations

import pytest
import torch

import weightonly as wo
from weightonly.cpu import library, native


@pytest.mark.parametrize("flush", [False, True], ids=["", "flush"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["cpu", "tiled", "interleaved"])
def test_each_number(backend: library.Backend, layout: str, dtype: torch.dtype, flush: bool) -> None:
    bits = torch.arange(256, dtype=torch.uint8).repeat(2)
    bits = torch.stack([bits.roll(column) for column in range(70)], 1)  # [512, 70]
    bits[(bits & 0x7F) == 0x7F] = 0
    q = bits.view(torch.float8_e4m3fn)
    packed = wo.preprocess(q, format="fp8", layout=layout)
    x, scales = torch.eye(512, dtype=dtype), torch.full((4, 70), 0.5, dtype=dtype)
    torch.set_flush_denormal(flush)
    try:
        for rows in (slice(0, 1), slice(9, 10), slice(120, 130), slice(0, 512)):
            y = native.gemm(backend, x[rows], packed, scales)
            assert torch.equal(y, (q.float() * 0.5)[rows].to(dtype))
    finally:
        torch.set_flush_denormal(False)
