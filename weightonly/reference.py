"""The library's equation in plain PyTorch: `gemm` on the CPU, `dequantize` on any device.

Both work on blocks of columns: the whole weight is never held in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .activations import activation_of, in_pieces
from .codebooks import codebook_on
from .layout import column_step
from .packed import PackedWeight
from .packing import unpack_columns

_BLOCK_ELEMS = 1 << 22
"""Weights in a block of columns: 16 MiB in fp32, enough for an efficient matmul."""


@torch.no_grad()  # else a bias that is trained makes a graph of what is written to `out`
def gemm(
    x: torch.Tensor,
    qweight: PackedWeight,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """y = act(x_scales * (x @ w) + bias) on the CPU: computed in fp32, rounded once to the dtype of scales.

    x: [..., K] float16, bfloat16 or float32, or float8_e4m3fn where there are x_scales [...]; scales, zeros:
    [K / g, N]; bias: [N]; out: [..., N] in the dtype of scales, or None for a new tensor. Returns y [..., N], which is
    `out` if given. `weightonly.gemm` has checked the arguments.

    invariant: whether the bits of a row of y depend on that row of x alone.
    """
    if out is None:
        out = torch.empty(*x.shape[:-1], qweight.n, dtype=scales.dtype, device=x.device)
    x32 = x.detach().to(torch.float32).reshape(-1, qweight.k)  # (M, K)
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):  # it would multiply in 16 bits
            return gemm(x, qweight, scales, zeros, bias, activation, out, x_scales, invariant)
    for begin, end in column_blocks(qweight):
        w = dequantize_columns(qweight, scales, zeros, begin, end)
        y = _in_order(x32, w) if invariant else x32 @ w  # (M, block)
        of_block = None if bias is None else bias[begin:end]
        finish(y, of_block, activation, x_scales, out[..., begin:end], invariant)
    return out


def finish(
    y: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    x_scales: torch.Tensor | None,
    out: torch.Tensor,
    invariant: bool,
) -> None:
    """out [..., n] = act(x_scales * y + bias), y [M, n] being fp32; y is overwritten."""
    if x_scales is not None:
        y *= x_scales.reshape(-1, 1)
    if bias is not None:
        y += bias
    activate = activation_of(activation).function
    out.copy_((in_pieces(activate, y) if invariant else activate(y)).view(out.shape))


def _in_order(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w, added in the order of K: a matrix product's order depends on the number of rows, and on threads."""
    y, part = x.new_zeros(x.shape[0], w.shape[1]), x.new_empty(x.shape[0], w.shape[1])
    for k, row in enumerate(w):
        y += torch.mul(x[:, k : k + 1], row, out=part)
    return y


def dequantize(qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
    """`weightonly.dequantize` by PyTorch's operators: [K, N] in the dtype of scales. The arguments are checked."""
    w = torch.empty(qweight.k, qweight.n, dtype=scales.dtype, device=qweight.device)
    for begin, end in column_blocks(qweight):
        w[:, begin:end] = dequantize_columns(qweight, scales, zeros, begin, end)
    return w


def column_blocks(qweight: PackedWeight) -> Iterator[tuple[int, int]]:
    """(begin, end) over the N columns; each `begin` is one at which `unpack_columns` can start."""
    least = column_step(qweight.bits, qweight.layout)
    step = max(least, _BLOCK_ELEMS // qweight.k_padded // least * least)
    for begin in range(0, qweight.n, step):
        yield begin, min(begin + step, qweight.n)


def dequantize_columns(
    qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None, begin: int, end: int
) -> torch.Tensor:
    """Columns begin..end of the weight, fp32 [K, end - begin]."""
    q, code = unpack_columns(qweight, begin, end), qweight.code
    groups = scales.shape[0]
    w = q.to(torch.float32) if code is None else codebook_on(code, q.device, torch.float32)[q.int()]
    w = w.unflatten(0, (groups, qweight.k // groups))  # (G, g, block)
    if zeros is not None:
        w -= zeros[:, begin:end].unsqueeze(1)
    w *= scales[:, begin:end].unsqueeze(1)
    return w.flatten(0, 1)
