"""GemmArgs and GroupedArgs: the arguments of one call of `gemm` and `grouped_gemm`, and what each of them must be.

Every check runs before anything is computed or launched. An error names the argument, what was expected, what came.
"""

from __future__ import annotations

from typing import Any

import torch

from . import invariance
from .activations import check_activation
from .heuristics import KernelConfig
from .heuristics.legal import check_kernel_group_size
from .heuristics.problem import check_group_size
from .layout import TILED_FP8
from .packed import PackedWeight
from .plain import PLAIN, span_bytes
from .require import require_dtype, require_plain, require_tensor
from .weight import NO_PLAN, LooseWeight, QuantizedWeight, check_device, check_dtype, check_packed

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_WEIGHT_SCHEMA = (
    "Tensor data, int k, int n, str format, str layout, float[]? code, int? group_size, bool? has_zeros, bool? has_perm"
)
"""A PackedWeight: PyTorch's dispatcher knows none."""

WEIGHT_SCHEMA = f"{_WEIGHT_SCHEMA}, Tensor scales, Tensor? zeros"
"""A QuantizedWeight but for its perm and its number of experts: see `weight_to_op`."""

OP_SCHEMA = f"(Tensor x, {WEIGHT_SCHEMA}, Tensor? bias, str? activation, Tensor? perm, bool invariant) -> Tensor"
"""The operator `weightonly::gemm`: see `GemmArgs.to_op`."""

GRADIENT_SCHEMA = f"(Tensor grad, {WEIGHT_SCHEMA}, Tensor? perm) -> Tensor"
"""The operator `weightonly::gemm_gradient`: see autograd.py."""


def weight_to_op(w: QuantizedWeight) -> tuple[Any, ...]:
    """The arguments of WEIGHT_SCHEMA."""
    packed = w._packed
    code = packed.code if packed.format == "code4" else None  # the format says which codebook others have
    fields = (packed.k, packed.n, packed.format, packed.layout, code)
    return packed.data, *fields, packed.group_size, packed.has_zeros, packed.has_perm, w._scales, w._zeros


