"""ColwiseLinear, RowwiseLinear: the part of a `weightonly.nn.Linear` that one rank computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from ..activations import activation_of
from ..heuristics.arch import Arch
from ..layout import ROW_MAJOR
from ..nn import Linear
from ..nn.linear import _frozen
from ..slicing import Operands
from .exchange import Exchange
from .ranges import check_rows, chunk, columns_of


class ParallelLinear(Linear):
    """A `Linear` that has the rows or columns of its weight which this rank computes.

    `ColwiseParallel` and `RowwiseParallel` of `weightonly.parallel` make one out of a `Linear`, in its place. The x and
    y of `forward` are as the style's layouts say.

    in_features, out_features: of this rank's part, 0 for a rank that has none. full_in_features, full_out_features: of
    the whole weight.
    """

    full_in_features: int
    full_out_features: int
    exchange: Exchange

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no part of the weight."""
        return not self.in_features or not self.out_features

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's part of the weight, as `Linear.dequantize` returns it; its rows are in the weight's order."""
        if self.is_empty:
            return self.scales.new_zeros(self.in_features, self.out_features, dtype=dtype)
        return super().dequantize(dtype)

    def repack(self, arch: Arch | None = None) -> Linear:
        """See `Linear.repack`; it brings this rank's part alone into another order."""
        return self if self.is_empty else super().repack(arch)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
        if self.is_empty:
            return x @ x.new_zeros(self.in_features, self.out_features)
        return super()._product(x, bias, activation)

    def _take(self, part: Operands | None) -> None:
        """The tensors of this rank's part, in place of those of the layer."""
        if part is None:
            self._packed, self._packed_from = None, (self.qweight, self.codebook)
        else:
            self._set_operands(part.weight, part.scales, part.zeros, part.bias, part.perm)
        self._scales_from = (self.scales, self.scales.dtype)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, rank {self.exchange.mesh.get_local_rank()} of {self.exchange.mesh.size()} of "
            f"[{self.full_in_features}, {self.full_out_features}]"
        )


class ColwiseLinear(ParallelLinear):
    """Columns of a weight: y[..., columns] = act(x[..., perm] @ w[:, columns] + bias[columns])."""

    @classmethod
    def convert(cls, layer: Linear, exchange: Exchange, parts: Sequence[int] | None) -> None:
        """Makes this rank's part of `layer`, in its place.

        parts: the columns of each of the layers that are fused into it; None: it is one layer.
        Raises ValueError for parts that do not add up.
        """
        ranks, rank = exchange.mesh.size(), exchange.mesh.get_local_rank()
        ranges = columns_of(layer.out_features, parts, ranks, rank)
        part = operands_of(layer).columns(ranges) if ranges else None
        self = _become(layer, cls, exchange)
        if part is None:
            empty = {"qweight": self.qweight[:0], "scales": self.scales[:, :0], "zeros": None, "bias": None}
            empty["zeros"] = None if self.zeros is None else self.zeros[:, :0]
            empty["bias"] = None if self.bias is None else self.bias[:0]
            _set_empty(self, empty)
            self.out_features = 0
        self._take(part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> y [..., N], laid out as the style says."""
        y = super().forward(self.exchange.enter(x, Replicate(), self.full_in_features))
        return self.exchange.leave(y, Shard(y.dim() - 1), self.full_out_features)


class RowwiseLinear(ParallelLinear):
    """Rows of a weight: y = act(sum over ranks of x[..., perm[rows]] @ w[rows] + bias).

    bias: [N], of the whole layer; it is added once, after the sum. columns: int64 [rows], the columns of x that meet
    this rank's rows of a weight in act-order, of which x is gathered; None for other weights.
    """

    columns: torch.Tensor | None

    @classmethod
    def convert(cls, layer: Linear, exchange: Exchange) -> None:
        """Makes this rank's part of `layer`, in its place.

        Raises ValueError, with the next K that works, for a cut that would leave groups that `gemm` does not take.
        """
        ranks, rank = exchange.mesh.size(), exchange.mesh.get_local_rank()
        k = layer.in_features
        check_rows(k, k // layer.scales.shape[0], ranks)
        begin, end = chunk(k, ranks, rank)
        part = operands_of(layer).rows(begin, end) if begin < end else None
        columns = None if layer.perm is None else layer.perm[begin:end].long()
        self = _become(layer, cls, exchange)
        if part is None:
            qweight = self.qweight[:0] if self.layout == ROW_MAJOR else self.qweight[:, :0]
            zeros = None if self.zeros is None else self.zeros[:0]
            _set_empty(self, {"qweight": qweight, "scales": self.scales[:0], "zeros": zeros, "bias": self.bias})
            self.in_features = 0
            self.register_buffer("perm", None)
        self._take(part)
        self.register_buffer("columns", columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> y [..., N], laid out as the style says."""
        exchange = self.exchange
        if self.columns is None:
            x = exchange.enter(x, Shard(x.dim() - 1), self.full_in_features)
        else:
            x = exchange.enter(x, Replicate(), self.full_in_features).index_select(-1, self.columns)
        y = exchange.redistribute(super().forward(x), Partial(), self.full_out_features)
        if self.bias is not None:
            y = y + exchange.replicated(self.bias.to(y.dtype))
        if self.activation is not None:
            y = activation_of(self.activation).function(y.float()).to(y.dtype)
        return exchange.finish(y)

    def _gemm(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, None, None)


def operands_of(layer: Linear) -> Operands:
    """The tensors of a layer, which may be cut."""
    scales, zeros, bias = (None if t is None else t.detach() for t in (layer.scales, layer.zeros, layer.bias))
    assert scales is not None
    return Operands(layer.packed, scales, zeros, bias, layer.perm)


def _become(layer: Linear, kind: type[ParallelLinear], exchange: Exchange) -> ParallelLinear:
    """`layer` itself, which is of this kind now: plans of torch go on with the module that they were given."""
    layer.__class__ = kind
    assert isinstance(layer, kind)
    layer.full_in_features, layer.full_out_features = layer.in_features, layer.out_features
    layer.exchange = exchange
    return layer


def _set_empty(layer: ParallelLinear, tensors: dict[str, torch.Tensor | None]) -> None:
    for name, tensor in tensors.items():
        layer.register_parameter(name, None if tensor is None else _frozen(tensor.detach().clone()))
