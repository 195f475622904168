"""NF4, FP4 and tables of one's own: packed weights, dequantize, gemm on the CPU, Linear, files and errors."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import weightonly as wo
from weightonly.code_tables import CODE_TABLES, code_table, table_on, table_values
from weightonly.heuristics import Problem, candidates, select
from weightonly.nn import Linear

FORMATS = ["nf4", "fp4", "code4"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
OWN = tuple(torch.linspace(-1.5, 2, 16).tolist())

formats = pytest.mark.parametrize("format", FORMATS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def random_codes(k: int, n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 16, (k, n), generator=g).to(torch.uint8)


def own(format: str) -> tuple[float, ...] | None:
    """What `preprocess` wants for `code`."""
    return OWN if format == "code4" else None


def packed(codes: torch.Tensor, format: str) -> wo.PackedWeight:
    return wo.preprocess(codes, format=format, code=own(format))


def table_of(format: str) -> torch.Tensor:
    """fp32 [16]"""
    return torch.tensor(CODE_TABLES.get(format, OWN))


def exact(codes: torch.Tensor, format: str, scales: torch.Tensor) -> torch.Tensor:
    """The weight in fp64, [K, N]."""
    group = codes.shape[0] // scales.shape[0]
    return table_of(format).double()[codes.long()] * scales.double().repeat_interleave(group, 0)


# --- tables ------------------------------------------------------------------------------------------------


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


# --- preprocess, unpack, slices ----------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 300),
    n=st.integers(1, 300),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.int8, torch.uint8]),
)
def test_unpack_is_the_inverse_of_preprocess(seed: int, k: int, n: int, format: str, dtype: torch.dtype) -> None:
    codes = random_codes(k, n, torch.Generator().manual_seed(seed))
    weight = packed(codes.to(dtype), format)
    assert (weight.k, weight.n, weight.format, weight.layout, weight.bits) == (k, n, format, "tiled", 4)
    assert weight.code == tuple(table_of(format).tolist())
    assert weight.data.shape == (-(-k // 64) * -(-n // 64) * 2048,)
    unpacked = wo.unpack(weight)
    assert unpacked.dtype == torch.int8 and unpacked.is_contiguous()
    assert torch.equal(unpacked, codes.to(torch.int8))


@formats
def test_padding_is_code_0(format: str, generator: torch.Generator) -> None:
    """A number of every table, and finite: zero times it is zero, which is all that padding must give."""
    codes = random_codes(70, 65, generator)
    full = torch.zeros(128, 128, dtype=torch.uint8)
    full[:70, :65] = codes
    assert torch.equal(packed(codes, format).data, packed(full, format).data)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 300),
    n=st.integers(1, 300),
    format=st.sampled_from(FORMATS),
    data=st.data(),
)
def test_a_slice_is_the_weight_packed_alone(seed: int, k: int, n: int, format: str, data: st.DataObject) -> None:
    codes = random_codes(k, n, torch.Generator().manual_seed(seed))
    weight = packed(codes, format)
    for size, cut, part in (
        (n, weight.slice_n, lambda b, e: codes[:, b:e]),
        (k, weight.slice_k, lambda b, e: codes[b:e]),
    ):
        begin = data.draw(st.integers(0, (size - 1) // 64)) * 64
        end = data.draw(st.sampled_from([size, *range(begin + 64, size, 64)]))
        got, expected = cut(begin, end), packed(part(begin, end), format)
        assert got.fields == expected.fields and got.code == expected.code
        assert torch.equal(got.data, expected.data)


@pytest.mark.parametrize("arch", ["sm90", "sm_90a", 90])
def test_packed_for_hopper(arch: str | int, generator: torch.Generator) -> None:
    codes = random_codes(64, 64, generator)
    assert torch.equal(wo.preprocess(codes, arch=arch, format="nf4").data, packed(codes, "nf4").data)


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (9, 0), (10, 0)], ids=str)
def test_one_layout_whatever_gpu_is_visible(
    capability: tuple[int, int], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert packed(random_codes(64, 64, generator), "fp4").layout == "tiled"


CODES = torch.zeros(64, 64, dtype=torch.uint8)
BAD_PREPROCESS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "arch": (CODES, {"format": "nf4", "arch": "sm80"}, ValueError, "arch: expected sm90 for nf4, .*got 'sm80'"),
    "unknown arch": (CODES, {"format": "nf4", "arch": "sm50"}, ValueError, "arch: expected one of .*got 'sm50'"),
    "layout": (CODES, {"format": "fp4", "layout": "interleaved"}, ValueError, "layout: expected 'tiled', .*got 'inter"),
    "unknown layout": (CODES, {"format": "fp4", "layout": "t"}, ValueError, "layout: expected one of .*got 't'"),
    "bits": (CODES, {"format": "nf4", "bits": 8}, ValueError, "bits: expected 4 for nf4, got 8"),
    "bits of int8": (CODES.to(torch.int8), {"format": "int8"}, ValueError, "bits: expected 8 for int8, got 4"),
    "format": (CODES.to(torch.int8), {"format": "nf5"}, ValueError, "format: expected one of int4, .*got 'nf5'"),
    "large": (CODES + 16, {"format": "nf4"}, ValueError, r"q: expected codes in 0\.\.15, got 16\.\.16"),
    "larger": (CODES + 200, {"format": "nf4"}, ValueError, r"q: expected codes in 0\.\.15, got -56"),
    "negative": (CODES.to(torch.int8) - 1, {"format": "nf4"}, ValueError, r"q: expected codes in 0\.\.15, got -1"),
    "dtype": (CODES.int(), {"format": "nf4"}, TypeError, "q: expected an int8 tensor, got torch.int32"),
    "not a tensor": ([[1]], {"format": "nf4"}, TypeError, "q: expected an int8 tensor, got list"),
    "uint8 of integers": (CODES, {}, TypeError, "q: expected an int8 tensor, got torch.uint8"),
    "empty": (CODES[:0], {"format": "nf4"}, ValueError, r"q: expected shape .*got \[0, 64\]"),
    "no table": (CODES, {"format": "code4"}, ValueError, "code: expected the table of a code4 weight, got None"),
    "table of nf4": (CODES, {"format": "nf4", "code": OWN}, ValueError, "code: expected None for nf4, which has no"),
    "table of int4": (CODES.to(torch.int8), {"code": OWN}, ValueError, "code: expected None for int4, which has no"),
}


@pytest.mark.parametrize("case", BAD_PREPROCESS)
def test_preprocess_rejects(case: str) -> None:
    q, arguments, error, message = BAD_PREPROCESS[case]
    with pytest.raises(error, match=message):
        wo.preprocess(q, **arguments)


# --- the object and its files ------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_have_the_table(
    format: str, clone: Callable[[wo.PackedWeight], wo.PackedWeight], generator: torch.Generator
) -> None:
    weight = packed(random_codes(65, 66, generator), format)
    for other in (clone(weight), weight.to("meta"), wo.PackedWeight(weight.data, **weight.fields)):
        assert other.fields == weight.fields and other.code == weight.code
    assert ("code" in weight.fields) == (format == "code4")
    stored = json.loads(json.dumps(weight.fields))
    assert wo.PackedWeight(weight.data, **stored).code == weight.code


def test_repr(generator: torch.Generator) -> None:
    weight = packed(random_codes(65, 64, generator), "nf4")
    assert repr(weight) == "PackedWeight(nf4 [65, 64], layout='tiled', 4096 bytes on cpu)"


BYTES = torch.zeros(2048, dtype=torch.uint8)
GOOD_FIELDS: dict[str, Any] = {"data": BYTES, "k": 64, "n": 64, "format": "code4", "layout": "tiled", "code": OWN}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "interleaved"}, "layout: expected 'tiled', the one for the codes of a table, got 'interleaved'"),
        ({"code": None}, "code: expected the table of a code4 weight, got None"),
        ({"format": "fp4"}, "code: expected None for fp4, which has no table of its own, got one"),
        ({"code": OWN[1:]}, r"code: expected 16 numbers, got shape \[15\]"),
    ],
    ids=["layout", "no table", "table of fp4", "length"],
)
def test_fields_are_checked(fields: dict[str, Any], message: str) -> None:
    wo.PackedWeight(**GOOD_FIELDS)
    with pytest.raises(ValueError, match=message):
        wo.PackedWeight(**GOOD_FIELDS | fields)


def test_save_and_load(tmp_path: Path, generator: torch.Generator) -> None:
    path = tmp_path / "model.safetensors"
    weights = {format: packed(random_codes(100, 77, generator), format) for format in FORMATS}
    wo.save(path, weights)
    loaded = wo.load(path)
    for name, weight in weights.items():
        entry = loaded[name]
        assert isinstance(entry, wo.PackedWeight)
        assert entry.fields == weight.fields and entry.code == weight.code
        assert torch.equal(entry.data, weight.data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields.pop("code"), "code: expected the table of a code4 weight, got None"),
        (lambda fields: fields["code"].pop(), r"code: expected 16 numbers, got shape \[15\]"),
        (lambda fields: fields.update(code="0123456789abcdef"), "code: expected 16 numbers, got str"),
        (lambda fields: fields.update(format="nf4"), "code: expected None for nf4"),
        (lambda fields: fields.update(layout="row_major"), "layout: expected 'tiled'"),
    ],
    ids=["missing", "short", "text", "another format", "layout"],
)
def test_load_rejects_damaged_tables(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path, generator: torch.Generator
) -> None:
    path = tmp_path / "w.safetensors"
    packed(random_codes(64, 64, generator), "code4").save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    fields = json.loads(metadata["weightonly.packed"])
    change(fields["qweight"])
    save_file(load_file(path), path, metadata | {"weightonly.packed": json.dumps(fields)})
    with pytest.raises(ValueError, match=rf"w\.safetensors: packed weight 'qweight': {message}"):
        wo.load(path)


# --- dequantize and gemm -----------------------------------------------------------------------------------


@formats
@dtypes
@pytest.mark.parametrize(("k", "n", "group_size"), [(128, 64, 32), (100, 77, 100), (65, 1, 13), (1, 130, 1)], ids=str)
def test_dequantize(
    format: str, dtype: torch.dtype, k: int, n: int, group_size: int, generator: torch.Generator
) -> None:
    codes = random_codes(k, n, generator)
    scales = (torch.rand(k // group_size, n, generator=generator) + 0.5).to(dtype)
    w = wo.dequantize(packed(codes, format), scales)
    assert w.dtype == dtype and w.shape == (k, n)
    in_fp32 = table_of(format)[codes.long()] * scales.float().repeat_interleave(group_size, 0)
    assert torch.equal(w, in_fp32.to(dtype))


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 256])
def test_dequantize_is_that_of_bitsandbytes(format: str, blocksize: int, generator: torch.Generator) -> None:
    """Bit for bit in fp32. Its weight is [N, K], its blocks run along K, its first code is in the high nibble."""
    functional = pytest.importorskip("bitsandbytes.functional")
    n, k = 72, 512
    data, state = functional.quantize_4bit(
        torch.randn(n, k, generator=generator), blocksize=blocksize, quant_type=format
    )
    codes = torch.stack((data.flatten() >> 4, data.flatten() & 15), -1).view(n, k).t()
    scales = state.absmax.view(n, k // blocksize).t()
    assert torch.equal(wo.dequantize(packed(codes, format), scales), functional.dequantize_4bit(data, state).t())


@formats
@dtypes
@pytest.mark.parametrize("group_size", [32, 64, 192])
def test_gemm_against_fp64(format: str, dtype: torch.dtype, group_size: int, generator: torch.Generator) -> None:
    codes = random_codes(192, 77, generator)
    scales = (torch.rand(192 // group_size, 77, generator=generator) + 0.5).to(dtype)
    x = (torch.randn(2, 3, 192, generator=generator) / 16).to(dtype)
    bias = torch.randn(77, generator=generator).to(dtype)
    w = exact(codes, format, scales)
    y = wo.gemm(x, packed(codes, format), scales, bias=bias, activation="relu")
    expected = torch.relu(x.double() @ w + bias.double())
    magnitude = x.double().abs() @ w.abs() + bias.double().abs()
    # w, fp32 sums in proportion to the sum of magnitudes, and the result rounded once
    tolerance = 1.2 * magnitude * 192 * 2**-24 + expected.abs() * torch.finfo(dtype).eps * 0.51
    assert y.dtype == dtype and y.shape == (2, 3, 77)
    assert ((y.double() - expected).abs() <= tolerance).all()


def test_gemm_is_exact_on_a_grid(generator: torch.Generator) -> None:
    """A table of small integers and scales of powers of two: every sum is exact in fp32."""
    codes = random_codes(256, 130, generator)
    weight = wo.preprocess(codes, format="code4", code=torch.arange(-8.0, 8.0))
    scales = torch.exp2(torch.randint(-2, 3, (4, 130), generator=generator).float()).half()
    x = torch.randint(-3, 4, (9, 256), generator=generator).half()
    same = wo.preprocess(codes.to(torch.int8) - 8, layout="tiled")
    assert torch.equal(wo.gemm(x, weight, scales), wo.gemm(x, same, scales))


def test_compiled_and_recorded_functions(generator: torch.Generator) -> None:
    codes = random_codes(128, 72, generator)
    scales = torch.rand(2, 72, generator=generator)
    x = torch.randn(3, 128, generator=generator)
    for format in FORMATS:
        weight = packed(codes, format)
        expected = wo.gemm(x, weight, scales)
        function = torch.compile(
            lambda x, weight=weight: wo.gemm(x, weight, scales) + 1, fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(function(x), expected + 1)
        assert torch.equal(wo.gemm(x.clone().requires_grad_(), weight, scales), expected)


@formats
def test_zeros_of_a_table_are_refused(format: str, generator: torch.Generator) -> None:
    weight = packed(random_codes(128, 72, generator), format)
    scales = torch.ones(2, 72)
    message = f"zeros: expected None for a weight of format {format}, got Tensor"
    with pytest.raises(ValueError, match=message):
        wo.gemm(torch.ones(1, 128), weight, scales, zeros=scales)
    with pytest.raises(ValueError, match=message):
        wo.dequantize(weight, scales, scales)
    with pytest.raises(ValueError, match=message):
        Linear.from_quantized(weight, scales, scales)


@pytest.mark.parametrize("group_size", [16, 48, 96])
def test_group_sizes_are_those_of_integers(group_size: int, generator: torch.Generator) -> None:
    weight = packed(random_codes(192, 72, generator), "nf4")
    with pytest.raises(ValueError, match=f"scales: .*group_size must be .*got {group_size}"):
        wo.gemm(torch.ones(1, 192), weight, torch.ones(192 // group_size, 72))


# --- Linear ------------------------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_dict_round_trip(format: str, assign: bool, tmp_path: Path, generator: torch.Generator) -> None:
    weight = packed(random_codes(128, 72, generator), format)
    scales = torch.rand(2, 72, generator=generator).half()
    layer = Linear.from_quantized(weight, scales, bias=torch.randn(72, generator=generator).half())
    assert layer.packed is weight
    assert set(layer.state_dict()) == {"qweight", "scales", "bias", "_extra_state"}
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = Linear(128, 72, group_size=64, format=format)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"), assign=assign)
    assert other.packed.code == weight.code
    assert other.packed.data is other.qweight
    x = torch.randn(3, 128, generator=generator).half()
    assert torch.equal(other(x), wo.gemm(x, weight, scales, bias=layer.bias))
    moved = copy.deepcopy(other).to(torch.bfloat16)
    assert moved.packed.code == weight.code and moved.scales.dtype == torch.bfloat16
    assert f"format={format}" in repr(other)


def test_an_empty_layer_gives_zeros() -> None:
    for format in FORMATS:
        assert torch.equal(Linear(128, 40, format=format)(torch.ones(2, 128).half()), torch.zeros(2, 40).half())


def test_state_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state dict: expected a weight with .*'fp4'.*got .*'nf4'"):
        Linear(128, 40, format="fp4").load_state_dict(Linear(128, 40, format="nf4").state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "nf4", "symmetric": False}, "symmetric: expected True for nf4, got False"),
        ({"format": "nf4", "bits": 8}, "bits: expected 4 for nf4, got 8"),
        ({"format": "fp4", "arch": "sm80"}, "arch: expected sm90 for fp4, .*got 'sm80'"),
        ({"format": "af4"}, "format: expected one of int4, .*got 'af4'"),
    ],
    ids=["zero points", "bits", "arch", "format"],
)
def test_linear_rejects(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Linear(128, 40, **arguments)


def test_compiled_layer(generator: torch.Generator) -> None:
    weight = packed(random_codes(128, 72, generator), "code4")
    layer = Linear.from_quantized(weight, torch.rand(2, 72, generator=generator))
    x = torch.randn(3, 128, generator=generator)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


# --- heuristics --------------------------------------------------------------------------------------------


@formats
def test_to_the_heuristics_they_are_one_format(format: str) -> None:
    problem = Problem(1, 4096, 4096, format, 64, 90, 132)
    assert (problem.format, problem.bits, problem.layout) == ("code4", 4, "tiled")
    assert problem == Problem(1, 4096, 4096, "code4", 64, 90, 132, "tiled")
    assert all("code4" in config.formats for config in candidates(problem))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": 80}, "layout must be one that sm80 reads, interleaved, got 'tiled'"),
        ({"layout": "interleaved"}, "layout must be 'tiled' for nf4, got 'interleaved'"),
        ({"zeros": True}, "zeros must be False for nf4, got True"),
        ({"format": "nf8"}, "format must be one of .*got 'nf8'"),
    ],
    ids=["arch", "layout", "zeros", "format"],
)
def test_select_rejects(arguments: dict[str, Any], message: str) -> None:
    good = {"m": 1, "n": 4096, "k": 4096, "format": "nf4", "group_size": 64, "arch": 90, "sm_count": 132}
    with pytest.raises(ValueError, match=message):
        select(**good | arguments)


# --- on the GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@formats
def test_packed_and_dequantized_on_the_gpu(format: str, cuda_device: torch.device, generator: torch.Generator) -> None:
    codes = random_codes(200, 130, generator)
    weight = packed(codes, format)
    there = packed(codes.to(cuda_device), format)
    assert there.device == cuda_device and there.fields == weight.fields
    assert torch.equal(there.data.cpu(), weight.data)
    assert torch.equal(weight.to(cuda_device).data, there.data)
    assert torch.equal(wo.unpack(there).cpu(), codes.to(torch.int8))
    scales = torch.rand(4, 130, generator=generator)
    for dtype in DTYPES:
        expected = wo.dequantize(weight, scales.to(dtype))
        assert torch.equal(wo.dequantize(there, scales.to(cuda_device, dtype)).cpu(), expected)


@pytest.mark.gpu
def test_tables_are_there_before_a_graph_is_captured(cuda_device: torch.device, generator: torch.Generator) -> None:
    """Whoever first multiplies inside of a capture finds a table that no capture has to make."""
    values = tuple(torch.randn(16, generator=generator).tolist())
    weight = wo.preprocess(random_codes(64, 64, generator), format="code4", code=values).to(cuda_device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=cuda_device)
        tables = [table_on(weight.code, weight.device, dtype) for dtype in DTYPES] if weight.code else []
    assert [table.cpu().tolist() for table in tables] == [torch.tensor(values).to(d).tolist() for d in DTYPES]


@pytest.mark.gpu
def test_a_gpu_without_kernels_for_tables_says_so(cuda_device: torch.device, generator: torch.Generator) -> None:
    major, minor = torch.cuda.get_device_capability(cuda_device)
    if (major, minor) == (9, 0):
        pytest.skip("Hopper has them")
    weight = packed(random_codes(128, 64, generator), "nf4").to(cuda_device)
    x, scales = torch.ones(1, 128, device=cuda_device).half(), torch.ones(2, 64, device=cuda_device).half()
    with pytest.raises(ValueError, match=re.escape("qweight: packed in layout 'tiled', but a GPU of compute")):
        wo.gemm(x, weight, scales)
