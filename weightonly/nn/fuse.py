"""fuse_model: layers of a model that read the same x become one product, on one packed weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from ..layout import ROW_MAJOR, column_align
from ..packed import PackedWeight
from ..weight import LooseWeight, QuantizedWeight
from .linear import Linear
from .same_input import same_input

_PARTS = "qweight", "scales", "zeros", "bias"
_FROM_COLUMNS = {"qweight": 0, "scales": 1, "zeros": 1, "bias": 0}
"""Tensor of a layer -> its dimension that is N, in every layout but "row_major"."""


class Fused:
    """The layers of an owner that read the same x: one product while the owner's forward runs.

    The tensors of the layers are views of the fused ones: what writes to a layer writes to the product, too. The first
    layer that the owner calls computes all columns; the others, called with the same tensor, return theirs. Called with
    another tensor, outside of the owner's forward, or with tensors that are no views any more, a layer computes alone.
    """

    def __init__(self, owner: torch.nn.Module, names: Sequence[str], layers: Sequence[Linear]) -> None:
        self.layers = list(layers)
        self._operand: QuantizedWeight | None = None
        self._bias: torch.Tensor | None = None
        self._fused: list[torch.Tensor] = []
        self._is_stale = self._is_fitting = False
        # None: closed. (): open. (x, when, y): open, and what the product was.
        self._kept: tuple[Any, ...] | None = None
        # `register_forward_pre_hook` takes a number that is another one for each owner, and torch.compile then compiles
        # a function for each.
        self._key = ", ".join(names)
        self._owner = owner
        before: Any = owner._forward_pre_hooks
        after: Any = owner._forward_hooks
        always: Any = owner._forward_hooks_always_called
        before[self._key], after[self._key], always[self._key] = self._open, self._close, True
        ends = torch.tensor([layer.out_features for layer in layers]).cumsum(0).tolist()
        for layer, end in zip(layers, ends, strict=True):
            layer._fused, layer._columns = self, (end - layer.out_features, end)
        self._fit()

    # --- one weight -------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fit(self) -> None:
        """Makes the tensors of the layers views of fused ones."""
        layers = self.layers
        self._is_stale, self._is_fitting = False, True
        fused: dict[str, torch.Tensor | None] = {}
        for name in _PARTS:
            parts = [getattr(layer, name) for layer in layers]
            if parts[0] is None:
                fused[name] = None
                continue
            dim = _FROM_COLUMNS[name]
            fused[name] = whole = torch.cat(parts, dim)
            for part, view in zip(parts, whole.split([part.shape[dim] for part in parts], dim), strict=True):
                part.data = view
        first = layers[0]
        for layer in layers:
            layer._forget()
        self._is_fitting = False
        qweight, scales = fused["qweight"], fused["scales"]
        assert qweight is not None and scales is not None
        packed = PackedWeight(
            qweight.view(-1),
            first.in_features,
            sum(layer.out_features for layer in layers),
            first.format,
            first.layout,
            first.packed.code if first.format == "code4" else None,
            first.group_size,
            not first.symmetric,
            False,
        )
        self._operand = QuantizedWeight(packed, scales, fused["zeros"])
        self._bias = fused["bias"]
        self._fused = [whole for whole in fused.values() if whole is not None]

    def fit_again(self) -> None:
        """Called where tensors of a layer may be others: now, or when all layers agree again, they are fused anew."""
        if self._is_fitting or (self._is_whole() and self._has_code()):
            return
        self._operand, self._bias, self._fused, self._is_stale = None, None, [], True
        self._is_whole()

    def _is_whole(self) -> bool:
        """Whether the tensors of all layers are views of the fused ones."""
        if self._is_stale and _agree(self.layers) and not _is_capturing():
            self._fit()
        if self._operand is None:
            return False
        names = [name for name in _PARTS if getattr(self.layers[0], name) is not None]
        for name, whole in zip(names, self._fused, strict=True):
            address, dim = whole.data_ptr(), _FROM_COLUMNS[name]
            for layer in self.layers:
                part = getattr(layer, name)
                if part.device != whole.device or part.dtype != whole.dtype or part.data_ptr() != address:
                    # Replaced by who does not tell: a cast of Parameters one by one, or weights that are offloaded.
                    self._operand, self._bias, self._fused = None, None, []
                    return False
                address += part.shape[dim] * whole.stride(dim) * whole.element_size()
        return True

    def _has_code(self) -> bool:
        """Whether the codebook of every layer is that of the product."""
        return self._operand is None or all(
            layer.format != "code4" or layer.packed.code == self._operand.packed.code for layer in self.layers
        )

    # --- one product ------------------------------------------------------------------------------------------

    def _open(self, owner: torch.nn.Module, args: Any) -> None:
        self._kept = () if (self._operand is not None if is_compiling() else self._is_whole()) else None

    def _close(self, owner: torch.nn.Module, args: Any, result: Any) -> None:
        self._kept = None

    def product(self, layer: Linear, x: torch.Tensor) -> torch.Tensor | None:
        """What `layer` returns of x; None where it has to compute alone."""
        kept = self._kept
        if kept is None or layer.compute_dtype != layer.scales.dtype:
            return None
        when = (torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type), _version(x))
        if kept and kept[0] is x and kept[1] == when:
            y = kept[2]
        else:
            if self._operand is None:
                return None
            y = self.multiply(x)
            self._kept = (x, when, y)
        begin, end = layer._columns
        part: torch.Tensor = y[..., begin:end]
        return part

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """All columns, those of the first layer first."""
        w = self._operand
        assert w is not None
        if is_compiling():  # the operator checks it
            w = LooseWeight(w.packed, w.scales, w.zeros, None)
        return self.layers[0]._multiply(x, w, self._bias)

    @torch.no_grad()
    def undo(self) -> None:
        """Gives every layer tensors of its own."""
        owner = self._owner
        hooks: Any
        for hooks in (owner._forward_pre_hooks, owner._forward_hooks, owner._forward_hooks_always_called):
            hooks.pop(self._key, None)
        for layer in self.layers:
            for name in _PARTS:
                if (part := getattr(layer, name)) is not None:
                    part.data = part.data.clone(memory_format=torch.contiguous_format)
            layer._fused = None
            layer._forget()

    def __getstate__(self) -> dict[str, Any]:
        # Copies of the layers have tensors of their own.
        return self.__dict__ | {"_operand": None, "_bias": None, "_fused": [], "_kept": None, "_is_stale": True}


def fuse_model(model: torch.nn.Module) -> list[tuple[str, ...]]:
    """Let layers of a model that read the same x compute one product, such as q, k, v, and gate and up; in place.

    Which layers read the same x is read from the source of the forward of the module that has them. They are fused
    where they agree in K, format, group size, zero points, dtype, device, layout, activations, and in having a bias,
    and where all but the last have an N that the layout does not pad. Others are left as they are: parts that are cut
    for tensor parallel, layers in act-order, with an activation, or offloaded, and layers in layout "row_major".

    The layers stay where they are, with their names and tensors, which become views of fused ones: state dicts, saved
    folders, `update_` and adapters see each layer by itself. A layer computes alone where it is called otherwise. So
    it does after something replaces its tensors, until all agree again after `model.to()`.

    The numbers are those of the layers alone, bit for bit where the kernel is the same one; a GPU may choose another
    one for the larger N. The weights of one set of layers are copied at a time.

    Args:
        model: a model with `Linear`s, or with PEFT's adapters around them.

    Returns:
        The names of the layers that were fused by this call, one tuple for each product.

    Raises:
        TypeError: a `model` that is no torch.nn.Module.

    Examples:
        >>> class Mlp(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate, self.up = (torch.nn.Linear(128, 256, bias=False) for _ in range(2))
        ...         self.down = torch.nn.Linear(256, 128, bias=False)
        ...     def forward(self, x):
        ...         return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        >>> model = wo.nn.quantize_model(torch.nn.Sequential(Mlp()), group_size=64)
        >>> wo.nn.fuse_model(model)  # doctest: +SKIP
        [('0.gate', '0.up')]
    """
    given: object = model
    if not isinstance(given, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(given).__name__}")
    fused = []
    for prefix, owner in model.named_modules():
        cls: Any = type(owner)
        for names in same_input(cls):
            alike: dict[object, list[tuple[str, Linear]]] = {}
            for name in names:
                layer = _inside(getattr(owner, name, None))
                if layer is not None and layer._fused is None and (key := _key(layer)) is not None:
                    alike.setdefault(key, []).append((name, layer))
            for found in alike.values():
                # A layer under two names would be two columns of itself.
                layers = list({id(layer): layer for _, layer in found}.values())
                if len(found) > 1 and len(layers) == len(found) and _agree(layers):
                    Fused(owner, [name for name, _ in found], layers)
                    fused.append(tuple(f"{prefix}.{name}" if prefix else name for name, _ in found))
    return fused


def unfuse_model(model: torch.nn.Module) -> None:
    """Undoes `fuse_model`: every layer computes alone, on tensors of its own."""
    for layer in list(model.modules()):
        if isinstance(layer, Linear) and layer._fused is not None:
            layer._fused.undo()


def _inside(module: Any) -> Linear | None:
    """The layer, or the one that an adapter has around it; None for others, and parts of one that is cut."""
    base = module.get_base_layer() if callable(getattr(module, "get_base_layer", None)) else module
    return base if type(base) is Linear else None


def _key(layer: Linear) -> object:
    """What layers have to agree in; None for one that is not fused."""
    w = layer.scales
    if layer.activation not in (None, "identity") or layer.perm is not None or layer.layout == ROW_MAJOR:
        return None
    if any(p.is_meta for p in layer.parameters()) or layer.reads is not None:
        return None
    kind = layer.in_features, layer.format, layer.layout, layer.activations, layer.is_conv1d
    tensors = tuple(getattr(layer, name) is None for name in _PARTS)
    code = layer.packed.code if layer.format == "code4" else None
    return *kind, tensors, w.shape[0], w.dtype, layer.compute_dtype, w.device, layer.qweight.device, code


def _agree(layers: Sequence[Linear]) -> bool:
    keys = [_key(layer) for layer in layers]
    aligned = all(layer.out_features % column_align(layer.packed.bits, layer.layout) == 0 for layer in layers[:-1])
    return None not in keys and len(set(keys)) == 1 and aligned


def _version(x: torch.Tensor) -> int:
    """Changes where something writes to x; tensors of inference mode, and traced ones, do not count."""
    return 0 if is_compiling() or x.is_inference() else x._version


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
