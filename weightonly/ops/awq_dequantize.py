"""awq_dequantize: AutoAWQ's tensors as a dense weight, the op that vLLM and SGLang call before a large matmul."""

from __future__ import annotations

import torch

from ..device import check_one_device, device_arch
from ..formats.awq import awq_shape, read_awq
from ..kernels import _C, FLOAT_TYPES, MAX_M, check_kernels
from ..plain import aligned, are_plain
from ..require import require_dtype

AUTO, ARITHMETIC, BIT_TRICKS = range(3)
"""enum AwqPath of kernels/convert/conversions.h."""


@torch.no_grad()
def awq_dequantize(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> torch.Tensor:
    """`w[k, n] = scales[k // g, n] * (u[k, n] - z[k // g, n])`, exact but for one rounding to the dtype of scales.

    All are on one device, CPU or CUDA.

    SGLang's op has the same arguments, vLLM's three more: they tune its kernel, and its callers pass 0. On a GPU this
    runs on the current stream and can be captured in a CUDA graph. Tensors that are not contiguous, and scales that are
    not 16-byte aligned, are copied first. Not differentiable. Subclasses of torch.Tensor, and calls that are traced, go
    through the operator `weightonly::awq_dequantize`.

    AWQ: Lin et al., https://arxiv.org/abs/2306.00978.

    Args:
        qweight: int32 [K, N / 8]; a word holds u of eight columns in AutoAWQ's order (see `weightonly.formats.awq`).
        scales: float16 or bfloat16 [groups, N]; g = K / groups, of any size.
        qzeros: int32 [groups, N / 8], the zero points z in the same order.

    Returns:
        [K, N] in the dtype of scales, the same bits on each device.

    Raises:
        TypeError: other dtypes.
        ValueError: shapes that do not fit and for tensors on different devices.
        RuntimeError: where no kernel was built for the device.

    Examples:
        >>> words = torch.randint(2**31 - 1, (512, 96), dtype=torch.int32)
        >>> wo.awq_dequantize(words, torch.rand(4, 768).half(), words[:4]).shape
        torch.Size([512, 768])
    """
    require_dtype("qweight", qweight, [torch.int32])
    require_dtype("scales", scales, [torch.float16, torch.bfloat16])
    require_dtype("qzeros", qzeros, [torch.int32])
    awq_shape(qweight, scales, qzeros)
    check_one_device(qweight=qweight, scales=scales, qzeros=qzeros)
    return (_compute if are_plain(qweight, scales, qzeros) else _operator)(qweight, scales, qzeros)


def _compute(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> torch.Tensor:
    if qweight.is_cuda:
        return on_gpu(qweight, scales, qzeros, AUTO)
    return read_awq(qweight, scales, qzeros, group_size=len(qweight) // max(len(scales), 1)).dequantize(scales.dtype)


_operator = torch.library.custom_op(
    "weightonly::awq_dequantize",
    mutates_args=(),
    schema="(Tensor qweight, Tensor scales, Tensor qzeros) -> Tensor",
)(_compute)


@_operator.register_fake
def _result_of_op(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> torch.Tensor:
    return scales.new_empty(qweight.shape[0], 8 * qweight.shape[1])


def on_gpu(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor, path: int) -> torch.Tensor:
    """`awq_dequantize` of checked CUDA tensors. path: AUTO is BIT_TRICKS where the GPU can, as they are quicker."""
    (k, words), groups = qweight.shape, scales.shape[0]
    if max(k, 8 * words) > MAX_M:
        raise ValueError(f"qweight: expected K and N of at most {MAX_M} on a GPU, got {k} and {8 * words}")
    device = qweight.get_device()
    check_kernels(device_arch(device), "qweight")
    qweight, scales, qzeros = aligned(qweight, 4), aligned(scales, 16), aligned(qzeros, 4)
    w = torch.empty(k, 8 * words, dtype=scales.dtype, device=scales.device)
    _C.awq_dequantize(
        device=device,
        type=FLOAT_TYPES[scales.dtype],
        path=path,
        k=k,
        n=8 * words,
        groups=groups,
        qweight=qweight.data_ptr(),
        scales=scales.data_ptr(),
        qzeros=qzeros.data_ptr(),
        w=w.data_ptr(),
        stream=torch._C._cuda_getCurrentRawStream(device),
    )
    return w
