"""Packed weights of codes as objects: copies, fields and files."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.code_cases import FORMATS, OWN, formats, packed, random_codes

import weightonly as wo


@formats
@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_have_the_codebook(
    format: str, clone: Callable[[wo.PackedWeight], wo.PackedWeight], generator: torch.Generator
) -> None:
    weight = packed(random_codes(65, 66, generator), format)
    for other in (clone(weight), weight.to("meta"), wo.PackedWeight(weight.data, **weight.fields)):
        assert other.fields == weight.fields and other.code == weight.code
    assert ("code" in weight.fields) == (format == "code4")
    stored = json.loads(json.dumps(weight.fields))
    assert wo.PackedWeight(weight.data, **stored).code == weight.code


def test_repr(generator: torch.Generator) -> None:
    weight = packed(random_codes(65, 64, generator), "nf4", "tiled")
    assert repr(weight) == "PackedWeight(nf4 [65, 64], layout='tiled', 4096 bytes on cpu)"


BYTES = torch.zeros(2048, dtype=torch.uint8)
GOOD_FIELDS: dict[str, Any] = {"data": BYTES, "k": 64, "n": 64, "format": "code4", "layout": "tiled", "code": OWN}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layout": "row_major"},
            "layout: expected 'interleaved' or 'tiled' or 'cpu' for codes of a codebook, got 'row_major'",
        ),
        ({"code": None}, "code: expected the codebook of a code4 weight, got None"),
        ({"format": "fp4"}, "code: expected None for fp4, got a codebook; only code4 takes one"),
        ({"code": OWN[1:]}, r"code: expected 16 numbers, got shape \[15\]"),
        ({"has_zeros": True}, "has_zeros: expected False or None for code4, whose codes have no zeros, got True"),
        ({"format": "nf4", "code": None, "has_zeros": True}, "has_zeros: expected False or None for nf4"),
    ],
    ids=["layout", "no codebook", "codebook of fp4", "length", "zeros", "zeros of nf4"],
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
        (lambda fields: fields.pop("code"), "code: expected the codebook of a code4 weight, got None"),
        (lambda fields: fields["code"].pop(), r"code: expected 16 numbers, got shape \[15\]"),
        (lambda fields: fields.update(code="0123456789abcdef"), "code: expected 16 numbers, got str"),
        (lambda fields: fields.update(format="nf4"), "code: expected None for nf4"),
        (lambda fields: fields.update(layout="row_major"), "layout: expected 'interleaved' or 'tiled'"),
    ],
    ids=["missing", "short", "text", "another format", "layout"],
)
def test_load_rejects_damaged_codebooks(
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
