"""Launches in every PDL mode, beside kernels that write what they read: every result bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.gemm_cases import DTYPES, Case, make, own_groups, own_layout, require, run, splits, this_gpu

import weightonly as wo
from weightonly.launch import LaunchOverlap

pytestmark = pytest.mark.gpu


# K of a few k-tiles and of many; K and N that end inside a block.
CASES = [
    Case(1024, 200, "int4", "bf16", 128),
    Case(8224, 200, "int4", "f16", 32, zeros=True),
    Case(200, 130, "int8", "f16", -1),
    Case(4096, 192, "code4", "f16", 64),
]


def outputs_of(calls: int, chain: Chain, *, graph: bool) -> list[torch.Tensor]:
    """The results of `calls` rounds of a chain, queued without a pause, from a graph or one by one."""
    results = [torch.full_like(chain.y, float("nan")) for _ in range(calls)]
    if not graph:
        for i, y in enumerate(results):
            chain.round(i, y)
        return results
    chain.round(0, results[0])  # gemm makes its plans outside of the capture
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for i, y in enumerate(results):
            chain.round(i, y)
    for y in results:
        y.fill_(float("nan"))
    captured.replay()
    return results


def replay(calls: Callable[[], None], results: list[torch.Tensor]) -> None:
    """The calls as one graph, into results full of NaN."""
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        calls()
    for y in results:
        y.fill_(float("nan"))
    captured.replay()
    torch.cuda.synchronize()


class Chain:
    """A gemm that writes what the gemm after it reads: its x, its scales, its bias or its bytes.

    Each round writes something else to the same place. What a kernel reads too early is of the round before it.
    """

    K = N = 512

    def __init__(self, written: str, m: int, generator: torch.Generator) -> None:
        if this_gpu() < 80:
            pytest.skip("bf16 needs compute capability 8.0")
        k, n, groups = self.K, self.N, self.K // 128
        # Integers below 2^24 throughout: every sum is exact, and bf16 rounds each once.
        first = {
            "x": (m, k),
            "scales": (groups, n),
            "channel": (1, n),
            "bias": (1, n),
            "weight": (16, k * n // 2 // 2 // 16),
        }[written]
        # One of 64 each: what is written are values of q. Their products with the consumer's q are exact in bf16,
        # to which gemm_sm90 rounds its weights.
        ones = [torch.randint(0, 64, (first[0],), generator=generator) for _ in range(3)]
        self.inputs = [torch.nn.functional.one_hot(i, 64).bfloat16().cuda() for i in ones]
        self.producer = make(Case(64, first[1], "int4", "bf16", -1), generator, own_layout(), exact=True)
        self.producer.scales.fill_(1)
        self.w64 = wo.unpack(self.producer.qweight).double()
        self.place = torch.zeros(first, dtype=torch.bfloat16, device="cuda")
        group_size = -1 if written == "channel" else 128
        self.consumer = make(Case(k, n, "int4", "bf16", group_size), generator, own_layout(), exact=True)
        self.bias = self.place.view(-1) if written == "bias" else None
        self.x = torch.randint(-1, 2, (m, k), generator=generator).bfloat16().cuda()
        self.y = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        self.written = written
        c = self.consumer
        if written == "x":
            self.x = self.place
        elif written in ("scales", "channel"):
            c.scales = self.place
        elif written == "weight":
            c.qweight = wo.PackedWeight(self.place.view(torch.uint8).view(-1), k, n, "int4", own_layout())

    def round(self, i: int, out: torch.Tensor) -> None:
        p, c = self.producer, self.consumer
        wo.gemm(self.inputs[i % 3], p.qweight, p.scales, out=self.place)
        wo.gemm(self.x, c.qweight, c.scales, bias=self.bias, out=out)

    def expected(self, i: int) -> torch.Tensor:
        self.place.copy_((self.inputs[i % 3].double() @ self.w64).bfloat16())
        c = self.consumer
        scales = c.scales.double().repeat_interleave(self.K // c.scales.shape[0], 0)
        y = self.x.double() @ (wo.unpack(c.qweight).double() * scales)
        return (y if self.bias is None else y + self.bias.double()).bfloat16()


def check_chain(chain: Chain, *, overlap: LaunchOverlap, graph: bool) -> None:
    """The same bits as without overlap, and the right ones."""
    wo.set_launch_overlap(overlap)
    together = outputs_of(24, chain, graph=graph)
    torch.cuda.synchronize()
    wo.set_launch_overlap(False)
    apart = outputs_of(24, chain, graph=graph)
    torch.cuda.synchronize()
    expected = [chain.expected(i) for i in range(3)]
    for i, (a, b) in enumerate(zip(together, apart, strict=True)):
        assert torch.equal(a, b), i
        assert torch.equal(a, expected[i % 3]), i


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("m", [1, 16, 40])
@pytest.mark.parametrize("written", ["x", "scales", "channel", "bias", "weight"])
def test_the_kernel_before_may_write_anything(
    cuda_device: torch.device, generator: torch.Generator, launch_overlap: None, written: str, m: int, graph: bool
) -> None:
    """A kernel that starts early waits for what it reads, and writes after others have read."""
    check_chain(Chain(written, m, generator), overlap=True, graph=graph)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("m", [1, 16, 40])
@pytest.mark.parametrize("written", ["x", "bias"])
def test_with_constant_weights_the_kernel_before_may_write_all_else(
    cuda_device: torch.device, generator: torch.Generator, launch_overlap: None, written: str, m: int, graph: bool
) -> None:
    check_chain(Chain(written, m, generator), overlap="constant_weights", graph=graph)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("m", [1, 9, 33])
def test_any_kernel_before_may_write_anything(
    cuda_device: torch.device, generator: torch.Generator, m: int, graph: bool
) -> None:
    """PyTorch's copies write x, the scales and the weight just before each gemm, on a stream of their own."""
    case = Case(4096, 1032, "int4", "f16", 128)
    sources = [make(case, generator, own_layout(), exact=True) for _ in range(2)]
    xs = [torch.randint(-1, 2, (m, case.k), generator=generator).half().cuda() for _ in range(2)]
    expected = [(x.double() @ o.w64).half() for x, o in zip(xs, sources, strict=True)]
    x = torch.zeros_like(xs[0])
    w = wo.PackedWeight(torch.zeros_like(sources[0].qweight.data), case.k, case.n, "int4", own_layout())
    scales = torch.zeros_like(sources[0].scales)
    results = [torch.full_like(expected[0], float("nan")) for _ in range(8)]

    def calls() -> None:
        for i, y in enumerate(results):
            x.copy_(xs[i % 2])
            scales.copy_(sources[i % 2].scales)
            w.data.copy_(sources[i % 2].qweight.data)
            wo.gemm(x, w, scales, out=y)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
    stream.synchronize()
    if graph:
        replay(calls, results)
    for i, y in enumerate(results):
        assert torch.equal(y, expected[i % 2]), i


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("m", [1, 16, 40])
def test_constant_scales_that_gemm_copies_are_waited_for(
    cuda_device: torch.device, generator: torch.Generator, launch_overlap: None, m: int, zeros: bool, graph: bool
) -> None:
    """N is no multiple of 64, so each call copies its scales just before its kernel, to where those of others were."""
    case = Case(2048, 136, "int4", "f16", 128, zeros)
    sources = [make(case, generator, own_layout(), exact=True) for _ in range(3)]
    x = torch.randint(-1, 2, (m, case.k), generator=generator).half().cuda()
    expected = [(x.double() @ o.w64).half() for o in sources]
    results = [torch.full_like(expected[0], float("nan")) for _ in range(24)]

    def calls() -> None:
        for i, y in enumerate(results):
            o = sources[i % 3]
            wo.gemm(x, o.qweight, o.scales, zeros=o.zeros, out=y)

    torch.cuda.synchronize()
    wo.set_launch_overlap("constant_weights")
    calls()
    torch.cuda.synchronize()
    if graph:
        replay(calls, results)
    for i, y in enumerate(results):
        assert torch.equal(y, expected[i % 3]), i


