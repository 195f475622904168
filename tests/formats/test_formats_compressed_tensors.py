"""The reader of compressed-tensors' pack-quantized weights: its own compressor packs, ours reads."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightonly.formats import IntWeight, read_compressed_tensors
from weightonly.formats.compressed_tensors import compressed_tensors_formats

quantization = pytest.importorskip("compressed_tensors.quantization")
packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")

Compressor = packing.PackedQuantizationCompressor
STRATEGIES = ["channel", "group"]
packs_g_idx = pytest.mark.skipif(
    "g_idx" not in inspect.signature(forward.quantize).parameters,
    reason="this compressed-tensors does not know weight_g_idx",
)


def scheme(bits: int, symmetric: bool, strategy: str, group_size: int | None, **more: Any) -> Any:
    args = quantization.QuantizationArgs(
        num_bits=bits,
        symmetric=symmetric,
        strategy=strategy,
        group_size=group_size if strategy == "group" else None,
        **more,
    )
    return quantization.QuantizationScheme(targets=["Linear"], weights=args)


def compress(
    w: torch.Tensor, groups: int, how: Any, g: torch.Generator, g_idx: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a layer as the package packs w [N, K]."""
    n, bits = w.shape[0], how.weights.num_bits
    limit = 1 << (bits - 1)
    local = {
        "weight": w,
        "weight_scale": (torch.rand(n, groups, generator=g) * 4 / limit + 1e-3).to(w.dtype),
        "weight_zero_point": torch.randint(-limit, limit, (n, groups), generator=g).to(torch.int8),
    }
    if g_idx is not None:
        local["weight_g_idx"] = g_idx
    if how.weights.symmetric:
        del local["weight_zero_point"]
    compressed: dict[str, torch.Tensor] = Compressor.compress(local, how)
    return compressed


def decompress(layer: dict[str, torch.Tensor], how: Any) -> torch.Tensor:
    """The dense weight [K, N] that the package computes."""
    w: torch.Tensor = Compressor.decompress(layer, how)["weight"]
    return w.t()


