"""ExpertParallel, ExpertTensorParallel: styles for `weightonly.nn.Experts`; ParallelExperts, a rank's part of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ..experts import Multiply
from ..grouped import Product
from ..nn.experts import Experts
from ..nn.grouped import GroupedLinear
from ..packed import PackedWeight
from ..slicing import cut_columns, cut_rows
from ..update import check_dense
from ..weight import LooseWeight
from .exchange import Exchange
from .linear import product_of
from .ranges import check_rows, chunk, columns_of
from .styles import same_on_all


class ParallelExperts(Experts):
    """`Experts` of which this rank has some, or a part of each: what `ExpertParallel` and `ExpertTensorParallel` make.
    y is the sum over ranks.

    Attributes:
        first_expert: the first one that this rank has.
        num_experts: how many this rank has.
        full_num_experts: of all ranks.
        hidden: H.
        is_empty: whether it has no part.
        is_cut_inside: whether this rank has a part of each expert.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # of all ranks
        >>> parallelize_module = torch.distributed.tensor.parallel.parallelize_module
        >>> products = wo.nn.GroupedLinear(4, 256, 1024), wo.nn.GroupedLinear(4, 512, 256)
        >>> experts = parallelize_module(wo.nn.Experts(*products, wo.Gate("silu")), mesh, ExpertParallel())
        >>> isinstance(experts, ParallelExperts), experts.full_num_experts
        (True, 4)
    """

    exchange: Exchange
    first_expert: int
    full_num_experts: int
    hidden: int
    is_empty: bool
    is_cut_inside: bool
    """Whether this rank has a part of each expert."""

    def update_(
        self,
        first: torch.Tensor,
        down: torch.Tensor,
        first_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> ParallelExperts:
        """As `Experts.update_`, with tensors of all experts of all ranks.

        Raises:
            ValueError: experts of which this rank has parts (`ExpertTensorParallel`).
        """
        if self.is_cut_inside:
            raise ValueError("first: expected whole experts on each rank (ExpertParallel), got parts of each of them")
        mine = slice(self.first_expert, self.first_expert + self.num_experts)
        named = {"first": first, "down": down, "first_bias": first_bias, "down_bias": down_bias}
        for name, tensor in named.items():
            if tensor is not None:
                check_dense(name, tensor)
                if tensor.dim() == 0 or len(tensor) != self.full_num_experts:
                    raise ValueError(f"{name}: expected {self.full_num_experts} experts, got {list(tensor.shape)}")
        if not self.is_empty:
            super().update_(*(None if tensor is None else tensor[mine] for tensor in named.values()))  # type: ignore
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *,
        adapters: Mapping[str, Multiply] | None = None,
    ) -> torch.Tensor:
        """As `Experts.forward`; x, the experts and their weights, and y are laid out as the style says.

        Ids of all ranks' experts: 0 .. full_num_experts - 1; -1 and full_num_experts say: to none.

        Raises:
            ValueError: `adapters`, which are of all experts.
        """
        if adapters:
            raise ValueError("adapters: expected experts that are not cut among ranks, got ParallelExperts")
        exchange = self.exchange
        x = exchange.enter(hidden_states, Replicate(), self.hidden)
        ids = exchange.enter(top_k_index, Replicate(), top_k_index.shape[-1])
        weights = exchange.enter(top_k_weights, Replicate(), top_k_weights.shape[-1])
        if self.is_empty:
            y = x * 0  # in the graph of x: the other ranks wait for its gradient
            y = y + (weights * 0).sum(-1, keepdim=True).to(y.dtype)
        else:
            ids = ids - self.first_expert
            if ids.device.type == "cpu":  # elsewhere all ids that are out of range say: to none
                ids = torch.where((ids >= 0) & (ids < self.num_experts), ids, -1)
            y = super().forward(x, ids, weights)
        return exchange.leave(y, Partial(), self.hidden)


class ExpertParallel(ParallelStyle):
    """Each rank has some of the experts of a `weightonly.nn.Experts`: ceil(E / ranks), the last ones fewer or none.

    Every rank computes its experts for all rows; rows of other experts cost nothing.

    Args:
        input_layouts: the layout of x [M, H], of the experts and of their weights [M, top_k] where they are no
            DTensors: Replicate() (the default), or Shard(0), each rank having some of the rows.
        output_layouts: of y: Replicate() (the default) or Shard(0).
        use_local_output: whether y is a torch.Tensor; else a DTensor.

    Raises:
        TypeError: another module.
        ValueError: experts that are cut already.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # of all ranks
        >>> parallelize_module = torch.distributed.tensor.parallel.parallelize_module
        >>> products = wo.nn.GroupedLinear(4, 256, 1024), wo.nn.GroupedLinear(4, 512, 256)
        >>> experts = parallelize_module(wo.nn.Experts(*products, wo.Gate("silu")), mesh, ExpertParallel())
        >>> experts.first_expert, experts.num_experts
        (0, 4)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, Experts):
            raise TypeError(f"module: expected weightonly.nn.Experts, got {type(module).__name__}")
        if isinstance(module, ParallelExperts):
            raise ValueError("module: expected experts that are not cut yet, got ParallelExperts")
        layers = {name: layer for name, layer in module.named_children() if isinstance(layer, GroupedLinear)}
        for layer in layers.values():
            same_on_all(layer, device_mesh, self.src_data_rank)
        ranks, rank = device_mesh.size(), device_mesh.get_local_rank()
        cut = self._cut(module, {name: product_of(layer) for name, layer in layers.items()}, ranks, rank)
        experts: Any = module
        experts.__class__ = ParallelExperts
        experts.hidden = module.down_proj.out_features
        experts.full_num_experts, experts.first_expert = module.num_experts, self._first(module, ranks, rank)
        experts.is_empty, experts.is_cut_inside = cut is None, isinstance(self, ExpertTensorParallel)
        experts.exchange = Exchange(device_mesh, self.input_layouts, self.output_layouts, self.use_local_output)
        for name in layers:
            if cut is None:
                setattr(experts, name, None)
                continue
            part = cut[name]
            new = GroupedLinear.from_quantized(part.operand, bias=part.bias, activations=layers[name].activations)
            setattr(experts, name, new.train(module.training))
        experts.num_experts = 0 if cut is None else experts.down_proj.num_experts
        return module

    def _first(self, module: Experts, ranks: int, rank: int) -> int:
        return chunk(module.num_experts, ranks, rank)[0]

    def _cut(self, module: Experts, layers: dict[str, Product], ranks: int, rank: int) -> dict[str, Product] | None:
        begin, end = chunk(module.num_experts, ranks, rank)
        if begin == end:
            return None
        return {name: _experts(product, begin, end) for name, product in layers.items()}


