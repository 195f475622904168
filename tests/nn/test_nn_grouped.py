"""nn.GroupedLinear: made of the layers of its experts, rows of no expert, its state, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.expert_cases import ends

import weightonly as wo
from weightonly.formats import QuantizedLayer
from weightonly.nn import GroupedLinear

K, N, E, GROUP = 128, 70, 3, 64


def expert(g: torch.Generator, group_size: int = GROUP, layout: str = "tiled", bits: int = 4) -> QuantizedLayer:
    """With everything that a layer can have, as a reader of checkpoints makes it."""
    q, scales, zeros = wo.quantize(torch.randn(K, N, generator=g), bits, group_size, symmetric=False)
    weight = wo.preprocess(q, bits, layout=layout)
    return QuantizedLayer("", weight, scales, zeros, torch.randn(N, generator=g), torch.randperm(K, generator=g))


@pytest.fixture
def parts(generator: torch.Generator) -> list[QuantizedLayer]:
    return [expert(generator) for _ in range(E)]


def test_parts_are_stacked_in_their_order(parts: list[QuantizedLayer], generator: torch.Generator) -> None:
    layer = GroupedLinear.from_parts(parts)
    assert (layer.num_experts, layer.in_features, layer.out_features, layer.group_size) == (E, K, N, GROUP)
    x = torch.randn(6, K, generator=generator)
    y = layer(x, ends([1, 2, 3]))
    for e, (begin, end) in enumerate(((0, 1), (1, 3), (3, 6))):
        p = parts[e]
        one = wo.gemm(x[begin:end], p.weight, p.scales, zeros=p.zeros, bias=p.bias, perm=p.perm)
        assert torch.equal(y[begin:end], one)
        assert torch.equal(layer.dequantize()[e], p.dequantize())


def test_parts_in_another_dtype(parts: list[QuantizedLayer]) -> None:
    layer = GroupedLinear.from_parts(parts, torch.bfloat16)
    for name in ("scales", "zeros", "bias"):
        expected = torch.stack([getattr(part, name) for part in parts])
        assert torch.equal(getattr(layer, name), expected.bfloat16())
    assert layer.perm is not None and torch.equal(
        layer.perm, torch.stack([p.perm for p in parts if p.perm is not None])
    )
    for e, part in enumerate(parts):  # computed in fp32 from what the layer has
        rounded = {name: getattr(part, name).bfloat16().float() for name in ("scales", "zeros")}
        assert torch.equal(layer.dequantize(torch.float32)[e], dataclasses.replace(part, **rounded).dequantize())
    assert layer.dequantize().dtype == torch.bfloat16


def test_scales_of_mxfp4_beyond_a_dtype_are_refused(generator: torch.Generator) -> None:
    weight = wo.preprocess(torch.randint(0, 16, (K, N), generator=generator).to(torch.uint8), format="mxfp4")
    parts = [QuantizedLayer("", weight, torch.full((K // 32, N), scale), None) for scale in (1.0, 2.0**40)]
    with pytest.raises(ValueError, match=r"^scales: expected powers of two in .* for mxfp4 in torch.float16, got 1.09"):
        GroupedLinear.from_parts(parts, torch.float16)
    assert GroupedLinear.from_parts(parts, torch.bfloat16).scales[1, 0, 0] == 2.0**40


Change = Callable[[torch.Generator, QuantizedLayer], QuantizedLayer]
OTHERS: dict[str, tuple[Change, str]] = {
    "format": (lambda g, part: expert(g, bits=8), "weight: expected .*'int4'.* as expert 0 has, got .*'int8'"),
    "layout": (lambda g, part: expert(g, layout="interleaved"), "weight: expected .*'tiled'.*, got .*'interleaved'"),
    "group size": (lambda g, part: expert(g, 32), r"scales: expected \[2, 70\] as expert 0 has, got \[4, 70\]"),
    "no zeros": (
        lambda g, part: dataclasses.replace(part, zeros=None),
        r"zeros: expected \[2, 70\] as expert 0 has, got None",
    ),
    "no bias": (
        lambda g, part: dataclasses.replace(part, bias=None),
        r"bias: expected \[70\] as expert 0 has, got None",
    ),
    "no perm": (
        lambda g, part: dataclasses.replace(part, perm=None),
        r"perm: expected \[128\] as expert 0 has, got None",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_parts_of_several_kinds_are_refused(case: str, parts: list[QuantizedLayer], generator: torch.Generator) -> None:
    change, message = OTHERS[case]
    parts[2] = change(generator, parts[2])
    with pytest.raises(ValueError, match=f"^expert 2: {message}"):
        GroupedLinear.from_parts(parts)


def test_no_parts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^parts: expected at least one expert, got none$"):
        GroupedLinear.from_parts([])


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "one weight": (lambda a: {"weight": a["weight"][0]}, ValueError, "weight: expected stacked experts"),
    "bytes": (lambda a: {"weight": a["weight"].data}, TypeError, "weight: expected the PackedWeight"),
    "scales of two": (
        lambda a: {"scales": a["scales"][:2]},
        ValueError,
        r"scales: expected shape \[E = 3, K / group_size, N",
    ),
    "groups of zeros": (lambda a: {"zeros": a["zeros"][:, :1]}, ValueError, "zeros: expected shape"),
    "dtype of bias": (lambda a: {"bias": a["bias"].half()}, TypeError, "bias: expected dtype torch.float32"),
    "K of perm": (lambda a: {"perm": a["perm"][:, 1:]}, ValueError, r"perm: expected shape \[E, K\] = \[3, 128\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_grouped_gemm_refuses_makes_no_layer(case: str, parts: list[QuantizedLayer]) -> None:
    layer = GroupedLinear.from_parts(parts)
    right: dict[str, Any] = {"weight": layer.packed, "perm": layer.perm}
    right |= {name: getattr(layer, name).detach() for name in ("scales", "zeros", "bias")}
    assert torch.equal(GroupedLinear.from_quantized(**right).dequantize(), layer.dequantize())
    change, error, message = WRONG[case]
    with pytest.raises(error, match=f"^{message}"):
        GroupedLinear.from_quantized(**right | change(right))


@pytest.mark.parametrize("counts", [[1, 0, 2], [0, 0, 0]], ids=["some rows", "no rows"])
def test_rows_of_no_expert_give_zeros(
    counts: list[int], parts: list[QuantizedLayer], generator: torch.Generator
) -> None:
    """They are those of experts of other ranks, and stay out of the sum."""
    layer = GroupedLinear.from_parts(parts)
    x, total = torch.randn(5, K, generator=generator), sum(counts)
    y = layer(x, ends(counts))
    assert not y[total:].any()
    if total:
        assert torch.equal(y[:total], layer(x[:total], ends(counts)))
        assert y[:total].any(1).all()


def test_ends_beyond_the_rows_are_refused(parts: list[QuantizedLayer]) -> None:
    with pytest.raises(ValueError, match=r"offs: expected T = 5, the rows of x, as the last end, got 6"):
        GroupedLinear.from_parts(parts)(torch.zeros(5, K), ends([1, 2, 3]))


def test_a_codebook_that_is_loaded_is_the_one_in_use(generator: torch.Generator) -> None:
    """Into a layer that computed with another one."""
    codes = torch.randint(0, 16, (E, K, N), generator=generator).to(torch.uint8)
    scales, x, offs = torch.rand(E, 2, N, generator=generator), torch.randn(4, K, generator=generator), ends([1, 2, 1])
    layers = [
        GroupedLinear.from_quantized(wo.preprocess(codes, format="code4", code=torch.linspace(-1, end, 16)), scales)
        for end in (1.0, 3.0)
    ]
    first, second = (layer(x, offs) for layer in layers)
    assert not torch.equal(first, second)
    layers[0].load_state_dict(layers[1].state_dict())
    assert torch.equal(layers[0](x, offs), second)


def test_a_state_of_another_layout_is_refused(parts: list[QuantizedLayer]) -> None:
    layer = GroupedLinear.from_parts(parts)
    state = GroupedLinear.from_parts(parts).repack("sm80").state_dict()
    with pytest.raises(ValueError, match=r"^state dict: qweight: expected .* for layout 'tiled', got .*'interleaved'"):
        layer.load_state_dict(state)


def test_it_says_how_many_experts_it_has() -> None:
    layer = GroupedLinear(E, K, N, group_size=GROUP, bias=True, act_order=True, dtype=torch.float32)
    assert layer.extra_repr().startswith(f"num_experts={E}, in_features={K}, out_features={N}, bias=True")
    assert layer.perm is not None and torch.equal(layer.perm, torch.arange(K, dtype=torch.int32).repeat(E, 1))
    assert not layer(torch.ones(4, K), ends([1, 2, 1])).any()