def read(layer: dict[str, torch.Tensor], bits: int, group_size: int | None = None) -> IntWeight:
    return read_compressed_tensors(**layer, bits=bits, group_size=group_size)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    strategy=st.sampled_from(STRATEGIES),
    group_size=st.integers(1, 40),
    groups=st.integers(1, 5),
    n=st.integers(1, 40),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_weight_is_that_of_the_package(
    seed: int, bits: int, symmetric: bool, strategy: str, group_size: int, groups: int, n: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(seed)
    k = group_size * groups
    how = scheme(bits, symmetric, strategy, group_size)
    runs = groups if strategy == "group" else 1
    layer = compress(torch.randn(n, k, generator=g).to(dtype), runs, how, g)
    weight = read(layer, bits, group_size if strategy == "group" else -1)
    assert weight.q.dtype == torch.int8 and weight.q.shape == (k, n) and weight.q.is_contiguous()
    assert weight.perm is None
    assert weight.scales.dtype == dtype and weight.scales.shape == (runs, n) and weight.scales.is_contiguous()
    if symmetric:
        assert weight.zeros is None
    # Its product is rounded to the dtype of the scales, ours is before that.
    assert torch.equal(weight.dequantize(dtype), decompress(layer, how))
    in_fp32 = layer | {"weight_scale": layer["weight_scale"].float()}
    assert torch.equal(weight.dequantize(), decompress(in_fp32, how))


@packs_g_idx
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_act_order(bits: int, symmetric: bool, generator: torch.Generator) -> None:
    k, n, group_size = 128, 24, 32
    how = scheme(bits, symmetric, "group", group_size)
    g_idx = (torch.arange(k) // group_size)[torch.randperm(k, generator=generator)].to(torch.int32)
    w = torch.randn(n, k, generator=generator)
    layer = compress(w, k // group_size, how, generator, g_idx)
    weight = read(layer, bits)
    dense = decompress(layer, how)
    assert torch.equal(weight.dequantize(), dense)
    assert weight.perm is not None
    assert torch.equal(g_idx[weight.perm.long()], torch.arange(k, dtype=torch.int32) // group_size)


@packs_g_idx
def test_g_idx_that_was_never_set(generator: torch.Generator) -> None:
    how = scheme(4, True, "group", 32)
    layer = compress(torch.randn(8, 64, generator=generator), 2, how, generator, torch.full((64,), -1))
    weight = read(layer, 4)
    assert weight.perm is None
    assert torch.equal(weight.dequantize(), decompress(layer, how))


@pytest.mark.parametrize("bits", [4, 8])
def test_one_scale_of_all(bits: int, generator: torch.Generator) -> None:
    how = scheme(bits, True, "tensor", None)
    w = torch.randn(24, 40, generator=generator).half()
    layer = Compressor.compress({"weight": w, "weight_scale": torch.tensor([0.25]).half()}, how)
    weight = read(layer, bits)
    assert weight.scales.shape == (1, 24)
    assert torch.equal(weight.dequantize(torch.float16), decompress(layer, how))


def packed_layer(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    layer = {
        "weight_packed": torch.zeros(16, 8, dtype=torch.int32),
        "weight_scale": torch.ones(16, 2).half(),
        "weight_shape": torch.tensor([16, 64]),
        "weight_zero_point": torch.zeros(2, 2, dtype=torch.int32),
        "weight_g_idx": (torch.arange(64) // 32).to(torch.int32),
    }
    return layer | changes


BAD: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "packed": (
        {"weight_packed": torch.zeros(16, 9, dtype=torch.int32)},
        r"weight_packed: expected int32 \[16, 8\], got",
    ),
    "shape": ({"weight_shape": torch.tensor([16])}, r"weight_shape: expected int32 or int64 \[2\], got int64 \[1\]"),
    "empty": ({"weight_shape": torch.tensor([16, 0])}, "weight_shape: expected N, K >= 1, got 16, 0"),
    "another k": ({"weight_shape": torch.tensor([16, 128])}, r"weight_packed: expected int32 \[16, 16\], got"),
    "scale": ({"weight_scale": torch.ones(15, 2)}, r"weight_scale: expected .*\[16, groups\], got float32 \[15, 2\]"),
    "groups": (
        {
            "weight_scale": torch.ones(16, 3),
            "weight_zero_point": torch.zeros(2, 3, dtype=torch.int32),
            "weight_g_idx": torch.full((64,), -1),
        },
        "weight_scale: expected a number of groups that gives K = 64 a power of two .*, got 3",
    ),
    "zero point": (
        {"weight_zero_point": torch.zeros(16, 2, dtype=torch.int8)},
        r"weight_zero_point: expected int32 \[2, 2\], got int8 \[16, 2\]",
    ),
    "length of g_idx": ({"weight_g_idx": torch.zeros(63).int()}, r"weight_g_idx: expected .*\[64\], got int32 \[63\]"),
    "range of g_idx": ({"weight_g_idx": torch.full((64,), 2)}, r"weight_g_idx: expected groups within 0\.\.1 .*got 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_tensors_that_do_not_fit(case: str) -> None:
    change, message = BAD[case]
    read(packed_layer(), 4)
    with pytest.raises(ValueError, match=message):
        read(packed_layer(**change), 4)


def test_words_of_which_the_config_tells_the_bits() -> None:
    """A word holds four numbers of 8 bits, or as many of 4 bits and padding: nothing is guessed."""
    tensors = {
        "weight_packed": torch.zeros(8, 1, dtype=torch.int32),
        "weight_scale": torch.ones(8, 1).half(),
        "weight_shape": torch.tensor([8, 4]),
    }
    with pytest.raises(ValueError, match=r"weight_packed: expected int32 \[N, 1 \(4 bit\) or 1 \(8 bit\)\] for K = 4"):
        compressed_tensors_formats({})[0].describe("a", tensors)
    for bits in (4, 8):
        options = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": bits}}}}
        assert compressed_tensors_formats(options)[0].describe("a", tensors).format == f"int{bits}"


def test_other_bits() -> None:
    with pytest.raises(ValueError, match="bits: expected 4 or 8, got 2"):
        read(packed_layer(), 2)


@pytest.mark.gpu
@packs_g_idx
@pytest.mark.parametrize("bits", [4, 8])
def test_on_the_gpu(bits: int, generator: torch.Generator) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    how = scheme(bits, False, "group", 32)
    g_idx = (torch.arange(128) // 32)[torch.randperm(128, generator=generator)].to(torch.int32)
    layer = compress(torch.randn(24, 128, generator=generator), 4, how, generator, g_idx)
    weight = read({name: tensor.cuda() for name, tensor in layer.items()}, bits)
    assert torch.equal(weight.dequantize().cpu(), decompress(layer, how))