class ExpertTensorParallel(ExpertParallel):
    """Each rank has a part of each expert of a `weightonly.nn.Experts`: columns of gate and up, and the rows of down
    that meet them. `ExpertParallel` has the same arguments and errors.

    I, the size between the products, is cut as `RowwiseParallel` cuts K. The bias of down is added once.

    Raises:
        ValueError: with the next I that works, a cut that would leave groups that `gemm` does not take, and down layers
            in act-order: their rows meet columns of all ranks.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # of all ranks
        >>> parallelize_module = torch.distributed.tensor.parallel.parallelize_module
        >>> products = wo.nn.GroupedLinear(4, 256, 1024), wo.nn.GroupedLinear(4, 512, 256)
        >>> experts = parallelize_module(wo.nn.Experts(*products, wo.Gate("silu")), mesh, ExpertTensorParallel())
        >>> experts.is_cut_inside
        True
    """

    def _first(self, module: Experts, ranks: int, rank: int) -> int:
        return 0

    def _cut(self, module: Experts, layers: dict[str, Product], ranks: int, rank: int) -> dict[str, Product] | None:
        down, inner = layers["down_proj"], module.down_proj.in_features
        if down.operand.perm is not None:
            raise ValueError("module: expected down_proj without act-order, whose rows would meet columns of all ranks")
        check_rows(inner, down.operand.group_rows, ranks)
        begin, end = chunk(inner, ranks, rank)
        if begin == end:
            return None
        (first,) = layers.keys() - {"down_proj"}
        columns = [(begin, end)]
        if module.between.has_gate:
            columns = columns_of(2 * inner, (inner, inner), ranks, rank)
        bias = down.bias if rank == 0 or down.bias is None else torch.zeros_like(down.bias)
        part = Product(cut_rows(down.operand, begin, end), bias)
        return {first: cut_columns(layers[first], columns), "down_proj": part}


def _experts(whole: Product, begin: int, end: int) -> Product:
    w, bias = whole.operand, whole.bias
    scales, zeros, perm, bias = (None if t is None else t[begin:end].clone() for t in (w.scales, w.zeros, w.perm, bias))
    assert scales is not None
    packed = w.packed[begin:end]
    packed = PackedWeight(packed.data.clone(), **packed.fields)  # not to keep the others alive
    return Product(LooseWeight(packed, scales, zeros, perm), bias)
