"""What the products cost, for torch.utils.flop_counter.FlopCounterMode."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_PRODUCTS = ("gemm", "gemm_fp8", "gemm_in_fp8", "gemm_gradient", "grouped_gemm", "grouped_gemm_gradient")


def tell_counters() -> None:
    """Tells the modes that count what the operators cost.

    Each copied PyTorch's table when it was made. To write to that table, an import of weightonly would import Triton.
    """
    for mode in _get_current_dispatch_mode_stack():
        table = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if table is not None:
            table.update({getattr(torch.ops.weightonly, name): _flops for name in _PRODUCTS})
            table[torch.ops.weightonly.fused_experts] = _flops_of_layer


def _flops(rows: torch.Tensor, data: torch.Tensor, k: int, n: int, *others: Any, **result: Any) -> int:
    """Of a product, or of its gradient. rows: [..., K], or [..., N]."""
    return 2 * math.prod(rows.shape[:-1]) * k * n


def _flops_of_layer(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    data: torch.Tensor,
    k: int,
    n: int,
    *others: Any,
    **result: Any,
) -> int:
    """Of both products of a layer of experts, the first one from k to n. ids: [M, top_k]."""
    *_, has_gate, _x_scales = others
    inner = n // 2 if has_gate else n
    return 2 * ids.numel() * k * (n + inner)
