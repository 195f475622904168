"""PackedWeight.slice_n and slice_k: shards of a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weightonly as wo

bits_4_and_8 = pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])


def random_q(k: int, n: int, bits: int, generator: torch.Generator) -> torch.Tensor:
    limit = 1 << (bits - 1)
    return torch.randint(-limit, limit, (k, n), dtype=torch.int8, generator=generator)


def assert_same_weight(got: wo.PackedWeight, expected: wo.PackedWeight) -> None:
    fields = ("k", "n", "k_padded", "n_padded", "format", "layout")
    assert [getattr(got, name) for name in fields] == [getattr(expected, name) for name in fields]
    assert torch.equal(got.data, expected.data)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 300),
    n=st.integers(1, 300),
    bits=st.sampled_from([4, 8]),
    layout=st.sampled_from(["tiled", "cpu"]),
    data=st.data(),
)
def test_a_slice_is_the_weight_packed_alone(
    seed: int, k: int, n: int, bits: int, layout: str, data: st.DataObject
) -> None:
    q = random_q(k, n, bits, torch.Generator().manual_seed(seed))
    weight = wo.preprocess(q, bits=bits, layout=layout)
    for size, cut, part in (
        (n, weight.slice_n, lambda b, e: q[:, b:e]),
        (k, weight.slice_k, lambda b, e: q[b:e]),
    ):
        begin = data.draw(st.integers(0, (size - 1) // 64)) * 64
        end = data.draw(st.sampled_from([size, *range(begin + 64, size, 64)]))
        assert_same_weight(cut(begin, end), wo.preprocess(part(begin, end), bits=bits, layout=layout))


@bits_4_and_8
def test_slices_of_slices_and_their_memory(bits: int, generator: torch.Generator) -> None:
    q = random_q(320, 300, bits, generator)
    weight = wo.preprocess(q, bits=bits, layout="tiled")
    wo.gemm(torch.zeros(1, 320), weight, torch.ones(1, 300))
    assert weight._kind is not None
    columns, rows = weight.slice_n(64, 300), weight.slice_k(64, 256)
    assert_same_weight(columns.slice_k(64, 256), rows.slice_n(64, 300))
    assert torch.equal(wo.unpack(columns.slice_k(64, 256)), q[64:256, 64:300])
    assert columns.data.untyped_storage().data_ptr() == weight.data.untyped_storage().data_ptr()
    assert rows.data.untyped_storage().nbytes() == rows.data.numel()
    assert weight.slice_k(0, 320).data.data_ptr() != weight.data.data_ptr()
    assert columns._kind is rows._kind is None


@bits_4_and_8
def test_shards_add_up(bits: int, generator: torch.Generator) -> None:
    """Shards along N give columns of y, shards along K terms of its sum. Small integers: every sum is exact."""
    q = random_q(320, 200, bits, generator)
    x = torch.randint(-1, 2, (5, 320), generator=generator).float()
    scales = torch.randint(1, 3, (5, 200), generator=generator).float()
    weight = wo.preprocess(q, bits=bits, layout="tiled")
    y = wo.gemm(x, weight, scales)
    left = wo.gemm(x, weight.slice_n(0, 128), scales[:, :128])
    right = wo.gemm(x, weight.slice_n(128, 200), scales[:, 128:])
    assert torch.equal(torch.cat([left, right], 1), y)
    upper = wo.gemm(x[:, :192], weight.slice_k(0, 192), scales[:3])
    lower = wo.gemm(x[:, 192:], weight.slice_k(192, 320), scales[3:])
    assert torch.equal(upper + lower, y)


def test_slices_are_saved_alone(tmp_path: Path, generator: torch.Generator) -> None:
    q = random_q(130, 200, 8, generator)
    weight = wo.preprocess(q, bits=8, layout="tiled")
    shards = {"0": weight.slice_n(0, 64), "1": weight.slice_n(64, 200), "2": weight.slice_k(64, 130)}
    wo.save(tmp_path / "shards.safetensors", shards)
    loaded = wo.load(tmp_path / "shards.safetensors")
    for name, shard in shards.items():
        entry = loaded[name]
        assert isinstance(entry, wo.PackedWeight)
        assert_same_weight(entry, shard)


BAD_SLICES: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "begin": (32, 128, ValueError, "begin: expected a multiple of 64, got 32"),
    "end": (0, 96, ValueError, "end: expected a multiple of 64 or {dimension} = 200, got 96"),
    "empty": (64, 64, ValueError, "begin, end: expected 0 <= begin < end <= {dimension} = 200, got 64, 64"),
    "reversed": (128, 64, ValueError, "begin, end: .*got 128, 64"),
    "negative": (-64, 64, ValueError, "begin, end: .*got -64, 64"),
    "into the padding": (64, 256, ValueError, "begin, end: .* <= {dimension} = 200, got 64, 256"),
    "float": (0.0, 64, TypeError, "begin: expected an int, got float"),
    "bool": (0, True, TypeError, "end: expected an int, got bool"),
}


@pytest.mark.parametrize("dimension", ["K", "N"])
@pytest.mark.parametrize("case", BAD_SLICES)
def test_slice_rejects(case: str, dimension: str) -> None:
    weight = wo.preprocess(torch.ones(200, 200, dtype=torch.int8), layout="tiled")
    begin, end, error, message = BAD_SLICES[case]
    with pytest.raises(error, match=message.format(dimension=dimension)):
        (weight.slice_k if dimension == "K" else weight.slice_n)(begin, end)


@pytest.mark.parametrize("layout", ["row_major", "interleaved"])
def test_slice_rejects_other_layouts(layout: str) -> None:
    weight = wo.preprocess(torch.ones(128, 128, dtype=torch.int8), layout=layout)
    for cut in (weight.slice_n, weight.slice_k):
        with pytest.raises(ValueError, match=f"layout: expected 'tiled', .*got '{layout}'"):
            cut(0, 64)
