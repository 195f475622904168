"""Cases of sums over ranks on GPUs that share memory. See parallel_ranks.py."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from tests.parallel import parallel_sums
from tests.parallel.parallel_sums import device_of, integers, name_of, of_integers, row_part, same_everywhere, terms
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from weightonly.parallel.sums import LIMITS, ONE_SHOT, SWITCH, TWO_SHOT, SharedSums, shared_of, sum_over_ranks, way_of


def shared(mesh: DeviceMesh) -> None:
    """This is what the other cases are of: the GPUs share memory. Sums of fp16, which PyTorch's kernels do not add, and
    of a group where one rank says so, are NCCL's."""
    term = torch.ones(1, 8192, device=device_of(mesh), dtype=torch.bfloat16)
    found = shared_of(mesh.get_group(), term)
    assert found is not None and found.capacity == max(LIMITS[mesh.size()])
    assert shared_of(mesh.get_group(), term) is found
    assert shared_of(mesh.get_group(), term.half()) is None
    other = distributed.new_group(list(range(mesh.size())))
    if mesh.get_local_rank() == 1:
        os.environ[SWITCH] = "0"
    assert other is not None
    total = sum_over_ranks(term, other.group_name)
    os.environ[SWITCH] = "1"
    assert shared_of(other, term) is None and torch.equal(total, mesh.size() * term)
    distributed.destroy_process_group(other)


def ways(mesh: DeviceMesh) -> None:
    """One-shot and two-shot have the same bits, which of two ranks are those of NCCL; the last number is added, too."""
    large = SharedSums(mesh.get_group(), device_of(mesh), 16 << 20)
    for dtype in (torch.bfloat16, torch.float32):
        for seed, shape in enumerate([(1,), (7,), (1, 8192), (33, 8191), (128, 8192), (400, 8192)]):
            of_all = terms(mesh, shape, dtype, seed)
            found = []
            for way in (ONE_SHOT, TWO_SHOT, ONE_SHOT):
                large.term(torch.Size(shape), dtype).copy_(of_all[mesh.get_local_rank()])
                found.append(large.sum(torch.Size(shape), dtype, way))
            in_order = of_all[0]
            for term in of_all[1:]:
                in_order = in_order + term
            for y in found:
                assert torch.equal(y, in_order), (dtype, shape)


def in_graphs(mesh: DeviceMesh) -> None:
    """Sums of all ways, and layers, in two graphs that are replayed in turns, among sums outside of them."""
    rank = mesh.get_local_rank()
    layer = row_part(mesh, torch.bfloat16)
    shapes = [(1, 8192), (5, 4099), *((limit // 2 // 1024, 1024) for limit in LIMITS[mesh.size()]), (2048, 8192)]
    ways = {way_of(mesh.size(), 2 * torch.Size(shape).numel()) for shape in shapes}
    assert len(ways) == 3, ways
    inputs = [integers(mesh, 0, shape, torch.bfloat16, rank) for shape in shapes]
    x = torch.randn(4, layer.in_features, device=device_of(mesh), dtype=torch.bfloat16)

    def work() -> list[torch.Tensor]:
        return [*(sum_over_ranks(term, name_of(mesh)) for term in inputs), layer(x)]

    with torch.no_grad():
        work()
        torch.cuda.synchronize()
        graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
        for graph in graphs:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results.append(work())
        for step in range(40):
            for term, shape in zip(inputs, shapes, strict=True):
                term.copy_(integers(mesh, step, shape, torch.bfloat16, rank))
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(step)))
            if step % 3 == rank:
                torch.cuda._sleep(300_000)
            graphs[step % 2].replay()
            if step % 5 == 0:
                outside = sum_over_ranks(inputs[0], name_of(mesh))
                assert torch.equal(outside, results[step % 2][0])
            for y, shape in zip(results[step % 2], shapes, strict=False):
                expected = of_integers(mesh, step, shape, torch.bfloat16)
                assert torch.equal(y, expected), (step, shape)
            assert torch.equal(results[step % 2][-1], layer(x)) and same_everywhere(mesh, results[step % 2][-1])
    torch.cuda.synchronize()
    for graph in graphs:
        graph.reset()


def first_in_a_graph(mesh: DeviceMesh) -> None:
    """Of a group whose first sum is captured: it is NCCL's, and the group's next one is not."""
    group = distributed.new_group(list(range(mesh.size())))
    assert group is not None
    term = integers(mesh, 1, (4, 1024), torch.bfloat16, mesh.get_local_rank())
    expected = sum_over_ranks(term, name_of(mesh))
    distributed.all_reduce(term.clone(), group=group)  # NCCL begins outside of captures
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = sum_over_ranks(term, group.group_name)
        assert shared_of(group, term) is None
    graph.replay()
    assert torch.equal(y, expected)
    torch.cuda.synchronize()
    graph.reset()
    assert torch.equal(sum_over_ranks(term, group.group_name), expected)
    assert shared_of(group, term) is not None


def on_streams(mesh: DeviceMesh) -> None:
    """Sums of one group on two streams, in turns, each as soon as its own stream lets it."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    rank, found = mesh.get_local_rank(), []
    for step in range(30):
        with torch.cuda.stream(streams[step % 2]):
            if step % 7 == rank:
                torch.cuda._sleep(300_000)
            found.append(sum_over_ranks(integers(mesh, step, (16, 8192), torch.bfloat16, rank), name_of(mesh)))
    torch.cuda.synchronize()
    for step, y in enumerate(found):
        expected = of_integers(mesh, step, (16, 8192), torch.bfloat16)
        assert torch.equal(y, expected), step


def in_modes(mesh: DeviceMesh) -> None:
    """What is made in inference mode is of use outside of it, and the other way round."""
    group = distributed.new_group(list(range(mesh.size())))
    assert group is not None
    term = integers(mesh, 2, (3, 512), torch.float32, mesh.get_local_rank())
    expected = sum_over_ranks(term, name_of(mesh))
    with torch.inference_mode():
        assert torch.equal(sum_over_ranks(term, group.group_name), expected)
    assert torch.equal(sum_over_ranks(term, group.group_name), expected)
    distributed.destroy_process_group(group)


def compiled_by_inductor(mesh: DeviceMesh) -> None:
    """A layer as torch.compile runs it, with CUDA graphs, too."""
    layer = row_part(mesh, torch.bfloat16)
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        graph = torch.compile(layer, fullgraph=True, dynamic=False, mode=mode)
        with torch.no_grad():
            for step in range(4):
                x = torch.randn(8, layer.in_features, device=device_of(mesh), dtype=torch.bfloat16)
                y = graph(x).clone()
                eager = layer(x)
                assert (y - eager).abs().max() <= 0.01 * eager.abs().max(), (mode, step)  # the bias may be fused
                assert same_everywhere(mesh, y)
    torch._dynamo.reset()


CASES: dict[str, Callable[[DeviceMesh], float | None]] = {
    "shared memory": shared,
    "ways": ways,
    **parallel_sums.CASES,
    "streams": on_streams,
    "inference mode": in_modes,
    "graphs": in_graphs,
    "the first one is captured": first_in_a_graph,
    "inductor": compiled_by_inductor,
}
RANKS = dict.fromkeys(CASES, (2, 4))
