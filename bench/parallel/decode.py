"""Decode steps of whole models: decoder layers are sharded over ranks, embeddings are on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from weightonly.parallel import ColwiseParallel, RowwiseParallel

from ..model.build import build
from ..model.decoder import Decoder
from ..model.providers import ModelProvider
from ..shapes import LLAMAS
from ..timing import CallTimer
from .pieces import only_nccl
from .ranks import Ranks
from .rows import Cell

STEP = "decode"
"""What a decode step has in the column `piece`."""

_ROOM = 64  # tokens of a cache beyond the context: what `check` writes has its place there
_COLWISE = (*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj")
_ROWWISE = ("self_attn.o_proj", "mlp.down_proj")


def cut_layer(mesh: DeviceMesh, layer: torch.nn.Module) -> None:
    """Leaves this rank's part of the linears of a decoder layer of Llama; its heads follow from them."""
    plan = {name: ColwiseParallel() for name in _COLWISE}
    parallelize_module(layer, mesh, plan | {name: RowwiseParallel() for name in _ROWWISE})


class DecodeRows:
    """A model in memory, this rank's part of it."""

    def __init__(
        self,
        model: str,
        layers: int,
        provider: ModelProvider,
        dtype: torch.dtype,
        ranks: Ranks,
        budget_ms: float,
    ) -> None:
        """Raises DoesNotFit where the part of a rank does not fit in its memory."""
        self.ranks, self.budget_ms, self.sizes = ranks, budget_ms, LLAMAS[model]
        cut = None if ranks.mesh is None else partial(cut_layer, ranks.mesh)
        self.built = build(self.sizes, layers, provider, dtype, ranks.device, cut=cut)

    def decoder(self, batch: int, length: int, compile: bool = False, backend: str = "inductor") -> Decoder:
        """With a cache of this rank's heads."""
        heads = self.sizes.kv_heads // self.ranks.count
        return Decoder(self.built.model, batch, length, compile=compile, backend=backend, kv_heads=heads)

    def row(self, cell: Cell, backend: str = "inductor") -> dict[str, Any]:
        """Times a step of cell.m lines after the logits are compared with transformers' forward on as many
        ranks. Raises RuntimeError, on all ranks, for wrong ones."""
        decoder = self.decoder(cell.m, cell.context + _ROOM, cell.compiled, backend)
        decoder.check()
        decoder.fill(cell.context)
        us = self._us(decoder)
        found = {"us": us, "tokens_s": 1e6 * cell.m / us}
        if self.ranks.mesh is not None and self.ranks.device.type == "cuda":
            with only_nccl():
                found["nccl_us"] = self._us(decoder)
        return found

    def _us(self, decoder: Decoder) -> float:
        timer = CallTimer([decoder.step], self.ranks.device, self.ranks.most)
        timer.prepare()
        timer.round(self.budget_ms)
        return self.ranks.most(timer.timing().us)
