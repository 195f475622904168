"""The equation of the library in plain PyTorch: `dequantize` on any device, `gemm` on the CPU.

Both work through the weight in blocks of columns, so that a packed weight is never held in fp32 as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .code_tables import table_on
from .layout import column_step
from .packed import PackedWeight, unpack_columns
from .quantize import WEIGHT_DTYPES

_BLOCK_ELEMS = 1 << 22
"""Weights per block of columns: 16 MiB in fp32, a size at which the matmul of a block is efficient."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda y: y,
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,  # the erf form
    "silu": torch.nn.functional.silu,
}
"""Name -> function of an fp32 tensor. `activation=None` is "identity"."""


def gemm(
    x: torch.Tensor,
    qweight: PackedWeight,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = act(x @ w + bias) on the CPU: fp32 throughout, rounded once to the dtype of x.

    x: [..., K] float16, bfloat16 or float32; scales, zeros: [K / g, N]; bias: [N]; out: [..., N] in the dtype
    of x, sharing no memory with an input, or None for a new tensor. Returns y, which is `out` if given. The
    arguments are those that `weightonly.gemm` has checked already.
    """
    if out is None:
        out = torch.empty(*x.shape[:-1], qweight.n, dtype=x.dtype, device=x.device)
    x32 = x.detach().to(torch.float32).reshape(-1, qweight.k)  # (M, K)
    act = ACTIVATIONS[activation or "identity"]
    for begin, end in _column_blocks(qweight):
        y = x32 @ _dequantize_columns(qweight, scales, zeros, begin, end)  # (M, block)
        if bias is not None:
            y += bias[begin:end]
        out[..., begin:end] = act(y).view(*x.shape[:-1], end - begin)
    return out


def dequantize(qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
    """`weightonly.dequantize` on any device, for arguments that it has checked."""
    w = torch.empty(qweight.k, qweight.n, dtype=scales.dtype, device=qweight.device)
    for begin, end in _column_blocks(qweight):
        w[:, begin:end] = _dequantize_columns(qweight, scales, zeros, begin, end)
    return w


def check_dequantize(qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
    """Checks the arguments of `weightonly.dequantize`."""
    if not isinstance(qweight, PackedWeight):
        raise TypeError(f"qweight: expected a PackedWeight (see preprocess), got {type(qweight).__name__}")
    _check_group_tensor("scales", scales, qweight)
    if zeros is not None:
        check_zeros_fit(zeros, qweight)
        _check_group_tensor("zeros", zeros, qweight)
        if zeros.dtype != scales.dtype:
            raise TypeError(f"zeros: expected dtype {scales.dtype} as scales have, got {zeros.dtype}")
        if zeros.shape != scales.shape:
            raise ValueError(f"zeros: expected shape {list(scales.shape)} as scales, got {list(zeros.shape)}")


def check_zeros_fit(zeros: torch.Tensor, qweight: PackedWeight) -> None:
    """Raises ValueError for zeros of a code table."""
    if qweight.code is not None:
        raise ValueError(f"zeros: expected None for a weight of format {qweight.format}, got {type(zeros).__name__}")


def _check_group_tensor(name: str, tensor: torch.Tensor, qweight: PackedWeight) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in WEIGHT_DTYPES:
        raise TypeError(
            f"{name}: expected a tensor of one of {', '.join(map(str, WEIGHT_DTYPES))}, "
            f"got {getattr(tensor, 'dtype', type(tensor).__name__)}"
        )
    if tensor.dim() != 2 or tensor.shape[1] != qweight.n or not tensor.shape[0] or qweight.k % tensor.shape[0]:
        raise ValueError(
            f"{name}: expected [K / g, N] for K={qweight.k}, N={qweight.n}, got shape {list(tensor.shape)}"
        )
    if tensor.device != qweight.device:
        raise ValueError(f"{name}: expected on {qweight.device} as qweight is, got {tensor.device}")


def _column_blocks(qweight: PackedWeight) -> Iterator[tuple[int, int]]:
    """(begin, end) over the N real columns; `begin` at a border where the layout can be cut."""
    border = column_step(qweight.bits, qweight.layout)
    step = max(border, _BLOCK_ELEMS // qweight.k_padded // border * border)
    for begin in range(0, qweight.n, step):
        yield begin, min(begin + step, qweight.n)


def _dequantize_columns(
    qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None, begin: int, end: int
) -> torch.Tensor:
    """Columns begin..end of the weight, fp32 [K, end - begin]."""
    q, code = unpack_columns(qweight, begin, end), qweight.code
    groups = scales.shape[0]
    w = q.to(torch.float32) if code is None else table_on(code, q.device, torch.float32)[q.int()]
    w = w.unflatten(0, (groups, qweight.k // groups))  # (G, g, block)
    if zeros is not None:
        w -= zeros[:, begin:end].unsqueeze(1)
    w *= scales[:, begin:end].unsqueeze(1)
    return w.flatten(0, 1)
