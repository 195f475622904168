"""What multiplies by stacked experts. To compare another library, subclass `ExpertsProvider` and `register` an
instance, in a module that --plugin names."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

import weightonly as wo
from weightonly.heuristics.problem import FORMATS

from ..providers import LayerProvider, Registry, nbytes
from ..weights import dtype_name
from .routing import Routing
from .weights import ExpertWeights, combined, gated


class ExpertsProvider(LayerProvider):
    """A way to multiply rows, sorted by expert, by the weights of their experts. holds: providers of the same share
    their operands, which are copied for rotation once."""

    holds: str

    @abstractmethod
    def prepare(self, weights: ExpertWeights) -> Any:
        """The weights in its own form, which copy.deepcopy copies; not timed."""

    @abstractmethod
    def weight_bytes(self, operand: Any) -> int:
        """Of all experts: weights and scales."""

    @abstractmethod
    def product(self, operand: Any, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """x [T, K], sorted by expert -> [T, N]."""

    def layer(self, w13: Any, w2: Any, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """x [M, H] -> [M, H], the rows sorted already: a gather, two products and what lies between, a sum."""
        rows = x[routing.order // routing.ids.shape[1]]  # [T, H]
        return combined(self.product(w2, gated(self.product(w13, rows, routing)), routing), routing)


@dataclass(frozen=True)
class PackedExperts:
    """Stacked experts as `grouped_gemm` takes them."""

    qweight: wo.PackedWeight
    scales: torch.Tensor  # [E, K / g, N]


class _OfPacked(ExpertsProvider):
    holds = "packed"

    def prepare(self, weights: ExpertWeights) -> PackedExperts:
        return PackedExperts(wo.preprocess(weights.q, FORMATS[weights.format], format=weights.format), weights.scales)

    def weight_bytes(self, operand: PackedExperts) -> int:
        return nbytes(operand.qweight.data, operand.scales)


class Grouped(_OfPacked):
    """`wo.grouped_gemm` and `wo.fused_experts`, which sorts the rows itself."""

    name = "ours"

    def product(self, operand: PackedExperts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return wo.grouped_gemm(x, operand.qweight, operand.scales, routing.offs)

    def layer(self, w13: PackedExperts, w2: PackedExperts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        first, second = (w13.qweight, w13.scales), (w2.qweight, w2.scales)
        return wo.fused_experts(x, first, second, routing.ids, routing.weights)


class OneGemmEach(_OfPacked):
    """One `wo.gemm` for each expert that has rows; the host knows how many, and does not wait for the GPU."""

    name = "gemms"

    def label(self, device: torch.device, dtype: torch.dtype) -> str:
        return "one gemm each"

    def product(self, operand: PackedExperts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        y = x.new_empty(x.shape[0], operand.qweight.n)
        begin = 0
        for expert, count in enumerate(routing.counts):
            if count:
                rows = slice(begin, begin + count)
                wo.gemm(x[rows], operand.qweight[expert], operand.scales[expert], out=y[rows])
                begin += count
        return y


class TorchGrouped(ExpertsProvider):
    """torch's grouped product of dense bf16 weights: `torch.nn.functional.grouped_mm`, `torch._grouped_mm` before."""

    name = "grouped_mm"
    dtypes = (torch.bfloat16,)
    holds = "dense"

    def label(self, device: torch.device, dtype: torch.dtype) -> str:
        return f"torch grouped_mm {dtype_name(dtype)}"

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if _grouped_mm() is None:
            return f"torch {torch.__version__} has no grouped_mm"
        return super().unavailable(device, dtype)

    def prepare(self, weights: ExpertWeights) -> torch.Tensor:
        return weights.dense

    def weight_bytes(self, operand: torch.Tensor) -> int:
        return nbytes(operand)

    def product(self, operand: torch.Tensor, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        multiply: Any = _grouped_mm()
        y: torch.Tensor = multiply(x, operand, offs=routing.offs)
        return y


def _grouped_mm() -> Any:
    return getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


EXPERTS_PROVIDERS: Registry[ExpertsProvider] = Registry()

register = EXPERTS_PROVIDERS.register

for _provider in (Grouped(), OneGemmEach(), TorchGrouped()):
    register(_provider)
