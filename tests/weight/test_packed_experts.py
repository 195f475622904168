"""Stacked experts: packing, taking one or some of them, copies, files, slices, dequantize, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.expert_cases import kinds, pack, random_stack

import weightonly as wo


@kinds
def test_each_expert_is_the_weight_packed_alone(format: str, layout: str, generator: torch.Generator) -> None:
    q = random_stack(3, 70, 130, format, generator)
    weight = pack(q, format, layout)
    assert (weight.experts, weight.k, weight.n, weight.format, weight.layout) == (3, 70, 130, format, layout)
    assert torch.equal(wo.unpack(weight), q)
    for expert, matrix in enumerate(q):
        alone = pack(matrix, format, layout)
        assert alone.experts is None
        assert weight[expert].fields == alone.fields
        assert torch.equal(weight[expert].data, alone.data)


def test_a_stack_of_views_and_of_one() -> None:
    q = torch.arange(-8, 8, dtype=torch.int8).repeat(3 * 65 * 5).view(65, 3, 80)[..., ::2].transpose(0, 1)
    assert torch.equal(wo.unpack(wo.preprocess(q)), q)
    one = wo.preprocess(q[:1])
    assert one.experts == 1
    assert torch.equal(one.data, wo.preprocess(q[0]).data)


def test_experts_share_the_memory_of_the_stack(generator: torch.Generator) -> None:
    weight = pack(random_stack(4, 64, 64, "int4", generator), "int4", "tiled")
    size = weight.data.numel() // 4
    assert [expert.data.data_ptr() - weight.data.data_ptr() for expert in weight] == [0, size, 2 * size, 3 * size]
    assert weight[-1].data.data_ptr() == weight[3].data.data_ptr()
    some = weight[1:3]
    assert some.experts == 2
    assert some.data.data_ptr() == weight[1].data.data_ptr()
    assert torch.equal(wo.unpack(some), wo.unpack(weight)[1:3])


BAD_INDEX: dict[str, tuple[Any, type[Exception], str]] = {
    "beyond": (4, IndexError, "index: expected one of 4 experts, got 4"),
    "before": (-5, IndexError, "index: expected one of 4 experts, got -5"),
    "bool": (True, TypeError, "index: expected an int or a slice, got bool"),
    "float": (1.0, TypeError, "index: expected an int or a slice, got float"),
    "step": (slice(0, 4, 2), ValueError, "index: expected at least one of 4 experts, in steps of 1, got slice"),
    "empty": (slice(2, 2), ValueError, "index: expected at least one of 4 experts"),
}


@pytest.mark.parametrize("case", BAD_INDEX)
def test_index_is_checked(case: str) -> None:
    index, error, message = BAD_INDEX[case]
    with pytest.raises(error, match=message):
        _ = wo.preprocess(torch.ones(4, 64, 64, dtype=torch.int8))[index]


def test_a_single_weight_has_no_experts() -> None:
    weight = wo.preprocess(torch.ones(64, 64, dtype=torch.int8))
    assert weight.experts is None
    assert "experts" not in weight.fields
    for use in (lambda: weight[0], lambda: iter(weight)):
        with pytest.raises(TypeError, match=r"qweight: expected stacked experts, got one weight PackedWeight\(int4"):
            use()


@kinds
@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w)), lambda w: w.to("meta")],
    ids=["copy", "deepcopy", "pickle", "to"],
)
def test_copies(
    clone: Callable[[wo.PackedWeight], wo.PackedWeight], format: str, layout: str, generator: torch.Generator
) -> None:
    weight = pack(random_stack(2, 65, 66, format, generator), format, layout)
    assert clone(weight).fields == weight.fields
    assert clone(weight).fields["experts"] == 2
    assert clone(weight).code == weight.code


def test_repr() -> None:
    weight = wo.preprocess(torch.ones(3, 65, 64, dtype=torch.int8), layout="row_major")
    assert repr(weight) == "PackedWeight(int4 [3, 65, 64], layout='row_major', 12288 bytes on cpu)"


@kinds
def test_save_and_load(format: str, layout: str, tmp_path: Path, generator: torch.Generator) -> None:
    weight = pack(random_stack(3, 100, 77, format, generator), format, layout)
    weight.save(tmp_path / "w.safetensors")
    loaded = wo.PackedWeight.load(tmp_path / "w.safetensors")
    assert loaded.fields == weight.fields
    assert torch.equal(loaded.data, weight.data)


@kinds
def test_dequantize(format: str, layout: str, generator: torch.Generator) -> None:
    q = random_stack(3, 128, 70, format, generator)
    scales = torch.rand(3, 2, 70, generator=generator).half()
    for zeros in (None, torch.randn(3, 2, 70, generator=generator).half()):
        if zeros is not None and not format.startswith("int"):
            continue  # codes have no zero points
        w = wo.dequantize(pack(q, format, layout), scales, zeros)
        assert w.shape == (3, 128, 70)
        for expert, matrix in enumerate(q):
            zero = None if zeros is None else zeros[expert]
            assert torch.equal(w[expert], wo.dequantize(pack(matrix, format, layout), scales[expert], zero))


def test_dequantize_checks_the_stack() -> None:
    weight = wo.preprocess(torch.ones(3, 64, 64, dtype=torch.int8))
    scales = torch.ones(3, 1, 64)
    for bad in (scales[0], scales[:2], scales[:, :0], scales[..., :63], scales[None], torch.ones(3, 7, 64)):
        with pytest.raises(ValueError, match=r"scales: expected (shape \[E = 3, )?K / group_size"):
            wo.dequantize(weight, bad)
    with pytest.raises(ValueError, match=r"zeros: expected shape \[3, 1, 64\] as scales, got \[3, 2, 64\]"):
        wo.dequantize(weight, scales, torch.ones(3, 2, 64))
    with pytest.raises(ValueError, match=r"scales: expected shape \[K / group_size, N = 64\], got \[3, 1, 64\]"):
        wo.dequantize(weight[0], scales)


@pytest.mark.parametrize("format", ["int4", "int8", "nf4"])
def test_slices_cut_each_expert(format: str, generator: torch.Generator) -> None:
    q = random_stack(3, 200, 130, format, generator)
    weight = pack(q, format, "tiled")
    for got, part in (
        (weight.slice_n(64, 130), q[:, :, 64:130]),
        (weight.slice_n(0, 64), q[:, :, :64]),
        (weight.slice_k(64, 200), q[:, 64:200]),
        (weight.slice_k(0, 128), q[:, :128]),
    ):
        expected = pack(part, format, "tiled")
        assert got.fields == expected.fields
        assert torch.equal(got.data, expected.data)


BAD_Q: dict[str, tuple[torch.Tensor, dict[str, Any], str]] = {
    "no experts": (torch.ones(0, 64, 64, dtype=torch.int8), {}, r"q: .* \[E, K, N\] with E >= 1, got \[0, 64, 64\]"),
    "no rows": (torch.ones(2, 0, 64, dtype=torch.int8), {}, r"q: expected shape .*got \[2, 0, 64\]"),
    "rank": (torch.ones(1, 2, 64, 64, dtype=torch.int8), {}, r"q: expected 2 dimensions, got shape \[1, 2, 64, 64\]"),
    "value": (torch.tensor([0, 9], dtype=torch.int8).view(2, 1, 1), {}, r"expert 1: q: .*-8\.\.7 .*got 0\.\.9"),
    "code": (torch.tensor([0, 16], dtype=torch.int8).view(2, 1, 1), {"format": "nf4"}, "expert 1: q: expected codes"),
}


@pytest.mark.parametrize("case", BAD_Q)
def test_preprocess_rejects(case: str) -> None:
    q, options, message = BAD_Q[case]
    with pytest.raises(ValueError, match=message):
        wo.preprocess(q, **options)


def test_fields_are_checked() -> None:
    data = torch.zeros(2 * 2048, dtype=torch.uint8)
    assert wo.PackedWeight(data, 64, 64, "int4", "tiled", experts=2).experts == 2
    for experts, error, message in (
        (3, ValueError, r"data: expected 6144 bytes for 3 x int4 \[64, 64\] padded to \[64, 64\], got 4096"),
        (None, ValueError, r"data: expected 2048 bytes for int4 \[64, 64\]"),
        (0, ValueError, "experts: expected at least 1, got 0"),
        (2.0, TypeError, "experts: expected an int, got float"),
    ):
        with pytest.raises(error, match=message):
            wo.PackedWeight(data, 64, 64, "int4", "tiled", experts=experts)  # type: ignore[arg-type]


def test_gemm_and_linear_refuse_a_stack() -> None:
    weight = wo.preprocess(torch.ones(2, 64, 64, dtype=torch.int8))
    x, scales = torch.ones(1, 64), torch.ones(1, 64)
    wo.gemm(x, weight[0], scales)  # its plan must not serve the stack
    with pytest.raises(ValueError, match=r"qweight: expected one weight .*got 2 stacked experts; .*grouped_gemm"):
        wo.gemm(x, weight, scales)
    with pytest.raises(ValueError, match=r"weight: expected one weight .*got 2 stacked experts"):
        wo.nn.Linear.from_quantized(weight, scales)
