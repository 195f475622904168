"""What the arguments of `gemm` must be. Every check runs before anything is computed or launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cpu import ACTIVATIONS, check_zeros_fit
from .heuristics.problem import check_group_size
from .packed import PackedWeight

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one with layout {value.layout}")


def require_dtype(name: str, value: object, dtypes: Sequence[torch.dtype]) -> None:
    """Raises TypeError unless `value` is a dense tensor of one of the dtypes."""
    require_tensor(name, value)
    assert isinstance(value, torch.Tensor)
    if value.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise TypeError(f"{name}: expected dtype {expected}, got {value.dtype}")


def check_operands(
    x: torch.Tensor,
    qweight: PackedWeight,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    perm: torch.Tensor | None = None,
) -> int:
    """Checks all but `out` and the numbers in `perm`; returns the group size in elements of K (-1: per channel)."""
    if not isinstance(qweight, PackedWeight):
        raise TypeError(
            f"qweight: expected the PackedWeight that weightonly.preprocess(q, bits) returns, "
            f"got {type(qweight).__name__}; call preprocess once, before deployment"
        )
    require_tensor("x", x)
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"x: expected a CPU or CUDA tensor, got one on {x.device}")
    dtypes = CPU_DTYPES if x.device.type == "cpu" else CUDA_DTYPES
    if x.dtype not in dtypes:
        expected = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"x: expected dtype {expected} on {x.device.type}, got {x.dtype}")
    if x.dim() < 1:
        raise ValueError("x: expected shape [..., K], got a scalar")
    if x.shape[-1] != qweight.k:
        raise ValueError(f"x: expected [..., K] with K = {qweight.k} as in qweight, got shape {list(x.shape)}")
    if qweight.device != x.device:
        raise ValueError(f"qweight: expected on {x.device} as x is, got {qweight.device}")

    group_size = check_scales("scales", scales, x, qweight)
    if zeros is not None:
        check_zeros_fit(zeros, qweight)
        check_scales("zeros", zeros, x, qweight)
        if zeros.shape != scales.shape:
            raise ValueError(f"zeros: expected shape {list(scales.shape)} as scales, got {list(zeros.shape)}")
    if bias is not None:
        require_tensor("bias", bias)
        check_like("bias", bias, x)
        if tuple(bias.shape) != (qweight.n,):
            raise ValueError(f"bias: expected shape [N] = [{qweight.n}], got {list(bias.shape)}")
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        names = ", ".join(repr(a) for a in (None, *ACTIVATIONS))
        raise ValueError(f"activation: expected one of {names}, got {activation!r}")
    if perm is not None:
        check_perm(perm, qweight.k)
        check_device("perm", perm, x)
    return group_size


def check_perm(perm: torch.Tensor, k: int) -> None:
    """Checks dtype and shape of a permutation of K, not its numbers."""
    require_tensor("perm", perm)
    if perm.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"perm: expected dtype torch.int32 or torch.int64, got {perm.dtype}")
    if tuple(perm.shape) != (k,):
        raise ValueError(f"perm: expected shape [K] = [{k}], got {list(perm.shape)}")


def check_perm_range(perm: torch.Tensor) -> None:
    """Raises ValueError unless the numbers of `perm` are within it; for the CPU, as it waits for them."""
    low, high = torch.stack(torch.aminmax(perm)).tolist()
    if low < 0 or high >= len(perm):
        raise ValueError(f"perm: expected a permutation of 0..{len(perm) - 1}, got numbers in {low}..{high}")


def check_like(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    if tensor.dtype != x.dtype:
        raise TypeError(f"{name}: expected dtype {x.dtype} as x has, got {tensor.dtype}")
    check_device(name, tensor, x)


def check_device(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name}: expected on {x.device} as x is, got {tensor.device}")


def check_one_device(**tensors: torch.Tensor) -> None:
    """Raises ValueError unless all are on the device of the first, which is a CPU or a CUDA GPU."""
    (first, where), *others = ((name, tensor.device) for name, tensor in tensors.items())
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"{first}: expected a CPU or CUDA tensor, got one on {where}")
    for name, device in others:
        if device != where:
            raise ValueError(f"{name}: expected on {where} as {first} is, got {device}")


def check_scales(name: str, scales: torch.Tensor, x: torch.Tensor, qweight: PackedWeight) -> int:
    """Checks scales or zeros [groups, N]; returns the group size, -1 for one group."""
    require_tensor(name, scales)
    check_like(name, scales, x)
    if scales.dim() != 2 or scales.shape[1] != qweight.n:
        raise ValueError(f"{name}: expected shape [K / group_size, N = {qweight.n}], got {list(scales.shape)}")
    groups = scales.shape[0]
    if groups < 1 or qweight.k % groups != 0:
        raise ValueError(
            f"{name}: expected K / group_size rows, a divisor of K = {qweight.k}, got shape {list(scales.shape)}"
        )
    if groups == 1:
        return -1
    group_size = qweight.k // groups
    try:
        check_group_size(group_size, qweight.k)
    except ValueError as error:
        raise ValueError(
            f"{name}: shape {list(scales.shape)} means a group size that is not supported: {error}"
        ) from None
    return group_size


def check_result(out: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Checks what `out` must be for any way of writing the result to it."""
    require_tensor("out", out)
    check_like("out", out, x)
    if tuple(out.shape) != shape:
        raise ValueError(f"out: expected shape {list(shape)}, got {list(out.shape)}")


def check_out(
    out: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...], inputs: dict[str, torch.Tensor | None]
) -> None:
    """Checks `out` for kernels that write rows to it, and that it shares no memory with an input."""
    check_result(out, x, shape)
    if out.numel() and out.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"out: expected elements of a row next to each other, got strides {out.stride()}")
    if len(shape) > 2 and not out.is_contiguous():
        raise ValueError(f"out: expected contiguous beyond two dimensions, got strides {out.stride()}")
    if len(shape) == 2 and shape[0] > 1 and out.stride(0) < shape[1]:
        raise ValueError(f"out: expected rows that do not overlap, got strides {out.stride()}")
    for name, tensor in inputs.items():
        if tensor is not None and _overlap(out, tensor):
            raise ValueError(f"out: expected memory of its own, got a tensor that overlaps {name}")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share memory: False for separate memory and for columns side by side."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    begin, other = a.data_ptr(), b.data_ptr()
    if begin + _span_bytes(a) <= other or other + _span_bytes(b) <= begin:
        return False
    if a.dim() != 2 or b.dim() != 2:
        return True
    # Rows at the same distance: they meet only where their columns do.
    pitch = a.stride(0) * a.element_size()
    if pitch == 0 or pitch != b.stride(0) * b.element_size():
        return True
    offset = (other - begin) % pitch
    return offset < _span_bytes(a[0]) or offset + _span_bytes(b[0]) > pitch


def _span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
