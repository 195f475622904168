"""ColwiseLinear, RowwiseLinear: the part of a `weightonly.nn.Linear` that one rank computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..activation_dtype import check_fp8_groups
from ..activations import activation_of
from ..grouped import Product
from ..heuristics.arch import Arch
from ..layout import K_ALIGN, Blocks, Range, blocks_of, column_align, padded_shape, stored_shape
from ..nn.base import PackedLayer, frozen
from ..nn.linear import METADATA, Linear
from ..packed import PackedWeight, format_bits
from ..packing import FLOAT_DTYPES, preprocess, unpack
from ..slicing import cut_columns, cut_rows, cut_weight, rows_of_a_group
from ..update import Update, check_dense, check_target, largest_of
from .exchange import Exchange
from .ranges import check_rows, chunk, columns_of
from .sums import sum_of_products, sum_over_ranks

DENSE, PACKED, WHOLE, OWN = "dense", "packed", "whole", "own"
"""`Linear.reads`: what a loader cuts while it reads, by the placements of the DTensors in the state dict: tensors of a
dense layer, or of a packed one; or none, as all come whole; or none, as all are this rank's part."""


class ParallelLinear(Linear):
    """`Linear` of which this rank has a part: what `ColwiseParallel` and `RowwiseParallel` make of one.

    Attributes:
        in_features: of this rank's part, 0 for a rank that has none.
        out_features: like in_features.
        full_in_features: of the whole weight.
        full_out_features: of the whole weight.
        full_group_size: rows of the whole weight that share a scale.
        rows: (begin, end) of this rank.
        ranges: columns of this rank, a pair for each layer that is fused into this one; none if it has no columns.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # of all ranks
        >>> parallelize_module = torch.distributed.tensor.parallel.parallelize_module
        >>> layer = parallelize_module(wo.nn.Linear(512, 1024), mesh, wo.parallel.ColwiseParallel())
        >>> layer.rank, layer.ranks, layer.full_out_features
        (0, 1, 1024)
    """

    full_in_features: int
    full_out_features: int
    full_group_size: int
    rows: Range
    ranges: list[Range]
    exchange: Exchange

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no part of the weight."""
        return not self.in_features or not self.out_features

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's part of the weight [K, N]. Rows that a `RowwiseLinear` has of a weight in act-order are in that
        order."""
        if self.is_empty:
            return self.scales.new_zeros(self.in_features, self.out_features, dtype=dtype)
        return super().dequantize(dtype)

    @property
    def _dense_shape(self) -> list[int]:
        return [self.full_in_features, self.full_out_features]

    def _updates(self, name: str, w: torch.Tensor, in_turns: bool = False) -> list[Update]:
        """w: whole, on every rank."""
        largest = largest_of(name, w, self.compute_dtype)
        if self.is_empty:
            return []
        check_target(self.operand)
        return [self._update(w, largest)]

    def _update(self, w: torch.Tensor, largest: float) -> Update:
        """This rank's part of a dense weight [K, N] that was checked."""
        raise NotImplementedError

    def _bias_update(self, bias: torch.Tensor, in_turns: bool = False) -> Callable[[], object]:
        check_dense("bias", bias)
        if bias.shape != self.full_shape("bias"):
            raise ValueError(f"bias: expected shape {list(self.full_shape('bias'))}, got {list(bias.shape)}")
        return super()._bias_update(self.cut("bias", bias))

    def repack(self, arch: Arch | None = None) -> ParallelLinear:
        """See `Linear.repack`; it brings this rank's part alone into another order."""
        return self if self.is_empty else super().repack(arch)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
        if self.is_empty:
            return x @ x.new_zeros(self.in_features, self.out_features)
        return super()._product(x, bias, activation)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr() if not self.is_empty else 'no part'}, rank {self.rank} of {self.ranks} of "
            f"[{self.full_in_features}, {self.full_out_features}]"
        )

    @property
    def ranks(self) -> int:
        """How many share the weight."""
        return self.exchange.mesh.size()

    @property
    def rank(self) -> int:
        """This one."""
        return self.exchange.mesh.get_local_rank()

    # --- tensors of the whole layer ---------------------------------------------------------------------------

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the whole layer, as a packed file has it: qweight, scales, zeros, bias, perm.

        Raises:
            ValueError: a qweight of another shape.
        """
        if name != "qweight":
            return self._cut_small(name, tensor)
        if tensor.shape != self.full_shape("qweight"):
            raise ValueError(f"qweight: expected {list(self.full_shape('qweight'))}, got {list(tensor.shape)}")
        if self.is_empty:
            return tensor.new_empty(self.qweight.shape)
        code = (0.0,) * 16 if self.format == "code4" else None
        shape = self.full_in_features, self.full_out_features
        weight = PackedWeight(tensor.reshape(-1), *shape, self.format, self.layout, code)
        return self._cut_weight(weight).data.view(self.qweight.shape)

    @torch.no_grad()
    def gather(self) -> Linear:
        """The whole layer, on every rank, bit for bit as it was before it was cut. All ranks have to call it."""
        tensors = {name: self._gathered(name, tensor) for name, tensor in self._own_tensors().items()}
        data, code = tensors.pop("qweight"), None
        codebook = tensors.pop("codebook", None)
        if codebook is not None:
            code = codebook.view(torch.float32).tolist()
        shape = self.full_in_features, self.full_out_features
        weight = PackedWeight(data.reshape(-1), *shape, self.format, self.layout, code)
        layer = Linear.from_quantized(weight, **tensors, activation=self.activation, activations=self.activations)
        layer.layer_name = self.layer_name
        return layer.train(self.training)

    def placement(self, name: str) -> Placement | None:
        """How a tensor of the whole layer is cut, where a DTensor can say it; None for all others."""
        raise NotImplementedError

    def differs(self, name: str) -> bool:
        """Whether ranks have different tensors of this name."""
        raise NotImplementedError

    def _cut_small(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _cut_weight(self, weight: PackedWeight) -> PackedWeight:
        raise NotImplementedError

    def _whole(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """The tensor that the parts of all ranks make; for qweight unpacked numbers, int8 [K, N]."""
        raise NotImplementedError

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        found = [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]
        return {name: tensor.detach() for name, tensor in found}

    def _gathered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self.differs(name):
            return tensor
        placement = self.placement(name)
        if placement is not None:
            return self._as_dtensor(name, tensor, placement).full_tensor()
        mine = tensor
        if name == "qweight":
            k, n = self.in_features, self.out_features
            mine = (
                tensor.new_empty(k, n, dtype=FLOAT_DTYPES.get(self.format, torch.int8))
                if self.is_empty
                else unpack(self.packed)
            )
        parts: list[Any] = [None] * self.ranks
        distributed.all_gather_object(parts, mine.cpu(), group=self.exchange.mesh.get_group())
        whole = self._whole(name, [part.to(tensor.device) for part in parts])
        if name == "qweight":
            code = (0.0,) * 16 if self.format == "code4" else None
            bits = format_bits(self.format)
            whole = preprocess(whole, bits, layout=self.layout, format=self.format, code=code).data
        return whole.view(self.full_shape(name))

    def full_shape(self, name: str) -> torch.Size:
        """The shape of a tensor of the whole layer."""
        k, n, bits = self.full_in_features, self.full_out_features, format_bits(self.format)
        qweight = stored_shape(*padded_shape(k, n, bits, self.layout), bits, self.layout)
        shapes = {"qweight": qweight, "bias": (n,), "perm": (k,)}
        return torch.Size(shapes.get(name, (k // self.full_group_size, n)))

    def _blocks(self) -> Blocks:
        """The bytes of the whole weight, as they can be cut."""
        k, n, bits = self.full_in_features, self.full_out_features, format_bits(self.format)
        return blocks_of(*padded_shape(k, n, bits, self.layout), bits, self.layout)

    def _as_dtensor(self, name: str, tensor: torch.Tensor, placement: Placement) -> DTensor:
        shape = self.full_shape(name)
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return DTensor.from_local(
            tensor.contiguous(), self.exchange.mesh, [placement], run_check=False, shape=shape, stride=stride
        )

    # --- state ------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
        if METADATA in metadata:
            metadata[METADATA] |= {"k": self.full_in_features, "n": self.full_out_features}
        for name in self._own_tensors():
            if not self.differs(name):
                continue
            tensor = destination[f"{prefix}{name}"]
            placement = self._placement_in_state(name)
            if placement is not None:
                destination[f"{prefix}{name}"] = self._as_dtensor(name, tensor, placement)
            elif self.reads is None:
                del destination[f"{prefix}{name}"]
                destination[f"{prefix}{name}{self._suffix}"] = tensor

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        state = dict(state_dict)
        for name in self._own_tensors():
            key = f"{prefix}{name}"
            tensor = state.get(key)
            if f"{key}{self._suffix}" in state:
                state[key] = state.pop(f"{key}{self._suffix}")
            elif isinstance(tensor, DTensor):
                state[key] = tensor.to_local()
            elif isinstance(tensor, torch.Tensor) and self.differs(name) and tensor.shape == self.full_shape(name):
                state[key] = self.cut(name, tensor)
        super()._load_from_state_dict(state, prefix, {}, *args)

    def comes_cut(self, name: str) -> bool:
        """Whether a loader that asks the state dict for placements brings this rank's part of a tensor."""
        return self.reads == OWN or not self.differs(name) or self._placement_in_state(name) is not None

    def _placement_in_state(self, name: str) -> Placement | None:
        if self.reads in (WHOLE, OWN):
            return None
        return self._dense_placement() if (name, self.reads) == ("qweight", DENSE) else self.placement(name)

    def _dense_placement(self) -> Placement | None:
        """How a dense weight [N, K] is cut such that each rank quantizes its part as it would the whole."""
        raise NotImplementedError

    @property
    def _suffix(self) -> str:
        return f".rank{self.rank}_of_{self.ranks}"

    def _take(self, part: Product | None) -> None:
        """The tensors of this rank's part, in place of the layer's own."""
        if part is None:
            self._packed, self._packed_from = None, (self.qweight, self.codebook)
            self._operand = self._view = None
            self._scales_from = (self.scales, self.scales.dtype)
        else:
            self._set_operand(part.operand, part.bias)


