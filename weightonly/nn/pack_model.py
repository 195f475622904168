"""pack_model: linear layers that another library quantized in memory become `Linear`s of the same numbers, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..heuristics.arch import Arch
from .handlers import library_of
from .linear import Linear
from .quantize_model import describe_model
from .recipe import Recipe

if TYPE_CHECKING:
    from ..formats.plain import CodeWeight, IntWeight


def pack_model(module: torch.nn.Module, dtype: torch.dtype | None = None, arch: Arch | None = None) -> torch.nn.Module:
    """Replace the linear layers of torchao and bitsandbytes inside `module` by `Linear`s, in place; return `module`.

    Those are torch.nn.Linear whose weight is a tensor of torchao, as `torchao.quantization.quantize_` leaves them, and
    `bitsandbytes.nn.Linear4bit`. Numbers are not quantized again: a layer computes with q and the scales that it had,
    these in `dtype`. x is not quantized, whatever the layer did before. Other modules stay as they are.

    A model of transformers forgets the other library, so that `save_pretrained` writes a folder of packed layers. If
    `module` itself is a layer, its replacement is returned.

    Args:
        module: a model, or a layer of these.
        dtype: of scales, bias and x: float16, bfloat16 or float32; None: that of each weight.
        arch: the GPU to pack for; None: that of the weights' device (see `preprocess`).

    Raises:
        TypeError: a `module` that is no torch.nn.Module.
        ValueError: naming the layer and before any is replaced, for classes and tensors that are not read; also where
            there are no such layers.

    Examples:
        >>> import bitsandbytes
        >>> linear = bitsandbytes.nn.Linear4bit(512, 768, quant_type="nf4", compute_dtype=torch.float16).to("cpu")
        >>> wo.nn.pack_model(torch.nn.Sequential(linear))[0].format
        'nf4'
    """
    given: object = module
    if not isinstance(given, torch.nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(given).__name__}")
    names_of: dict[int, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if library_of(child) is not None:
            names_of.setdefault(id(child), []).append(name)
    if not names_of:
        raise ValueError("module: expected linear layers that torchao or bitsandbytes quantized, got none")
    for is_checked in (False, True):
        for names in names_of.values():
            old: Any = module.get_submodule(names[0])
            try:
                weight = _read(old)
                new = _packed(names[0], weight, old, dtype, arch) if is_checked else old
            except (TypeError, ValueError) as error:
                raise ValueError(f"layer {names[0]!r}: {error}") from error
            for name in names if is_checked else ():
                if name == "":
                    return new
                module.set_submodule(name, new)
    quantizer: Any = getattr(module, "hf_quantizer", None)
    if quantizer is not None and not any(map(library_of, module.modules())):
        quantizer.remove_quantization_config(module)
        vars(module).pop("is_loaded_in_4bit", None)
    describe_model(module, Recipe.of(None, None, None, True, dtype, arch), set())
    return module


def _read(linear: Any) -> IntWeight | CodeWeight:
    from ..formats.bitsandbytes import ANCHORS, read_bitsandbytes
    from ..formats.torchao import read_torchao

    weight = linear.weight
    if library_of(linear) == "torchao":
        return read_torchao(weight)
    if getattr(weight, "quant_state", None) is None:
        raise ValueError("weight: expected one that is quantized, got one that has not been on a device yet")
    found = weight.quant_state.as_dict(packed=True)
    state = next(value for name, value in found.items() if f"weight.{name}" in ANCHORS)
    nested = (found.get(f"nested_{name}") for name in ("absmax", "quant_map"))
    return read_bitsandbytes(weight.data, found["absmax"], found["quant_map"], state, *nested)


def _packed(
    name: str, weight: IntWeight | CodeWeight, old: Any, dtype: torch.dtype | None, arch: Arch | None
) -> Linear:
    from ..formats.records import pack

    bias = None if old.bias is None else old.bias.detach().clone()
    kept = getattr(old.weight, "quant_state", old.weight).dtype if dtype is None else dtype
    layer = pack(name, weight, bias, arch).to_linear(kept, arch).train(old.training)
    layer.layer_name = name or None
    return layer
