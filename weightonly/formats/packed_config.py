"""The quantization config of this library, in config.json: what tells how the packed layers of a folder are read.

    quant_method, format_version
    format, group_size, symmetric, act_order, layout    what most layers have; group_size is a number of rows, never -1
    activations                                         "fp8" where most layers have it; else it is left out
    layers                                              layer -> those of the six that it has otherwise
    modules_to_not_convert                              linear layers that are not packed

K of a layer is the rows of its scales times its group size, N their columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..activation_dtype import FP8, WHOLE, activations_of, check_layer_layout
from ..heuristics.arch import Arch
from ..heuristics.legal import check_kernel_group_size
from ..heuristics.problem import CODE_FORMATS, FORMATS, check_group_size
from ..layout import LAYOUTS, TILED_FP8
from ..packing import resolve_layout
from .expect import option
from .layers import LayerShape

METHOD = "weightonly"
"""`quant_method` of this library."""

VERSION = 3
"""`format_version` of the folders that are written and read."""

_GUARD = "fusion_config"
_MESSAGE = f"{METHOD} (the checkpoint is packed: `import weightonly.hf` before from_pretrained)"

_FIELDS: dict[str, tuple[type, tuple[Any, ...]]] = {
    "format": (str, tuple(FORMATS)),
    "group_size": (int, ()),
    "symmetric": (bool, ()),
    "act_order": (bool, ()),
    "layout": (str, (*LAYOUTS, TILED_FP8)),
    "activations": (str, (WHOLE, FP8)),
}
"""Name -> its type and the values that it may have; () for any."""


def check_version(version: object) -> None:
    """Raises ValueError for a `format_version` that is not read."""
    if version != VERSION:
        raise ValueError(f"format_version: expected {VERSION}, got {version!r}; convert the folder of its source again")


def options_of(shapes: Mapping[str, LayerShape]) -> dict[str, Any]:
    """The entries of the config that describe layers: what most of them have, and who differs."""
    fields = {
        name: {field: getattr(shape, field) for field in _FIELDS} | {"activations": shape.activations or WHOLE}
        for name, shape in shapes.items()
    }
    common = {field: Counter(own[field] for own in fields.values()).most_common(1)[0][0] for field in _FIELDS}
    layers = {
        name: {field: value for field, value in own.items() if value != common[field]} for name, own in fields.items()
    }
    if common["activations"] == WHOLE:  # as earlier versions have it
        del common["activations"]
    return common | {"layers": {name: other for name, other in layers.items() if other}}


def fields_of(options: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """format, group_size, symmetric, act_order, layout and activations (None or "fp8") of `layer`.

    Raises ValueError, naming the entry, for one that is missing or of another type, and for a layout that does not go
    with the activations.
    """
    options = {"activations": WHOLE} | dict(options)
    own = option(option(options, "layers", dict, {}), layer, dict, {})
    fields = {}
    for field, (kind, allowed) in _FIELDS.items():
        value = option(own, field, kind, option(options, field, kind))
        if value is None or (allowed and value not in allowed):
            expected = f"one of {', '.join(allowed)}" if allowed else f"a {kind.__name__}"
            raise ValueError(f"{field} of {layer}: expected {expected}, got {value!r}")
        fields[field] = value
    if fields["group_size"] < 1:
        raise ValueError(f"group_size of {layer}: expected at least 1, got {fields['group_size']}")
    fields["activations"] = activations_of(fields["activations"])
    check_layer_layout(f"layout of {layer}", fields["layout"], fields["activations"])
    return fields


def check_runs(shapes: Mapping[str, LayerShape], arch: Arch | None) -> None:
    """Raises ValueError, naming the first layer, unless kernels of `arch` compute every layer.

    arch: None: any GPU, or the CPU. "cpu" computes all.
    """
    for name, shape in shapes.items():
        try:
            if arch in (None, "cpu"):
                check_group_size(shape.group_size, shape.k)
            else:
                check_kernel_group_size(shape.group_size, shape.k, arch)
        except ValueError as error:
            count = sum(other.group_size == shape.group_size for other in shapes.values())
            raise ValueError(
                f"{name}: {error}; {count} of {len(shapes)} layers have such groups. They can be read and dequantized "
                "(load_checkpoint), not multiplied: quantize the model again with group_size 32, 64 or 128"
            ) from error
        if shape.format in CODE_FORMATS:
            try:
                resolve_layout(shape.format, arch)
            except ValueError as error:
                raise ValueError(
                    f"{name}: {error}. Leave arch away to load it on a CPU, or quantize the model to int4"
                ) from error


def guard_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of config.json that makes transformers refuse a folder where it does not know this library.

    transformers warns of an unknown `quant_method`, and would leave the packed layers random. For an unknown fusion it
    raises an error that quotes the name. Where `weightonly.hf` is imported, `unguarded` takes the entry out before.
    """
    return {_GUARD: {**(config.get(_GUARD) or {}), _MESSAGE: True}}


def unguard(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what `guard_of` added to it."""
    others = unguarded(config.get(_GUARD))
    return {key: value for key, value in config.items() if key != _GUARD} | ({_GUARD: others} if others else {})


def unguarded(fusions: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The fusions of a config without the guard; None where none are left."""
    return {name: value for name, value in (fusions or {}).items() if name != _MESSAGE} or None
