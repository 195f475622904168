"""What a fused MoE layer of vLLM asks for: whether we have it, its gate, and what this rank holds of its experts."""

from __future__ import annotations

from typing import Any

import torch

from ..formats.groups import group_rows
from ..gate import Gate
from ..heuristics.legal import check_kernel_group_size
from .expert_tensors import ExpertTensors
from .support import is_asked_for, why_many_launches, why_not

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "situ", "swigluoai", "swigluoai_uninterleave")
_WITHOUT_GATE = ("silu", "gelu", "gelu_tanh", "relu2")
"""Values of vLLM's MoEActivation that a `Gate` computes; those without a gate have another name, "silu_no_mul"."""


def why_no_experts(layer: Any, tensors: ExpertTensors) -> str | None:
    """Why `fused_experts` cannot compute a fused MoE layer; None: it can."""
    moe = layer.moe_config
    try:
        gate = gate_of(moe)
    except ValueError as error:
        return str(error)
    parallel = moe.moe_parallel_config
    refused = {
        "LoRA": moe.is_lora_enabled,
        "load balancing of experts (EPLB)": parallel.enable_eplb,
        "all-to-all kernels (data parallelism with expert parallelism)": parallel.use_all2all_kernels,
        "router weights on the input with top_k above 1": layer.apply_router_weight_on_input and layer.top_k > 1,
        "a --moe-backend of vLLM": getattr(moe, "moe_backend", "auto") != "auto" and not is_asked_for(),
    }
    for what, is_asked in refused.items():
        if is_asked:
            return f"weightonly has no experts with {what}"
    if (moe.activation.value == "swigluoai") != tensors.alternates:
        return "activation: expected swigluoai for experts of gpt-oss, and for no others"
    inner = tensors.inner(moe)
    for stem, k, n in (("w13", moe.hidden_dim, (2 if gate.has_gate else 1) * inner), ("w2", inner, moe.hidden_dim)):
        try:
            shard = Shard(layer, tensors, stem)
        except ValueError as error:
            return f"{stem}: {error}"
        has_zeros = tensors.zeros is not None
        product = k, n, tensors.format, shard.group_size, has_zeros, moe.in_dtype
        reason = why_not(*product, tensors.activations)
        if reason is None and not is_asked_for():
            counts = int(layer.local_num_experts), int(layer.top_k)
            reason = why_many_launches(*product, *counts, tensors.activations)
        if reason is not None:
            return f"{stem}: {reason}"
    return None


def gate_of(moe: Any) -> Gate:
    """What a layer computes between its products, as apply_moe_activation of vLLM has it.

    moe: its FusedMoEConfig. Raises ValueError for what no `Gate` is.
    """
    value = moe.activation.value
    names = (*_ACTIVATIONS, *(f"{name}_no_mul" for name in _WITHOUT_GATE))
    if value not in names:
        raise ValueError(f"activation: expected one of {', '.join(names)}, got {value}")
    if value == "swigluoai":
        return Gate.of(value)
    # Older versions do not have all of these.
    limit, alpha, beta = (getattr(moe, f"swiglu_{name}", None) for name in ("limit", "alpha", "beta"))
    if value == "swigluoai_uninterleave":
        return Gate("silu", limit, alpha, shift=beta or 0.0)
    if alpha is not None or beta is not None or (limit is not None and value != "silu"):
        raise ValueError(f"activation: expected {value} without alpha, beta and limit, got {alpha}, {beta} and {limit}")
    if value == "situ":
        return Gate("situ", moe.activation_situ_linear_beta, moe.activation_situ_beta)
    return Gate(value.removesuffix("_no_mul"), limit, has_gate=not value.endswith("_no_mul"))


class Shard:
    """What this rank holds of the first product of all experts ("w13": gate beside up, or up alone) or of the second.

    k, n: of the product. parts: projections of the file that it has beside each other. full_k, full_n: of one of them.
    first_row, first_column: of that projection, where this rank's part begins.
    groups: the groups of the file that its rows are in, a range. source: int64, the group in `groups` of each of its
        own, where the rank's part cuts groups; else None. group_size: rows of its own groups.
    """

    def __init__(self, layer: Any, tensors: ExpertTensors, stem: str) -> None:
        """Raises ValueError for groups that no kernel takes. Of the pieces of a group `why_not` says it."""
        moe = layer.moe_config
        inner, parallel = tensors.inner(moe), moe.moe_parallel_config
        begin, full, hidden = inner * int(parallel.tp_rank), inner * int(parallel.tp_size), int(moe.hidden_dim)
        is_first = stem == "w13"
        self.parts = 2 if is_first and gate_of(moe).has_gate else 1
        self.k, self.n = (hidden, self.parts * inner) if is_first else (inner, hidden)
        self.full_k, self.full_n = (hidden, full) if is_first else (full, hidden)
        self.first_row, self.first_column = (0, begin) if is_first else (begin, 0)
        size = tensors.first_group if is_first else tensors.down_group
        size = self.full_k if size == -1 else size
        check_kernel_group_size(size, self.full_k)
        end = self.first_row + self.k
        self.groups = range(self.first_row // size, -(-end // size))
        self.source: torch.Tensor | None = None
        self.group_size = min(size, self.k)
        if len(self.groups) > 1:
            rows = torch.arange(self.first_row, end, device="cpu") // size - self.groups.start
            grouping = group_rows(rows, len(self.groups))
            self.group_size, self.source = grouping.rows, grouping.source
