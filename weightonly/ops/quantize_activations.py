"""quantize_activations: rows of x in E4M3, each with a scale."""

from __future__ import annotations

import torch

from ..dense import WEIGHT_DTYPES, over
from ..device import check_one_device, device_arch
from ..kernels import _C, FLOAT_TYPES, MAX_M, check_kernels
from ..plain import are_plain, is_compiling
from ..require import require_dtype

LARGEST = 448.0
"""Of E4M3."""


@torch.no_grad()
def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each row of x to 8-bit floats (E4M3) with a scale of its own.

    A scale is the largest magnitude of its row / 448, or 1 where that is 0. x / x_scales is computed in fp32, rounded
    to the nearest number of E4M3, to the even one of two, and no more than 448. A row with NaN has the scale NaN, and
    NaN everywhere; one with Inf has the scale Inf, and NaN where Inf was: its products are NaN.

    On a GPU one kernel does it, on the current stream; it can be captured in a CUDA graph. Under torch.compile it is
    the operator `weightonly::quantize_activations`. Under torch.jit.trace and modes, and for subclasses of
    torch.Tensor, PyTorch's operators do it, with the same bits. Not differentiable.

    Args:
        x: [..., K] float16, bfloat16 or float32, on a CPU or a GPU, K >= 1.

    Returns:
        (x8, x_scales): float8_e4m3fn [..., K] and fp32 [...], so that x is about `x8 * x_scales[..., None]`.

    Raises:
        TypeError: wrong types and dtypes.
        ValueError: a scalar, no columns, and devices other than CPUs and CUDA GPUs.
        RuntimeError: where no kernel was built for the device.

    Examples:
        >>> x8, x_scales = wo.quantize_activations(torch.tensor([[1.0, -448.0], [0.0, 0.0]]))
        >>> x8.float() * x_scales[:, None]
        tensor([[   1., -448.],
                [   0.,    0.]])
    """
    require_dtype("x", x, WEIGHT_DTYPES)
    check_one_device(x=x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: expected shape [..., K] with K >= 1, got {list(x.shape)}")
    return _operator(x) if is_compiling() else quantize_rows(x)


def quantize_rows(x: torch.Tensor, rows_end: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_activations` of what that checks. rows_end: int32 [1], from which row on numbers are of no account."""
    if not x.is_cuda or not are_plain(x):
        return _by_operators(x)
    k = x.shape[-1]
    rows = x.reshape(-1, k)  # [M, K]
    if len(rows) > MAX_M:
        raise ValueError(f"x: expected at most {MAX_M} rows on a GPU, got {len(rows)}")
    x8 = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    x_scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if len(rows) == 0:
        return x8, x_scales
    device = x.get_device()
    check_kernels(device_arch(device))
    aligned = 16 // x.element_size()
    in_place = rows.stride(1) == 1 or k == 1
    if not in_place or rows.data_ptr() % 16 or (len(rows) > 1 and (rows.stride(0) % aligned or rows.stride(0) < k)):
        copy = rows.new_empty(len(rows), -(-k // aligned) * aligned)
        copy[:, :k] = rows
        rows = copy
    _C.quantize_activations(
        device=device,
        type=FLOAT_TYPES[x.dtype],
        m=len(rows),
        k=k,
        x=rows.data_ptr(),
        ldx=rows.stride(0),
        x8=x8.data_ptr(),
        x_scales=x_scales.data_ptr(),
        rows_end=0 if rows_end is None else rows_end.data_ptr(),
        stream=torch._C._cuda_getCurrentRawStream(device),
    )
    return x8, x_scales


# Traced by Dynamo as PyTorch's operators, its division would be one of Triton's, which rounds otherwise.
_operator = torch.library.custom_op(
    "weightonly::quantize_activations", mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)"
)(lambda x: quantize_rows(x))


@_operator.register_fake
def _results_of_op(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x8 = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return x8, x.new_empty(x.shape[:-1], dtype=torch.float32)


def _by_operators(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x32 = x.to(torch.float32)
    x_scales = over(x32.abs().amax(-1), LARGEST)
    x_scales = torch.where(x_scales == 0, 1.0, x_scales)
    x8 = (x32 / x_scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return x8.contiguous(), x_scales
