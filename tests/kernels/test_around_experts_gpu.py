"""The kernels around the products of a layer of experts, beside what PyTorch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tensor_kinds import GONE
from torch.fx.experimental.proxy_tensor import make_fx

import weightonly as wo
from weightonly.heuristics.families import FAMILIES
from weightonly.ops import around_experts
from weightonly.ops.around_experts import combine, sort_by_expert

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("cuda_device"),
    pytest.mark.skipif(not FAMILIES["grouped_sm90"].verified, reason="the kernels are not in use"),
]

DTYPES = [torch.float16, torch.bfloat16]
_SPREAD = around_experts._spread


def choices(tokens: int, top_k: int, experts: int, g: torch.Generator) -> torch.Tensor:
    """ids with some of no expert, and one expert that most choose."""
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=g)
    return torch.where(torch.rand(tokens, top_k, generator=g) < 0.4, min(3, experts - 1), ids)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(1, 1, 1), (1, 8, 256), (5, 3, 7), (37, 4, 512), (512, 8, 128), (513, 8, 1024), (4099, 2, 61), (65536, 32, 896)],
)
def test_sorted(tokens: int, top_k: int, experts: int, ids_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(tokens)
    ids = choices(tokens, top_k, experts, g).to(ids_dtype).cuda()
    x = torch.randn(tokens, 24 if tokens > 10_000 else 72, generator=g).half().cuda()
    rows, offs, places = sort_by_expert(x, ids, experts)
    assert places.dtype == torch.int32, "by the kernel"
    monkeypatch.setattr(around_experts, "runs", lambda *tensors: False)
    its_rows, its_offs, its_places = sort_by_expert(x, ids, experts)
    assert torch.equal(offs, its_offs)
    assert torch.equal(places.long(), its_places)
    assert torch.equal(rows[: int(offs[-1])], its_rows[: int(offs[-1])])


@pytest.mark.parametrize("top_k", [1, 8, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combined(dtype: torch.dtype, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(3)
    ids = choices(50, top_k, 20, g).cuda()
    x = torch.randn(50, 64, generator=g).to(dtype).cuda()
    _, offs, places = sort_by_expert(x, ids, 20)
    rows = torch.randn(50 * top_k, 2104, generator=g).to(dtype).cuda()
    rows[int(offs[-1]) :] = torch.nan
    weights = torch.rand(50, top_k, generator=g).to(dtype).cuda()
    y = combine(rows, weights, ids, offs, places, dtype)
    monkeypatch.setattr(around_experts, "runs", lambda *tensors: False)
    wanted = combine(rows, weights, ids, offs, places.long(), dtype)
    torch.testing.assert_close(y, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert (y != wanted).float().mean() < 0.02


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=["both", "rows", "weights"])
@pytest.mark.parametrize("columns", [8, 264, 2104])
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_the_sum(
    dtype: torch.dtype, top_k: int, columns: int, needs: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside PyTorch's, and exact on small integers; rows of no expert hold NaN and have zeros."""
    g = torch.Generator().manual_seed(columns)
    ids = choices(50, top_k, 20, g).cuda()
    _, offs, places = sort_by_expert(torch.randn(50, 8, generator=g).to(dtype).cuda(), ids, 20)
    launches = []

    def spread(*arguments: Any) -> None:
        launches.append(arguments)
        _SPREAD(*arguments)

    for is_exact in (True, False):
        draw = (
            (lambda *s: torch.randint(-4, 5, s, generator=g)) if is_exact else (lambda *s: torch.randn(s, generator=g))
        )
        rows, grad = draw(50 * top_k, columns).to(dtype).cuda(), draw(50, columns).to(dtype).cuda()
        rows[int(offs[-1]) :] = torch.nan
        weights = draw(top_k, 50).float().cuda().t()  # their gradient is written row by row all the same
        rows.requires_grad_(needs[0])
        weights.requires_grad_(needs[1])
        of = [t for t in (rows, weights) if t.requires_grad]
        launches.clear()
        with monkeypatch.context() as patch:
            patch.setattr(around_experts, "_spread", spread)
            got = torch.autograd.grad(combine(rows, weights, ids, offs, places, dtype), of, grad)
            again = torch.autograd.grad(combine(rows, weights, ids, offs, places, dtype), of, grad)
        assert len(launches) == 2, "by the kernel"
        with monkeypatch.context() as patch:
            patch.setattr(around_experts, "runs", lambda *tensors: False)
            wanted = torch.autograd.grad(combine(rows, weights, ids, offs, places.long(), dtype), of, grad)
        for ours, ours_again, exact in zip(got, again, wanted, strict=True):
            assert torch.equal(ours, ours_again)
            if is_exact or ours.dtype == dtype:
                assert torch.equal(ours, exact)
            torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5 * columns**0.5)


