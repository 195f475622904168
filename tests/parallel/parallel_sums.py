"""Cases of sums over ranks, on CPUs over gloo and on GPUs over NCCL and shared memory. See parallel_ranks.py."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from tests.parallel.parallel_linear import error
from tests.parallel.parallel_more import experts as layer_of_experts
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from weightonly.gemm import gemm
from weightonly.nn.linear import Linear
from weightonly.parallel import ExpertParallel, RowwiseParallel
from weightonly.parallel.sums import LIMITS, PIECE_BYTES, sum_of_products, sum_over_ranks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", mesh.get_local_rank()) if mesh.device_type == "cuda" else torch.device("cpu")


def name_of(mesh: DeviceMesh) -> str:
    return str(mesh.get_group().group_name)


def sizes(mesh: DeviceMesh, dtype: torch.dtype) -> list[tuple[int, ...]]:
    """Shapes of few and of ragged numbers, and on both sides of the limit and of a piece."""
    shapes: list[tuple[int, ...]] = [(0, 8), (1,), (3, 1), (1, 8192), (5, 4099), (16, 8192), (2, 3, 777)]
    for limit in (LIMITS[mesh.size()], PIECE_BYTES, 3 * PIECE_BYTES):
        count = limit // dtype.itemsize
        shapes += [(count - 1,), (2, count // 2), (count + 1,)]
    return shapes


def terms(mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Those of all ranks, which each rank can make."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).to(device_of(mesh)) for _ in range(mesh.size())]


def same_everywhere(mesh: DeviceMesh, y: torch.Tensor) -> bool:
    """Whether y has the same bits on every rank."""
    if not y.numel():
        return True
    bits = y.contiguous().view(torch.uint8).clone()
    distributed.broadcast(bits, distributed.get_global_rank(mesh.get_group(), 0), group=mesh.get_group())
    return torch.equal(bits, y.contiguous().view(torch.uint8))


def of_random_numbers(mesh: DeviceMesh) -> None:
    """Near the sum in fp64; the same bits in each run and on each rank; the next sum leaves y alone."""
    for dtype in DTYPES:
        for seed, shape in enumerate(sizes(mesh, dtype)):
            of_all = terms(mesh, shape, dtype, seed)
            mine = of_all[mesh.get_local_rank()]
            before = mine.clone()
            y = sum_over_ranks(mine, name_of(mesh))
            kept = y.clone()
            assert y.shape == shape and y.dtype == dtype and y.is_contiguous()
            assert torch.equal(mine, before)
            again = sum_over_ranks(mine, name_of(mesh))
            assert torch.equal(y, kept) and torch.equal(again, y), (dtype, shape)
            assert y.numel() == 0 or y.data_ptr() != again.data_ptr()
            assert same_everywhere(mesh, y), (dtype, shape)
            exact = torch.stack(of_all).double().sum(0)
            largest = torch.stack(of_all).double().abs().sum(0)
            bound = (mesh.size() - 1) * torch.finfo(dtype).eps * largest
            assert ((y.double() - exact).abs() <= bound).all(), (dtype, shape)


def of_strided_terms(mesh: DeviceMesh) -> None:
    """Columns of a wider matrix, and one transposed."""
    wide = terms(mesh, (6, 40), torch.bfloat16, 1)
    for view in (lambda t: t[:, 3:20], lambda t: t.t(), lambda t: t[::2]):
        y = sum_over_ranks(view(wide[mesh.get_local_rank()]), name_of(mesh))
        expected = sum_over_ranks(view(wide[mesh.get_local_rank()]).contiguous(), name_of(mesh))
        assert y.is_contiguous() and torch.equal(y, expected)


def integers(mesh: DeviceMesh, step: int, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Small integers, whose sums every dtype has; they differ from step to step and from rank to rank."""
    places = torch.arange(torch.Size(shape).numel(), device=device_of(mesh)).view(shape)
    return ((places * (rank + 1) + 7 * step + 3 * rank) % 31 - 15).to(dtype)


