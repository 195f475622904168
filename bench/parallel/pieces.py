"""A linear of a decoder layer, or all four one after another, whole and cut over ranks.

As inference engines store them, query, key and value are one matrix, and so are gate and up: each of their parts is
cut. qkv and gate_up are cut along N; o and down along K, and their terms are added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.compiler import is_compiling
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional

import weightonly as wo
from weightonly.parallel import ColwiseParallel, RowwiseParallel
from weightonly.parallel.exchange import Exchange
from weightonly.parallel.ranges import chunk, columns_of
from weightonly.parallel.sums import LIMITS, SharedSums

from ..shapes import LlamaSizes, MixtureModelSizes, Shape

LINEARS = ("qkv", "o", "gate_up", "down")
"""The linears of a decoder layer, in order."""

LAYER = "layer"
"""The name of the piece that has all of them."""

EXPERTS = "experts"
"""The name of the piece of a mixture: all experts of a decoder layer, see experts.py."""

ROWWISE = ("o", "down")

Multiply = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def names_of(piece: str) -> tuple[str, ...]:
    """The linears of a piece: of `LAYER`, of each of the `EXPERTS`, or of one linear."""
    return {LAYER: LINEARS, EXPERTS: LINEARS[2:]}.get(piece, (piece,))


def parts_of(sizes: LlamaSizes, linear: str) -> tuple[int, ...]:
    """The columns of each layer that is fused into a linear."""
    key = sizes.kv_heads * sizes.head_dim
    return {
        "qkv": (sizes.hidden, key, key),
        "o": (sizes.hidden,),
        "gate_up": (sizes.intermediate, sizes.intermediate),
        "down": (sizes.hidden,),
    }[linear]


def shape_of(sizes: LlamaSizes, linear: str) -> Shape:
    """(K, N) of the whole linear."""
    return dict(zip(LINEARS, sizes.linears, strict=True))[linear]


def check_ranks(sizes: LlamaSizes, name: str, ranks: int) -> None:
    """Raises ValueError unless every rank gets as much of each linear, or as many experts. name: of the model."""
    if isinstance(sizes, MixtureModelSizes):
        if sizes.experts % ranks:
            raise ValueError(f"ranks: expected a divisor of {sizes.experts}, the experts of {name}, got {ranks}")
        return
    for linear in LINEARS:
        for size in (shape_of(sizes, linear)[0], *parts_of(sizes, linear)):
            if size % ranks:
                raise ValueError(f"ranks: expected a divisor of {size}, of {linear} of {name}, got {ranks}")


class Piece(torch.nn.Module):
    """Linears of a decoder layer; with all four, o reads what would be queries, and down silu(gate) * up.

    A piece that begins with o or down reads, once it is cut, its rank's columns of x, and one that ends with qkv or
    gate_up returns its rank's columns of y.
    """

    def __init__(self, sizes: LlamaSizes, name: str, dtype: torch.dtype, device: torch.device) -> None:
        """Random dense weights, which depend on the linear alone."""
        super().__init__()
        self.sizes, self.queries = sizes, sizes.hidden
        for linear in names_of(name):
            generator = torch.Generator(device).manual_seed(LINEARS.index(linear))
            k, n = shape_of(sizes, linear)
            dense = torch.nn.Linear(k, n, bias=False, device=device, dtype=dtype).requires_grad_(False)
            dense.weight.normal_(std=k**-0.5, generator=generator)
            self.add_module(linear, dense)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> y [M, N], all-reduces included."""
        y = self._run(x, lambda linear, x: linear(x))
        return y if is_compiling() else _finished(y)

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """The same without all-reduces: what this rank multiplies."""
        return self._run(x, local_product)

    def _run(self, x: torch.Tensor, multiply: Multiply) -> torch.Tensor:
        is_layer = len(self._modules) > 1
        for name, linear in self.named_children():
            if is_layer and name == "o":
                x = x[:, : self.queries]
            elif is_layer and name == "down":
                gate, up = x.chunk(2, dim=-1)  # (M, I / ranks) each
                x = functional.silu(gate) * up
            x = multiply(linear, x)
        return x

    @property
    def is_packed(self) -> bool:
        """Whether its linears are of weightonly."""
        return all(isinstance(linear, wo.nn.Linear) for linear in self.children())

    @property
    def rowwise(self) -> list[str]:
        """The linears with an all-reduce."""
        return [name for name, _ in self.named_children() if name in ROWWISE]

    def cut(self, mesh: DeviceMesh) -> Piece:
        """Makes this rank's part of a quantized piece, in its place: by `weightonly.parallel`, dense ones by torch's
        styles of the same names."""
        ranks = mesh.size()
        for name, linear in self.named_children():
            parts = parts_of(self.sizes, name)
            style: ParallelStyle
            if name in ROWWISE:
                style = RowwiseParallel()
            elif isinstance(linear, wo.nn.Linear):
                style = ColwiseParallel(parts=parts)
            else:  # torch's has no parts: the rows of the weight are brought into the order in which it cuts
                columns = [pair for rank in range(ranks) for pair in columns_of(sum(parts), parts, ranks, rank)]
                whole = linear.get_parameter("weight").data  # (N, K)
                linear.get_parameter("weight").data = torch.cat([whole[begin:end] for begin, end in columns])
                style = ColwiseParallel()
            parallelize_module(linear, mesh, style)
        self.queries //= ranks
        return self


def local_product(linear: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x times this rank's part of the weight."""
    if isinstance(linear, wo.nn.Linear):
        return linear._product(x, linear.bias, None)
    weight = linear.get_parameter("weight").data
    return functional.linear(x, weight.to_local() if isinstance(weight, DTensor) else weight)


def own_input(x: torch.Tensor, piece: str, ranks: int, rank: int) -> torch.Tensor:
    """What a rank reads of all of x."""
    if names_of(piece)[0] not in ROWWISE:
        return x
    begin, end = chunk(x.shape[1], ranks, rank)
    return x[:, begin:end].contiguous()


def own_output(y: torch.Tensor, sizes: LlamaSizes, piece: str, ranks: int, rank: int) -> torch.Tensor:
    """What a rank returns of all of y."""
    last = names_of(piece)[-1]
    if last in ROWWISE:
        return y
    return torch.cat([y[:, begin:end] for begin, end in columns_of(y.shape[1], parts_of(sizes, last), ranks, rank)], 1)


def all_reduce(mesh: DeviceMesh, terms: Sequence[torch.Tensor]) -> None:
    """Adds up terms [M, N] over the ranks as `RowwiseParallel` does, one after another."""
    exchange = Exchange(mesh, Shard(-1), Replicate(), True)
    for term in terms:
        _finished(exchange.leave(term, Partial(), term.shape[1]))


@contextmanager
def only_nccl() -> Iterator[None]:
    """Inside, layers leave all sums to torch.distributed."""
    limits = dict(LIMITS)
    LIMITS.update(dict.fromkeys(LIMITS, -1))
    try:
        yield
    finally:
        LIMITS.update(limits)


def shared_sums(shared: SharedSums, terms: Sequence[torch.Tensor]) -> None:
    """Adds terms up in place, one after another, as products are."""
    for term in terms:
        shared.add_(term)


def _finished(y: torch.Tensor) -> torch.Tensor:
    """y, once its all-reduce has joined the current stream: otherwise the first who reads y waits for it."""
    return y.wait() if isinstance(y, AsyncCollectiveTensor) else y