def test_rows_that_no_kernel_reads_are_left_to_pytorch() -> None:
    """A column count that fills no 16 bytes, and columns at a distance."""
    ids = torch.tensor([[1, 0], [0, 2]]).cuda()
    for x in (torch.randn(2, 30).half().cuda(), torch.randn(2, 80).half().cuda()[:, ::2]):
        rows, offs, places = sort_by_expert(x, ids, 3)
        assert offs.tolist() == [2, 3, 4] and places.tolist() == [2, 0, 1, 3]
        assert torch.equal(rows, x[[0, 1, 0, 1]])


def test_fused_experts_are_traced_and_read_no_freed_memory() -> None:
    g = torch.Generator().manual_seed(5)
    first = wo.preprocess(torch.randint(-8, 8, (2, 128, 256), generator=g, dtype=torch.int8).cuda())
    second = wo.preprocess(torch.randint(-8, 8, (2, 128, 128), generator=g, dtype=torch.int8).cuda())
    scales = [torch.full((2, 2, n), 0.01).half().cuda() for n in (256, 128)]
    x, ids = torch.randn(3, 128, generator=g).half().cuda(), torch.tensor([[0, 1]] * 3).cuda()
    operands = {"x": x, "first": scales[0], "topk_ids": ids, "topk_weights": torch.rand(3, 2, generator=g).cuda()}

    def call(x: torch.Tensor, first_scales: torch.Tensor, ids: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return wo.fused_experts(x, (first, first_scales), (second, scales[1]), ids, choice)

    y = call(*operands.values())
    graph = make_fx(lambda x: call(x, *list(operands.values())[1:]))(x)
    assert "torch.ops.weightonly.grouped_gemm" in graph.code
    assert (graph(x).float() - y.float()).abs().max() <= 0.01 * y.float().abs().max()
    for name in operands:
        kinds = operands | {name: GONE["freed"](operands[name])}
        with pytest.raises(ValueError, match=r"^(x|w13: scales|topk_ids|topk_weights): expected memory"):
            call(*kinds.values())


@pytest.mark.parametrize("layout", ["tiled", "tiled_fp8"])
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_compiled_layers_run_the_kernels_of_the_call(tokens: int, layout: str, launch_overlap: None) -> None:
    """The same bits, between kernels of torch.compile that start early; no sort of PyTorch."""
    g = torch.Generator().manual_seed(tokens)

    def stack(k: int, n: int) -> wo.QuantizedWeight:
        q = torch.randint(-8, 8, (8, k, n), generator=g, dtype=torch.int8).cuda()
        scales = torch.rand(8, k // 128, n, generator=g).mul(0.02).bfloat16().cuda()
        return wo.QuantizedWeight(wo.preprocess(q, layout=layout, group_size=128), scales)

    first, second = stack(512, 768), stack(384, 512)
    ids = torch.rand(tokens, 8, generator=g).topk(2).indices.cuda()
    weights = torch.rand(tokens, 2, generator=g).bfloat16().cuda()
    xs = torch.randn(6, tokens, 512, generator=g).bfloat16().cuda()

    def step(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x, weights = x * 2, weights * 2
        if layout == "tiled":
            return wo.fused_experts(x, first, second, ids, weights) * 2
        x8, x_scales = wo.quantize_activations(x)
        return wo.fused_experts(x8, first, second, ids, weights, x_scales=x_scales) * 2

    expected = [step(x, weights) for x in xs]
    compiled = torch.compile(step, fullgraph=True, options=wo.compile_options(cudagraphs=True))
    with torch.no_grad():
        for _ in range(2):
            for x, y in zip(xs, expected, strict=True):
                torch.compiler.cudagraph_mark_step_begin()
                assert torch.equal(compiled(x, weights), y)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
            compiled(xs[0], weights)
            torch.cuda.synchronize()
    names = [event.key for event in traced.key_averages()]
    assert names and not any("radixSort" in name or "searchsorted" in name for name in names), names