def of_integers(mesh: DeviceMesh, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The sum of those of all ranks."""
    return torch.stack([integers(mesh, step, shape, dtype, rank) for rank in range(mesh.size())]).sum(0).to(dtype)


def many_in_a_row(mesh: DeviceMesh) -> None:
    """Of distinct integers and sizes, without a wait between them: no sum reads terms of the next or the last one."""
    shapes = [(1, 8192), (16, 8192), (3, 1111), (64, 8192), (1, 8)]
    sleeps = random.Random(mesh.get_local_rank())
    for dtype in DTYPES:
        found = []
        for step in range(200 if mesh.device_type == "cuda" else 10):
            if mesh.device_type == "cuda" and sleeps.random() < 0.2:
                torch.cuda._sleep(sleeps.randrange(400_000))  # cycles; ranks come at different times
            shape = shapes[step % len(shapes)]
            found.append(sum_over_ranks(integers(mesh, step, shape, dtype, mesh.get_local_rank()), name_of(mesh)))
        for step, y in enumerate(found):
            shape = shapes[step % len(shapes)]
            expected = of_integers(mesh, step, shape, dtype)
            assert torch.equal(y, expected), (dtype, step)


def in_two_groups(mesh: DeviceMesh) -> None:
    """Of the same ranks, in turns."""
    other = distributed.new_group(list(range(mesh.size())))
    assert other is not None and other.group_name != name_of(mesh)
    found = []
    for step in range(10):
        mine = integers(mesh, step, (4, 1024), torch.bfloat16, mesh.get_local_rank())
        found.append((sum_over_ranks(mine, name_of(mesh)), sum_over_ranks(2 * mine, other.group_name)))
    for step, (one, two) in enumerate(found):
        expected = of_integers(mesh, step, (4, 1024), torch.bfloat16)
        assert torch.equal(one, expected) and torch.equal(two, 2 * expected), step
    distributed.destroy_process_group(other)


def row_part(mesh: DeviceMesh, dtype: torch.dtype, use_local_output: bool = True, **options: str) -> Linear:
    """A layer that is cut along K."""
    torch.manual_seed(3)
    layer = Linear.from_linear(torch.nn.Linear(1024, 640), group_size=128, arch=90, dtype=dtype, **options)  # type: ignore
    layer = layer.to(device_of(mesh))
    parallelize_module(layer, mesh, RowwiseParallel(use_local_output=use_local_output))
    return layer


def of_products(mesh: DeviceMesh) -> None:
    """The product that writes to the memory of the sum has the bits of a product and a sum; what a layer returns."""
    dtypes = (torch.bfloat16, torch.float16) if mesh.device_type == "cuda" else (torch.float32,)
    for dtype in dtypes:
        layer = row_part(mesh, dtype, activation="silu")
        for m in (0, 1, 5, 16, 100, 700, 2000):
            x = torch.randn(m, layer.in_features, device=device_of(mesh)).to(dtype)
            with torch.no_grad():
                y = sum_of_products(x, layer.operand, name_of(mesh))
                expected = sum_over_ranks(gemm(x, layer.operand), name_of(mesh))
                assert torch.equal(y, expected), (dtype, m)
                assert same_everywhere(mesh, y)
                assert layer.bias is not None
                whole = torch.nn.functional.silu((y + layer.bias).float()).to(dtype)
                assert torch.equal(layer(x), whole), (dtype, m)
    placed = row_part(mesh, dtype, use_local_output=False, activation="silu")
    with torch.no_grad():
        y = placed(x)
        assert isinstance(y, DTensor) and torch.equal(y.to_local(), layer(x))


def with_gradients(mesh: DeviceMesh) -> float:
    """Autograd's sums are those of torch.distributed: the gradient of x is the one of a whole product."""
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    layer = row_part(mesh, dtype)
    x = torch.randn(4, layer.in_features, device=device_of(mesh)).to(dtype)
    with torch.no_grad():
        expected = layer(x)
    y = layer(x.requires_grad_())
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
    y.backward(grad)
    assert x.grad is not None
    bound = 1 if dtype == torch.float32 else 1e-3  # in units of that of fp32
    return bound * max(error(y.detach(), expected), error(x.grad, grad @ layer.dequantize().t()))


def compiled(mesh: DeviceMesh) -> None:
    """One graph, for any number of rows; the bits of the layer without it."""
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    layer = row_part(mesh, dtype)
    torch._dynamo.reset()
    graph = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    summed = torch.compile(lambda x: sum_over_ranks(2 * x, name_of(mesh)), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for m in (2, 16, 900):
            x = torch.randn(m, layer.in_features, device=device_of(mesh)).to(dtype)
            assert torch.equal(graph(x), layer(x))
            assert torch.equal(summed(x), sum_over_ranks(2 * x, name_of(mesh)))


def on_fake_tensors(mesh: DeviceMesh) -> None:
    """The operators say what they return, without a sum."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        y = sum_over_ranks(torch.empty(3, 5, dtype=torch.bfloat16), name_of(mesh))
        assert y.shape == (3, 5) and y.dtype == torch.bfloat16


def experts(mesh: DeviceMesh) -> None:
    """Of expert parallel layers: sums of each rank's experts."""
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    whole, cut = (layer_of_experts().to(dtype).to(device_of(mesh)) for _ in range(2))
    parallelize_module(cut, mesh, ExpertParallel())
    x = terms(mesh, (6, whole.down_proj.out_features), dtype, 1)[0]
    ids = torch.arange(12, device=device_of(mesh)).view(6, 2) % whole.num_experts
    weights = torch.full((6, 2), 0.5, device=device_of(mesh))
    with torch.no_grad():
        y = cut(x, ids, weights)
        assert torch.equal(cut(x, ids, weights), y) and same_everywhere(mesh, y)
        assert error(y.float(), whole(x, ids, weights).float()) < (0.02 if dtype == torch.bfloat16 else 1e-5)


CASES: dict[str, Callable[[DeviceMesh], float | None]] = {
    "random numbers": of_random_numbers,
    "strided terms": of_strided_terms,
    "many in a row": many_in_a_row,
    "two groups": in_two_groups,
    "products": of_products,
    "gradients": with_gradients,
    "torch.compile": compiled,
    "fake tensors": on_fake_tensors,
    "experts": experts,
}
RANKS = {name: (2, 4) if name in ("random numbers", "many in a row", "products") else (2,) for name in CASES}