class GemmArgs:
    """The arguments of one call, as the caller of `gemm` gave them; `gemm` says what each of them is.

    One object travels from the call to the plan that computes it, so that they are listed once.
    """

    __slots__ = ("activation", "addresses", "bias", "config", "invariant", "out", "weight", "x", "x_address")

    x_address: int
    addresses: tuple[int, int, int, int, object]
    """Of the weight, scales, zeros and bias, 0 for None, as `Plan.holds` saw them, and that plan."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: QuantizedWeight,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        out: torch.Tensor | None = None,
        config: KernelConfig | None = None,
    ) -> None:
        self.x = x
        self.weight = weight
        self.bias = bias
        self.activation = activation
        self.out = out
        self.config = config
        self.invariant = invariance._on  # a call keeps the mode that it began with

    @property
    def m(self) -> int:
        """Rows of x: the product of its leading dimensions."""
        return self.x.numel() // self.weight.k

    def result_shape(self) -> tuple[int, ...]:
        """[..., N]"""
        return (*self.x.shape[:-1], self.weight.n)

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.x.dtype

    def new_result(self) -> torch.Tensor:
        """[..., N], its numbers not set."""
        return self.x.new_empty(self.result_shape())

    def key(self) -> tuple[object, ...]:
        """All that the checks and the plan of a call depend on. Loose tensors have their parts here, not in a `kind`.

        Their devices are left to `Plan.holds`, which looks at them once for a set of addresses. Raises AttributeError,
        TypeError or RuntimeError where an argument is not of its type; the checks say which.
        """
        x, w, bias = self.x, self.weight, self.bias
        if type(x) not in PLAIN or x.is_neg() or (bias is not None and (type(bias) not in PLAIN or bias.is_neg())):
            raise TypeError(NO_PLAN)
        device: object = x.get_device()
        if device == -1:  # a string is hashed in less time than a torch.device
            device = "cpu" if x.is_cpu else x.device
        of_bias = None if bias is None else (bias.shape, bias.is_contiguous() or bias.stride(), bias.dtype)
        strides = x.is_contiguous() or x.stride()
        if type(w) is not LooseWeight:
            kind = w._kind or w.look_again()
            return kind, x.shape, strides, x.dtype, device, of_bias, self.activation, self.config, self.invariant
        packed, scales, zeros, perm = w._packed, w._scales, w._zeros, w._perm
        if (
            type(scales) not in PLAIN
            or scales.is_neg()
            or (zeros is not None and (type(zeros) not in PLAIN or zeros.is_neg()))
            or (perm is not None and type(perm) not in PLAIN)
        ):
            raise TypeError(NO_PLAN)
        return (
            packed._kind or packed.kind,
            x.shape,
            strides,
            x.dtype,
            device,
            of_bias,
            self.activation,
            self.config,
            self.invariant,
            scales.shape,
            scales.is_contiguous() or scales.stride(),
            scales.dtype,
            None if zeros is None else (zeros.shape, zeros.is_contiguous() or zeros.stride(), zeros.dtype),
            None if perm is None else (perm.shape, perm.is_contiguous() or perm.stride(), perm.dtype, perm.device),
        )

    def to_op(self) -> tuple[Any, ...]:
        """The arguments of OP_SCHEMA: all but `out` and `config`, which the operator does not take."""
        return self.x, *weight_to_op(self.weight), self.bias, self.activation, self.weight._perm, self.invariant

    @classmethod
    def from_op(cls, x: torch.Tensor, *rest: Any) -> GemmArgs:
        """The inverse of `to_op`."""
        *weight, scales, zeros, bias, activation, perm, invariant = rest
        args = cls(x, LooseWeight(PackedWeight(*weight), scales, zeros, perm), bias, activation)
        args.invariant = invariant
        return args

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the call reads, by the arguments that they belong to."""
        w = self.weight
        data = getattr(w._packed, "data", None)
        named = {"x": self.x, "scales": w._scales, "zeros": w._zeros, "bias": self.bias, "perm": w._perm}
        return {name: tensor for name, tensor in (named | {"qweight": data}).items() if tensor is not None}

    def is_plain(self) -> bool:
        """Whether no operand is of a subclass of torch.Tensor, which PyTorch's dispatcher has to see."""
        w = self.weight
        return (
            type(self.x) in PLAIN
            and type(w._scales) in PLAIN
            and type(w._packed._data) in PLAIN
            and (w._zeros is None or type(w._zeros) in PLAIN)
            and (self.bias is None or type(self.bias) in PLAIN)
            and (w._perm is None or type(w._perm) in PLAIN)
        )

    def check_memory(self) -> None:
        """Raises TypeError or ValueError unless kernels can read every operand by its address."""
        for name, tensor in self.tensors().items():
            require_plain(name, tensor)

    def check(self) -> None:
        """Checks everything but `out`, `config` and the numbers in `perm`.

        Raises TypeError for wrong types and dtypes, ValueError for wrong shapes, devices, group sizes and activations.
        """
        x, w, bias = self.x, self.weight, self.bias
        packed = w._packed
        check_packed("qweight", packed)
        self.check_stack(packed)
        require_tensor("x", x)
        if x.device.type not in ("cpu", "cuda"):
            raise ValueError(f"x: expected a CPU or CUDA tensor, got one on {x.device}")
        self.check_x()
        if x.dim() < 1:
            raise ValueError("x: expected shape [..., K], got a scalar")
        if x.shape[-1] != packed.k:
            raise ValueError(f"x: expected [..., K] with K = {packed.k} as in qweight, got shape {list(x.shape)}")
        self.check_weight()
        # A configuration says itself which groups it computes.
        check_groups = check_kernel_group_size if x.is_cuda and self.config is None else check_group_size
        try:
            check_groups(w.group_rows, packed.k)
        except ValueError as error:
            raise ValueError(
                f"scales: shape {list(w._scales.shape)} means a group size that is not supported: {error}; "
                "dequantize the weight, or quantize it again with groups of 32, 64 or 128"
            ) from None
        if bias is not None:
            self.check_like("bias", bias)
            names, sizes = ("[N]", [packed.n]) if packed.experts is None else ("[E, N]", [packed.experts, packed.n])
            if list(bias.shape) != sizes:
                raise ValueError(f"bias: expected shape {names} = {sizes}, got {list(bias.shape)}")
        check_activation(self.activation)

    def check_x(self) -> None:
        """Raises TypeError for an x of another dtype than its device computes."""
        x = self.x
        dtypes = CPU_DTYPES if x.device.type == "cpu" else CUDA_DTYPES
        if x.dtype not in dtypes:
            expected = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            cure = "; x_scales= takes its scales" if x.dtype == torch.float8_e4m3fn else ""
            raise TypeError(f"x: expected dtype {expected} on {x.device.type}, got {x.dtype}{cure}")

    def check_weight(self) -> None:
        """Raises what `QuantizedWeight.check` does, and ValueError for a layout that is for another x."""
        x, layout = self.x, self.weight._packed.layout
        self.weight.check("qweight", x)
        if x.is_cuda and layout == TILED_FP8:
            raise ValueError(
                f"qweight: packed in layout {layout!r} for x in float8_e4m3fn, but x is {x.dtype}; "
                "repack(qweight, layout='tiled'), or quantize_activations(x)"
            )

    def check_like(self, name: str, tensor: torch.Tensor) -> None:
        """Raises TypeError or ValueError unless a tensor has the dtype of the result, and the device."""
        check_dtype(name, tensor, self.x.dtype, "x has")
        check_device(name, tensor, "x", self.x)

    def check_stack(self, packed: PackedWeight) -> None:
        """Raises ValueError for stacked experts, of which `grouped_gemm` has rows."""
        check_single("qweight", packed)

    def check_result(self) -> None:
        """Checks what `out` must be for any way of writing the result to it: type, dtype, device, shape."""
        out = self.out
        assert out is not None
        self.check_like("out", out)
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


