"""Wrong arguments of every public function: refused by a TypeError or ValueError that begins with the argument's name.

What is wrong is tried by kind, one argument at a time. `tools.fuzz --target invalid` does the same at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly.formats import convert
from weightonly.heuristics import Problem, select
from weightonly.nn import Linear

K, N, M, GROUP = 128, 64, 3, 64

Case = tuple[str, Callable[..., object], dict[str, Any]]


_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a str": lambda t: "x",
    "a number": lambda t: 3,
    "a list": lambda t: [1.0],
    "an object": lambda t: object(),
    "fp64": lambda t: t.to(torch.float64),
    "int16": lambda t: t.to(torch.int16),
    "bool": lambda t: t.to(torch.bool),
    "complex": lambda t: t.to(torch.complex64),
    "fp8": lambda t: t.float().to(torch.float8_e4m3fn),
    "a scalar": lambda t: t.reshape(-1)[0],
    "five dimensions": lambda t: t.reshape(1, 1, 1, -1, t.shape[-1]),
    "no rows": lambda t: t[:0],
    "no columns": lambda t: t[..., :0],
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t], dtype=t.dtype),
    "on meta": lambda t: t.to("meta"),
    "negated": lambda t: torch._neg_view(t),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.qint8),
}


class _Object:
    def __repr__(self) -> str:
        return "an object"  # the same id in every process


_INTS: list[Any] = [None, "4", 4.0, True, [4], {}, float("nan"), torch.tensor(4), -2, 0]
_BOOLS: list[Any] = ["no", 2, 0.5, [], _Object(), torch.tensor([1, 2])]
_STRS: list[Any] = [3, "", "zzz", b"int4", ["int4"], {}, _Object(), True]
_DTYPES: list[Any] = ["float16", 3, torch.float64, torch.int8, _Object()]


def _calls() -> list[Case]:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(K, N, generator=g)
    q, scales, zeros = wo.quantize(w, 4, GROUP, symmetric=False)
    assert zeros is not None
    weight = wo.preprocess(q, 4)
    stack = wo.preprocess(torch.stack([q, q]), 4)
    both = {"scales": torch.stack([scales, scales]), "zeros": torch.stack([zeros, zeros])}
    x, bias, perm = torch.randn(M, K, generator=g), torch.randn(N, generator=g), torch.randperm(K, generator=g)
    out, offs = torch.zeros(M, N), torch.tensor([1, M], dtype=torch.int32)
    packed, absmax = wo.quantize_4bit(w)
    words = torch.ones(K, N // 8, dtype=torch.int32)
    code = torch.linspace(-1, 1, 16)
    problem = {"m": 4, "n": 4096, "k": 4096, "format": "int4", "group_size": 128, "arch": 90, "sm_count": 132}
    layer = Linear(K, N, group_size=GROUP, dtype=torch.float32)
    blocks = {"packed": packed, "absmax": absmax, "blocksize": 64, "quant_type": "nf4"}
    return [
        ("quantize", wo.quantize, {"w": w, "bits": 4, "group_size": GROUP, "symmetric": False}),
        ("quantize to nvfp4", wo.quantize, {"w": w, "format": "nvfp4", "symmetric": True}),
        ("preprocess", wo.preprocess, {"q": q, "bits": 4, "layout": "tiled", "group_size": GROUP, "zeros": True}),
        ("preprocess code4", wo.preprocess, {"q": q.abs(), "bits": 4, "format": "code4", "code": code}),
        ("preprocess experts", wo.preprocess, {"q": torch.stack([q, q]), "perm": False}),
        ("unpack", wo.unpack, {"qweight": weight}),
        ("repack", wo.repack, {"qweight": weight, "arch": "sm80"}),
        (
            "gemm",
            wo.gemm,
            {"x": x, "qweight": weight, "scales": scales, "zeros": zeros, "bias": bias, "perm": perm, "out": out},
        ),
        (
            "grouped_gemm",
            wo.grouped_gemm,
            {"x": x, "qweight": stack, "offs": offs, "bias": torch.ones(2, N), "out": out, **both},
        ),
        ("dequantize", wo.dequantize, {"qweight": weight, "scales": scales, "zeros": zeros}),
        ("dequantize experts", wo.dequantize, {"qweight": stack, **both}),
        (
            "awq_dequantize",
            wo.awq_dequantize,
            {"qweight": words, "scales": torch.ones(2, N).half(), "qzeros": torch.ones(2, N // 8, dtype=torch.int32)},
        ),
        ("quantize_4bit", wo.quantize_4bit, {"w": w, "blocksize": 64, "quant_type": "nf4", "code": code}),
        ("dequantize_4bit", wo.dequantize_4bit, {**blocks, "shape": (K, N), "dtype": torch.float16, "code": code}),
        (
            "PackedWeight",
            wo.PackedWeight,
            {"data": weight.data, "k": K, "n": N, "format": "int4", "layout": "cpu", "group_size": GROUP},
        ),
        ("slice_n", weight.slice_n, {"begin": 0, "end": 64}),
        ("slice_k", weight.slice_k, {"begin": 0, "end": 64}),
        ("to", weight.to, {"device": "cpu"}),
        (
            "Linear",
            Linear,
            {
                "in_features": K,
                "out_features": N,
                "bias": True,
                "bits": 4,
                "group_size": GROUP,
                "symmetric": True,
                "dtype": torch.float16,
                "device": "cpu",
                "activation": "relu",
                "act_order": False,
            },
        ),
        (
            "from_quantized",
            Linear.from_quantized,
            {"weight": weight, "scales": scales, "zeros": zeros, "bias": bias, "perm": perm},
        ),
        ("layer.dequantize", layer.dequantize, {"dtype": torch.float32}),
        ("layer.requantize", layer.requantize, {"w": w}),
        ("Problem", Problem, problem),
        ("select", select, problem),
    ]


_RIGHT = {
    "gemm-x-no rows",  # an empty result, but `out` has rows
    "gemm-x-five dimensions",
    "grouped_gemm-x-no rows",
    *(f"from_quantized-{name}-on meta" for name in ("scales", "zeros", "bias", "perm")),
    "PackedWeight-data-on meta",
    *(
        f"{name}-code-{kind}"
        for name in ("preprocess code4", "quantize_4bit", "dequantize_4bit")
        for kind in ("fp64", "fp8")
    ),
    *(f"quantize_4bit-w-{kind}" for kind in ("a scalar", "five dimensions", "no rows", "no columns")),
    "dequantize_4bit-packed-five dimensions",
    *(f"{name}-group_size-None" for name in ("preprocess", "PackedWeight", "quantize", "Linear")),
    *(f"{name}-bits-None" for name in ("quantize", "Linear", "preprocess", "preprocess code4")),
}
"""What is no mistake of this argument."""


def _wrong(name: str, argument: str, right: object) -> Iterator[tuple[str, Any]]:
    """(what is wrong, the value)"""
    if isinstance(right, torch.Tensor):
        for kind, change in _TENSORS.items():
            try:
                value = change(right)
            except (RuntimeError, NotImplementedError):
                continue  # PyTorch has no such tensor of this dtype
            same = isinstance(value, torch.Tensor) and value.dtype == right.dtype and value is right
            if not same and not (kind == "negated" and not right.is_floating_point()):
                yield kind, value
        return
    values: list[Any] = []
    if isinstance(right, bool):
        values = _BOOLS
    elif isinstance(right, int):
        values = _INTS
    elif isinstance(right, str):
        values = _STRS
    elif isinstance(right, torch.dtype):
        values = _DTYPES
    elif isinstance(right, tuple):
        values = ["x", 3, [K, 64.0], (True, N), (-1, N), (10**40, N), (0, 1 << 70)]
    elif isinstance(right, wo.PackedWeight):
        values = [None, 3, "w", torch.zeros(4), right.data]
    for value in values:
        if isinstance(value, list | dict) and name == "select":
            continue  # functools.lru_cache refuses them, by a TypeError of Python's
        if argument == "begin" and type(value) is int and value == 0:
            continue
        yield repr(value)[:40], value


_CASES = [
    pytest.param(call, arguments, argument, value, id=f"{name}-{argument}-{kind}")
    for name, call, arguments in _calls()
    for argument in arguments
    for kind, value in _wrong(name, argument, arguments[argument])
    if f"{name}-{argument}-{kind}" not in _RIGHT
]


@pytest.mark.parametrize(("call", "arguments", "argument", "value"), _CASES)
def test_refused_by_name(call: Callable[..., object], arguments: dict[str, Any], argument: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(**arguments | {argument: value})
    named = str(caught.value).partition(":")[0].split(", ")  # "begin, end: expected ..."
    assert argument in named or str(caught.value).startswith(f"{argument} must"), str(caught.value)


@pytest.mark.parametrize(("name", "call", "arguments"), _calls(), ids=[name for name, *_ in _calls()])
def test_the_right_arguments_are_taken(name: str, call: Callable[..., object], arguments: dict[str, Any]) -> None:
    call(**arguments)


_WITH_PATHS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "save": ("path", lambda path: wo.save(path, {"w": torch.ones(3)})),
    "load": ("path", wo.load),
    "load_checkpoint": ("folder", wo.load_checkpoint),
    "convert from": ("source", lambda path: convert(path, "target")),
    "convert to": ("target", lambda path: convert("source", path)),
}


class BytesPath:
    """As os.DirEntry is, of a folder that was named by bytes."""

    def __fspath__(self) -> bytes:
        return b"weights"


@pytest.mark.parametrize(
    "value", [b"weights", 3, None, ["weights"], True, BytesPath()], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("name", _WITH_PATHS)
def test_what_is_no_path_is_refused_by_name(name: str, value: Any) -> None:
    """Bytes, too: they have no place in a message, and no encoding."""
    argument, call = _WITH_PATHS[name]
    with pytest.raises(TypeError, match=f"^{argument}: expected a path, got {type(value).__name__}$"):
        call(value)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("symmetric", lambda: wo.quantize(torch.ones(K, N), 4, GROUP, symmetric=None)),  # type: ignore[arg-type]
        ("symmetric", lambda: Linear(K, N, symmetric=None)),  # type: ignore[arg-type]
    ],
    ids=["quantize", "Linear"],
)
def test_none_is_no_flag_where_there_is_no_third_case(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=f"^{argument}: expected True or False, got NoneType$"):
        call()


# --- tensors that PyTorch negates when it reads them: their memory has the numbers with the other sign ------------


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    """As z.conj().imag is, of a complex z: the same numbers."""
    view = torch._neg_view(-tensor)
    assert view.is_neg()
    assert torch.equal(view, tensor)
    return view


@pytest.mark.parametrize("name", ["x", "scales", "zeros", "bias", "out"])
def test_a_negated_view_is_refused_though_others_have_a_plan(name: str, generator: torch.Generator) -> None:
    q, scales, zeros = wo.quantize(torch.randn(K, N, generator=generator), 4, GROUP, symmetric=False)
    x, qweight, out = torch.randn(M, K, generator=generator), wo.preprocess(q, 4), torch.zeros(M, N)
    right: dict[str, Any] = {"x": x, "scales": scales, "zeros": zeros, "bias": torch.ones(N)}
    wo.gemm(**right, qweight=qweight, out=out)
    wrong = right | {"out": out} | {name: _negated(out if name == "out" else right[name])}
    with pytest.raises(ValueError, match=f"^{name}: expected .* negated view; resolve_neg"):
        wo.gemm(**wrong, qweight=qweight)


def test_a_negated_view_is_saved_as_it_reads(tmp_path: Path, generator: torch.Generator) -> None:
    tensor = torch.randn(K, generator=generator)
    conjugate = torch.complex(tensor, tensor).conj()
    wo.save(tmp_path / "t.safetensors", {"negated": _negated(tensor), "conjugate": conjugate})
    loaded: dict[str, Any] = {**wo.load(tmp_path / "t.safetensors")}
    assert torch.equal(loaded["negated"], tensor)
    assert torch.equal(loaded["conjugate"], conjugate.resolve_conj())
