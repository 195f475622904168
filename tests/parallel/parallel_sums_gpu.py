"""Cases of sums over ranks on GPUs that share memory. See parallel_ranks.py."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from tests.parallel import parallel_sums
from tests.parallel.parallel_sums import device_of, integers, name_of, of_integers, row_part, same_everywhere, terms
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from weightonly.parallel.sums import LIMITS, PIECE_BYTES, SWITCH, shared_of, sum_over_ranks


def shared(mesh: DeviceMesh) -> None:
    """This is what the other cases are of: the GPUs share memory, unless told otherwise. Sums of fp32, and of a group
    where one rank says so, are NCCL's."""
    term = torch.ones(1, 8192, device=device_of(mesh), dtype=torch.bfloat16)
    found = shared_of(mesh.get_group(), term)
    assert found is not None and found.capacity == min(LIMITS[mesh.size()], PIECE_BYTES)
    assert shared_of(mesh.get_group(), term) is found
    assert shared_of(mesh.get_group(), term.half()) is found
    assert shared_of(mesh.get_group(), term.float()) is None
    other = distributed.new_group(list(range(mesh.size())))
    if mesh.get_local_rank() == 1:
        os.environ[SWITCH] = "0"
    assert other is not None
    total = sum_over_ranks(term, other.group_name)
    os.environ.pop(SWITCH, None)
    assert shared_of(other, term) is None and torch.equal(total, mesh.size() * term)
    distributed.destroy_process_group(other)


DTYPES = (torch.bfloat16, torch.float16)


def in_order(of_all: list[torch.Tensor]) -> torch.Tensor:
    """The sum in fp32 from rank 0 on, rounded once."""
    total = of_all[0].float()
    for term in of_all[1:]:
        total = total + term.float()
    return total.to(of_all[0].dtype)


def many_sizes(mesh: DeviceMesh) -> None:
    """Large and small in turns, which clear after each other; numbers behind the last whole 16 bytes; bit for bit."""
    shapes: list[tuple[int, ...]] = [(400, 8192), (1,), (33, 8191), (7,), (4100, 1024), (1, 8192), (3, 5), (128, 8192)]
    for size in (PIECE_BYTES, LIMITS[mesh.size()]):
        shapes += [(size // 2 - 1,), (8191,), (size // 2,), (8,), (size // 2 + 1,)]
    for dtype in DTYPES:
        for seed, shape in enumerate(shapes * 2):
            of_all = terms(mesh, shape, dtype, seed)
            y = sum_over_ranks(of_all[mesh.get_local_rank()], name_of(mesh))
            if 2 * y.numel() <= LIMITS[mesh.size()]:
                assert torch.equal(y, in_order(of_all)), (dtype, shape)


def in_place(mesh: DeviceMesh) -> None:
    """Of numbers in the middle of a tensor, at any address; what is beside them stays."""
    found = shared_of(mesh.get_group(), torch.ones(8, device=device_of(mesh), dtype=torch.bfloat16))
    assert found is not None
    for dtype in DTYPES:
        for begin in (8, 1, 15):
            for count in (1, 7, 8, 4097, found.capacity // 2 + 9):
                of_all = terms(mesh, (begin + count + 9,), dtype, count)
                y = of_all[mesh.get_local_rank()].clone()
                found.add_(y[begin : begin + count])
                expected = of_all[mesh.get_local_rank()].clone()
                expected[begin : begin + count] = in_order([term[begin : begin + count] for term in of_all])
                assert torch.equal(y, expected), (dtype, begin, count)


def any_bits(mesh: DeviceMesh) -> None:
    """Terms of random bits: NaN, Inf, subnormal numbers, and words of all bits set, which mark what has not arrived."""
    for dtype in DTYPES:
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            of_all = []
            for rank in range(mesh.size()):
                bits = torch.randint(-(2**15), 2**15, (64, 1000), generator=generator, dtype=torch.int16)
                bits[rank::3] = -1
                bits[seed] = 0
                of_all.append(bits.to(device_of(mesh)).view(dtype))
            y, expected = sum_over_ranks(of_all[mesh.get_local_rank()], name_of(mesh)), in_order(of_all)
            assert torch.equal(y.isnan(), expected.isnan())
            assert torch.equal(y.nan_to_num(), expected.nan_to_num()), (dtype, seed)
            assert same_everywhere(mesh, y)


def in_graphs(mesh: DeviceMesh) -> None:
    """Sums over shared memory and by NCCL, and layers, in two graphs that are replayed in turns, among other sums."""
    rank = mesh.get_local_rank()
    layer = row_part(mesh, torch.bfloat16)
    limit = LIMITS[mesh.size()] // 2 // 1024
    shapes = [(1, 8192), (5, 4099), (limit, 1024), (limit + 1, 1024)]
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
    term = integers(mesh, 2, (3, 512), torch.bfloat16, mesh.get_local_rank())
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
    "many sizes": many_sizes,
    "in place": in_place,
    "any bits": any_bits,
    **parallel_sums.CASES,
    "streams": on_streams,
    "inference mode": in_modes,
    "graphs": in_graphs,
    "the first one is captured": first_in_a_graph,
    "inductor": compiled_by_inductor,
}
RANKS = dict.fromkeys(CASES, (2, 4))
