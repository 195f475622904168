"""QuantizedWeight.update_: the bits of a fresh weight at the addresses of the old one, or an error and no change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly import dense
from weightonly.layout import CODE_LAYOUTS, LAYOUTS
from weightonly.quantize import quantize_for

ROOT = Path(__file__).parents[2]
K, N = 256, 200
CODE = [i / 8 - 1 for i in range(16)]

KINDS: dict[str, tuple[str, int, bool]] = {
    "int4": ("int4", 32, True),
    "int4 zeros": ("int4", 64, False),
    "int4 channel": ("int4", -1, True),
    "int8": ("int8", -1, True),
    "int8 zeros": ("int8", 128, False),
    "nf4": ("nf4", 64, True),
    "fp4": ("fp4", 32, True),
    "code4": ("code4", 64, True),
    "mxfp4": ("mxfp4", 32, True),
    "nvfp4": ("nvfp4", 16, True),
}
CASES = [
    pytest.param(*kind, layout, id=f"{name}, {layout}")
    for name, kind in KINDS.items()
    for layout in (LAYOUTS if kind[0].startswith("int") else CODE_LAYOUTS)
]


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of these tests take several."""
    monkeypatch.setattr(dense, "_SLICE_ELEMS", 64 * K)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The largest are in the last slice: what all of a weight share is seen."""
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    w[..., -1] *= 50
    return w.to(dtype)


def fresh(
    w: torch.Tensor, format: str, group: int, symmetric: bool, layout: str, perm: torch.Tensor | None = None
) -> wo.QuantizedWeight:
    rows = w if perm is None else w[perm.long()]
    code = CODE if format == "code4" else None
    q, scales, zeros = quantize_for(rows, w.dtype, format, group, symmetric, code=code)
    bits = 8 if format == "int8" else 4
    packed = wo.preprocess(
        q, bits, layout=layout, format=format, code=code, group_size=group, zeros=not symmetric, perm=perm is not None
    )
    return wo.QuantizedWeight(packed, scales, zeros, perm)


def quantized_layer(w: torch.Tensor, search: Any) -> wo.nn.Linear:
    linear = torch.nn.Linear(w.shape[0], w.shape[1], bias=False)
    linear.weight = torch.nn.Parameter(w.t())
    return wo.nn.Linear.from_linear(linear, group_size=64, symmetric=False, arch="cpu", search=search)


def tensors(w: wo.QuantizedWeight) -> list[torch.Tensor]:
    return [t for t in (w.packed.data, w.scales, w.zeros, w.perm) if t is not None]


def same(a: wo.QuantizedWeight, b: wo.QuantizedWeight) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@pytest.mark.parametrize(("format", "group", "symmetric", "layout"), CASES)
def test_bits_are_those_of_a_fresh_weight_and_addresses_stay(
    format: str, group: int, symmetric: bool, layout: str
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        w = fresh(numbers(K, N, dtype=dtype), format, group, symmetric, layout)
        before = [(t.data_ptr(), t._version) for t in tensors(w)]
        other = numbers(K, N, seed=1, dtype=dtype)
        expected = fresh(other, format, group, symmetric, layout)
        assert not same(w, expected)
        assert w.update_(other.t().contiguous().t()) is w and same(w, expected)
        for t, (address, version) in zip(tensors(w), before, strict=True):
            assert t.data_ptr() == address and t._version > version


@pytest.mark.parametrize("search", ["whole", False])
def test_whole_zero_points_stay_whole(search: Any) -> None:
    def quantized(w: torch.Tensor, search: Any) -> wo.QuantizedWeight:
        q, scales, zeros = wo.quantize(w, 4, 64, False, search)
        return wo.QuantizedWeight(wo.preprocess(q, 4, layout="tiled"), scales, zeros)

    first, other = numbers(K, N), numbers(K, N, seed=1)
    assert same(quantized(first, search).update_(other), quantized(other, "whole"))
    assert not same(quantized(other, True), quantized(other, "whole"))
    layer = wo.nn.Linear(K, N, group_size=64, symmetric=False, bias=False, arch="cpu")
    layer.load_state_dict(quantized_layer(first, search).state_dict())
    layer.update_(other.t())
    assert layer.zeros is not None and torch.equal(layer.zeros, layer.zeros.round())
    empty = wo.nn.Linear(K, N, group_size=64, symmetric=False, bias=False, arch="cpu").update_(other.t())
    assert empty.zeros is not None and not torch.equal(empty.zeros, empty.zeros.round())


def test_a_product_of_a_warm_plan_is_that_of_the_new_numbers() -> None:
    w = fresh(numbers(K, N), "int4", 32, False, "cpu")
    x = torch.randn(3, K)
    y, compiled = wo.gemm(x, w), torch.compile(lambda x: wo.gemm(x, w) + 1, fullgraph=True)
    assert torch.equal(compiled(x), y + 1)
    other = numbers(K, N, seed=1)
    w.update_(other)
    exact = x.double() @ w.dequantize().double()
    for got in (wo.gemm(x, w), compiled(x) - 1):
        assert (got - exact).abs().max() < 1e-4 * exact.abs().max()
    assert (exact - x.double() @ other.double()).norm() < 0.2 * exact.norm() < (exact - y.double()).norm()


def test_rows_in_act_order_are_brought_into_it() -> None:
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(3)).int()
    w = fresh(numbers(K, N), "int4", 32, False, "tiled", perm)
    other = numbers(K, N, seed=1)
    w.update_(other)
    assert same(w, fresh(other, "int4", 32, False, "tiled", perm))
    assert (w.dequantize() - other).norm() < 0.2 * other.norm()


def stack(w: torch.Tensor, format: str, group: int) -> wo.QuantizedWeight:
    each = [wo.quantize(one, format=format, group_size=group) for one in w]
    packed = wo.preprocess(torch.stack([q for q, _, _ in each]), format=format, layout="tiled")
    return wo.QuantizedWeight(packed, torch.stack([scales for _, scales, _ in each]))


@pytest.mark.parametrize("format", ["int4", "nvfp4"])
def test_stacked_experts_are_updated_all_or_one(format: str) -> None:
    group = 16 if format == "nvfp4" else 32
    w, other = stack(numbers(3, K, N), format, group), numbers(3, K, N, seed=1)
    w[1].update_(other[1])
    assert torch.equal(w[1].dequantize(), stack(other, format, group)[1].dequantize())
    assert torch.equal(w[0].dequantize(), stack(numbers(3, K, N), format, group)[0].dequantize())
    assert same(w.update_(other), stack(other, format, group))


def nan(w: torch.Tensor) -> torch.Tensor:
    w[-1, -1] = float("nan")
    return w


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "another shape": (torch.zeros(N, K), ValueError, rf"w: expected shape \[{K}, {N}\], got \[{N}, {K}\]"),
    "one dimension": (torch.zeros(K), ValueError, rf"w: expected shape \[{K}, {N}\], got \[{K}\]"),
    "fp64": (torch.zeros(K, N).double(), TypeError, "w: expected dtype torch.float16 or .*, got torch.float64"),
    "a list": ([0.0], TypeError, "w: expected a tensor, got list"),
    "on meta": (torch.zeros(K, N, device="meta"), ValueError, "w: expected a tensor with numbers, got one on meta"),
    "NaN": (nan(torch.zeros(K, N)), ValueError, r"w: expected finite values, got NaN or Inf \(min nan"),
    "Inf": (torch.full((K, N), float("inf")), ValueError, "w: expected finite values, got NaN or Inf"),
    "beyond fp16": (torch.full((K, N), 1e5), ValueError, r"w: expected values within \+-65504, the range of"),
}


@pytest.mark.parametrize(("value", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_weight_is_an_error_and_the_old_numbers_stay(value: Any, error: type[Exception], message: str) -> None:
    w = fresh(numbers(K, N, dtype=torch.float16), "int4", 32, False, "tiled")
    before = [t.clone() for t in tensors(w)]
    with pytest.raises(error, match=f"^{message}"):
        w.update_(value)
    assert all(torch.equal(t, old) for t, old in zip(tensors(w), before, strict=True))


def test_one_bad_expert_leaves_all() -> None:
    w = stack(numbers(3, K, N), "int4", 32)
    before, bad = [t.clone() for t in tensors(w)], numbers(3, K, N, seed=1)
    nan(bad[2])
    with pytest.raises(ValueError, match=r"^w: expert 2: expected finite values"):
        w.update_(bad)
    assert all(torch.equal(t, old) for t, old in zip(tensors(w), before, strict=True))


def test_a_weight_that_cannot_be_written_is_refused() -> None:
    plain = fresh(numbers(K, N), "int4", 32, True, "cpu")
    other = numbers(K, N, seed=1)
    expanded = wo.QuantizedWeight(plain.packed, torch.ones(1, N).expand(K // 32, N))
    with pytest.raises(ValueError, match=r"^scales: expected memory of its own .*strides \(0, 1\); clone\(\) it"):
        expanded.update_(other)
    with torch.inference_mode():
        made = fresh(numbers(K, N), "int4", 32, True, "cpu")
        made.update_(other)
    with pytest.raises(ValueError, match=r"^packed: expected a tensor that can be written, got one of torch.inference"):
        made.update_(other)
    assert same(made, fresh(other, "int4", 32, True, "cpu"))
    meta = wo.QuantizedWeight(plain.packed.to("meta"), plain.scales.to("meta"))
    with pytest.raises(ValueError, match=r"^packed: expected a tensor with numbers, got one on meta"):
        meta.update_(other)


@pytest.mark.parametrize(
    ("format", "code", "groups", "message"),
    [
        ("nf4", None, 1, "^group_size: expected one of 32, 64, .* for nf4, got 192"),
        ("code4", [float(i) for i in range(16)], 3, r"^packed: expected a codebook within -1 .. 1, .*, got \[0.0,"),
    ],
)
def test_codes_that_nothing_is_quantized_to_are_refused(format: str, code: Any, groups: int, message: str) -> None:
    q = torch.full((192, N), 3, dtype=torch.int8)
    w = wo.QuantizedWeight(wo.preprocess(q, format=format, code=code, layout="cpu"), torch.ones(groups, N))
    before = w.dequantize()
    with pytest.raises(ValueError, match=message):
        w.update_(torch.zeros(192, N))
    assert torch.equal(w.dequantize(), before)


def test_a_backward_pass_over_the_old_numbers_is_an_error() -> None:
    w = fresh(numbers(K, N), "int4", 32, True, "cpu")
    y = wo.gemm(torch.randn(2, K, requires_grad=True), w)
    w.update_(numbers(K, N, seed=1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


_MEMORY = """
import resource, torch, weightonly as wo
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def of(k, n):
    data = torch.zeros(k * n // 2, dtype=torch.uint8)
    return wo.QuantizedWeight(wo.PackedWeight(data, k, n, "int4", "LAYOUT"), torch.ones(k // 128, n))
of(512, 512).update_(torch.ones(512, 512))  # what code and threads take
k = n = 6144
w, dense = of(k, n), torch.ones(n, k).t()
w.packed.data.fill_(1)
before = peak()
w.update_(dense)
print(peak() - before, k * n * 4)
"""


@pytest.mark.parametrize("layout", ["cpu", "tiled"])
def test_no_copy_of_the_dense_weight_is_made(layout: str) -> None:
    """The peak beside the dense weight of 151 MB: some slices of 16 MB each."""
    program = _MEMORY.replace("LAYOUT", layout)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    grown, whole = map(int, result.stdout.split())
    assert grown < 0.5 * whole


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_captured_graph_sees_the_new_numbers(cuda_device: torch.device, kind: tuple[str, int, bool]) -> None:
    format, group, symmetric = kind
    code = CODE if format == "code4" else None

    def made(w: torch.Tensor) -> wo.QuantizedWeight:
        q, scales, zeros = quantize_for(w, w.dtype, format, group, symmetric, code=code)
        bits = 8 if format == "int8" else 4
        return wo.QuantizedWeight(wo.preprocess(q, bits, format=format, code=code), scales, zeros)

    w = made(numbers(K, N, dtype=torch.float16).cuda())
    other = numbers(K, N, seed=1, dtype=torch.float16)
    x = torch.randn(4, K, device="cuda").half()
    wo.gemm(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = wo.gemm(x, w)
    graph.replay()
    old = y.clone()
    w.update_(other)  # from the CPU, slice by slice
    graph.replay()
    expected = made(other.cuda())
    assert same(w, expected)
    assert torch.equal(y, wo.gemm(x, expected)) and not torch.equal(y, old)
    message = "^update_: expected no CUDA graph to be captured"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        w.update_(other)


@pytest.mark.gpu
def test_peak_memory_on_a_gpu_is_some_slices(cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 512 MiB of a dense weight."""
    monkeypatch.undo()
    k, n = 8192, 32768
    w = torch.randn(n, k, device="cuda", dtype=torch.float16).t()
    q, scales, _ = wo.quantize(w)
    weight = wo.QuantizedWeight(wo.preprocess(q), scales)
    del q
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weight.update_(w)
    assert torch.cuda.max_memory_allocated() - before <= 40 * dense._SLICE_ELEMS
