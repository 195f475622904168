"""All experts of a decoder layer of a mixture, whole, and some of them on each rank, which sends no tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import weightonly as wo
from weightonly.parallel import ExpertParallel

from ..experts.routing import Routing, topk_ids
from ..model.build import fill, transformers_config
from ..shapes import MixtureModelSizes
from .pieces import Piece


class ExpertsPiece(Piece):
    """transformers' experts with random weights; tokens choose them evenly."""

    experts: Any

    def __init__(self, sizes: MixtureModelSizes, max_m: int, dtype: torch.dtype, device: torch.device) -> None:
        """max_m: the most tokens."""
        from transformers import AutoModelForCausalLM

        torch.nn.Module.__init__(self)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(transformers_config(sizes, 1)).to(dtype)
        self.experts = model.model.layers[0].mlp.experts.requires_grad_(False)
        fill(self.experts, device, seed=0)
        ids = topk_ids("even", max_m, sizes.experts, sizes.top_k, device)
        self.choice = Routing.of(ids, sizes.experts)
        self.own_ids = ids

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, H] -> y [M, H], the sum over ranks included."""
        m = x.shape[0]
        y: torch.Tensor = self.experts(x, self.choice.ids[:m], self.choice.weights[:m])
        return y

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank's experts add to y."""
        m = x.shape[0]
        return wo.nn.Experts.forward(self.experts, x, self.own_ids[:m], self.choice.weights[:m])

    @property
    def is_packed(self) -> bool:
        return True

    @property
    def rowwise(self) -> list[str]:
        return ["down"]

    def cut(self, mesh: DeviceMesh) -> ExpertsPiece:
        parallelize_module(self.experts, mesh, ExpertParallel())
        ids = self.choice.ids - self.experts.first_expert
        self.own_ids = torch.where((ids >= 0) & (ids < self.experts.num_experts), ids, -1)
        return self