@pytest.mark.parametrize("case", CASES, ids=str)
def test_overlap_of_launches_changes_no_bit(
    cuda_device: torch.device, generator: torch.Generator, launch_overlap: None, case: Case
) -> None:
    """x is written just before each call, by a kernel of PyTorch or by the gemm before it."""
    modes: tuple[LaunchOverlap, ...] = (True, False, "constant_weights")
    for config in wo.kernels():
        if not config.shares_cluster or case.format not in config.formats:
            continue
        if config.groups_of_16 and case.mode == "channel":
            continue
        own = replace(case, group_size=own_groups(config, case.group_size))
        require(config, own)
        o = make(own, generator, config.layout, exact=False)
        m = min(config.max_m, 40)
        source = torch.randn(m, own.k, generator=generator).to(DTYPES[own.dtype]).cuda()
        for split in splits(config, m, own, (1, 4)):
            results = []
            for mode in modes:
                wo.set_launch_overlap(mode)
                for _ in range(3):
                    x = source * 1
                    results.append(run(x, o, config=split))
                    results.append(wo.gemm(x, o.qweight, o.scales, zeros=o.zeros, config=split))
            assert all(torch.equal(y, results[0]) for y in results), split


@pytest.mark.parametrize("m", [1, 16, 40])
@pytest.mark.parametrize("overlap", [True, "constant_weights"], ids=str)
def test_between_kernels_of_torch_compile_that_start_early(
    cuda_device: torch.device, generator: torch.Generator, launch_overlap: None, overlap: LaunchOverlap, m: int
) -> None:
    """Rounds of one graph write to the same memory: what is read too early is of the round before it."""
    first, second = (make(Case(512, 512, "int4", "bf16", 128), generator, own_layout(), exact=True) for _ in range(2))
    xs = torch.randint(-1, 2, (24, m, 512), generator=generator).bfloat16().cuda()

    def step(x: torch.Tensor) -> torch.Tensor:
        between = wo.gemm(x.neg(), first.qweight, first.scales, zeros=first.zeros).sign()
        return wo.gemm(between * 2 - 1, second.qweight, second.scales, zeros=second.zeros) + 1

    wo.set_launch_overlap(False)
    expected = torch.stack([step(x) for x in xs])
    wo.set_launch_overlap(overlap)
    compiled = torch.compile(step, options=wo.compile_options())
    x = torch.zeros_like(xs[0])
    results = list(torch.full_like(expected, float("nan")))
    compiled(x)

    def calls() -> None:
        for i, y in enumerate(results):
            x.copy_(xs[i])
            y.copy_(compiled(x))

    replay(calls, results)
    for i, y in enumerate(results):
        assert torch.equal(y, expected[i]), i
