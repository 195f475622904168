"""PackedLayer: what Linear and GroupedLinear have in common, a packed weight and its operands in a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling

from ..activation_dtype import check_layer_layout
from ..dense import check_weight_dtype, default_group_size, resolve_group_size
from ..device import check_visible
from ..heuristics.arch import Arch
from ..heuristics.problem import CODE_FORMATS, check_group_size
from ..layout import LAYOUTS, TILED_FP8, padded_shape, stored_shape
from ..packed import PackedWeight, format_bits
from ..packing import repack, resolve_layout
from ..quantize_codes import check_scales_as
from ..require import require_bool, require_dtype, require_int
from ..update import Update, check_dense, checked
from ..weight import LooseWeight, QuantizedWeight
from .weight_view import WeightView, refusal

Layer = TypeVar("Layer", bound="PackedLayer")


class PackedLayer(torch.nn.Module):
    """One weight, or those of `_experts` experts, whose tensors then begin with a dimension of that size.

    The docstrings of the layers say what their tensors and attributes are.
    """

    qweight: torch.nn.Parameter
    scales: torch.nn.Parameter
    zeros: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None
    perm: torch.Tensor | None
    codebook: torch.Tensor | None
    activations: str | None = None
    """ "fp8" where x becomes E4M3, else None."""
    is_conv1d = False
    """Whether it is in the place of a Conv1D of transformers, whose `weight` is [K, N]."""
    locked: str | None = None
    """Why the weight must not be replaced now, or None."""
    reads: str | None = None
    """Of a layer that transformers is loading, for `weightonly.parallel`: which of its tensors are cut."""
    _is_hf_initialized = True  # transformers has nothing to fill
    _view: WeightView | None = None

    @property
    def _experts(self) -> int | None:
        """How many experts are stacked; None: the tensors have no dimension of experts."""
        return None

    @property
    def _order(self) -> torch.Tensor | None:
        """The permutation that the product applies to x."""
        return self.perm

    def _title(self) -> str:
        """What errors begin with."""
        return type(self).__name__

    def _set_operand(self, w: QuantizedWeight, bias: torch.Tensor | None) -> None:
        """Another weight and bias, in place of those that the layer has."""
        check_group_size(w.group_rows, w.k)
        self.in_features = w.k
        self.out_features = w.n
        self.format = w.format
        self.group_size = w.group_size
        self.symmetric = w.zeros is None
        self.scales = frozen(w.scales)
        self.register_parameter("zeros", None if w.zeros is None else frozen(w.zeros))
        self.register_parameter("bias", None if bias is None else frozen(bias))
        self.register_buffer("perm", w.perm)
        self.register_buffer("codebook", codebook_bits(w.packed) if self.format == "code4" else None)
        self._scales_from = (self.scales, self.scales.dtype)
        self._hold(w.packed)

    def _hold(self, weight: PackedWeight) -> None:
        """The bytes of a weight of the same shape and format, and their layout."""
        self.layout = weight.layout
        self.qweight = frozen(weight.data.view(self._stored_shape(self.layout)))
        self._packed: PackedWeight | None = self._pack(weight.data, weight.code)
        self._packed_from = (self.qweight, self.codebook)
        self._operand: QuantizedWeight | None = None
        self._view = None

    @property
    def packed(self) -> PackedWeight:
        """The Parameter `qweight` with its metadata, as the product takes it: on the same memory, in one dimension."""
        qweight, codebook = self._packed_from
        packed = self._packed
        if packed is None or qweight is not self.qweight or codebook is not self.codebook:
            # Replaced, by .to(), load_state_dict(assign=True), or hooks that bring weights to a device.
            code = None
            if self.codebook is not None:
                code = (0.0,) * 16 if self.codebook.is_meta else self.codebook.view(torch.float32).tolist()
            packed = self._pack(self.qweight.detach().view(-1), code)
            if not is_compiling():
                self._packed = packed
                self._packed_from = (self.qweight, self.codebook)
        return packed

    @property
    def operand(self) -> QuantizedWeight:
        """What the layer multiplies by: its tensors as one object, checked where one of them is another."""
        packed, scales, zeros, perm = self.packed, self.scales, self.zeros, self._order
        w = self._operand
        if (
            w is None
            or w._packed is not packed
            or w._scales is not scales
            or w._zeros is not zeros
            or w._perm is not perm
        ):
            if is_compiling():  # the operator checks it
                return LooseWeight(packed, scales, zeros, perm)
            self._operand = w = QuantizedWeight(packed, scales, zeros, perm)
        return w

    @property
    def weight(self) -> torch.Tensor:
        """The weight as torch.nn.Linear has it, [N, K], of experts [E, N, K]; [K, N] in the place of a Conv1D.

        For code that looks at its dtype, device and shape, which costs nothing. What reads its numbers gets them
        dequantized, each time anew, and no gradient. Writing to it is a RuntimeError, but for `mul_` and `div_` by a
        number, which change the scales; `update_` takes another weight. It is no Parameter and in no state
        dict. Under torch.compile it is the dequantized weight, a tensor of its own.
        """
        is_traced = is_compiling()
        view, tensors = self._view, (*self._parameters.values(), *self._buffers.values())
        if not is_traced and view is not None and all(map(is_, view.tensors, tensors)):
            return view
        k, n, scales = self.in_features, self.out_features, self.scales
        shape = (*(() if self._experts is None else (self._experts,)), *((k, n) if self.is_conv1d else (n, k)))
        if self.reads is not None or not self.qweight.numel():
            # transformers fills what it takes for a new weight: of a layer that is being loaded nothing is new.
            device = scales.device if self.reads is None else "meta"
            return torch.empty(shape, dtype=scales.dtype, device=device)
        if is_traced:
            w = self.operand._dense(scales.dtype)
            return w if self.is_conv1d else w.mT.contiguous()
        self._view = view = WeightView.of(self.operand, self._title(), shape, not self.is_conv1d)
        view.tensors = tensors
        return view

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise RuntimeError(f"{self._title()}: weight: {refusal(self.format)}, got another {type(value).__name__}")
        super().__setattr__(name, value)

    def _pack(self, data: torch.Tensor, code: Sequence[float] | None) -> PackedWeight:
        return PackedWeight(
            data,
            self.in_features,
            self.out_features,
            self.format,
            self.layout,
            code if self.format == "code4" else None,
            self.group_size,
            self.zeros is not None,
            self._order is not None,
            experts=self._experts,
        )

    def repack(self: Layer, arch: Arch | None = None) -> Layer:
        """Brings the weight, in place, into the byte order of another GPU's kernels; see `weightonly.repack`.

        Args:
            arch: the GPU to pack for; None: that of the device of the weight.

        Returns:
            This layer.

        Raises:
            ValueError: with activations "fp8" for other GPUs than Hopper.
        """
        packed = self.packed
        weight = repack(packed, layout=resolve_layout(self.format, arch, None, packed.device, self.activations))
        if weight is not self.packed:
            self._hold(weight)
            self._forget()
        return self

    @torch.no_grad()
    def update_(self: Layer, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Layer:
        """Quantizes another weight into the memory of this one; see `QuantizedWeight.update_`.

        Raises what `QuantizedWeight.update_` raises.

        Args:
            weight: dense, of the shape that the attribute `weight` has: [N, K] as torch.nn.Linear, of experts [E, N,
                K]; in the place of a Conv1D [K, N]. On any device.
            bias: [N], of experts [E, N]; None: the bias stays as it is.

        Returns:
            This layer. Errors begin with its name.

        Raises:
            ValueError: a bias of another shape, with NaN or Inf, or of a layer without one.
            RuntimeError: a layer with merged adapters of PEFT.
        """
        for write in self.checked_update(weight, bias):
            write()
        return self

    def checked_update(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        name: str = "weight",
        *,
        is_transposed: bool | None = None,
        in_turns: bool = False,
    ) -> list[Callable[[], object]]:
        """What `update_` then calls; nothing is written yet.

        Args:
            name: of `weight` in errors.
            is_transposed: whether it is [K, N]; None: as the attribute `weight` is.
            in_turns: whether its even columns, and those of the bias, are the first half of those of this layer.
        """
        is_transposed = self.is_conv1d if is_transposed is None else is_transposed
        try:
            if self.locked is not None:
                raise RuntimeError(f"{name}: {self.locked}")
            check_dense(name, weight)
            *lead, k, n = self._dense_shape
            shape = [*lead, *((k, n) if is_transposed else (n, k))]
            if list(weight.shape) != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {list(weight.shape)}")
            w = weight.detach() if is_transposed else weight.detach().mT
            writes: list[Callable[[], object]] = [update.write for update in self._updates(name, w, in_turns)]
            return writes if bias is None else [*writes, self._bias_update(bias, in_turns)]
        except (TypeError, ValueError, RuntimeError) as error:
            if type(error) not in (TypeError, ValueError, RuntimeError):
                raise
            raise type(error)(f"{self._title()}: {error}") from error

    def _updates(self, name: str, w: torch.Tensor, in_turns: bool = False) -> list[Update]:
        """w: [K, N] or [E, K, N], of the whole layer."""
        return checked(name, self.operand, w, self.compute_dtype, in_turns)

    def _bias_update(self, bias: torch.Tensor, in_turns: bool = False) -> Callable[[], object]:
        mine = self.bias
        if mine is None:
            raise ValueError("bias: expected None for a layer without a bias, got a tensor")
        check_dense("bias", bias)
        if bias.shape != mine.shape:
            raise ValueError(f"bias: expected shape {list(mine.shape)}, got {list(bias.shape)}")
        new = bias.detach().to(self.compute_dtype)
        new = torch.cat([new[..., ::2], new[..., 1::2]], -1) if in_turns else new
        if not bool(new.isfinite().all()):
            raise ValueError(f"bias: expected finite values in {new.dtype}, got NaN or Inf")
        return lambda: mine.copy_(new)

    @property
    def _dense_shape(self) -> list[int]:
        """[K, N] or [E, K, N] of the whole layer."""
        return [*([] if self._experts is None else [self._experts]), self.in_features, self.out_features]

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the product computes in: the dtype of the scales, unless something casts them in place, as PEFT's
        prepare_model_for_kbit_training does; then that from before."""
        scales, dtype = self._scales_from
        return dtype if scales is self.scales else self.scales.dtype

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """w [K, N], of experts [E, K, N], its rows in the order of x: computed in fp32 and rounded once to `dtype`.

        Args:
            dtype: float16, bfloat16 or float32; None: that of the scales.
        """
        return self.operand.dequantize(dtype)

    def extra_repr(self) -> str:
        activations = "" if self.activations is None else f", activations={self.activations}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.format}, "
            f"group_size={self.in_features // self.scales.shape[-2]}, "
            f"symmetric={self.zeros is None}, act_order={self.perm is not None}, layout={self.layout}{activations}"
        )

    def _stored_shape(self, layout: str) -> tuple[int, ...]:
        bits = format_bits(self.format)
        rows = stored_shape(*padded_shape(self.in_features, self.out_features, bits, layout), bits, layout)
        return rows if self._experts is None else (self._experts, *rows)

    def _check_layout(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raises ValueError for bytes in another layout, which nothing but their shape tells."""
        expected = tuple(self.qweight.shape)
        shape = tuple(getattr(state_dict.get(f"{prefix}qweight"), "shape", expected))
        if shape == expected:
            return
        for layout in (*LAYOUTS, *([TILED_FP8] if format_bits(self.format) == 4 else [])):
            if shape == self._stored_shape(layout):
                check_layer_layout(f"state dict: {prefix}qweight", layout, self.activations)
                raise ValueError(
                    f"state dict: {prefix}qweight: expected {list(expected)} for layout {self.layout!r}, got "
                    f"{list(shape)}, the shape of layout {layout!r}; make the layer for a GPU of that layout (arch=), "
                    "load the state, and call repack"
                )

    def _apply(self: Layer, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Layer:
        dtype = fn(self.scales[:0]).dtype
        if dtype == torch.float64:
            raise TypeError(f"{self._title()}: expected float16, bfloat16 or float32, got float64 to convert to")
        try:
            check_scales_as(self.scales, dtype, self.format)
        except ValueError as error:
            raise ValueError(f"{self._title()}: {error}") from error
        super()._apply(fn, recurse)
        # Of the bytes from before: they would stay alive, and stay in use.
        self._scales_from = (self.scales, self.scales.dtype)
        self._forget()
        return self

    def _forget(self) -> None:
        """What was made of tensors that are others now."""
        self._packed = self._operand = self._view = None

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles hold the bytes once: as a Parameter.
        return self.__dict__ | {"_packed": None, "_packed_from": (None, None), "_operand": None, "_view": None}


def zero_weight(
    format: str,
    k: int,
    n: int,
    group_size: int | None,
    symmetric: bool,
    dtype: torch.dtype,
    device: torch.device | str | None,
    arch: Arch | None,
    act_order: bool,
    experts: int | None = None,
    activations: str | None = None,
) -> QuantizedWeight:
    """A weight of zeros, its rows in order, for a layer to load a state dict into; its arguments are those of `Linear`,
    and it raises what that raises."""
    require_int("in_features", k, least=1)
    require_int("out_features", n, least=1)
    require_bool("symmetric", symmetric)
    require_bool("act_order", act_order)
    check_weight_dtype(dtype)
    device = None if device is None else check_visible(device)
    bits = format_bits(format)
    if format in CODE_FORMATS and not symmetric:
        raise ValueError(f"symmetric: expected True for {format}, got False")
    layout = resolve_layout(format, arch, device=device, activations=activations)
    k_padded, n_padded = padded_shape(k, n, bits, layout)
    groups = k // resolve_group_size(default_group_size(format) if group_size is None else group_size, k)
    if k_padded * n_padded >= 1 << 63:
        raise ValueError(f"in_features, out_features: expected sizes that memory can have, got {k} and {n}")
    lead = () if experts is None else (experts,)
    count = 1 if experts is None else experts
    data = torch.zeros(count * k_padded * n_padded * bits // 8, dtype=torch.uint8, device=device)
    code = (0.0,) * 16 if format == "code4" else None
    packed = PackedWeight(data, k, n, format, layout, code, experts=experts)
    scales = torch.zeros(*lead, groups, n, dtype=dtype, device=device)
    order = torch.arange(k, dtype=torch.int32, device=device) if act_order else None
    perm = order if order is None or experts is None else order.repeat(experts, 1)
    return LooseWeight(packed, scales, None if symmetric else torch.zeros_like(scales), perm)


def check_bias(bias: torch.Tensor | None, w: QuantizedWeight) -> None:
    """Raises TypeError or ValueError unless it is [N], of stacked experts [E, N], in the dtype of the scales."""
    if bias is None:
        return
    require_dtype("bias", bias, (w.dtype,))
    expected = [w.n] if w.experts is None else [w.experts, w.n]
    if list(bias.shape) != expected:
        raise ValueError(f"bias: expected {expected}, got {list(bias.shape)}")


def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    """`tensor` itself if it is a Parameter, else a frozen Parameter on its memory."""
    return tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor, requires_grad=False)


def codebook_bits(weight: PackedWeight) -> torch.Tensor:
    """int32 [16]: no conversion of a module's dtype rounds integers."""
    return torch.tensor(weight.code, dtype=torch.float32).view(torch.int32).to(weight.device)
