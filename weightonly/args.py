"""GemmArgs: the arguments of one call of `gemm`, and what each of them must be.

Every check runs before anything is computed or launched. An error names the argument, what was expected, what came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from .activations import check_activation
from .heuristics import KernelConfig
from .heuristics.legal import check_kernel_group_size
from .heuristics.problem import check_group_size
from .packed import PackedWeight
from .plain import PLAIN, span_bytes
from .require import require_plain, require_tensor

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_WEIGHT_SCHEMA = (
    "Tensor data, int k, int n, str format, str layout, float[]? code, int? group_size, bool? has_zeros, bool? has_perm"
)
"""A PackedWeight: PyTorch's dispatcher knows none."""

OP_SCHEMA = (
    f"(Tensor x, {_WEIGHT_SCHEMA}, Tensor scales, Tensor? zeros, Tensor? bias, str? activation, Tensor? perm) -> Tensor"
)
"""The operator `weightonly::gemm`: see `GemmArgs.to_op`."""

GRADIENT_SCHEMA = f"(Tensor grad, {_WEIGHT_SCHEMA}, Tensor scales, Tensor? zeros, Tensor? perm) -> Tensor"
"""The operator `weightonly::gemm_gradient`: see autograd.py."""


class HasKind(Protocol):
    """What a plan asks of a QuantizedWeight."""

    _kind: object | None

    def look_again(self) -> object: ...


class GemmArgs:
    """The arguments of one call, as the caller of `gemm` gave them; `gemm` says what each of them is.

    One object travels from the call to the plan that computes it, so that they are listed once.
    """

    __slots__ = (
        "activation",
        "addresses",
        "bias",
        "config",
        "out",
        "perm",
        "qweight",
        "scales",
        "weight",
        "x",
        "x_address",
        "zeros",
    )

    x_address: int
    addresses: tuple[int, int, int, int, object]
    """Of the weight, scales, zeros and bias, 0 for None, as `Plan.holds` saw them, and that plan."""

    def __init__(
        self,
        x: torch.Tensor,
        qweight: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        out: torch.Tensor | None = None,
        config: KernelConfig | None = None,
        perm: torch.Tensor | None = None,
        weight: HasKind | None = None,
    ) -> None:
        self.weight = weight  # the QuantizedWeight that qweight, scales, zeros and perm are of
        self.x = x
        self.qweight = qweight
        self.scales = scales
        self.zeros = zeros
        self.bias = bias
        self.activation = activation
        self.out = out
        self.config = config
        self.perm = perm

    @property
    def m(self) -> int:
        """Rows of x: the product of its leading dimensions."""
        return self.x.numel() // self.qweight.k

    @property
    def group_size(self) -> int:
        """Rows of the weight that share a scale; -1 where all of them do."""
        groups = self.scales.shape[0]
        return -1 if groups == 1 else self.qweight.k // groups

    def result_shape(self) -> tuple[int, ...]:
        """[..., N]"""
        return (*self.x.shape[:-1], self.qweight.n)

    def to_op(self) -> tuple[Any, ...]:
        """The arguments of OP_SCHEMA: all but `out` and `config`, which the operator does not take."""
        w = self.qweight
        code = w.code if w.format == "code4" else None  # the format says which codebook others have
        weight = (w.data, w.k, w.n, w.format, w.layout, code, w.group_size, w.has_zeros, w.has_perm)
        return self.x, *weight, self.scales, self.zeros, self.bias, self.activation, self.perm

    @classmethod
    def from_op(cls, x: torch.Tensor, *rest: Any) -> GemmArgs:
        """The inverse of `to_op`."""
        *weight, scales, zeros, bias, activation, perm = rest
        return cls(x, PackedWeight(*weight), scales, zeros, bias, activation, perm=perm)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that the call reads, by the arguments that they belong to."""
        data = getattr(self.qweight, "data", None)
        tensors = {"x": self.x, "scales": self.scales, "zeros": self.zeros, "bias": self.bias, "perm": self.perm}
        return {name: tensor for name, tensor in (tensors | {"qweight": data}).items() if tensor is not None}

    def is_plain(self) -> bool:
        """Whether no operand is of a subclass of torch.Tensor, which PyTorch's dispatcher has to see."""
        zeros, bias, perm = self.zeros, self.bias, self.perm
        return (
            type(self.x) in PLAIN
            and type(self.scales) in PLAIN
            and type(self.qweight._data) in PLAIN
            and (zeros is None or type(zeros) in PLAIN)
            and (bias is None or type(bias) in PLAIN)
            and (perm is None or type(perm) in PLAIN)
        )

    def check_memory(self) -> None:
        """Raises TypeError or ValueError unless kernels can read every operand by its address."""
        for name, tensor in self.tensors().items():
            require_plain(name, tensor)

    def check(self) -> None:
        """Checks everything but `out`, `config` and the numbers in `perm`.

        Raises TypeError for wrong types and dtypes, ValueError for wrong shapes, devices, group sizes and activations.
        """
        x, qweight = self.x, self.qweight
        if not isinstance(qweight, PackedWeight):
            raise TypeError(
                f"qweight: expected the PackedWeight that weightonly.preprocess(q, bits) returns, "
                f"got {type(qweight).__name__}; call preprocess once, before deployment"
            )
        check_single("qweight", qweight)
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
        check_device("qweight", qweight.data, x)
        require_tensor("qweight", qweight.data)

        # A configuration says itself which groups it computes.
        check_groups = check_kernel_group_size if x.is_cuda and self.config is None else check_group_size
        check_scales("scales", self.scales, x, qweight, check_groups)
        if self.zeros is not None:
            check_zeros_fit(self.zeros, qweight)
            check_scales("zeros", self.zeros, x, qweight, check_groups)
            if self.zeros.shape != self.scales.shape:
                raise ValueError(
                    f"zeros: expected shape {list(self.scales.shape)} as scales, got {list(self.zeros.shape)}"
                )
        if self.bias is not None:
            require_tensor("bias", self.bias)
            check_like("bias", self.bias, x)
            if tuple(self.bias.shape) != (qweight.n,):
                raise ValueError(f"bias: expected shape [N] = [{qweight.n}], got {list(self.bias.shape)}")
        check_activation(self.activation)
        if self.perm is not None:
            check_perm(self.perm, qweight.k)
            check_device("perm", self.perm, x)
        check_expected(qweight, self.scales, self.zeros)
        check_perm_expected(qweight, self.perm)

    def check_result(self) -> None:
        """Checks what `out` must be for any way of writing the result to it: type, dtype, device, shape."""
        out = self.out
        require_tensor("out", out)
        assert out is not None
        check_like("out", out, self.x)
        if tuple(out.shape) != self.result_shape():
            raise ValueError(f"out: expected shape {list(self.result_shape())}, got {list(out.shape)}")
        if out.requires_grad:
            raise ValueError(
                "out: expected a tensor that requires no gradient, as none leads through it, got one that does"
            )

    def check_out(self) -> None:
        """Checks `out` for kernels that write rows to it, and that it shares no memory with an input."""
        self.check_result()
        out, shape = self.out, self.result_shape()
        assert out is not None
        require_plain("out", out)
        if out.numel() and out.stride(-1) != 1 and shape[-1] > 1:
            raise ValueError(f"out: expected elements of a row next to each other, got strides {out.stride()}")
        if len(shape) > 2 and not out.is_contiguous():
            raise ValueError(f"out: expected contiguous beyond two dimensions, got strides {out.stride()}")
        if len(shape) == 2 and shape[0] > 1 and out.stride(0) < shape[1]:
            raise ValueError(f"out: expected rows that do not overlap, got strides {out.stride()}")
        for name, tensor in self.tensors().items():
            if _overlap(out, tensor):
                raise ValueError(f"out: expected memory of its own, got a tensor that overlaps {name}")


