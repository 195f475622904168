"""Activations between ranks: the layouts of torch's parallel styles, as DTensor moves them, gradients too."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .ranges import chunk
from .sums import sum_over_ranks


@dataclass(frozen=True)
class Exchange:
    """How x comes to a parallel layer and how y leaves it; torch's ColwiseParallel has the same arguments."""

    mesh: DeviceMesh
    input_layout: Placement
    output_layout: Placement
    use_local_output: bool
    group_name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_name", self.mesh.get_group().group_name)

    def enter(self, x: torch.Tensor, layout: Placement, columns: int) -> torch.Tensor:
        """This rank's tensor of x in `layout`, Replicate or Shard(-1).

        columns: of all of x. Raises ValueError for a tensor that has not this rank's columns.
        """
        if not isinstance(x, DTensor):
            self._check_columns(x, columns)
            if self.input_layout == layout and not (layout == Replicate() and _has_gradient(x)):
                return x
            x = self._spread(x, self.input_layout, columns)
        x = x.redistribute(placements=[layout])
        # Each rank has the gradient of its own columns of y: their sum is the gradient of x.
        return x.to_local(grad_placements=[Partial()] if layout == Replicate() else None)

    def leave(self, y: torch.Tensor, layout: Placement, columns: int) -> torch.Tensor:
        """y as its users want it. layout: of the y that each rank has, Shard(-1) or Partial; columns: of all."""
        return self.finish(self.redistribute(y, layout, columns))

    def redistribute(self, y: torch.Tensor, layout: Placement, columns: int) -> torch.Tensor:
        """y in the output's layout: a DTensor, or a tensor where it has this layout already and is to be local."""
        if layout == self.output_layout and self.use_local_output:
            return y
        if layout == Partial() and self.adds(y):
            return self.added(sum_over_ranks(y, self.group_name))
        return self._spread(y, layout, columns).redistribute(placements=[self.output_layout])

    def adds(self, term: torch.Tensor) -> bool:
        """Whether `sum_over_ranks` is to add terms up: on all ranks, and autograd does not look at them."""
        return self.output_layout == Replicate() and self.mesh.size() > 1 and not _has_gradient(term)

    def added(self, y: torch.Tensor) -> torch.Tensor:
        """A sum of `sum_over_ranks` as `redistribute` returns it."""
        return y if self.use_local_output else self.replicated(y)

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """What the layer returns."""
        return y.to_local() if isinstance(y, DTensor) and self.use_local_output else y

    def replicated(self, tensor: torch.Tensor) -> DTensor:
        """A tensor that every rank has, so that its gradient is the gradient of all."""
        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)

    def _spread(self, x: torch.Tensor, layout: Placement, columns: int) -> DTensor:
        if not (isinstance(layout, Shard) and layout.dim in (-1, x.dim() - 1)):
            return DTensor.from_local(x, self.mesh, [layout], run_check=False)
        shape = torch.Size((*x.shape[:-1], columns))  # said, as ranks may have fewer columns than others, or none
        stride = [1] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
        return DTensor.from_local(
            x.contiguous(), self.mesh, [Shard(x.dim() - 1)], run_check=False, shape=shape, stride=tuple(stride)
        )

    def _check_columns(self, x: torch.Tensor, columns: int) -> None:
        is_cut = isinstance(self.input_layout, Shard) and self.input_layout.dim in (-1, x.dim() - 1)
        if is_cut:
            begin, end = chunk(columns, self.mesh.size(), self.mesh.get_local_rank())
            columns = end - begin
        if x.shape[-1] != columns:
            whose = f"this rank's, as input_layouts is {self.input_layout}" if is_cut else "all of them"
            raise ValueError(f"x: expected {columns} columns, {whose}, got shape {list(x.shape)}")


def _has_gradient(x: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad
