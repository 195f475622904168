"""Blocks of GGUF's types, beside package gguf's `dequantize`."""

from __future__ import annotations

import dataclasses
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.gguf_files import random_blocks

from weightonly.formats.expect import TensorError
from weightonly.formats.gguf_blocks import TYPES
from weightonly.formats.records import pack

N, K = 48, 1024

EXACT_FP32 = {kind for kind, block in TYPES.items() if not block.has_zeros}
EXACT_FP16 = EXACT_FP32 - {"Q6_K", "IQ4_XS"}
ERRORS = {"Q4_1": 4e-4, "Q5_1": 2e-5, "Q4_K": 4e-4, "Q5_K": 4e-4, "Q6_K": 4e-4, "IQ4_XS": 4e-4}
"""Of types that fp16 rounds: of a weight, relative to the root of the mean square of all."""


def blocks_of(kind: str, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 [N, blocks, bytes], fp32 [K, N] as package gguf has them)."""
    data = random_blocks(kind, (N, K), **arguments)
    w = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(data).view(N, K // TYPES[kind].values, -1), torch.from_numpy(w).t()


@pytest.mark.parametrize("kind", TYPES)
def test_values(kind: str) -> None:
    blocks, expected = blocks_of(kind)
    weight = TYPES[kind].read(kind, blocks)
    w = weight.dequantize(torch.float32)
    assert w.isfinite().all() and w.std() > 0.001
    if kind in EXACT_FP32:
        assert torch.equal(w, expected)
    else:
        torch.testing.assert_close(w, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    half = pack("x", weight, None, "cpu").product(torch.float16 if kind != "MXFP4" else torch.bfloat16).operand
    w = half.dequantize(torch.float32)
    if kind in EXACT_FP16:
        assert torch.equal(w, expected)
    else:
        error = (w - expected).norm() / expected.norm()
        assert 0 < float(error) < ERRORS[kind]


@pytest.mark.parametrize("kind", TYPES)
def test_shapes(kind: str) -> None:
    blocks, _ = blocks_of(kind)
    block, weight = TYPES[kind], TYPES[kind].read(kind, blocks)
    assert (block.values, blocks.shape[-1]) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert weight.scales.shape == (K // block.group_size, N)
    assert (getattr(weight, "zeros", None) is not None) is block.has_zeros


@pytest.mark.parametrize("kind", sorted(set(TYPES) - {"Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}))
def test_quantized_by_gguf(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    w = np.random.default_rng(1).normal(0, 0.02, (N, K)).astype(np.float32)
    data = gguf.quantize(w, number)
    blocks = torch.from_numpy(data).view(N, K // TYPES[kind].values, -1)
    expected = torch.from_numpy(gguf.dequantize(data, number)).t()
    torch.testing.assert_close(TYPES[kind].read(kind, blocks).dequantize(torch.float32), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q4_K", "Q5_K"])
def test_flat_groups(kind: str) -> None:
    """Groups that are constant, or all but: no zero point of 16 bits reaches 0 from them, in steps of theirs."""
    number = gguf.GGMLQuantizationType[kind]
    data = random_blocks(kind, (N, K)).reshape(N, K // TYPES[kind].values, -1)
    tiny, large = np.array([0, 6e-8], np.float16), np.array([0.75], np.float16)
    data[::2, :, :2] = tiny[:1].view(np.uint8)
    data[1::2, :, :2] = tiny[1:].view(np.uint8)
    data[::3, :, 2:4] = large.view(np.uint8)
    data[5, :, 2:4] = 0
    expected = torch.from_numpy(gguf.dequantize(data.reshape(N, -1), number)).t()
    weight = TYPES[kind].read(kind, torch.from_numpy(data))
    for dtype in (torch.float32, torch.float16):
        w = pack("x", weight, None, "cpu").product(dtype).operand.dequantize(torch.float32)
        assert w.isfinite().all()
        torch.testing.assert_close(w, expected, rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1"])
def test_zeros_keep_fractions(kind: str) -> None:
    """Of q in 8 bits the zero point is within half a step of 0, so that 16 bits hold it to 2^-12 of a step."""
    weight: Any = TYPES[kind].read(kind, blocks_of(kind)[0])
    assert (weight.zeros != weight.zeros.round()).any()
    if kind == "Q5_1":
        assert weight.zeros.abs().max() <= 0.5
        rounded = dataclasses.replace(weight, zeros=weight.zeros.half().float())
        assert (rounded.dequantize() - weight.dequantize()).abs().max() <= 2**-12 * weight.scales.abs().max()


def test_nan_scales_stay_nan() -> None:
    data = random_blocks("Q4_1", (N, K)).reshape(N, K // 32, -1)
    data[3, 2, :2] = np.array([np.nan], np.float16).view(np.uint8)
    w = TYPES["Q4_1"].read("Q4_1", torch.from_numpy(data)).dequantize(torch.float32)
    assert w.isnan().sum() == 32 and w[64:96, 3].isnan().all()


def test_mxfp4_nan_is_refused() -> None:
    blocks, _ = blocks_of("MXFP4")
    blocks[1, 0, 0] = 255
    with pytest.raises(TensorError, match=r"MXFP4: expected exponents 0\.\.252 of E8M0, got 255, which is NaN"):
        TYPES["MXFP4"].read("MXFP4", blocks)
