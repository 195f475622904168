"""The GPTQ reader against a plain-numpy reference: both versions, 4 and 8 bit, act-order, odd shapes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import formats_reference as ref

from weightonly.formats import read_gptq
from weightonly.formats.plain import scale_rows

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ORDERS = ["none", "sorted", "shuffled", "uneven"]


def random_layer(k: int, n: int, groups: int, bits: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, Any]:
    per_word = 32 // bits
    return {
        "qweight": ref.random_words(-(-k // per_word), n, g),
        "scales": ref.random_scales(groups, n, dtype, g),
        "qzeros": ref.random_words(groups, -(-n // per_word), g),
    }


def random_group(order: str, k: int, group_size: int, groups: int, g: torch.Generator) -> torch.Tensor:
    """int32 [K]: the group of each row."""
    group = torch.arange(k) // group_size
    if order == "shuffled":
        group = group[torch.randperm(k, generator=g)]
    if order == "uneven":
        group = torch.randint(0, groups, (k,), generator=g)
    return group.to(torch.int32)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    bits=st.sampled_from([4, 8]),
    version=st.sampled_from([1, 2]),
    k=st.integers(1, 70),
    group_size=st.integers(1, 40),
    n=st.integers(1, 20),
    order=st.sampled_from(ORDERS),
    dtype=st.sampled_from(DTYPES),
)
def test_weight_is_that_of_the_reference(
    seed: int, bits: int, version: int, k: int, group_size: int, n: int, order: str, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(seed)
    if order == "none":
        k = -(-k * bits // 32) * 32 // bits  # without a g_idx, the words say what K is
    groups = -(-k // group_size)  # the last one may be short
    layer = random_layer(k, n, groups, bits, dtype, g)
    g_idx = random_group(order, k, group_size, groups, g)
    given_order: dict[str, Any] = {} if order == "none" else {"g_idx": g_idx}
    weight = read_gptq(**layer, **given_order, bits=bits, version=version, group_size=group_size)
    expected = ref.gptq_weight(**layer, group=g_idx.numpy().astype(np.int64), bits=bits, version=version)
    assert weight.q.dtype == torch.int8 and weight.q.shape == (k, n) and weight.bits == bits
    assert k % weight.scales.shape[0] == 0
    assert weight.scales.dtype == dtype
    assert weight.zeros is None or (weight.zeros.dtype == dtype and weight.zeros.shape == weight.scales.shape)
    assert torch.equal(weight.dequantize(), expected)
    is_sorted = bool((g_idx[1:] >= g_idx[:-1]).all())
    assert (weight.perm is None) == is_sorted
    if weight.perm is not None:
        assert weight.perm.dtype == torch.int32
        assert torch.equal(scale_rows(weight.q, weight.scales, weight.zeros), expected[weight.perm])


@pytest.mark.parametrize("bits", [4, 8])
def test_activations_are_permuted_like_the_rows(bits: int, generator: torch.Generator) -> None:
    layer = random_layer(128, 16, 4, bits, torch.float16, generator)
    layer["scales"] = torch.exp2(torch.randint(-3, 3, (4, 16), generator=generator).float()).half()  # sums are exact
    g_idx = random_group("shuffled", 128, 32, 4, generator)
    weight = read_gptq(**layer, g_idx=g_idx, bits=bits)
    assert weight.scales.shape == (4, 16)
    assert torch.equal(weight.scales, layer["scales"])
    x = torch.randint(-4, 5, (3, 128), generator=generator).float()
    assert weight.perm is not None
    sorted_w = scale_rows(weight.q, weight.scales, weight.zeros)
    assert torch.equal(x[:, weight.perm] @ sorted_w, x @ weight.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
def test_both_versions_of_the_same_zero_points(bits: int, generator: torch.Generator) -> None:
    """Zero points of 0, too: the reader adds to the words what the quantizer subtracted."""
    layer = random_layer(64, 24, 2, bits, torch.float16, generator)
    zeros = torch.randint(0, 2**bits, (2, 24), generator=generator).numpy()
    zeros[0, :5] = 0
    of_version_2 = ref.pack_columns(zeros, bits)
    of_version_1 = ref.add_to_words(of_version_2, -ref.ones(bits))
    first = read_gptq(**layer | {"qzeros": of_version_1}, bits=bits, version=1)
    second = read_gptq(**layer | {"qzeros": of_version_2}, bits=bits, version=2)
    middle = 1 << (bits - 1)
    assert first.zeros is not None and second.zeros is not None
    assert torch.equal(first.zeros, torch.from_numpy(zeros - middle).half())
    assert torch.equal(second.zeros, first.zeros)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_version_1_one_below(bits: int, generator: torch.Generator) -> None:
    """As AutoGPTQ packs them, value by value."""
    layer = random_layer(64, 24, 2, bits, torch.float16, generator)
    zeros = torch.randint(1, 2**bits, (2, 24), generator=generator).numpy()
    weight = read_gptq(**layer | {"qzeros": ref.pack_columns(zeros - 1, bits)}, bits=bits, version=1)
    assert weight.zeros is not None
    assert torch.equal(weight.zeros, torch.from_numpy(zeros - (1 << (bits - 1))).half())


# --- symmetric ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_has_no_zeros(bits: int, version: int, generator: torch.Generator) -> None:
    layer = random_layer(64, 12, 2, bits, torch.float16, generator)
    middle = 1 << (bits - 1)
    layer["qzeros"] = ref.pack_columns(np.full((2, 12), middle - (version == 1)), bits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = read_gptq(**layer, bits=bits, version=version, symmetric=True)
    assert weight.zeros is None
    group = np.arange(64) // 32
    assert torch.equal(weight.dequantize(), ref.gptq_weight(**layer, group=group, bits=bits, version=version))


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_of_version_2_that_says_version_1(bits: int, generator: torch.Generator) -> None:
    layer = random_layer(64, 12, 2, bits, torch.float16, generator)
    middle = 1 << (bits - 1)
    layer["qzeros"] = ref.pack_columns(np.full((2, 12), middle), bits)
    with pytest.warns(UserWarning, match=f"qzeros: expected {middle - 1}, .*got {middle}: read as version 2"):
        weight = read_gptq(**layer, bits=bits, version=1, symmetric=True)
    assert weight.zeros is None
    # Without `sym` in the config the version decides.
    weight = read_gptq(**layer, bits=bits, version=1)
    assert weight.zeros is not None
    assert torch.equal(weight.zeros, torch.ones(2, 12).half())


def test_symmetric_with_other_zero_points_keeps_them(generator: torch.Generator) -> None:
    layer = random_layer(64, 12, 2, 4, torch.float16, generator)
    weight = read_gptq(**layer, symmetric=True)
    group = np.arange(64) // 32
    assert torch.equal(weight.dequantize(), ref.gptq_weight(**layer, group=group, bits=4, version=1))


# --- errors ------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({"bits": 3}, "bits: expected 4 or 8 for GPTQ, got 3"),
    "version": ({"version": 3}, "version: expected 1 or 2, got 3"),
    "dtype": ({"qweight": torch.zeros(8, 16)}, r"qweight: expected int32 \[K \* 4 / 32, N\], got float32"),
    "rows": ({"g_idx": torch.zeros(65, dtype=torch.int32)}, r"qweight: expected int32 \[9, 16\], got int32 \[8, 16\]"),
    "kind of g_idx": ({"g_idx": torch.zeros(64)}, r"g_idx: expected int32 or int64 \[K\], got float32"),
    "g_idx above": ({"g_idx": torch.full((64,), 2)}, r"g_idx: expected groups within 0\.\.1 as scales has, got 2\.\.2"),
    "g_idx below": ({"g_idx": torch.full((64,), -1)}, r"g_idx: expected groups within 0\.\.1 .*got -1\.\.-1"),
    "scales": ({"scales": torch.ones(2, 15).half()}, r"scales: expected .*\[groups, 16\], got float16 \[2, 15\]"),
    "groups": (
        {"scales": torch.ones(3, 16).half(), "qzeros": torch.zeros(3, 2, dtype=torch.int32)},
        "gives K = 64 a power of two",
    ),
    "group size": ({"group_size": 16}, "scales: expected 4 groups of 16 rows for K = 64, got 2"),
    "no group size": ({"group_size": 0}, "scales: group_size: expected -1 or at least 1, got 0"),
    "one group": ({"group_size": -1}, "scales: expected 1 groups of 64 rows for K = 64, got 2"),
    "zeros": ({"qzeros": torch.zeros(2, 4, dtype=torch.int32)}, r"qzeros: expected int32 \[2, 2\], got int32 \[2, 4\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_arguments_that_do_not_fit(case: str, generator: torch.Generator) -> None:
    change, message = BAD[case]
    layer = random_layer(64, 16, 2, 4, torch.float16, generator)
    read_gptq(**layer)
    with pytest.raises(ValueError, match=message):
        read_gptq(**layer | change)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bits", [4, 8])
def test_on_the_gpu(order: str, bits: int, generator: torch.Generator) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    layer = random_layer(96, 24, 2, bits, torch.float16, generator)  # groups of 64 and 32
    g_idx = random_group(order, 96, 64, 2, generator)
    given_order: dict[str, Any] = {} if order == "none" else {"g_idx": g_idx.cuda()}
    on_gpu = {name: tensor.cuda() for name, tensor in layer.items()}
    weight = read_gptq(**on_gpu, **given_order, bits=bits, group_size=64)
    group = g_idx.numpy().astype(np.int64)
    assert torch.equal(weight.dequantize().cpu(), ref.gptq_weight(**layer, group=group, bits=bits, version=1))
