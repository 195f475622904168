"""The reader of bitsandbytes' 4-bit weights: the package quantizes on the CPU, ours reads."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import weightonly as wo
from weightonly.formats import read_bitsandbytes
from weightonly.formats.records import pack
from weightonly.packing import record_code_layout

bnb = pytest.importorskip("bitsandbytes")
functional = pytest.importorskip("bitsandbytes.functional")

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BLOCKSIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]


@pytest.fixture(autouse=True)
def no_compiler() -> Iterator[None]:
    """bitsandbytes compiles its generic path with torch.compile, which needs a compiler and seconds for each shape."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # since PyTorch 2.6
    with set_stance("force_eager") if set_stance else contextlib.nullcontext():
        yield


def tensors_of(data: torch.Tensor, state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a layer as the package stores them, by the names of our arguments."""
    stored = state.as_dict(packed=True)
    short = {("quant_state" if "quant_state" in name else name): tensor for name, tensor in stored.items()}
    return {"weight": data, **short}


def dense(data: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """What the package dequantizes to, [K, N].

    Through a flat shape: its AVX-512 code starts a new block with each row, which is wrong where the blocksize does
    not divide K (its pull request 2072 says so too).
    """
    n, k = state.shape
    flat = functional.QuantState(
        absmax=absmax_of(state),
        shape=torch.Size([n * k]),
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=dtype,
    )
    w: torch.Tensor = functional.dequantize_4bit(data, flat)
    return w.view(n, k).t()


def absmax_of(state: Any) -> torch.Tensor:
    """The statistics in fp32, as its dequantize_4bit resolves nested ones."""
    if not state.nested:
        plain: torch.Tensor = state.absmax
        return plain
    resolved: torch.Tensor = functional.dequantize_blockwise(state.absmax, state.state2)
    return resolved + state.offset


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 70),
    k=st.integers(1, 130),
    blocksize=st.sampled_from(BLOCKSIZES),
    quant_type=st.sampled_from(["nf4", "fp4"]),
    nested=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_weight_is_that_of_the_package(
    seed: int, n: int, k: int, blocksize: int, quant_type: str, nested: bool, dtype: torch.dtype
) -> None:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(dtype)
    data, state = functional.quantize_4bit(w, blocksize=blocksize, quant_type=quant_type, compress_statistics=nested)
    weight = read_bitsandbytes(**tensors_of(data, state))
    assert weight.codes.shape == (k, n) and weight.codes.dtype == torch.uint8 and weight.codes.is_contiguous()
    assert (weight.format, weight.dtype) == (quant_type, dtype)
    group_size = math.gcd(k, blocksize)
    first = torch.arange(n) * k + group_size * torch.arange(k // group_size)[:, None]  # (groups, N), of [N, K]
    assert weight.scales.dtype == torch.float32
    assert torch.equal(weight.scales, absmax_of(state)[first // blocksize])
    assert weight.table is not None and torch.equal(weight.table, state.code)
    assert torch.equal(weight.dequantize(torch.float32), dense(data, state, torch.float32))
    assert torch.equal(weight.dequantize(), dense(data, state, dtype))

    packed = pack("layer", weight, None, None)
    assert (packed.weight.format, packed.weight.layout) == (quant_type, record_code_layout(None))
    for arch, layout in (("sm70", "tiled"), ("sm80", "interleaved"), ("sm90", "tiled")):
        assert pack("layer", weight, None, arch).weight.layout == layout
    assert packed.zeros is None and packed.perm is None
    assert torch.equal(packed.scales, weight.scales)
    assert torch.equal(packed.dequantize(), dense(data, state, torch.float32))
    assert torch.equal(packed.dequantize(dtype), dense(data, state, dtype))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemm_is_as_accurate_as_the_package(
    quant_type: str, blocksize: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Against fp64: rounding the scales to the dtype of x costs as much as the package's rounding of the weight."""
    w = torch.randn(96, 512, generator=generator).to(dtype)
    data, state = functional.quantize_4bit(w, blocksize=blocksize, quant_type=quant_type, compress_statistics=True)
    record = pack("layer", read_bitsandbytes(**tensors_of(data, state)), None, None)
    assert record.scales.shape == (512 // blocksize, 96)
    x = torch.randn(7, 512, generator=generator).to(dtype)
    expected = x.double() @ record.dequantize(torch.float64)
    peer = (x.float() @ dense(data, state, dtype).float()).to(dtype)
    y = wo.gemm(x, record.weight, record.scales.to(dtype))
    error, peer_error = ((t.double() - expected).norm() / expected.norm() for t in (y, peer))
    # Where neither rounds to 16 bits both errors are those of fp32 sums, in orders that the machine chooses.
    assert error <= 2 * peer_error + 512 * 2**-24


@pytest.mark.parametrize(("k", "blocksize", "group_size"), [(96, 64, 32), (192, 128, 64), (320, 4096, 64)])
def test_blocks_that_cross_rows_become_smaller_groups(
    k: int, blocksize: int, group_size: int, generator: torch.Generator
) -> None:
    data, state = functional.quantize_4bit(torch.randn(40, k, generator=generator), blocksize=blocksize)
    record = pack("layer", read_bitsandbytes(**tensors_of(data, state)), None, None)
    assert record.scales.shape == (k // group_size, 40)
    x = torch.randn(3, k, generator=generator)
    exact = x.double() @ dense(data, state, torch.float32).double()
    torch.testing.assert_close(wo.gemm(x, record.weight, record.scales).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_nested_statistics_of_several_blocks(quant_type: str, generator: torch.Generator) -> None:
    """More than 256 blocks of 64: more than one nested block, the last one short."""
    w = torch.randn(300, 128, generator=generator)
    data, state = functional.quantize_4bit(w, blocksize=64, quant_type=quant_type, compress_statistics=True)
    assert state.state2.absmax.shape == (3,)
    weight = read_bitsandbytes(**tensors_of(data, state))
    assert torch.equal(weight.scales, absmax_of(state).view(300, 2).t())
    assert torch.equal(weight.dequantize(), functional.dequantize_4bit(data, state).t())


@pytest.mark.parametrize("storage", [torch.uint8, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_storage_under_another_dtype(storage: torch.dtype, generator: torch.Generator) -> None:
    w = torch.randn(32, 64, generator=generator).half()
    data, state = functional.quantize_4bit(w, quant_type="nf4", quant_storage=storage)
    assert data.dtype == storage
    weight = read_bitsandbytes(**tensors_of(data, state))
    assert torch.equal(weight.dequantize(), functional.dequantize_4bit(data, state).t())


@pytest.mark.parametrize("nested", [False, True])
def test_state_dict_of_a_module(nested: bool, tmp_path: Path, generator: torch.Generator) -> None:
    """The names and shapes that its Linear4bit really writes."""
    module = bnb.nn.Linear4bit(64, 48, bias=True, quant_type="nf4", compress_statistics=nested)
    w = torch.randn(48, 64, generator=generator)
    module.weight = bnb.nn.Params4bit(w, requires_grad=False, quant_type="nf4", compress_statistics=nested)
    module = module.to("cpu")  # quantizes it
    save_file(module.state_dict(), tmp_path / "layer.safetensors")
    stored = load_file(tmp_path / "layer.safetensors")
    weight = read_bitsandbytes(
        stored["weight"],
        stored["weight.absmax"],
        stored["weight.quant_map"],
        stored["weight.quant_state.bitsandbytes__nf4"],
        stored.get("weight.nested_absmax"),
        stored.get("weight.nested_quant_map"),
    )
    assert ("weight.nested_absmax" in stored) == nested
    assert torch.equal(weight.dequantize(), functional.dequantize_4bit(module.weight, module.weight.quant_state).t())


def test_all_zero_blocks_are_zero() -> None:
    data, state = functional.quantize_4bit(torch.zeros(4, 64), quant_type="nf4")
    assert torch.equal(read_bitsandbytes(**tensors_of(data, state)).dequantize(), torch.zeros(64, 4))


def test_a_table_of_ones_own(generator: torch.Generator) -> None:
    data, state = functional.quantize_4bit(torch.randn(4, 64, generator=generator), quant_type="nf4")
    table = torch.linspace(-1, 1, 16)
    weight = read_bitsandbytes(**tensors_of(data, state) | {"quant_map": table})
    assert weight.format == "code4"
    codes = weight.codes.long()
    assert torch.equal(weight.dequantize(), table[codes] * state.absmax)  # a block is a row of [N, K]
    packed = pack("layer", weight, None, None)
    assert packed.weight.code == tuple(table.tolist())
    assert torch.equal(packed.dequantize(), weight.dequantize())


# --- errors ------------------------------------------------------------------------------------------------

STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [16, 64]}
NESTED = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}


def json_tensor(value: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def stored_layer(**changes: Any) -> dict[str, Any]:
    layer = {
        "weight": torch.zeros(512, 1, dtype=torch.uint8),
        "absmax": torch.ones(16),
        "quant_map": torch.zeros(16),
        "quant_state": json_tensor(STATE),
    }
    return layer | changes


def nested_layer(**changes: Any) -> dict[str, Any]:
    return (
        stored_layer(
            absmax=torch.ones(16, dtype=torch.uint8),
            nested_absmax=torch.ones(1),
            nested_quant_map=torch.ones(256),
            quant_state=json_tensor(STATE | NESTED),
        )
        | changes
    )


def without(key: str) -> torch.Tensor:
    return json_tensor({name: value for name, value in STATE.items() if name != key})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "bytes": (stored_layer(weight=torch.zeros(511, 1).byte()), r"weight: expected 512 bytes for .*\[16, 64\], got 511"),
    "kind": (stored_layer(weight=torch.zeros(128, 1).int()), "weight: expected 512 bytes .*got 512 as int32"),
    "absmax": (stored_layer(absmax=torch.ones(15)), r"weight.absmax: expected float32 \[16\], got float32 \[15\]"),
    "kind of absmax": (
        stored_layer(absmax=torch.ones(16).half()),
        r"weight.absmax: expected float32 \[16\], got float16",
    ),
    "map": (stored_layer(quant_map=torch.ones(256)), r"weight.quant_map: expected float32 \[16\], got float32 \[256\]"),
    "json": (stored_layer(quant_state=torch.tensor([123, 34]).byte()), "weight.quant_state: "),
    "no object": (stored_layer(quant_state=json_tensor(3)), "weight.quant_state: expected a JSON object, got 3"),
    "no shape": (stored_layer(quant_state=without("shape")), "weight.quant_state: shape: expected in the JSON"),
    "no blocksize": (stored_layer(quant_state=without("blocksize")), "weight.quant_state: blocksize: expected"),
    "blocksize": (
        stored_layer(quant_state=json_tensor(STATE | {"blocksize": 0})),
        "blocksize: expected at least 1, got 0",
    ),
    "blocksize beyond int32": (
        stored_layer(quant_state=json_tensor(STATE | {"blocksize": 1 << 31})),
        "blocksize: expected less than 2.31, got 2147483648",
    ),
    "shape": (
        stored_layer(quant_state=json_tensor(STATE | {"shape": [1024]})),
        r"shape: expected \[N, K\], got \[1024\]",
    ),
    "type": (stored_layer(quant_state=json_tensor(STATE | {"quant_type": "af4"})), "quant_type: .*got 'af4'"),
    "dtype": (stored_layer(quant_state=json_tensor(STATE | {"dtype": "int8"})), "dtype: expected one of .*got 'int8'"),
    "not nested": (stored_layer(nested_absmax=torch.ones(1)), "weight.nested_absmax: expected none .*got it"),
    "no nested map": (nested_layer(nested_quant_map=None), "weight.nested_quant_map: expected it .*got none"),
    "nested map": (nested_layer(nested_quant_map=torch.ones(16)), r"weight.nested_quant_map: expected float32 \[256\]"),
    "nested blocks": (nested_layer(nested_absmax=torch.ones(2)), r"weight.nested_absmax: expected float32 \[1\], got"),
    "nested kind": (nested_layer(absmax=torch.ones(16)), r"weight.absmax: expected uint8 \[16\], got float32 \[16\]"),
    "offset": (
        nested_layer(quant_state=json_tensor(STATE | NESTED | {"nested_offset": None})),
        "nested_offset: expected in the JSON",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_tensors_that_do_not_fit(case: str) -> None:
    layer, message = BAD[case]
    read_bitsandbytes(**stored_layer())
    read_bitsandbytes(**nested_layer())
    with pytest.raises(ValueError, match=message):
        read_bitsandbytes(**layer)


@pytest.mark.gpu
@pytest.mark.parametrize("nested", [False, True])
def test_on_the_gpu(nested: bool, generator: torch.Generator) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    w = torch.randn(33, 70, generator=generator)
    data, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=nested)
    layer = tensors_of(data, state)
    on_gpu = read_bitsandbytes(**{name: tensor.cuda() for name, tensor in layer.items()})
    assert torch.equal(on_gpu.scales.cpu(), read_bitsandbytes(**layer).scales)
    assert torch.equal(on_gpu.dequantize().cpu(), read_bitsandbytes(**layer).dequantize())
