"""ColwiseParallel and RowwiseParallel: torch's styles of the same names, for packed layers, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from ..nn.grouped import GroupedLinear
from ..nn.linear import Linear
from .exchange import Exchange
from .linear import ColwiseLinear, ParallelLinear, RowwiseLinear


class ColwiseParallel(TorchColwiseParallel):
    """Cuts a `weightonly.nn.Linear` along N: each rank computes some columns of y.

    A weight is cut as by torch.chunk: ceil(N / ranks) columns for each rank but the last ones, which have fewer or
    none. Any N works. Bytes are cut where they lie if the columns begin and end at multiples of 64, 32 for some layouts
    of int8; else the columns are packed anew. Where `parallelize_module` has a src_data_rank (0 by default), tensors
    come from that rank; None takes each rank's own, without a word to others.

    Other modules are cut as torch's ColwiseParallel does.

    Args:
        input_layouts: the layout of x where it is no DTensor: Replicate() (the default), or Shard(d), with Shard(1) for
            sequence parallelism.
        output_layouts: the layout of y: Shard(-1) (the default), Replicate() or Shard(d).
        use_local_output: whether y is a torch.Tensor, this rank's; else a DTensor.
        parts: the columns of each of the layers that are fused into one, such as (n_q, n_k, n_v): each is cut, and a
            rank has its columns of each side by side. None: it is one layer. It needs output_layouts=Shard(-1) and
            use_local_output=True, as no placement describes such an order.

    Raises:
        ValueError: naming the argument, for parts that do not add up to N or that another layout is asked for, and for
            a layer that is cut already.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # of all ranks
        >>> parallelize_module = torch.distributed.tensor.parallel.parallelize_module
        >>> up = parallelize_module(wo.nn.Linear(512, 1024), mesh, ColwiseParallel())
        >>> up.ranges
        [(0, 1024)]
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        parts: Sequence[int] | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.parts = None if parts is None else tuple(parts)
        if self.parts is not None and (self.output_layouts[0] != Shard(-1) or not use_local_output):
            raise ValueError(
                "output_layouts: expected Shard(-1) with use_local_output=True for a layer of several parts, got "
                f"{self.output_layouts[0]} with use_local_output={use_local_output}"
            )

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, Linear):
            return super()._apply(module, device_mesh)
        _prepare(module, device_mesh, self.src_data_rank)
        exchange = Exchange(device_mesh, self.input_layouts[0], self.output_layouts[0], self.use_local_output)
        ColwiseLinear.convert(module, exchange, self.parts)
        return module


class RowwiseParallel(TorchRowwiseParallel):
    """Cuts a `weightonly.nn.Linear` along K: each rank computes a term of y, and the terms are added.

    A weight is cut as by torch.chunk: ceil(K / ranks) rows for each rank but the last ones, which have fewer or none.
    Rows of a rank must be multiples of 16, or lie in one group: a group that is cut becomes smaller groups with the
    same scale, and no weight changes. Scales per channel allow any cut. The bias and the activation come after the sum.
    Of a weight in act-order x is gathered, as a rank's rows meet columns of all ranks. `ColwiseParallel` says what
    src_data_rank is.

    Other modules are cut as torch's RowwiseParallel does.

    Args:
        input_layouts: the layout of x where it is no DTensor: Shard(-1) (the default), or Replicate() or Shard(d).
        output_layouts: the layout of y: Replicate() (the default), or Shard(d), with Shard(1) for sequence parallelism.
        use_local_output: whether y is a torch.Tensor, this rank's; else a DTensor.

    Raises:
        ValueError: with the next K that works, for a cut that would leave other groups, and for a layer that is cut
            already.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # of all ranks
        >>> parallelize_module = torch.distributed.tensor.parallel.parallelize_module
        >>> down = parallelize_module(wo.nn.Linear(1024, 512), mesh, RowwiseParallel())
        >>> down.rows
        (0, 1024)
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, Linear):
            return super()._apply(module, device_mesh)
        _prepare(module, device_mesh, self.src_data_rank)
        exchange = Exchange(device_mesh, self.input_layouts[0], self.output_layouts[0], self.use_local_output)
        RowwiseLinear.convert(module, exchange)
        return module


def _prepare(layer: Linear, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """The same tensors on each rank. Raises ValueError for a layer that is cut already and a mesh of several dims."""
    if isinstance(layer, ParallelLinear):
        raise ValueError(f"module: expected a layer that is not cut yet, got a {type(layer).__name__}")
    if layer._fused is not None:
        layer._fused.undo()  # the parts of it are views
    same_on_all(layer, mesh, src_data_rank)


def same_on_all(layer: Linear | GroupedLinear, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Gives every rank the tensors of one. Raises ValueError for a mesh of several dimensions."""
    if mesh.ndim != 1:
        raise ValueError(f"device_mesh: expected one dimension, got {mesh.ndim}; take one of them by its name")
    if src_data_rank is None or mesh.size() == 1 or layer.qweight.is_meta:
        return
    source = distributed.get_global_rank(mesh.get_group(), src_data_rank)
    for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
        distributed.broadcast(tensor.data, source, group=mesh.get_group())
    layer._packed = layer._operand = None
