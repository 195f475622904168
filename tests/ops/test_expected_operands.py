"""A PackedWeight that knows its group size, zeros and perm: who tells it, what is refused, what keeps it."""

# mypy: disable-error-code="arg-type"

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

import weightonly as wo

K, N, G = 256, 64, 64


def known(**fields: Any) -> wo.PackedWeight:
    q = torch.randint(-8, 8, (K, N), dtype=torch.int8, generator=torch.Generator().manual_seed(3))
    return wo.preprocess(q, layout="tiled", **fields)


def scales(groups: int = K // G) -> torch.Tensor:
    return torch.full((groups, N), 0.5)


X = torch.randn(3, K, generator=torch.Generator().manual_seed(4))
PERM = torch.arange(K).flip(0)

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "groups of 64 for 128": (
        {"group_size": 128},
        {"scales": scales(4)},
        r"scales: expected 2 rows for groups of 128, as qweight was packed for, got shape \[4, 64\]",
    ),
    "groups of 128 for 64": (
        {"group_size": 64},
        {"scales": scales(2)},
        r"scales: expected 4 rows for groups of 64, as qweight was packed for, got shape \[2, 64\]",
    ),
    "groups for a channel": (
        {"group_size": -1},
        {"scales": scales(4)},
        r"scales: expected 1 rows for groups of 256, .*got shape \[4, 64\]",
    ),
    "forgotten zeros": (
        {"zeros": True},
        {"scales": scales()},
        r"zeros: expected shape \[4, 64\], as qweight was packed for, got None",
    ),
    "needless zeros": (
        {"zeros": False},
        {"scales": scales(), "zeros": scales()},
        r"zeros: expected None, as qweight was packed for, got shape \[4, 64\]",
    ),
    "forgotten perm": (
        {"perm": True},
        {"scales": scales()},
        "perm: expected the act-order permutation, as qweight was packed for, got None",
    ),
    "needless perm": (
        {"perm": False},
        {"scales": scales(), "perm": PERM},
        "perm: expected None, as qweight was packed for, got a permutation",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("way", ["eager", "planned", "compiled"])
def test_gemm_refuses_what_does_not_fit(case: str, way: str) -> None:
    said, operands, message = REFUSED[case]
    torch.compiler.reset()

    def product(x: torch.Tensor, qweight: wo.PackedWeight) -> torch.Tensor:
        return wo.gemm(x, qweight, **operands)

    unknown = product(X, known())  # the same call, with a weight that nobody described
    assert torch.isfinite(unknown).all()
    if way == "compiled":
        product = torch.compile(product, backend="aot_eager")
    with pytest.raises((ValueError, RuntimeError), match=message):
        product(X, known(**said))


@pytest.mark.parametrize("case", [case for case in REFUSED if "perm" not in case])
def test_dequantize_refuses_what_does_not_fit(case: str) -> None:
    said, operands, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        wo.dequantize(known(**said), **operands)


def test_what_fits_is_the_same_product() -> None:
    operands = {"scales": scales(), "zeros": scales(), "perm": PERM}
    expected = wo.gemm(X, known(), **operands)
    told = known(group_size=G, zeros=True, perm=True)
    assert torch.equal(wo.gemm(X, told, **operands), expected)
    compiled = torch.compile(lambda x: wo.gemm(x, told, **operands), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X), expected)
    per_channel = known(group_size=K)
    assert per_channel.group_size == -1
    assert torch.equal(wo.gemm(X, per_channel, scales(1)), wo.gemm(X, known(), scales(1)))


COPIES: dict[str, Callable[[wo.PackedWeight], wo.PackedWeight]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "to": lambda w: w.to("meta"),
    "fields": lambda w: wo.PackedWeight(w.data, **json.loads(json.dumps(w.fields))),
    "slice_n": lambda w: w.slice_n(0, 64),
    "repack": lambda w: wo.repack(w, "sm80"),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("said", [{}, {"group_size": G, "zeros": True, "perm": False}], ids=["unknown", "known"])
def test_copies_know_the_same(said: dict[str, Any], name: str) -> None:
    clone = COPIES[name](known(**said))
    expected = (said.get("group_size"), said.get("zeros"), said.get("perm"))
    assert (clone.group_size, clone.has_zeros, clone.has_perm) == expected


def test_files_keep_it_and_old_files_load(tmp_path: Path) -> None:
    wo.save(tmp_path / "w", {"told": known(group_size=G, zeros=False), "untold": known()})
    with safe_open(tmp_path / "w", framework="pt") as file:
        fields = json.loads(file.metadata()["weightonly.packed"])
    # What nobody said is not written: these are the fields of version 0.1.
    assert fields["untold"] == {"k": K, "n": N, "format": "int4", "layout": "tiled"}
    loaded = wo.load(tmp_path / "w")
    told, untold = loaded["told"], loaded["untold"]
    assert isinstance(told, wo.PackedWeight) and isinstance(untold, wo.PackedWeight)
    assert (told.group_size, told.has_zeros, told.has_perm) == (G, False, None)
    assert (untold.group_size, untold.has_zeros, untold.has_perm) == (None, None, None)


def test_slices_along_k() -> None:
    weight = known(group_size=128, perm=True)
    part = weight.slice_k(128, 256)
    assert (part.group_size, part.has_perm) == (-1, False)  # one group is all of its rows
    assert known(group_size=64).slice_k(128, 256).group_size == 64
    with pytest.raises(ValueError, match="begin, end: expected multiples of the group size 128, got 64, 256"):
        weight.slice_k(64, 256)
    assert known(group_size=-1).slice_k(64, 256).group_size == -1
    assert known().slice_k(64, 256).has_perm is None


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"group_size": 48}, ValueError, "group_size: expected -1 or a divisor of K=256, got 48"),
        ({"group_size": "64"}, TypeError, "group_size: expected an int, got str"),
        ({"zeros": torch.zeros(4, N)}, TypeError, "zeros: expected True, False or None, got Tensor"),
        ({"perm": 1}, TypeError, "perm: expected True, False or None, got int"),
        ({"format": "nf4", "zeros": True}, ValueError, "zeros: expected False or None for nf4"),
    ],
    ids=["group size", "type of group size", "a tensor", "an int", "zeros of codes"],
)
def test_preprocess_rejects(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wo.preprocess(torch.zeros(K, N, dtype=torch.int8), layout="tiled", **fields)


def test_a_layer_tells_its_weight() -> None:
    layer = wo.nn.Linear.from_quantized(known(), scales(), scales(), perm=PERM)
    assert (layer.packed.group_size, layer.packed.has_zeros, layer.packed.has_perm) == (G, True, True)
    with pytest.raises(ValueError, match="zeros: expected shape"):
        wo.nn.Linear.from_quantized(known(zeros=True), scales())
    with pytest.raises(ValueError, match="perm: expected the act-order"):
        wo.nn.Linear.from_quantized(known(perm=True), scales())