class GroupedArgs(GemmArgs):
    """The arguments of one call of `grouped_gemm`, which says what each of them is.

    has_rest: whether rows of no expert may follow the rows of the last one; their results are zeros.
    """

    __slots__ = ("has_rest", "offs")

    def __init__(
        self,
        x: torch.Tensor,
        weight: QuantizedWeight,
        offs: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        out: torch.Tensor | None = None,
        config: KernelConfig | None = None,
        has_rest: bool = False,
    ) -> None:
        super().__init__(x, weight, bias, activation, out, config)
        self.offs = offs
        self.has_rest = has_rest

    def key(self) -> tuple[object, ...]:
        offs = self.offs
        return *super().key(), self.has_rest, offs.shape, offs.dtype, offs.device

    def to_op(self) -> tuple[Any, ...]:
        """The arguments of the operator `weightonly::grouped_gemm`: all but `out`."""
        return *super().to_op(), self.weight.experts, self.offs, self.has_rest

    @classmethod
    def from_op(cls, x: torch.Tensor, *rest: Any) -> GroupedArgs:
        """The inverse of `to_op`."""
        *fields, scales, zeros, bias, activation, perm, invariant, experts, offs, has_rest = rest
        weight = LooseWeight(PackedWeight(*fields, experts=experts), scales, zeros, perm)
        args = cls(x, weight, offs, bias, activation, has_rest=has_rest)
        args.invariant = invariant
        return args

    def tensors(self) -> dict[str, torch.Tensor]:
        return super().tensors() | {"offs": self.offs}

    def is_plain(self) -> bool:
        return super().is_plain() and type(self.offs) in PLAIN

    def of_each_call(self) -> tuple[torch.Tensor, ...]:
        """Operands that `Plan.holds` does not look at."""
        return (self.offs,)

    def check(self) -> None:
        """Checks everything but `out` and the numbers in `offs` and `perm`."""
        super().check()
        x, offs, experts = self.x, self.offs, self.weight.experts
        if x.dim() != 2:
            raise ValueError(f"x: expected shape [T, K], rows sorted by expert, got {list(x.shape)}")
        if self.out is not None:
            require_tensor("out", self.out)
            if self.out.dim() != 2:
                raise ValueError(f"out: expected shape [T, N], got {list(self.out.shape)}")
        require_dtype("offs", offs, (torch.int32,))
        if tuple(offs.shape) != (experts,):
            raise ValueError(f"offs: expected shape [E] = [{experts}], got {list(offs.shape)}")
        check_device("offs", offs, "x", x)

    def check_stack(self, packed: PackedWeight) -> None:
        if packed.experts is None:
            raise ValueError(
                f"qweight: expected stacked experts, packed from q [E, K, N], got one weight {packed!r}; "
                f"gemm multiplies by it"
            )

    def of_expert(self, expert: int, begin: int, end: int) -> GemmArgs:
        """The product of rows begin..end, all of one expert."""
        bias = None if self.bias is None else self.bias[expert]
        out = None if self.out is None else self.out[begin:end]
        args = GemmArgs(self.x[begin:end], self.weight.expert(expert), bias, self.activation, out)
        args.invariant = self.invariant
        return args


# --- the checks of single arguments, which other functions of the library share ------------------------------


def check_single(name: str, qweight: PackedWeight) -> None:
    """Raises ValueError for stacked experts."""
    if qweight.experts is not None:
        raise ValueError(
            f"{name}: expected one weight [K, N], got {qweight.experts} stacked experts; "
            f"weightonly.grouped_gemm multiplies by them, {name}[e] is one of them"
        )


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