# --- the checks of single arguments, which other functions of the library share ------------------------------


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


def check_scales(
    name: str, scales: torch.Tensor, x: torch.Tensor, qweight: PackedWeight, check_groups: Callable[[int, int], None]
) -> None:
    """Checks scales or zeros, [K / group_size, N] in the dtype of x, on its device.

    check_groups: raises ValueError for a group size and a K that are not computed there.
    """
    require_tensor(name, scales)
    check_like(name, scales, x)
    if scales.dim() != 2 or scales.shape[1] != qweight.n:
        raise ValueError(f"{name}: expected shape [K / group_size, N = {qweight.n}], got {list(scales.shape)}")
    groups = scales.shape[0]
    if groups < 1 or qweight.k % groups != 0:
        raise ValueError(
            f"{name}: expected K / group_size rows, a divisor of K = {qweight.k}, got shape {list(scales.shape)}"
        )
    try:
        check_groups(qweight.k // groups, qweight.k)
    except ValueError as error:
        raise ValueError(
            f"{name}: shape {list(scales.shape)} means a group size that is not supported: {error}; "
            "dequantize the weight, or quantize it again with groups of 32, 64 or 128"
        ) from None


def check_single(name: str, qweight: PackedWeight) -> None:
    """Raises ValueError for stacked experts."""
    if qweight.experts is not None:
        raise ValueError(
            f"{name}: expected one weight [K, N], got {qweight.experts} stacked experts; "
            f"weightonly.grouped_gemm multiplies by them, {name}[e] is one of them"
        )


def check_zeros_fit(zeros: torch.Tensor, qweight: PackedWeight) -> None:
    """Raises ValueError for zeros of codes: a codebook has no zero points."""
    if qweight.code is not None:
        raise ValueError(f"zeros: expected None for a weight of format {qweight.format}, got {type(zeros).__name__}")


def check_expected(qweight: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
    """Raises ValueError for scales of other groups than the weight was packed for, and forgotten or needless zeros."""
    if qweight.group_size is not None:
        rows = qweight.k if qweight.group_size == -1 else qweight.group_size
        if scales.shape[-2] != qweight.k // rows:
            raise ValueError(
                f"scales: expected {qweight.k // rows} rows for groups of {rows}, as qweight was packed for, "
                f"got shape {list(scales.shape)}"
            )
    if qweight.has_zeros is not None and qweight.has_zeros != (zeros is not None):
        expected = f"shape {list(scales.shape)}" if qweight.has_zeros else "None"
        got = "None" if zeros is None else f"shape {list(zeros.shape)}"
        raise ValueError(f"zeros: expected {expected}, as qweight was packed for, got {got}")


def check_perm_expected(qweight: PackedWeight, perm: torch.Tensor | None) -> None:
    """Raises ValueError for a forgotten or a needless permutation."""
    if qweight.has_perm is not None and qweight.has_perm != (perm is not None):
        expected = "the act-order permutation" if qweight.has_perm else "None"
        got = "None" if perm is None else "a permutation"
        raise ValueError(f"perm: expected {expected}, as qweight was packed for, got {got}")


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


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share memory: False for separate memory and for columns side by side."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    begin, other = a.data_ptr(), b.data_ptr()
    if begin + span_bytes(a) <= other or other + span_bytes(b) <= begin:
        return False
    if a.dim() != 2 or b.dim() != 2:
        return True
    # Rows at the same distance: they meet only where their columns do.
    pitch = a.stride(0) * a.element_size()
    if pitch == 0 or pitch != b.stride(0) * b.element_size():
        return True
    offset = (other - begin) % pitch
    return offset < span_bytes(a[0]) or offset + span_bytes(b[0]) > pitch
