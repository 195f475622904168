"""Act-order: `perm` of `gemm` and `Linear`, from GPTQ and compressed-tensors checkpoints to the product."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import formats_reference as ref
from tests.formats_layers import CT, GPTQ, GROUP, K, Layer, N, ct_layer, folder_of, gptq_layer
from tests.gemm_cases import Case, make, own_layout, run
from tests.ops.gemm_arguments import Arguments, Change, M, convert, expected, good, setting, zeros_of
from tests.ops.gemm_arguments import K as GOOD_K
from tests.ops.gemm_arguments import N as GOOD_N

import weightonly as wo
from weightonly.formats import QuantizedLayer
from weightonly.formats import convert as convert_checkpoint
from weightonly.nn import Linear

index_dtypes = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])


def permutation(k: int, g: torch.Generator) -> torch.Tensor:
    return torch.randperm(k, generator=g).to(torch.int32)


def permuted(**changes: Any) -> Arguments:
    """The arguments of `good` with a permutation; `expected(x[..., perm], a)` is the result."""
    return good() | {"perm": permutation(GOOD_K, torch.Generator().manual_seed(2))} | changes


# --- gemm --------------------------------------------------------------------------------------------------


@index_dtypes
@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (0,), (2, 0)], ids=str)
def test_columns_of_x_are_permuted(lead: tuple[int, ...], index: torch.dtype) -> None:
    a = permuted(out=None)
    a["perm"] = a["perm"].to(index)
    a["x"] = x = torch.randint(-3, 4, (*lead, GOOD_K)).half()
    before = x.clone()
    y = wo.gemm(**a)
    assert y.shape == (*lead, GOOD_N)
    assert torch.equal(y, expected(x[..., a["perm"].long()], a))
    assert torch.equal(x, before)


def test_into_out() -> None:
    a = permuted()
    assert wo.gemm(**a) is a["out"]
    assert torch.equal(a["out"], expected(a["x"][:, a["perm"]], a))


def test_the_identity_changes_nothing() -> None:
    a = permuted(perm=torch.arange(GOOD_K), out=None)
    assert torch.equal(wo.gemm(**a), wo.gemm(**a | {"perm": None}))


def test_strided_x_and_perm(generator: torch.Generator) -> None:
    a = permuted(out=None)
    a["x"] = torch.randint(-3, 4, (GOOD_K, 5), generator=generator).half().t()
    a["perm"] = torch.stack([a["perm"], a["perm"]], 1)[:, 1]
    assert torch.equal(wo.gemm(**a), expected(a["x"][:, a["perm"]], a))


def test_compiled_and_recorded_functions() -> None:
    a = permuted(out=None)
    x = a.pop("x")
    want = expected(x[:, a["perm"]], a)
    function = torch.compile(lambda x: wo.gemm(x, **a) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(function(x), want + 1)
    assert torch.equal(wo.gemm(x.clone().requires_grad_(), **a), want)


def overlapping_perm(a: Arguments) -> None:
    """`out` ends where perm begins, but for one number."""
    memory = torch.zeros(M * GOOD_N // 2 + GOOD_K - 1, dtype=torch.int32)
    a.update(perm=memory[-GOOD_K:], out=memory.view(torch.float16)[: M * GOOD_N].view(M, GOOD_N))


BAD: dict[str, tuple[Change, type[Exception], str]] = {
    "list": (lambda a: a.update(perm=a["perm"].tolist()), TypeError, "perm: expected a tensor, got list"),
    "dtype": (convert("perm", torch.float32), TypeError,
              "perm: expected dtype torch.int32 or torch.int64, got torch.float32"),
    "bytes": (convert("perm", torch.uint8), TypeError,
              "perm: expected dtype torch.int32 or torch.int64, got torch.uint8"),
    "short": (lambda a: a.update(perm=a["perm"][1:]), ValueError, "perm: expected shape [K] = [192], got [191]"),
    "rank": (lambda a: a.update(perm=a["perm"][None]), ValueError, "perm: expected shape [K] = [192], got [1, 192]"),
    "scalar": (setting(perm=torch.tensor(1)), ValueError, "perm: expected shape [K] = [192], got []"),
    "device": (convert("perm", "meta"), ValueError, "perm: expected on cpu as x is, got meta"),
    "too large": (lambda a: a["perm"].add_(1), ValueError,
                  "perm: expected a permutation of 0..191, got numbers in 1..192"),
    "negative": (lambda a: a["perm"].sub_(1), ValueError,
                 "perm: expected a permutation of 0..191, got numbers in -1..190"),
    "sparse": (lambda a: a.update(perm=a["perm"].to_sparse()), TypeError,
               "perm: expected a dense tensor, got one with layout torch.sparse_coo"),
    "overlapped": (overlapping_perm, ValueError, "out: expected memory of its own, got a tensor that overlaps perm"),
    "x": (zeros_of("x", M, GOOD_K + 8), ValueError, "x: expected [..., K] with K = 192 as in qweight"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused_before_any_work(case: str) -> None:
    change, error, message = BAD[case]
    a = permuted()
    out = a["out"]
    change(a)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        wo.gemm(**a)
    assert out.isnan().all()


# --- checkpoints and Linear --------------------------------------------------------------------------------


def layers_of(folder: Path, arch: str | None = None) -> dict[str, QuantizedLayer]:
    records = wo.load_checkpoint(folder, arch=arch)
    return {record.name: record for record in records if isinstance(record, QuantizedLayer)}


def gptq_reference(folder: Path, name: str) -> torch.Tensor:
    """The weight [K, N] of a GPTQ layer, from the words of the file, one element at a time."""
    stored = load_file(folder / "model.safetensors")
    layer = {inside: stored[f"{name}.{inside}"] for inside in ("qweight", "scales", "qzeros")}
    return ref.gptq_weight(**layer, group=stored[f"{name}.g_idx"].long().numpy(), bits=4, version=1)


@pytest.mark.parametrize("arch", ["sm70", "sm80", "sm90"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_gptq_with_act_order_from_the_file_to_the_product(
    dtype: torch.dtype, arch: str, tmp_path: Path, generator: torch.Generator
) -> None:
    folder = folder_of(tmp_path, gptq_layer, GPTQ, generator)
    for name, record in layers_of(folder, arch).items():
        assert record.perm is not None and record.zeros is not None
        w = gptq_reference(folder, name).double()
        x = (torch.randn(5, K, generator=generator) / 8).to(dtype)
        scales, zeros = record.scales.to(dtype), record.zeros.to(dtype)
        y = wo.gemm(x, record.weight, scales, zeros=zeros, perm=record.perm)
        exact = x.double() @ w
        tolerance = x.double().abs() @ w.abs() * K * 2**-23 + exact.abs() * torch.finfo(dtype).eps * 0.51
        assert ((y.double() - exact).abs() <= tolerance).all()
        layer = Linear.from_quantized(record.weight, scales, zeros, perm=record.perm)
        assert torch.equal(layer(x), y)


@pytest.mark.parametrize(("layer", "options"), [(gptq_layer, GPTQ), (ct_layer, CT)], ids=["gptq", "ct"])
def test_converted_checkpoints_keep_the_order(
    layer: Layer, options: dict[str, Any], tmp_path: Path, generator: torch.Generator
) -> None:
    def ordered(g: torch.Generator) -> dict[str, torch.Tensor]:
        shuffled = (torch.arange(K) // GROUP)[torch.randperm(K, generator=g)].to(torch.int32)
        return layer(g) | ({"weight_g_idx": shuffled} if layer is ct_layer else {})

    folder = folder_of(tmp_path, ordered, options, generator)
    convert_checkpoint(folder, tmp_path / "packed", arch="sm90")
    first, again = layers_of(folder), layers_of(tmp_path / "packed")
    x = torch.randn(5, K, generator=generator)
    for name, record in again.items():
        perm = first[name].perm
        assert record.perm is not None and perm is not None and torch.equal(record.perm, perm)
        zeros = None if record.zeros is None else record.zeros.float()
        y = wo.gemm(x, record.weight, record.scales.float(), zeros=zeros, perm=record.perm)
        torch.testing.assert_close(y.double(), x.double() @ record.dequantize().double(), rtol=1e-5, atol=1e-5)


@index_dtypes
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_dict_of_a_layer(index: torch.dtype, assign: bool, tmp_path: Path) -> None:
    a = permuted()
    layer = Linear.from_quantized(a["qweight"], a["scales"], a["zeros"], a["bias"], "relu", a["perm"].to(index))
    assert "perm" in layer.state_dict()
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = Linear(GOOD_K, GOOD_N, group_size=64, symmetric=False, activation="relu", act_order=True, arch="sm80")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"), assign=assign)
    want = expected(a["x"][:, a["perm"]], a)
    assert torch.equal(layer(a["x"]), want)
    assert torch.equal(other(a["x"]), want)
    assert torch.equal(copy.deepcopy(other)(a["x"]), want)
    assert "act_order=True" in repr(other)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a["x"]), want)


def test_a_layer_of_another_dtype_keeps_its_order() -> None:
    a = permuted()
    layer = Linear.from_quantized(a["qweight"], a["scales"], perm=a["perm"]).to(torch.bfloat16)
    assert layer.perm is not None
    assert torch.equal(layer.perm, a["perm"]) and layer.perm.dtype == torch.int32


def test_states_with_and_without_an_order_are_not_confused() -> None:
    ordered = Linear(GOOD_K, GOOD_N, group_size=64, act_order=True)
    plain = Linear(GOOD_K, GOOD_N, group_size=64)
    assert torch.equal(ordered(torch.ones(1, GOOD_K).half()), torch.zeros(1, GOOD_N).half())
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"perm"'):
        plain.load_state_dict(ordered.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key.*"perm"'):
        ordered.load_state_dict(plain.state_dict())


def test_from_quantized_rejects() -> None:
    a = good()
    with pytest.raises(ValueError, match=r"perm: expected shape \[K\] = \[192\], got \[191\]"):
        Linear.from_quantized(a["qweight"], a["scales"], perm=torch.arange(GOOD_K - 1))
    with pytest.raises(TypeError, match=r"perm: expected dtype torch.int32 or torch.int64, got torch.int16"):
        Linear.from_quantized(a["qweight"], a["scales"], perm=torch.arange(GOOD_K).short())


# --- on the GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@index_dtypes
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("format", ["int4", "int8"])
def test_bit_exact_on_the_grid(
    cuda_device: torch.device, generator: torch.Generator, format: str, dtype: str, index: torch.dtype
) -> None:
    for k, n in ((512, 328), (200, 130), (257, 33)):
        o = make(Case(k, n, format, dtype, -1), generator, own_layout(), exact=True)
        perm = permutation(k, generator).to(cuda_device, index)
        for m in (1, 3, 16, 65, 300):
            x = torch.randint(-3, 4, (m, k), generator=generator).to(o.scales.dtype).to(cuda_device)
            want = (x.double()[:, perm] @ o.w64).to(x.dtype)
            y = run(x, o, perm=perm)
            assert torch.equal(y, want), (k, n, m)
            assert torch.equal(run(x, o, perm=perm), y)
            assert torch.equal(run(x, o), (x.double() @ o.w64).to(x.dtype))  # the plan of the permuted call is its own


@pytest.mark.gpu
def test_views_of_x_on_the_gpu(cuda_device: torch.device, generator: torch.Generator) -> None:
    o = make(Case(256, 72), generator, own_layout(), exact=True)
    perm = permutation(256, generator).to(cuda_device)
    wide = torch.randint(-3, 4, (6, 300), generator=generator).half().to(cuda_device)
    views = {
        "strided rows": wide[:, :256],
        "misaligned rows": wide[:, 3:259],
        "transposed": torch.randint(-3, 4, (256, 5), generator=generator).half().to(cuda_device).t(),
        "expanded": wide[:1, :256].expand(4, 256),
        "one dimension": wide[2, :256],
        "three dimensions": torch.randint(-3, 4, (2, 3, 256), generator=generator).half().to(cuda_device),
        "no rows": wide[:0, :256],
    }
    for name, x in views.items():
        y = wo.gemm(x, o.qweight, o.scales, perm=perm)
        assert y.shape == (*x.shape[:-1], 72), name
        assert torch.equal(y, (x[..., perm].double() @ o.w64).half()), name


@pytest.mark.gpu
def test_in_a_cuda_graph_and_compiled(cuda_device: torch.device, generator: torch.Generator) -> None:
    """The graph reads perm when it runs: another permutation in its place counts."""
    o = make(Case(2048, 264), generator, own_layout(), exact=True)
    perm = permutation(2048, generator).to(cuda_device)
    for m in (1, 16, 128):
        x = torch.randint(-3, 4, (m, 2048), generator=generator).half().to(cuda_device)
        want = (x[:, perm].double() @ o.w64).half()
        assert torch.equal(wo.gemm(x, o.qweight, o.scales, perm=perm), want)
        function = torch.compile(
            lambda x: wo.gemm(x, o.qweight, o.scales, perm=perm), fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(function(x), want)
        y = torch.empty_like(want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wo.gemm(x, o.qweight, o.scales, out=y, perm=perm)
        perm.copy_(permutation(2048, generator))
        for _ in range(2):
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, (x[:, perm].double() @ o.w64).half())


@pytest.mark.gpu
@pytest.mark.parametrize("after_a_good_call", [False, True], ids=["first call", "later call"])
def test_refused_on_the_gpu(cuda_device: torch.device, after_a_good_call: bool) -> None:
    a = good(cuda_device, own_layout())
    perm = permutation(GOOD_K, torch.Generator().manual_seed(2))
    if after_a_good_call:
        wo.gemm(**a, perm=perm.to(cuda_device))
    with pytest.raises(ValueError, match=r"^perm: expected on cuda:\d as x is, got cpu"):
        wo.gemm(**a, perm=perm)
    with pytest.raises(ValueError, match=r"^perm: expected shape \[K\] = \[192\], got \[191\]"):
        wo.gemm(**a, perm=perm[1:].to(cuda_device))
    with pytest.raises(TypeError, match=r"^perm: expected dtype torch.int32 or torch.int64, got torch.float16"):
        wo.gemm(**a, perm=perm.to(cuda_device).half())


@pytest.mark.gpu
def test_gptq_with_act_order_on_the_gpu(tmp_path: Path, cuda_device: torch.device, generator: torch.Generator) -> None:
    """The 2x rule: against fp64, beside the dense product in the same dtype."""
    folder = folder_of(tmp_path, gptq_layer, GPTQ, generator)
    for record in wo.load_checkpoint(folder, device=cuda_device):
        if not isinstance(record, QuantizedLayer):
            continue
        x = torch.randn(7, K, generator=generator).half().to(cuda_device)
        want = x.double() @ gptq_reference(folder, record.name).double().to(cuda_device)
        peer = x @ record.dequantize(torch.float16)
        layer = Linear.from_quantized(record.weight, record.scales, record.zeros, perm=record.perm)
        for y in (layer(x), wo.gemm(x, record.weight, record.scales, zeros=record.zeros, perm=record.perm)):
            assert y.shape == (7, N)
            assert (y.double() - want).norm() <= 2 * (peer.double() - want).norm() + 1e-6 * want.norm()
