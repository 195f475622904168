"""Linear: a drop-in for `torch.nn.Linear` on a packed weight; `quantize_model` puts it into a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from .checks import check_perm
from .cpu import ACTIVATIONS, check_zeros_fit
from .gemm import gemm
from .heuristics.problem import CODE_FORMATS, check_group_size
from .layout import INTERLEAVED, padded_shape
from .packed import PackedWeight, code_layout, format_of, layout_for_arch, preprocess
from .quantize import quantize_for, resolve_group_size


class Linear(torch.nn.Module):
    """y = act(x[..., perm] @ w + bias) with a packed weight: x [..., in_features] -> y [..., out_features].

    The weight here is w [K, N] = [in_features, out_features], the transpose of `torch.nn.Linear.weight`.

    Buffers (moved by `.to`, stored in the state dict): qweight, uint8, the bytes; scales [K / g, N]; zeros,
    like scales, or None; bias [N] or None; perm [K] int32 or int64, the act-order permutation, or None. Format,
    layout and code table of the bytes travel as the extra state.
    `.half()` and the like convert the scales, and with them the dtype of x that the module takes.

    The bytes keep their layout when the module moves: on a GPU whose kernels read another one, `forward`
    raises. Such a module is packed again from the original weight, with `arch=` of that GPU.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bias: torch.Tensor | None
    perm: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bits: int = 4,
        group_size: int = 128,
        symmetric: bool = True,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
        arch: str | int | None = None,
        activation: str | None = None,
        format: str | None = None,
        act_order: bool = False,
    ) -> None:
        """An empty layer, of zeros, to load a state dict into; see `from_linear` for the arguments.

        format: None for the integers of `bits`, or "nf4", "fp4", "code4", whose table is zeros until one is loaded.
        act_order: whether x is permuted; by the identity until a permutation is loaded.
        Raises ValueError for `bits`, a format, a group size or an activation that does not exist, for zero points of a
        code format, and for an `arch` that does not read one.
        """
        format = format_of(bits, format)
        is_code = format in CODE_FORMATS
        if is_code and not symmetric:
            raise ValueError(f"symmetric: expected True for {format}, got False")
        layout = code_layout(format, arch) if is_code else INTERLEAVED if arch is None else layout_for_arch(arch)
        k_padded, n_padded = padded_shape(in_features, out_features, bits, layout)
        groups = in_features // resolve_group_size(group_size, in_features)
        data = torch.zeros(k_padded * n_padded * bits // 8, dtype=torch.uint8, device=device)
        scales = torch.zeros(groups, out_features, dtype=dtype, device=device)
        self._adopt(
            PackedWeight(data, in_features, out_features, format, layout, (0.0,) * 16 if format == "code4" else None),
            scales,
            None if symmetric else torch.zeros_like(scales),
            torch.zeros(out_features, dtype=dtype, device=device) if bias else None,
            activation,
            torch.arange(in_features, dtype=torch.int32, device=device) if act_order else None,
        )

    def _adopt(
        self,
        weight: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        activation: str | None,
        perm: torch.Tensor | None,
    ) -> None:
        super().__init__()
        _check_activation(activation)
        check_group_size(weight.k // scales.shape[0], weight.k)
        self.in_features = weight.k
        self.out_features = weight.n
        self.activation = activation
        self._packed = weight
        self.register_buffer("qweight", weight.data)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.register_buffer("bias", bias)
        self.register_buffer("perm", perm)

    @classmethod
    def from_quantized(
        cls,
        weight: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        perm: torch.Tensor | None = None,
    ) -> Linear:
        """A layer on tensors that exist already; they are used as they are, not copied.

        weight: a PackedWeight [K, N]; scales, zeros: [K / g, N]; bias: [N] or None; perm: [K] int32 or int64, the
        order of the weight's rows (see `gemm`), or None. All on one device.
        Raises TypeError for a weight that is not packed or another kind of perm, ValueError for shapes that do not
        fit, zeros of a code format, or a group size that `gemm` does not take.
        """
        if not isinstance(weight, PackedWeight):
            raise TypeError(f"weight: expected a PackedWeight (see preprocess), got {type(weight).__name__}")
        if scales.dim() != 2 or scales.shape[1] != weight.n or not scales.shape[0] or weight.k % scales.shape[0]:
            raise ValueError(f"scales: expected [K / g, N] for K={weight.k}, N={weight.n}, got {list(scales.shape)}")
        if zeros is not None:
            check_zeros_fit(zeros, weight)
            if zeros.shape != scales.shape:
                raise ValueError(f"zeros: expected {list(scales.shape)} like scales, got {list(zeros.shape)}")
        if bias is not None and bias.shape != (weight.n,):
            raise ValueError(f"bias: expected [{weight.n}], got {list(bias.shape)}")
        if perm is not None:
            check_perm(perm, weight.k)
        layer = cls.__new__(cls)
        layer._adopt(weight, scales, zeros, bias, activation, perm)
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        bits: int = 4,
        group_size: int = 128,
        symmetric: bool = True,
        dtype: torch.dtype | None = None,
        arch: str | int | None = None,
        activation: str | None = None,
    ) -> Linear:
        """Quantize and pack the weight of `linear`, on its device.

        dtype: of scales, bias and x; None is that of the weight.
        arch: the GPU to pack for; None is that of the weight's device (see `preprocess`).
        activation: applied after the bias: None, "relu", "gelu" or "silu".
        Raises what `quantize` and `preprocess` raise, TypeError for another kind of module.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        _check_activation(activation)
        check_group_size(resolve_group_size(group_size, linear.in_features), linear.in_features)
        dtype = linear.weight.dtype if dtype is None else dtype
        q, scales, zeros = quantize_for(linear.weight.detach().t(), dtype, bits, group_size, symmetric)
        # A copy: the layer must not change with the parameter it was made from.
        bias = None if linear.bias is None else linear.bias.detach().to(dtype, copy=True)
        return cls.from_quantized(preprocess(q, bits, arch=arch), scales, zeros, bias, activation).train(
            linear.training
        )

    @property
    def packed(self) -> PackedWeight:
        """The weight as `gemm` takes it: the buffer `qweight` with its metadata."""
        data = self.qweight
        if self._packed.data is not data:  # the buffer was replaced: .to(), load_state_dict(assign=True)
            self._packed = PackedWeight(data, **self._packed.fields)
        return self._packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] in the dtype of scales -> [..., out_features]; raises what `gemm` raises."""
        return gemm(
            x,
            self.packed,
            self.scales,
            zeros=self.zeros,
            bias=self.bias,
            activation=self.activation,
            perm=self.perm,
        )

    def extra_repr(self) -> str:
        packed = self.packed
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={packed.format}, "
            f"group_size={self.in_features // self.scales.shape[0]}, "
            f"symmetric={self.zeros is None}, act_order={self.perm is not None}, "
            f"layout={packed.layout}, activation={self.activation}"
        )

    def get_extra_state(self) -> torch.Tensor:
        """The metadata of the bytes as JSON in a uint8 tensor: safetensors stores nothing but tensors."""
        return torch.tensor(list(json.dumps(self.packed.fields).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Take the layout and code table of loaded bytes, and make room for them where it pads to another size.

        Raises ValueError if their shape or format is another, or the layout or table is none.
        """
        fields = json.loads(bytes(state.tolist()))
        packed = self.packed
        expected = {"k": packed.k, "n": packed.n, "format": packed.format}
        got = {name: fields.get(name) for name in expected}
        if got != expected:
            raise ValueError(f"state dict: expected a weight with {expected}, got {got}")
        layout = fields.get("layout")
        k_padded, n_padded = padded_shape(packed.k, packed.n, packed.bits, layout)
        size_bytes = k_padded * n_padded * packed.bits // 8
        if self.qweight.numel() != size_bytes:
            self.qweight = self.qweight.new_empty(size_bytes)
        self._packed = PackedWeight(self.qweight, packed.k, packed.n, packed.format, layout, fields.get("code"))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # PyTorch loads the extra state last, but the layout in it decides how many bytes there are to load.
        state = state_dict.get(f"{prefix}_extra_state")
        if state is not None:
            self.set_extra_state(state)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Linear:
        super()._apply(fn, recurse)
        _ = self.packed  # follow the buffer now: the old object would keep the bytes on the old device alive
        return self


def quantize_model(
    module: torch.nn.Module,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    skip: Collection[str] = (),
    dtype: torch.dtype | None = None,
    arch: str | int | None = None,
) -> torch.nn.Module:
    """Replace every `torch.nn.Linear` inside `module` by a `Linear`, in place, and return `module`.

    skip: qualified names ("lm_head", "layers.0.mlp.up") to leave alone; `*` matches as in a file name.
    Subclasses of torch.nn.Linear are left alone too: their owners reach for the weight itself, as
    torch.nn.MultiheadAttention does for its out_proj. A layer used under several names stays shared.
    If `module` itself is a torch.nn.Linear, its replacement is returned. Other arguments as in
    `Linear.from_linear`.

    Raises ValueError naming the layer if its K does not allow the group size (before any layer is replaced),
    if a pattern of `skip` matches no layer, or for what `quantize` and `preprocess` reject: then the layers
    before the named one have been replaced already.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip: expected a collection of names, got the str {skip!r}")
    names = [name for name, child in module.named_modules(remove_duplicate=False) if type(child) is torch.nn.Linear]
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"skip: expected names of torch.nn.Linear layers, got {pattern!r}, which matches none")
    # Only names are kept, so that each original can be freed as soon as it is replaced.
    uses: dict[int, list[str]] = {}
    for name in names:
        if not any(fnmatchcase(name, pattern) for pattern in skip):
            _check_group_size(name, module.get_submodule(name), group_size)
            uses.setdefault(id(module.get_submodule(name)), []).append(name)

    for shared_names in uses.values():
        linear = module.get_submodule(shared_names[0])
        assert isinstance(linear, torch.nn.Linear)
        try:
            layer = Linear.from_linear(linear, bits, group_size, symmetric, dtype, arch)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layer {shared_names[0]!r}: {error}") from error
        if shared_names == [""]:
            return layer
        for name in shared_names:
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, layer)
    return module


def _check_group_size(name: str, linear: torch.nn.Module, group_size: int) -> None:
    assert isinstance(linear, torch.nn.Linear)
    try:
        check_group_size(resolve_group_size(group_size, linear.in_features), linear.in_features)
    except ValueError as error:
        raise ValueError(f"layer {name!r}: {error}") from error


def _check_activation(activation: Any) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
