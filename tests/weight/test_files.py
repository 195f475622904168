"""save and load: packed weights and tensors in one file, and files that are damaged or of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.packed_cases import LAYOUTS, bits_4_and_8, random_q

import weightonly as wo


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


def test_save_asks_for_names(tmp_path: Path) -> None:
    weight = wo.preprocess(torch.ones(64, 64, dtype=torch.int8))
    message = (
        r"^entries: expected a mapping of names to weights, got PackedWeight; qweight\.save\(path\) writes a single"
    )
    with pytest.raises(TypeError, match=message):
        wo.save(tmp_path / "w.safetensors", weight)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^entries: expected a mapping of names to weights, got list$"):
        wo.save(tmp_path / "w.safetensors", [weight])  # type: ignore[arg-type]


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
    save_file({"qweight": torch.zeros(2048, dtype=torch.uint8)}, path, metadata)
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
