"""Linear: `torch.nn.Linear` with a packed weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.compiler import is_compiling

from ..activation_dtype import FP8, activations_of, check_fp8_format, check_fp8_groups, check_layer_layout
from ..activations import check_activation
from ..args import check_single
from ..fp8_product import gemm_in_fp8
from ..gemm import gemm
from ..heuristics.arch import Arch
from ..layout import TILED_FP8
from ..least_squares import SearchFor
from ..packed import PackedWeight
from ..packing import format_of
from ..require import require_bool
from ..storage import parse_json
from ..update import checked
from ..weight import QuantizedWeight, check_packed, weight_of
from .base import PackedLayer, check_bias, codebook_bits, frozen, zero_weight
from .recipe import Recipe

METADATA = "weightonly.packed"
"""Key of a state dict's metadata for each layer: the fields of its weight. Files of safetensors do not keep it."""


class Linear(PackedLayer):
    """`y = act(x[..., perm] @ w + bias)` with a packed weight: x [..., in_features] -> y [..., out_features].

    The weight here is w [K, N] = [in_features, out_features], the transpose of `torch.nn.Linear.weight`, which the
    attribute `weight` shows to code that looks for it. All Parameters are frozen. Plain attributes are the arguments,
    `layout`, `layer_name`, the name in the model, which errors of `forward` begin with, or None, and `reads`, of a
    layer that is being loaded, for `weightonly.parallel`.

    With activations "fp8" the layer computes `gemm` of what `quantize_activations(x)` returns: each row of x is rounded
    to E4M3 by a scale of its own. Gradients of x are those of x @ w. The weight is symmetric int4, in layout
    "tiled_fp8" for Hopper, or "cpu", with the same numbers. None: x is multiplied as it is.

    The state dict holds the tensors alone. It loads into a layer that was made with the same arguments, for a GPU of
    the same layout: a state of another layout has another shape and is refused, unless its metadata says what it is.
    State dicts of earlier versions, with one-dimensional bytes and an `_extra_state`, load as well.

    `.half()`, `.bfloat16()` and `.float()` convert scales, zeros and bias, and with them the dtype of x that the module
    takes; `.double()` is an error. Under torch.autocast x is cast to the dtype of the scales. The bytes keep their
    layout when the module moves; `repack` changes it. Where something casts the Parameters themselves, one by one, as
    PEFT's prepare_model_for_kbit_training does, the module computes in the dtype from before and returns that of x.

    Attributes:
        qweight: Parameter, uint8, the bytes of a PackedWeight as a matrix: [N / 64, (K / 64) * block_bytes] for
            "tiled", N and K padded to multiples of 64; the other layouts are in `layout.stored_shape`.
        scales: Parameter, [K / g, N].
        zeros: Parameter, like scales, or None.
        bias: Parameter, [N], or None.
        perm: buffer, int32 or int64 [K], the act-order permutation, or None.
        codebook: buffer, int32 [16], the bits of the fp32 numbers of a "code4" weight; None for other formats.

    Examples:
        >>> layer = wo.nn.Linear.from_linear(torch.nn.Linear(512, 768), format="int4", group_size=64)
        >>> layer(torch.randn(4, 512)).shape
        torch.Size([4, 768])
    """

    _fused: Any = None
    """The layers that this one computes one product with, a `fuse.Fused`, or None."""
    _columns = (0, 0)
    """Its columns of that product."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bits: int | None = None,
        group_size: int | None = None,
        symmetric: bool = True,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
        arch: Arch | None = None,
        activation: str | None = None,
        format: str | None = None,
        act_order: bool = False,
        activations: str | None = None,
    ) -> None:
        """A layer of zeros, to load a state dict into.

        Args:
            in_features: K.
            out_features: N.
            bias: whether there is one.
            bits: as for `from_linear`.
            group_size: as for `from_linear`. 128 for "code4".
            symmetric: as for `from_linear`.
            dtype: of scales, bias and x.
            device: where the tensors are; None: PyTorch's default.
            arch: as for `from_linear`.
            activation: as for `from_linear`.
            format: as for `from_linear`.
            act_order: whether there is a `perm`; it is the identity until one is loaded. The codebook of "code4" is
                zeros until one is loaded.
            activations: as for `from_linear`.

        Raises:
            ValueError: unknown `bits`, format, activation, activations or arch, a group size that `gemm` does not take,
                zero points of a code format, an arch whose GPU does not read code formats, and weights or an arch that
                activations "fp8" do not go with.
        """
        require_bool("bias", bias)
        activations = activations_of(activations)
        if activations is not None:
            check_fp8_format(format_of(bits, format), symmetric)
        w = zero_weight(
            format_of(bits, format),
            in_features,
            out_features,
            group_size,
            symmetric,
            dtype,
            device,
            arch,
            act_order,
            activations=activations,
        )
        bias_zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self._adopt(w, bias_zeros, activation, activations)

    def _adopt(
        self, w: QuantizedWeight, bias: torch.Tensor | None, activation: str | None, activations: str | None = None
    ) -> None:
        super().__init__()
        check_activation(activation)
        if activations is not None:
            check_fp8_format(w.format, w.zeros is None)
            check_fp8_groups(w.group_rows, w.k)
        check_layer_layout("weight", w.packed.layout, activations)
        self.activation = activation
        self.activations = activations
        self.layer_name: str | None = None
        self._set_operand(w, bias)

    @classmethod
    def from_quantized(
        cls,
        weight: PackedWeight | QuantizedWeight,
        scales: torch.Tensor | None = None,
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        perm: torch.Tensor | None = None,
        activations: str | None = None,
    ) -> Linear:
        """A layer on tensors that exist already, all on one device. They are used as they are, without a copy.

        Args:
            weight: a PackedWeight [K, N]; or a QuantizedWeight, which has all but the bias.
            scales: [K / g, N].
            zeros: like scales, or None.
            bias: [N] or None.
            activation: as for `from_linear`.
            perm: int32 or int64 [K], the order of the weight's rows (see `gemm`), or None.
            activations: "fp8" is that of a weight in layout "tiled_fp8" in any case.

        Raises:
            TypeError: a weight that is not packed or a perm of another dtype.
            ValueError: shapes that do not fit, zeros of a code format, a group size that `gemm` does not take, what the
                weight was not packed for, and with activations "fp8" for other weights than those take.
        """
        activations = activations_of(activations)
        w = weight_of(weight, scales, zeros, perm)
        check_packed("weight", w.packed)
        check_single("weight", w.packed)
        w.check("weight")
        check_bias(bias, w)
        layer = cls.__new__(cls)
        layer._adopt(w, bias, activation, FP8 if w.packed.layout == TILED_FP8 else activations)
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        bits: int | None = None,
        group_size: int | None = None,
        symmetric: bool = True,
        dtype: torch.dtype | None = None,
        arch: Arch | None = None,
        activation: str | None = None,
        format: str | None = None,
        search: SearchFor = True,
        activations: str | None = None,
    ) -> Linear:
        """Quantize and pack the weight of `linear`, on its device.

        Raises what `quantize` and `preprocess` raise.

        Args:
            linear: a torch.nn.Linear.
            bits: 4 or 8, another way to say "int4" or "int8".
            group_size: rows that share a scale: -1, 16, 32, a multiple of 64, or K; for "nf4" and "fp4" a power of two.
                The default is 128, for "nf4" and "fp4" 64; "mxfp4" has 32, "nvfp4" 16.
            symmetric: as for `quantize`.
            dtype: of scales, bias and x; None: that of the weight.
            arch: the GPU to pack for; None: that of the weight's device (see `preprocess`).
            activation: applied after the bias: None, "relu", "gelu" (the erf form) or "silu".
            format: "int4" (the default), "int8", "nf4", "fp4", "mxfp4", "nvfp4" or "fp8".
            search: as for `quantize`.
            activations: None, or "fp8": see the class.

        Raises:
            TypeError: a module that is no torch.nn.Linear.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        check_activation(activation)
        recipe = Recipe.of(bits, format, group_size, symmetric, dtype, arch, search, activations)
        layer = cls.from_weight(linear.weight.detach().t(), linear.bias, recipe, activation)
        return layer.train(linear.training)

    @classmethod
    def from_weight(
        cls, w: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, activation: str | None = None
    ) -> Linear:
        """Quantize and pack a weight w [K, N], with a bias [N] or None; of a weight on meta a layer on meta."""
        dtype = w.dtype if recipe.dtype is None else recipe.dtype
        if w.is_meta:
            recipe.check_k(w.shape[0])
            k, n = w.shape
            return cls(
                k,
                n,
                bias=bias is not None,
                format=recipe.format,
                group_size=recipe.group_size,
                symmetric=recipe.symmetric,
                dtype=dtype,
                device="meta",
                arch=recipe.arch,
                activation=activation,
                activations=recipe.activations,
            )
        # A copy, so that training the original on does not change this layer.
        bias = None if bias is None else bias.detach().to(dtype, copy=True)
        return cls.from_quantized(recipe.quantize(w), bias=bias, activation=activation, activations=recipe.activations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> y [..., out_features], both in the dtype of scales.

        Raises what `gemm` raises; the message begins with the name of the layer.
        """
        if is_compiling():
            return self._gemm(x)
        try:
            return self._gemm(x)
        except (TypeError, ValueError, RuntimeError) as error:
            if type(error) not in (TypeError, ValueError, RuntimeError):
                raise  # one with attributes of its own, such as that of a full memory
            raise type(error)(f"{self._title()}: {error}") from error

    def _forget(self) -> None:
        super()._forget()
        if self._fused is not None:
            self._fused.fit_again()

    def _gemm(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused is not None and isinstance(x, torch.Tensor):
            y: torch.Tensor | None = self._fused.product(self, x)
            if y is not None:
                return y
        return self._product(x, self.bias, self.activation)

    def _multiply(
        self, x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, activation: str | None = None
    ) -> torch.Tensor:
        product = gemm if self.activations is None else gemm_in_fp8
        return product(x, w, bias=bias, activation=activation)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
        w, dtype = self.operand, self.compute_dtype
        if dtype == w.dtype or not isinstance(x, torch.Tensor):
            return self._multiply(x, w, bias, activation)
        # PEFT's prepare_model_for_kbit_training makes each 16-bit Parameter fp32, which kernels do not take.
        bias = None if bias is None else bias.to(dtype)
        return self._multiply(x.to(dtype), w.with_dtype(dtype), bias, activation).to(x.dtype)

    def _title(self) -> str:
        name = "without a name" if self.layer_name is None else repr(self.layer_name)
        return f"layer {name} (weightonly.nn.Linear {self.in_features} -> {self.out_features})"

    @torch.no_grad()
    def requantize(self, w: torch.Tensor) -> None:
        """`update_` of w [K, N], which of a layer that is cut among ranks is this rank's part."""
        for update in checked("w", self.operand, w, self.compute_dtype):
            update.write()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"

    # --- state ----------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            fields = {"k": self.in_features, "n": self.out_features, "format": self.format, "layout": self.layout}
            metadata.setdefault(prefix[:-1], {})[METADATA] = fields

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        fields = local_metadata.get(METADATA)
        extra_state = state_dict.get(f"{prefix}_extra_state")
        if extra_state is not None:  # written by an earlier version: one-dimensional bytes
            fields = _old_fields(f"{prefix}_extra_state", extra_state)
            state_dict = {name: value for name, value in state_dict.items() if name != f"{prefix}_extra_state"}
        if fields is not None:
            state_dict = self._adopt_layout(fields, state_dict, prefix)
        else:
            self._check_layout(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        self._forget()

    def _adopt_layout(self, fields: Mapping[str, Any], state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Takes over the layout of the bytes that are being loaded. Returns the state with bytes as a matrix.

        fields: what describes them. Raises ValueError for those of another shape or format, an unknown layout, a bad
        codebook, and bytes that do not fit.
        """
        expected = {"k": self.in_features, "n": self.out_features, "format": self.format}
        got = {name: fields.get(name) for name in expected}
        if got != expected:
            raise ValueError(f"state dict: expected a weight with {expected}, got {got}")
        state = dict(state_dict)
        layout = str(fields.get("layout"))
        check_layer_layout("state dict", layout, self.activations)
        rows = self._stored_shape(layout)
        data = state.get(f"{prefix}qweight")
        if isinstance(data, torch.Tensor):
            state[f"{prefix}qweight"] = weight = data.view(rows) if data.numel() == math.prod(rows) else data
            code = fields.get("code")
            if weight.dtype == torch.uint8 and weight.shape == rows and code is not None:
                flat = PackedWeight(weight.view(-1), self.in_features, self.out_features, self.format, layout, code)
                state[f"{prefix}codebook"] = codebook_bits(flat)
            if weight.shape == rows and layout != self.layout:
                self.layout = layout
                self.qweight = frozen(self.qweight.new_empty(rows))
        return state


def _old_fields(name: str, extra_state: Any) -> Mapping[str, Any]:
    """What an earlier version said of the bytes, a JSON object in a uint8 tensor. Raises ValueError for others."""
    try:
        fields = parse_json(bytes(extra_state.tolist()))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"state dict: {name}: expected JSON as uint8, got something else ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"state dict: {name}: expected a JSON object, got {type(fields).__name__}")
    return fields
