"""PackedWeight: preprocess and its inverse, the choice of the layout, and files."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import weightonly as wo
from weightonly.packed import arch_number, layout_for_arch

LAYOUTS = ["row_major", "interleaved", "tiled"]
KNOWN_ARCHS = [70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121]

bits_4_and_8 = pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])


def random_q(k: int, n: int, bits: int, generator: torch.Generator) -> torch.Tensor:
    limit = 1 << (bits - 1)
    return torch.randint(-limit, limit, (k, n), dtype=torch.int8, generator=generator)


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def column_multiple(bits: int, layout: str) -> int:
    return 32 if bits == 8 and layout != "tiled" else 64


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 300),
    n=st.integers(1, 300),
    bits=st.sampled_from([4, 8]),
    layout=st.sampled_from(LAYOUTS),
)
def test_unpack_is_the_inverse_of_preprocess(seed: int, k: int, n: int, bits: int, layout: str) -> None:
    q = random_q(k, n, bits, torch.Generator().manual_seed(seed))
    weight = wo.preprocess(q, bits=bits, layout=layout)
    k_padded, n_padded = padded(k, 64), padded(n, column_multiple(bits, layout))
    assert (weight.k, weight.n, weight.format, weight.layout) == (k, n, f"int{bits}", layout)
    assert (weight.k_padded, weight.n_padded, weight.bits) == (k_padded, n_padded, bits)
    assert weight.data.dtype == torch.uint8
    assert weight.data.shape == (k_padded * n_padded * bits // 8,)
    unpacked = wo.unpack(weight)
    assert unpacked.is_contiguous()
    assert torch.equal(unpacked, q)


@bits_4_and_8
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_zero(bits: int, layout: str, generator: torch.Generator) -> None:
    q = random_q(70, 65, bits, generator)
    full = torch.zeros(128, padded(65, column_multiple(bits, layout)), dtype=torch.int8)
    full[:70, :65] = q
    got = wo.preprocess(q, bits=bits, layout=layout)
    assert torch.equal(got.data, wo.preprocess(full, bits=bits, layout=layout).data)


# --- which layout ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", KNOWN_ARCHS, ids=lambda a: f"sm{a}")
def test_every_known_arch_has_a_layout(arch: int) -> None:
    expected = {70: "row_major", 72: "row_major", 90: "tiled"}.get(arch, "interleaved")
    assert layout_for_arch(arch) == expected
    assert wo.preprocess(torch.ones(64, 64, dtype=torch.int8), arch=arch).layout == expected


@pytest.mark.parametrize("arch", ["sm80", "sm_80", "80", 80, "SM80", "sm80a"], ids=repr)
def test_spellings_of_an_arch(arch: str | int) -> None:
    assert arch_number(arch) == 80


def test_arch_specific_suffix() -> None:
    assert [arch_number(arch) for arch in ("sm90a", "sm_90a", "90a", "sm100f")] == [90, 90, 90, 100]


@pytest.mark.parametrize("arch", ["sm60", 61, "sm81", "sm900", "hopper", "", "sm", True, -80, "8.0", None], ids=repr)
def test_unknown_arch(arch: Any) -> None:
    with pytest.raises(ValueError, match=r"arch: expected one of sm70, .*sm121, got"):
        arch_number(arch)


def test_arch_and_layout_together() -> None:
    q = torch.ones(64, 64, dtype=torch.int8)
    assert wo.preprocess(q, arch="sm70", layout="row_major").layout == "row_major"
    assert wo.preprocess(q, arch="sm90a", layout="tiled").layout == "tiled"
    with pytest.raises(ValueError, match="layout: expected 'interleaved' for arch 'sm80', got 'row_major'"):
        wo.preprocess(q, arch="sm80", layout="row_major")
    with pytest.raises(ValueError, match="layout: expected 'tiled' for arch 90, got 'interleaved'"):
        wo.preprocess(q, arch=90, layout="interleaved")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        (None, "interleaved"),
        ((7, 0), "row_major"),
        ((8, 9), "interleaved"),
        ((9, 0), "tiled"),
        ((10, 0), "interleaved"),
        ((6, 1), "interleaved"),
    ],
    ids=["no_gpu", "sm70", "sm89", "sm90", "sm100", "sm61"],
)
def test_layout_for_a_cpu_tensor_follows_the_visible_gpu(
    capability: tuple[int, int] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert wo.preprocess(torch.ones(64, 64, dtype=torch.int8)).layout == expected


@pytest.mark.gpu
@bits_4_and_8
def test_preprocess_on_the_gpu(bits: int, cuda_device: torch.device, generator: torch.Generator) -> None:
    q = random_q(100, 90, bits, generator)
    weight = wo.preprocess(q.to(cuda_device), bits=bits)
    major, minor = torch.cuda.get_device_capability(cuda_device)
    assert weight.layout == layout_for_arch(10 * major + minor)
    assert weight.device == cuda_device
    assert torch.equal(weight.data.cpu(), wo.preprocess(q, bits=bits, layout=weight.layout).data)
    assert torch.equal(wo.unpack(weight).cpu(), q)
    assert weight.to("cpu").device.type == "cpu"
    assert weight.to(cuda_device) is weight


# --- the object --------------------------------------------------------------------------------------------


def test_to_the_same_device_is_the_same_object(generator: torch.Generator) -> None:
    weight = wo.preprocess(random_q(64, 64, 4, generator))
    assert weight.to("cpu") is weight
    assert weight.device == torch.device("cpu")


def test_to_another_device_keeps_the_metadata_and_drops_the_plans(generator: torch.Generator) -> None:
    weight = wo.preprocess(random_q(65, 66, 4, generator), layout="row_major")
    weight._plans["key"] = object()
    moved = weight.to("meta")
    assert (moved.k, moved.n, moved.format, moved.layout) == (65, 66, "int4", "row_major")
    assert moved.device.type == "meta"
    assert moved._plans == {}


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_drop_the_plans(clone: Callable[[wo.PackedWeight], wo.PackedWeight], generator: torch.Generator) -> None:
    weight = wo.preprocess(random_q(65, 66, 8, generator), bits=8, layout="row_major")
    weight._plans["key"] = object()
    other = clone(weight)
    assert (other.k, other.n, other.format, other.layout) == (65, 66, "int8", "row_major")
    assert torch.equal(other.data, weight.data)
    assert other._plans == {}


def test_repr() -> None:
    weight = wo.preprocess(torch.ones(65, 64, dtype=torch.int8), layout="row_major")
    assert repr(weight) == "PackedWeight(int4 [65, 64], layout='row_major', 4096 bytes on cpu)"


# --- fields ------------------------------------------------------------------------------------------------

BYTES = torch.zeros(2048, dtype=torch.uint8)
GOOD_FIELDS: dict[str, Any] = {"data": BYTES, "k": 64, "n": 64, "format": "int4", "layout": "interleaved"}
BAD_FIELDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"data": BYTES.view(torch.int8)}, TypeError, "data: expected a uint8 tensor, got torch.int8"),
    "not a tensor": ({"data": b"\0" * 2048}, TypeError, "data: expected a uint8 tensor, got bytes"),
    "rank": (
        {"data": BYTES.view(64, 32)},
        ValueError,
        r"data: expected one contiguous dimension, got \[64, 32\]",
    ),
    "strides": ({"data": BYTES.repeat(2)[::2]}, ValueError, "data: expected one contiguous dimension"),
    "bytes": ({"data": BYTES[1:]}, ValueError, "data: expected 2048 bytes for int4.*got 2047"),
    "k": (
        {"k": 65},
        ValueError,
        r"data: expected 4096 bytes for int4 \[65, 64\] padded to \[128, 64\], got 2048",
    ),
    "padding of tiled int8": (
        {"n": 32, "format": "int8", "layout": "tiled"},
        ValueError,
        r"data: expected 4096 bytes for int8 \[64, 32\] padded to \[64, 64\], got 2048",
    ),
    "zero n": ({"n": 0}, ValueError, "n: expected at least 1, got 0"),
    "float k": ({"k": 64.0}, TypeError, "k: expected an int, got float"),
    "format": ({"format": "int3"}, ValueError, "format: expected one of int4, int8, nf4, fp4, code4, got 'int3'"),
    "layout": (
        {"layout": "tiles"},
        ValueError,
        "layout: expected one of row_major, interleaved, tiled, got 'tiles'",
    ),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_fields_are_checked(case: str) -> None:
    fields, error, message = BAD_FIELDS[case]
    wo.PackedWeight(**GOOD_FIELDS)
    with pytest.raises(error, match=message):
        wo.PackedWeight(**GOOD_FIELDS | fields)


BAD_PREPROCESS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "rank": (torch.ones(64, dtype=torch.int8), {}, ValueError, r"q: expected 2 dimensions, got shape \[64\]"),
    "dtype": (torch.ones(64, 64), {}, TypeError, "q: expected an int8 tensor, got torch.float32"),
    "not a tensor": ([[1]], {}, TypeError, "q: expected an int8 tensor, got list"),
    "empty": (torch.ones(0, 64, dtype=torch.int8), {}, ValueError, r"K, N >= 1, got \[0, 64\]"),
    "range": (torch.full((64, 64), 8, dtype=torch.int8), {}, ValueError, r"-8\.\.7 for bits=4, got 8\.\.8"),
    "bits": (torch.ones(64, 64, dtype=torch.int8), {"bits": 2}, ValueError, "bits: expected 4 or 8, got 2"),
    "arch": (torch.ones(64, 64, dtype=torch.int8), {"arch": "sm50"}, ValueError, "arch: .*got 'sm50'"),
    "layout": (torch.ones(64, 64, dtype=torch.int8), {"layout": ""}, ValueError, "layout: .*got ''"),
}


@pytest.mark.parametrize("case", BAD_PREPROCESS)
def test_preprocess_rejects(case: str) -> None:
    q, arguments, error, message = BAD_PREPROCESS[case]
    with pytest.raises(error, match=message):
        wo.preprocess(q, **arguments)


def test_unpack_rejects_a_plain_tensor() -> None:
    with pytest.raises(TypeError, match="qweight: expected a PackedWeight, got Tensor"):
        wo.unpack(BYTES)  # type: ignore[arg-type]


# --- files -------------------------------------------------------------------------------------------------


@bits_4_and_8
@pytest.mark.parametrize("layout", LAYOUTS)
def test_save_and_load_one_weight(bits: int, layout: str, tmp_path: Path, generator: torch.Generator) -> None:
    q = random_q(100, 77, bits, generator)
    weight = wo.preprocess(q, bits=bits, layout=layout)
    weight.save(tmp_path / "w.safetensors")
    loaded = wo.PackedWeight.load(tmp_path / "w.safetensors")
    assert (loaded.k, loaded.n, loaded.format, loaded.layout) == (100, 77, f"int{bits}", layout)
    assert torch.equal(wo.unpack(loaded), q)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_save_and_load_a_model(tmp_path: Path, generator: torch.Generator) -> None:
    path = str(tmp_path / "model.safetensors")
    q4, q8 = random_q(64, 70, 4, generator), random_q(33, 32, 8, generator)
    embedding = torch.randn(10, 6, generator=generator).t()  # not contiguous
    wo.save(path, {"a.qweight": wo.preprocess(q4), "b.qweight": wo.preprocess(q8, bits=8), "embedding": embedding})
    loaded = wo.load(path)
    assert sorted(loaded) == ["a.qweight", "b.qweight", "embedding"]
    first, second, plain = loaded["a.qweight"], loaded["b.qweight"], loaded["embedding"]
    assert isinstance(first, wo.PackedWeight)
    assert torch.equal(wo.unpack(first), q4)
    assert isinstance(second, wo.PackedWeight)
    assert torch.equal(wo.unpack(second), q8)
    assert isinstance(plain, torch.Tensor)
    assert torch.equal(plain, embedding)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    weight = wo.preprocess(torch.ones(64, 64, dtype=torch.int8))
    weight.save(path)
    before = path.read_bytes()

    def fail_halfway(tensors: object, filename: Path, metadata: object) -> None:
        Path(filename).write_bytes(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail_halfway)
    with pytest.raises(OSError, match="disk full"):
        weight.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.safetensors"]


def test_save_rejects_other_entries(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"entries\['step'\]: expected a PackedWeight or a tensor, got int"):
        wo.save(tmp_path / "w.safetensors", {"step": 3})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the metadata of the packed weights in `path`, leaving the bytes alone."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    packed = json.loads(metadata["weightonly.packed"])
    change(packed)
    save_file(tensors, path, metadata | {"weightonly.packed": json.dumps(packed)})


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "bytes": (lambda p: p["qweight"].update(k=65), "expected 4096 bytes for int4 .*got 2048"),
    "layout": (lambda p: p["qweight"].update(layout="tiles"), "layout: expected one of .*got 'tiles'"),
    "format": (lambda p: p["qweight"].update(format="int3"), "format: expected one of .*got 'int3'"),
    "missing field": (lambda p: p["qweight"].pop("n"), "missing 1 required positional argument: 'n'"),
    "foreign field": (lambda p: p["qweight"].update(m=1), "unexpected keyword argument 'm'"),
    "kind of field": (lambda p: p["qweight"].update(k="64"), "k: expected an int, got str"),
    "missing tensor": (
        lambda p: p.update(other=p["qweight"]),
        "names a packed weight 'other' that is not in the file",
    ),
    "fields": (lambda p: p.update(qweight=3), "does not map names to fields"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_load_rejects_damaged_metadata(case: str, tmp_path: Path) -> None:
    change, message = DAMAGE[case]
    path = tmp_path / "w.safetensors"
    wo.preprocess(torch.ones(64, 64, dtype=torch.int8)).save(path)
    rewrite(path, change)
    with pytest.raises(ValueError, match=rf"w\.safetensors: .*{message}"):
        wo.PackedWeight.load(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "without its metadata"),
        ({"format": "pt"}, "without its metadata"),
        ({"weightonly.file_version": "99"}, "expected file version 1, got '99'"),
        ({"weightonly.file_version": "1"}, "missing or not JSON"),
        ({"weightonly.file_version": "1", "weightonly.packed": "{"}, "missing or not JSON"),
    ],
    ids=["none", "foreign", "newer", "incomplete", "not_json"],
)
def test_load_rejects_foreign_files(metadata: dict[str, str] | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file({"qweight": BYTES}, path, metadata)
    with pytest.raises(ValueError, match=rf"foreign\.safetensors: .*{message}"):
        wo.load(path)


def test_load_rejects_unreadable_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match=r"broken\.safetensors: expected a safetensors file"):
        wo.load(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.safetensors"):
        wo.load(tmp_path / "missing.safetensors")


def test_load_of_one_weight_rejects_a_model_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weight = wo.preprocess(torch.ones(64, 64, dtype=torch.int8))
    wo.save(path, {"qweight": weight, "scales": torch.ones(1, 64)})
    with pytest.raises(ValueError, match=r"model\.safetensors: expected one packed weight named 'qweight', got"):
        wo.PackedWeight.load(path)
