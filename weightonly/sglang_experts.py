"""Experts of SGLang by `fused_experts`: layers of GPTQ, AWQ and compressed-tensors that SGLang would give to Marlin.

Importing this module imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .experts import fused_experts
from .formats import IntWeight
from .formats.awq import unpack_awq
from .formats.records import pack
from .formats.words import to_signed, unpack_words
from .gate import Gate
from .nn.grouped import GroupedLinear
from .vllm.support import why_many_launches, why_not

_STEMS = "w13", "w2"


@dataclass(frozen=True)
class Stored:
    """How a layer of SGLang holds the tensors of its experts, once they are loaded.

    words, scales, zeros: how their names end, behind w13_ and w2_: int32 [E, ...], [E, groups, N] and int32 [E, ...].
    values: words of one expert -> uint8 [K, N]; zero_values: words of its zero points -> uint8 [groups, N].
    """

    bits: int
    words: str
    scales: str
    zeros: str | None
    values: Callable[[torch.Tensor], torch.Tensor]
    zero_values: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def gptq(cls, kernel: Any) -> Stored:
        """kernel: GPTQMarlinMoEKernel. Raises ValueError for act-order."""
        if kernel.quant_config.desc_act:
            raise ValueError("experts in act-order")
        return cls._by_words(kernel.quant_config.weight_bits, "qweight", "scales", None)

    @classmethod
    def awq(cls, kernel: Any) -> Stored:
        """kernel: AWQMoEKernel."""
        return cls(kernel.quant_config.weight_bits, "qweight", "scales", "qzeros", unpack_awq, unpack_awq)

    @classmethod
    def compressed_tensors(cls, scheme: Any) -> Stored:
        """scheme: CompressedTensorsWNA16MoE. Raises ValueError for act-order."""
        if scheme.actorder == "group":
            raise ValueError("experts in act-order")
        zeros = None if scheme.sym else "weight_zero_point"
        return cls._by_words(scheme.num_bits, "weight_packed", "weight_scale", zeros)

    @classmethod
    def _by_words(cls, bits: int, words: str, scales: str, zeros: str | None) -> Stored:
        """Words are along K, those of zero points along N."""
        return cls(
            bits,
            words,
            scales,
            zeros,
            lambda words: unpack_words(words, bits, 0),
            lambda words: unpack_words(words, bits, 1),
        )

    def product(self, layer: Any, stem: str) -> GroupedLinear:
        """One product of all experts, packed, its scales in the dtype of the layer."""
        words, scales = (getattr(layer, f"{stem}_{name}").data for name in (self.words, self.scales))
        zeros = None if self.zeros is None else getattr(layer, f"{stem}_{self.zeros}").data
        parts = []
        for expert in range(len(words)):
            q = to_signed(self.values(words[expert]), self.bits)
            of_groups = None if zeros is None else to_signed(self.zero_values(zeros[expert]), self.bits)
            of_groups = None if of_groups is None else of_groups.to(scales.dtype)
            weight = IntWeight(q, self.bits, scales[expert], of_groups, None)
            parts.append(pack(f"{stem}, expert {expert}", weight, None, None))
        return GroupedLinear.from_parts(parts, layer.moe_runner_config.params_dtype)

    def why_not(self, layer: Any) -> str | None:
        """Why the layer is left to SGLang; None: it is ours."""
        config = layer.moe_runner_config
        refused = {
            "expert parallelism": getattr(layer, "moe_ep_size", 1) > 1,
            "router weights on the input": config.apply_router_weight_on_input,
            "results that are not summed": config.no_combine,
            "a gate with alpha": config.gemm1_alpha is not None,
            "fused shared experts": bool(config.num_fused_shared_experts),
        }
        for what, is_asked in refused.items():
            if is_asked:
                return f"experts with {what}"
        try:
            _gate(config)
        except ValueError as error:
            return str(error)
        for stem in _STEMS:
            scales = getattr(layer, f"{stem}_{self.scales}")
            experts, groups, n = scales.shape
            k = layer.hidden_size if stem == "w13" else layer.intermediate_size_per_partition
            if k % groups:
                return f"{stem}: {groups} groups of {k} rows"
            product = k, n, f"int{self.bits}", k // groups, self.zeros is not None, config.params_dtype
            reason = why_not(*product)
            if reason is None and why_many_launches(*product, experts, config.top_k or 1):
                reason = "no kernel has all experts in one launch"
            if reason is not None:
                return f"{stem}: {reason}"
        return None


def _gate(config: Any) -> Gate:
    """Raises ValueError for what no `Gate` is."""
    return Gate(config.activation, config.swiglu_limit, has_gate=config.is_gated)


class Experts(torch.nn.Module):
    """The experts of one layer, and what SGLang asks of them."""

    def __init__(self, stored: Stored, layer: Any) -> None:
        super().__init__()
        self.w13, self.w2 = (stored.product(layer, stem) for stem in _STEMS)
        self.gate = _gate(layer.moe_runner_config)
        self.factor = layer.moe_runner_config.routed_scaling_factor

    def forward(self, x: torch.Tensor, topk: Any) -> torch.Tensor:
        """x [M, H] -> [M, H]. topk: SGLang's TopKOutput."""
        if hasattr(topk, "topk_weights"):
            ids, weights = topk.topk_ids, topk.topk_weights
        else:  # int32: the expert in the upper half, the bits of a bf16 number in the lower one
            ids, weights = topk.packed_topk_ids >> 16, (topk.packed_topk_ids << 16).view(torch.float32)
        if self.factor is not None:
            weights = weights * self.factor
        return fused_experts(x, self.w13.operand, self.w2.operand, ids, weights, self.gate)
