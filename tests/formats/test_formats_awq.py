"""The AWQ reader against a plain-numpy reference and against the converter of compressed-tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import formats_reference as ref

from weightonly.formats import read_awq
from weightonly.formats.awq import awq_format

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    group_size=st.integers(1, 40),
    groups=st.integers(1, 5),
    words=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
)
def test_weight_is_that_of_the_reference(
    seed: int, group_size: int, groups: int, words: int, dtype: torch.dtype
) -> None:
    k, n = group_size * groups, 8 * words
    layer = ref.random_awq_layer(k, n, groups, dtype, torch.Generator().manual_seed(seed))
    weight = read_awq(**layer, group_size=group_size)
    assert weight.q.dtype == torch.int8 and weight.q.shape == (k, n) and weight.q.is_contiguous()
    assert weight.bits == 4 and weight.perm is None
    assert torch.equal(weight.scales, layer["scales"])
    assert torch.equal(weight.q, torch.from_numpy(ref.awq_values(layer["qweight"]) - 8).to(torch.int8))
    zeros = torch.from_numpy(ref.awq_values(layer["qzeros"]) - 8).to(dtype)
    assert weight.zeros is None or weight.zeros.dtype == dtype
    assert torch.equal(torch.zeros_like(zeros) if weight.zeros is None else weight.zeros, zeros)
    assert torch.equal(weight.dequantize(), ref.awq_weight(**layer))


def test_reference_packs_what_it_unpacks(generator: torch.Generator) -> None:
    words = ref.random_words(5, 3, generator)
    assert torch.equal(ref.awq_words(ref.awq_values(words)), words)


def test_zero_points_in_the_middle_are_none(generator: torch.Generator) -> None:
    layer = ref.random_awq_layer(64, 16, 2, torch.float16, generator)
    layer["qzeros"] = torch.full((2, 2), ref.int32(0x88888888), dtype=torch.int32)
    weight = read_awq(**layer)
    assert weight.zeros is None
    assert torch.equal(weight.dequantize(), ref.awq_weight(**layer))


@pytest.mark.parametrize("shape", [(128, 64, 1), (256, 24, 8)], ids=str)
def test_compressed_tensors_converts_to_the_same_weight(
    shape: tuple[int, int, int], generator: torch.Generator
) -> None:
    """Its AutoAWQConverter unpacks AWQ by itself; its decompressor then gives the dense weight."""
    autoawq = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    k, n, groups = shape
    layer = ref.random_awq_layer(k, n, groups, torch.float32, generator)
    converter = autoawq.AutoAWQConverter(group_size=k // groups)
    converted = converter.process({f"layer.{name}": tensor for name, tensor in layer.items()})
    args = quantization.QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=k // groups)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    local = {name.removeprefix("layer."): tensor for name, tensor in converted.items()}
    dense = packing.PackedQuantizationCompressor.decompress(local, scheme)["weight"]  # [N, K]
    assert torch.equal(read_awq(**layer).dequantize(), dense.t())


BAD: dict[str, tuple[str, Any, str]] = {
    "dtype": ("qweight", torch.zeros(64, 2, dtype=torch.int64), r"qweight: expected int32 \[K, N / 8\], got int64"),
    "rank": ("qweight", torch.zeros(64, dtype=torch.int32), r"qweight: expected int32 \[K, N / 8\], got int32 \[64\]"),
    "empty": ("qweight", torch.zeros(0, 2, dtype=torch.int32), r"qweight: expected .*got int32 \[0, 2\]"),
    "columns": ("scales", torch.ones(2, 15).half(), r"scales: expected float16 .* \[groups, 16\], got float16 \[2, 15"),
    "groups": ("scales", torch.ones(3, 16).half(), r"scales: expected a number of groups that divides K = 64, got 3"),
    "kind of scales": ("scales", torch.ones(2, 16).double(), r"scales: expected .*got float64"),
    "zeros": ("qzeros", torch.zeros(2, 3, dtype=torch.int32), r"qzeros: expected int32 \[2, 2\], got int32 \[2, 3\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_tensors_that_do_not_fit(case: str, generator: torch.Generator) -> None:
    name, tensor, message = BAD[case]
    layer = ref.random_awq_layer(64, 16, 2, torch.float16, generator)
    read_awq(**layer)
    with pytest.raises(ValueError, match=message):
        read_awq(**layer | {name: tensor})


@pytest.mark.gpu
def test_on_the_gpu(generator: torch.Generator) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    layer = ref.random_awq_layer(128, 40, 4, torch.float16, generator)
    weight = read_awq(**{name: tensor.cuda() for name, tensor in layer.items()})
    assert weight.q.is_cuda and weight.scales.is_cuda
    assert torch.equal(weight.dequantize().cpu(), ref.awq_weight(**layer))


@pytest.mark.parametrize("key", ["version", "format"])
@pytest.mark.parametrize("order", ["gemv", "gemv_fast", "marlin", "exllama"])
def test_other_orders_are_not_read(order: str, key: str) -> None:
    assert awq_format({"bits": 4, key: "GEMM"}).name == "awq"
    with pytest.raises(ValueError, match=f"^version: expected 'gemm', got '{order}'; other orders of AutoAWQ are not"):
        awq_format({"bits": 4, key: order})
