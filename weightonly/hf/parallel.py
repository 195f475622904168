"""Tensor parallel models of transformers: `tp_plan="auto"` cuts packed layers, and each rank reads its own part.

transformers distributes a model while all of it is on the meta device, by the styles of its registry: each cuts the
Parameters of a module and wraps its `forward`. `register` puts a style around those of linear layers that makes a
`weightonly.parallel` layer out of a packed one, and leaves all others to transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import ColwiseParallel, PackedColwiseParallel, RowwiseParallel

from ..nn.linear import Linear
from ..parallel import ColwiseLinear, RowwiseLinear
from ..parallel.exchange import Exchange


def register() -> None:
    """Teaches the styles of transformers what a packed layer is."""
    for name, style in list(ALL_PARALLEL_STYLES.items()):
        if isinstance(style, (ColwiseParallel, RowwiseParallel, PackedColwiseParallel)):
            ALL_PARALLEL_STYLES.register(name, _Style(style))


class _Style:
    """A style of transformers, which packed layers do not come to."""

    def __init__(self, style: Any) -> None:
        self._style = style

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_style"], name)

    def validate_param(self, module: torch.nn.Module, param: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
        if not isinstance(module, Linear):
            self._style.validate_param(module, param, mesh, **kwargs)

    def shard_param(self, module: torch.nn.Module, param: str, mesh: DeviceMesh) -> None:
        if not isinstance(module, Linear):
            self._style.shard_param(module, param, mesh)

    def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        style = self._style
        if not isinstance(module, Linear):
            found: torch.nn.Module = style.install_forward(module, mesh)
            return found
        try:
            if isinstance(style, RowwiseParallel):
                exchange = Exchange(mesh, style.input_layouts, style.output_layouts, style.use_local_output)
                RowwiseLinear.convert(module, exchange)
            elif isinstance(style, PackedColwiseParallel):
                parts = [module.out_features // style.split_factor] * style.split_factor
                ColwiseLinear.convert(module, Exchange(mesh, Replicate(), Shard(-1), True), parts)
            else:
                layouts: tuple[Placement, Placement] = style.input_layouts, style.output_layouts
                ColwiseLinear.convert(module, Exchange(mesh, *layouts, style.use_local_output), None)
        except ValueError as error:
            raise ValueError(f"layer {module.layer_name!r}: {error}") from error
        return module
