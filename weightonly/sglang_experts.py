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

    group_size: rows that share a scale; -1: all of them.
    words, scales, zeros: how their names end, behind w13_ and w2_: int32 [E, ...], [E, groups, N] and int32 [E, ...].
    values: words of one expert -> uint8 [K, N]; zero_values: words of its zero points -> uint8 [groups, N].
    """

    bits: int
    group_size: int
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
        config = kernel.quant_config
        return cls._by_words(config.weight_bits, config.group_size, "qweight", "scales", None)

    @classmethod
    def awq(cls, kernel: Any) -> Stored:
        """kernel: AWQMoEKernel."""
        config = kernel.quant_config
        return cls(config.weight_bits, config.group_size, "qweight", "scales", "qzeros", unpack_awq, unpack_awq)

    @classmethod
    def compressed_tensors(cls, scheme: Any) -> Stored:
        """scheme: CompressedTensorsWNA16MoE. Raises ValueError for act-order."""
        if scheme.actorder == "group":
            raise ValueError("experts in act-order")
        zeros = None if scheme.sym else "weight_zero_point"
        return cls._by_words(scheme.num_bits, scheme.group_size, "weight_packed", "weight_scale", zeros)

    @classmethod
    def _by_words(cls, bits: int, group_size: int, words: str, scales: str, zeros: str | None) -> Stored:
        """Words are along K, those of zero points along N."""
        return cls(
            bits,
            group_size,
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
        _, groups = self._rows_and_groups(layer, stem)
        parts = []
        for expert in range(len(words)):
            q = to_signed(self.values(words[expert]), self.bits)
            of_groups = None if zeros is None else to_signed(self.zero_values(zeros[expert, :groups]), self.bits)
            of_groups = None if of_groups is None else of_groups.to(scales.dtype)
            weight = IntWeight(q, self.bits, scales[expert, :groups], of_groups, None)
            parts.append(pack(f"{stem}, expert {expert}", weight, None, None))
        return GroupedLinear.from_parts(parts, layer.moe_runner_config.params_dtype)

    def _rows_and_groups(self, layer: Any, stem: str) -> tuple[int, int]:
        """Of a product's weight, as this rank has it. SGLang may hold more groups, behind this rank's: of GPTQ as many
        as all ranks have. Raises ValueError where the ranks cut groups: their scales are not there then."""
        k = layer.hidden_size if stem == "w13" else layer.intermediate_size_per_partition
        size = k if self.group_size == -1 else self.group_size
        held = getattr(layer, f"{stem}_{self.scales}").shape[1]
        if k % size or held < k // size:
            raise ValueError(f"{stem}: {k} rows and {held} scales of a column, in groups of {size}")
        return k, k // size

    def check(self, layer: Any) -> None:
        """Raises ValueError for a layer that is left to SGLang, with the reason."""
        config = layer.moe_runner_config
        refused = {
            **_refused_of_ranks(layer),
            "router weights on the input": config.apply_router_weight_on_input,
            "results that are not summed": config.no_combine,
            "a gate with alpha": config.gemm1_alpha is not None,
            "fused shared experts": bool(config.num_fused_shared_experts),
        }
        for what, is_asked in refused.items():
            if is_asked:
                raise ValueError(f"experts with {what}")
        _gate(config)
        for stem in _STEMS:
            experts, _, n = getattr(layer, f"{stem}_{self.scales}").shape
            k, groups = self._rows_and_groups(layer, stem)
            product = k, n, f"int{self.bits}", k // groups, self.zeros is not None, config.params_dtype
            reason = why_not(*product)
            if reason is None and why_many_launches(*product, experts, config.top_k or 1):
                reason = "no kernel has all experts in one launch"
            if reason is not None:
                raise ValueError(f"{stem}: {reason}")


def _refused_of_ranks(layer: Any) -> dict[str, bool]:
    """What layers of expert parallelism may ask for. Its ids must be those of this rank's experts, -1 of others."""
    if layer.moe_ep_size == 1:
        return {}
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatcher
    from sglang.srt.runtime_context import get_exec

    dispatcher = layer.dispatcher
    return {
        "all-to-all kernels": not isinstance(dispatcher, StandardDispatcher),
        "ids of all ranks' experts": getattr(dispatcher, "skip_local_expert_mapping", False),
        "load balancing of experts (EPLB)": get_exec().moe.enable_eplb,  # moves what was loaded between ranks
    }


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
        self.has_experts_elsewhere = layer.moe_ep_size > 1

    def forward(self, x: torch.Tensor, topk: Any) -> torch.Tensor:
        """x [M, H] -> [M, H], the sum over this rank's experts. topk: SGLang's TopKOutput."""
        if hasattr(topk, "topk_weights"):
            ids, weights = topk.topk_ids, topk.topk_weights
        elif self.has_experts_elsewhere:  # SGLang does not map these ids to this rank
            raise ValueError("topk: expected topk_ids and topk_weights with expert parallelism, got both in one tensor")
        else:  # int32: the expert in the upper half, the bits of a bf16 number in the lower one
            ids, weights = topk.packed_topk_ids >> 16, (topk.packed_topk_ids << 16).view(torch.float32)
        if self.factor is not None:
            weights = weights * self.factor
        return fused_experts(x, self.w13.operand, self.w2.operand, ids, weights, self.gate)