class ColwiseLinear(ParallelLinear):
    """Columns of a weight: `y[..., columns] = act(x[..., perm] @ w[:, columns] + bias[columns])`.

    Attributes:
        parts: the columns of each of the layers that are fused into it; None: it is one layer.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # of all ranks
        >>> parallelize_module = torch.distributed.tensor.parallel.parallelize_module
        >>> fused = parallelize_module(wo.nn.Linear(512, 768), mesh, wo.parallel.ColwiseParallel(parts=(512, 128, 128)))
        >>> fused.ranges
        [(0, 512), (512, 640), (640, 768)]
    """

    parts: Sequence[int] | None

    @classmethod
    def convert(cls, layer: Linear, exchange: Exchange, parts: Sequence[int] | None) -> None:
        """Makes this rank's part of `layer`, in its place.

        Args:
            layer: of the whole weight.
            exchange: between the ranks.
            parts: the columns of each of the layers that are fused into it; None: it is one layer.

        Raises:
            ValueError: parts that do not add up.
        """
        ranks, rank = exchange.mesh.size(), exchange.mesh.get_local_rank()
        ranges = columns_of(layer.out_features, parts, ranks, rank)
        part = cut_columns(product_of(layer), ranges) if ranges else None
        self = _become(layer, cls, exchange)
        self.rows, self.ranges, self.parts = (0, layer.in_features), ranges, parts
        if part is None:
            names = [name for name in self._own_tensors() if self.differs(name)]
            _make_empty(self, {name: 1 if name in ("scales", "zeros") else 0 for name in names})
            self.out_features = 0
        self._take(part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> y [..., N], laid out as the style says."""
        y = super().forward(self.exchange.enter(x, Replicate(), self.full_in_features))
        return self.exchange.leave(y, Shard(y.dim() - 1), self.full_out_features)

    def differs(self, name: str) -> bool:
        return name in ("qweight", "scales", "zeros", "bias")

    def placement(self, name: str) -> Placement | None:
        if self.parts is not None:
            return None
        if name != "qweight":
            return Shard(1 if name in ("scales", "zeros") else 0)
        blocks = self._blocks()
        if blocks.column_dim != 0:
            return None
        n, align = self.full_out_features, column_align(format_bits(self.format), self.layout)
        return Shard(0) if _cuts_alike(n, align, self.full_shape(name)[0], blocks.columns, self.ranks) else None

    def _dense_placement(self) -> Placement | None:
        return Shard(0) if self.parts is None else None

    def _cut_small(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self.differs(name):
            return tensor
        empty = [tensor[..., :0]]
        return torch.cat([tensor[..., begin:end] for begin, end in self.ranges] or empty, -1)

    def _cut_weight(self, weight: PackedWeight) -> PackedWeight:
        return cut_weight(weight, columns=self.ranges)

    def _update(self, w: torch.Tensor, largest: float) -> Update:
        parts = [w[:, begin:end] for begin, end in self.ranges]
        return Update(self.operand, parts, self.compute_dtype, largest, self.full_group_size, self.perm)

    def _whole(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        whole = parts[0].new_empty(*parts[0].shape[:-1], self.full_out_features)
        for rank, part in enumerate(parts):
            first = 0
            for begin, end in columns_of(self.full_out_features, self.parts, self.ranks, rank):
                whole[..., begin:end] = part[..., first : first + end - begin]
                first += end - begin
        return whole


class RowwiseLinear(ParallelLinear):
    """Rows of a weight: `y = act(sum over ranks of x[..., perm] @ w[rows] + bias)`.

    With activations "fp8" each rank rounds its part of a row of x by a scale of its own: the sum differs from that of
    one process by this rounding.

    Attributes:
        bias: [N], of the whole layer; it is added once, after the sum.
        perm: int32 or int64 [rows], the columns of all of x that meet this rank's rows of a weight in act-order, for
            which x is gathered; None for other weights.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # of all ranks
        >>> parallelize_module = torch.distributed.tensor.parallel.parallelize_module
        >>> layer = parallelize_module(wo.nn.Linear(1024, 512), mesh, wo.parallel.RowwiseParallel())
        >>> layer(torch.randn(4, 1024).half()).shape
        torch.Size([4, 512])
    """

    @classmethod
    def convert(cls, layer: Linear, exchange: Exchange) -> None:
        """Makes this rank's part of `layer`, in its place.

        Raises:
            ValueError: with the next K that works, for a cut that would leave groups that `gemm` does not take.
        """
        ranks, rank = exchange.mesh.size(), exchange.mesh.get_local_rank()
        k = layer.in_features
        check_rows(k, k // layer.scales.shape[0], ranks)
        begin, end = chunk(k, ranks, rank)
        whole = product_of(layer)
        part = Product(cut_rows(whole.operand, begin, end), whole.bias) if begin < end else None
        if layer.activations is not None and part is not None:
            check_fp8_groups(part.operand.group_rows, part.operand.k)
        perm = None if layer.perm is None else layer.perm[begin:end]
        self = _become(layer, cls, exchange)
        self.rows, self.ranges = (begin, end), [(0, layer.out_features)]
        if part is None:
            dims = {name: 0 for name in self._own_tensors() if self.differs(name)}
            _make_empty(self, dims | {"qweight": self._blocks().row_dim})
            self.in_features = 0
        self._take(part)
        self.register_buffer("perm", perm)

    @property
    def _order(self) -> torch.Tensor | None:
        return None  # x is permuted and cut before the product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> y [..., N], laid out as the style says."""
        exchange = self.exchange
        if self.perm is None:
            x = exchange.enter(x, Shard(x.dim() - 1), self.full_in_features)
        else:
            x = exchange.enter(x, Replicate(), self.full_in_features).index_select(-1, self.perm)
        y = super().forward(x)
        y = exchange.added(y) if exchange.adds(x) else exchange.redistribute(y, Partial(), self.full_out_features)
        if self.bias is not None:
            bias = self.bias.to(y.dtype)
            y = y + (exchange.replicated(bias) if isinstance(y, DTensor) else bias)
        if self.activation is not None:
            y = activation_of(self.activation).function(y.float()).to(y.dtype)
        return exchange.finish(y)

    def _gemm(self, x: torch.Tensor) -> torch.Tensor:
        """The product, and where `Exchange.adds` says so the sum: it begins where the product writes."""
        if not self.exchange.adds(x):
            return self._product(x, None, None)
        group = self.exchange.group_name
        if self.is_empty or self.activations is not None or self.compute_dtype != self.operand.dtype:
            return sum_over_ranks(self._product(x, None, None), group)
        return sum_of_products(x, self.operand, group)

    def differs(self, name: str) -> bool:
        if name in ("scales", "zeros"):
            return self.full_group_size != self.full_in_features
        return name in ("qweight", "perm")

    def placement(self, name: str) -> Placement | None:
        k = self.full_in_features
        if name == "perm":
            return Shard(0)
        if name in ("scales", "zeros"):
            group = self.full_group_size
            return Shard(0) if _cuts_alike(k, group, k // group, group, self.ranks) else None
        dim = self._blocks().row_dim
        stored = self.full_shape("qweight")[dim]
        is_alike = _cuts_alike(k, K_ALIGN, stored, K_ALIGN, self.ranks, stored // -(-k // K_ALIGN))
        return Shard(dim) if is_alike else None

    def _dense_placement(self) -> Placement | None:
        return self.placement("scales") and Shard(1) if self.differs("scales") else None

    def _cut_small(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        begin, end = self.rows
        if name == "perm":
            return tensor[begin:end]
        if not self.differs(name):
            return tensor
        group = self.full_group_size
        rows = rows_of_a_group(self.full_in_features, group, begin, end) if begin < end else group
        return tensor.index_select(0, torch.arange(begin, end, rows, device=tensor.device) // group)

    def _cut_weight(self, weight: PackedWeight) -> PackedWeight:
        return cut_weight(weight, rows=self.rows)

    def _update(self, w: torch.Tensor, largest: float) -> Update:
        """Raises ValueError for groups in act-order that the cut splits: their other rows are known to other ranks."""
        (begin, end), group = self.rows, self.full_group_size
        first, last = begin // group * group, -(-end // group) * group
        if self.perm is not None and (first, last) != (begin, end):
            raise ValueError(f"rows: expected whole groups of {group} in act-order, got {begin} .. {end} of this rank")
        w = w[first:last] if self.perm is None else w
        return Update(self.operand, [w], self.compute_dtype, largest, group, self.perm, begin - first)

    def _whole(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        if name not in ("scales", "zeros"):
            return torch.cat(parts)
        rows = []
        for first in range(0, self.full_in_features, self.full_group_size):
            rank = first // -(-self.full_in_features // self.ranks)
            begin, end = chunk(self.full_in_features, self.ranks, rank)
            rows.append(parts[rank][(first - begin) * len(parts[rank]) // (end - begin)])
        return torch.stack(rows)


def product_of(layer: PackedLayer) -> Product:
    """The weight and the bias of a layer, to be cut."""
    return Product(layer.operand, None if layer.bias is None else layer.bias.detach())


def _become(layer: Linear, kind: type[Any], exchange: Exchange) -> Any:
    """`layer` itself, which is of this kind now: plans of torch go on with the module that they were given."""
    layer.__class__ = kind
    assert isinstance(layer, ParallelLinear)
    layer.full_in_features, layer.full_out_features = layer.in_features, layer.out_features
    layer.full_group_size = layer.in_features // layer.scales.shape[0]
    layer.exchange = exchange
    return layer


def _make_empty(layer: ParallelLinear, dims: dict[str, int]) -> None:
    """Tensors without elements; dims: name -> the dimension that is 0."""
    for name, tensor in layer._own_tensors().items():
        if name in dims and name in layer._parameters:
            layer.register_parameter(name, frozen(tensor.narrow(dims[name], 0, 0).clone()))


def _cuts_alike(size: int, align: int, stored: int, unit: int, ranks: int, per_unit: int = 1) -> bool:
    """Whether the chunks of `size` rows or columns are the chunks of the `stored` indices that hold them.

    align: what bytes can be cut at. per_unit: indices that hold `unit` rows or columns.
    """
    for rank in range(ranks):
        begin, end = chunk(size, ranks, rank)
        padded = -(-end // align) * align
        if begin < end and chunk(stored, ranks, rank) != (begin * per_unit // unit, padded * per_unit // unit):
            return False
        if begin == end and chunk(stored, ranks, rank) != (stored, stored):
            return False
    return True
