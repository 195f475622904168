"""quantize_model: the linear layers of a model become `Linear`s, in place."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..heuristics.arch import Arch
from ..least_squares import SearchFor
from ..require import require_bool
from .base import PackedLayer
from .choice import check_own, named, recipe_of
from .experts import Experts
from .fuse import fuse_model
from .handlers import PACKED, Handler, handler_of
from .head import head_names, head_recipe
from .kept import kept_in_fp32
from .linear import Linear
from .recipe import Recipe
from .summary import LayerSummary, Summary, module_bytes

Choice = Collection[str] | Callable[[str, torch.nn.Module], bool]
"""Names and patterns of layers, or a function of a layer's name and the layer."""

_log = logging.getLogger("weightonly")

_BY_CALLER = _SKIP, _NOT_IN_ONLY = "skip", "not in only"


def quantize_model(
    module: torch.nn.Module,
    bits: int | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    skip: Choice = (),
    dtype: torch.dtype | None = None,
    arch: Arch | None = None,
    *,
    format: str | None = None,
    only: Choice | None = None,
    search: SearchFor = True,
    layers: Mapping[str, Mapping[str, Any]] | None = None,
    activations: str | None = None,
    fuse: bool = False,
    quantize_head: str | None = None,
) -> torch.nn.Module:
    """Replace the linear layers inside `module` by `Linear`s, in place, and return `module`.

    Quantized are torch.nn.Linear, the Conv1D of transformers' GPT-2, and the experts of mixtures in transformers'
    interface (Mixtral, Qwen2-MoE, Qwen3-MoE, gpt-oss and others), which become `Experts`.

    Left by default are output embeddings (`get_output_embeddings`, or a weight that an embedding shares), layers that a
    model keeps in fp32 (`_keep_in_fp32_modules` and `_strict` of transformers, such as the `wo` of T5), layers that
    share a weight, gates with one column, layers whose K the group size does not fit, and layers that ask for gradients
    while others are frozen. Of these, what `only` names is quantized, or refused. Layers that are packed already are
    left, whatever their format. Subclasses of torch.nn.Linear but Falcon's are left: their owners use the weight
    itself, as torch.nn.MultiheadAttention does with its out_proj. So are experts in 3-D tensors that have not
    transformers' interface.

    `module.weightonly_summary`, which can be printed, says what was quantized and what was left, why, and the bytes
    before and after; it is also logged to the logger "weightonly".

    A model of transformers gets the quantization config of `weightonly.hf`, so that `save_pretrained` writes a folder
    that `from_pretrained` loads. Without `transformers` of a version that `weightonly.hf` takes a warning is logged.

    A model on meta becomes a quantized model on meta, to load a state dict into. A layer with several names stays
    shared. If `module` itself is a layer, its replacement is returned.

    Args:
        module: a model, or one layer.
        bits: 4 or 8, another way to say "int4" or "int8".
        group_size: rows that share a scale: -1 (all of K), 16, 32, or a multiple of 64; for "nf4" and "fp4" a power of
            two. The default is 128, and 64 for "nf4" and "fp4". Those of "mxfp4" are 32, those of "nvfp4" 16. (The
            table `weightonly.dense.DEFAULT_GROUP_SIZE` is that of layers, `WeightOnlyConfig` and commands, too.)
        symmetric: False adds zero points to integers.
        skip: layers to leave alone: names ("lm_head", "layers.0.mlp.up"), where `*` matches as in a file name, and the
            ends of names after a dot ("down_proj", where no whole name is that), or a function of (name, module) that
            returns True for those.
        dtype: of scales, bias and x: float16, bfloat16 or float32; None: that of each weight.
        arch: the GPU to pack for; None: that of the weights' device (see `preprocess`).
        format: "int4" (the default), "int8", "nf4", "fp4", "mxfp4", "nvfp4", "fp8".
        only: the layers to quantize, in the same words; None: all but those that are left by default.
        search: as for `quantize`: False takes scales by the largest value of a group, "whole" keeps zero points whole.
        layers: what some layers have otherwise: pattern of `skip` -> their format, group_size, symmetric or
            activations; of several that match, the last is taken. Where one of both formats is a codebook, the group
            size is the usual one of the layer's format.
        activations: "fp8": layers round x to E4M3, each row by its own scale, and Hopper's FP8 tensor cores multiply
            (see `Linear`). For mxfp4 and symmetric int4 in groups of 32, a multiple of 64, or all of K. Layers that
            `layers` gives "16bit" take x as it is. None: x stays as it is.
        fuse: whether layers that read the same x compute one product, such as q, k, v: see `fuse_model`.
        quantize_head: the format of the output embeddings, such as "int8" or "fp8", in groups of its usual size (of all
            of K where that does not divide it), whatever `skip`, `only` and `layers` say of them. Where they share the
            weight of an embedding, they get a packed copy, and the embedding stays as it is. None: they are left.

    Raises:
        TypeError: a `module` that is no torch.nn.Module and a `skip` or `only` that is a str.
        ValueError: before any layer is replaced, for output embeddings that cannot be quantized, for a pattern that
            matches no layer, for a layer of `only` that cannot be quantized, for adapters of PEFT, and where
            nothing would be quantized, unless `skip`, `only` or an earlier call with the same format is why.
        TypeError | ValueError: naming the layer, for a weight that `quantize` or `preprocess` refuses; the layers
            before it are replaced by then.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 768), torch.nn.Linear(768, 10))
        >>> model = wo.nn.quantize_model(model, format="int4", group_size=64, skip=["1"])
        >>> model(torch.randn(4, 512)).shape  # print(model.weightonly_summary) says what was quantized
        torch.Size([4, 10])
    """
    given: object = module
    if not isinstance(given, torch.nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(given).__name__}")
    require_bool("fuse", fuse)
    recipe = Recipe.of(bits, format, group_size, symmetric, dtype, arch, search, activations)
    heads = [] if quantize_head is None else head_names(module)
    layers = {} if layers is None else layers
    check_own(layers, recipe)
    _check_no_adapters(module)
    # Names, not modules: each original can be freed as soon as it is replaced.
    names_of: dict[int, list[str]] = {}
    handlers: dict[int, Handler] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if (handler := handler_of(child)) is not None:
            names_of.setdefault(id(child), []).append(name)
            handlers[id(child)] = handler
    names = [name for shared in names_of.values() for name in shared]
    recipes_of = recipe_of(recipe, layers, names)
    recipes = {key: recipes_of(shared) for key, shared in names_of.items()}
    for name in heads:
        head = module.get_submodule(name)
        if name not in names:
            raise ValueError(f"quantize_head: expected a torch.nn.Linear, got a {type(head).__name__} at {name!r}")
        k, _ = handlers[id(head)].shape(head)
        assert quantize_head is not None
        recipes[id(head)] = head_recipe(recipe, quantize_head, k)
    is_skipped = _predicate("skip", skip, names)
    is_named = None if only is None else _predicate("only", only, names)
    by_default = {
        id(module.get_submodule(name)): f"{owner} keeps it in fp32" for name, owner in kept_in_fp32(module).items()
    }
    by_default |= _shared_weights(module) | _output_embeddings(module) | _in_training(module, names_of)

    reasons: dict[int, str | None] = {}
    unfit = []
    for key, shared in names_of.items():
        child, handler = module.get_submodule(shared[0]), handlers[key]
        reason = handler.why_left(child, recipes[key])
        if not set(heads).isdisjoint(shared):
            if reason is not None:
                raise ValueError(f"quantize_head: expected output embeddings that can be quantized, got {reason}")
            reasons[key] = None
        elif any(is_skipped(name, child) for name in shared):
            reasons[key] = _SKIP
        elif is_named is not None and not any(is_named(name, child) for name in shared):
            reasons[key] = _NOT_IN_ONLY
        elif reason is not None and is_named is not None and not callable(only) and not isinstance(child, PackedLayer):
            raise ValueError(f"only: expected layers that can be quantized, got layer {shared[0]!r}: {reason}")
        else:
            reasons[key] = reason or (by_default.get(key) if is_named is None else None)
            if reason is not None and handler.kind in ("Linear", "Conv1D"):
                unfit.append(f"layer {shared[0]!r}: {reason}")
    if None not in reasons.values():
        chosen = {key: reason for key, reason in reasons.items() if reason not in _BY_CALLER}
        packed = {key: module.get_submodule(names_of[key][0]) for key in chosen if handlers[key] is PACKED}
        fits = [PACKED.fits(layer, recipes[key]) for key, layer in packed.items()]
        if unfit or not all(fits) or not (fits or len(chosen) < len(reasons)):
            why = [f"layer {names_of[key][0]!r}: {reason}" for key, reason in (chosen if fits else reasons).items()]
            found = "; ".join((unfit or why)[:3]) or f"{type(module).__name__} has no linear layers"
            raise ValueError(f"module: expected layers that can be quantized, got none: {found}")

    bytes_before = module_bytes(module)
    summaries = []
    for key, shared in names_of.items():
        old, handler, reason = module.get_submodule(shared[0]), handlers[key], reasons[key]
        before, shape = module_bytes(old), handler.shape(old)
        after = before
        if reason is None:
            try:
                new = handler.quantize(old, recipes[key])
            except (TypeError, ValueError) as error:
                raise type(error)(f"layer {shared[0]!r}: {error}") from error
            if isinstance(new, Linear | Experts):
                new.layer_name = shared[0] or None
            after = module_bytes(new)
            if shared == [""]:
                module = new
            for name in shared if module is not new else ():
                parent, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(parent), attribute, new)
        del old
        own = recipes[key]
        kind = (own.format, own.group_size, own.activations) if reason is None else (None, None, None)
        summaries.append(LayerSummary(tuple(shared), handler.kind, shape, before, after, reason, *kind))
    summary = Summary(
        recipe.format, recipe.group_size, tuple(summaries), bytes_before, module_bytes(module), recipe.activations
    )
    module.weightonly_summary = summary  # type: ignore[assignment]
    _log.info("%s", summary)
    if None in reasons.values():
        conv1d = {name for layer in summary.quantized if layer.kind == "Conv1D" for name in layer.names}
        describe_model(module, recipe, conv1d)
    if fuse:
        fuse_model(module)
    return module


def describe_model(module: torch.nn.Module, recipe: Recipe, conv1d: set[str]) -> None:
    """Let a model of transformers say what its layers are when it is saved. transformers is imported by then.

    recipe, conv1d: see `WeightOnlyQuantizer.adopt`.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return
    try:
        from ..hf.quantizer import WeightOnlyQuantizer
    except ImportError as error:
        _log.warning("save_pretrained will not say how the layers of this model are packed: %s", error)
        return
    WeightOnlyQuantizer.adopt(module, recipe, conv1d)


def _predicate(argument: str, choice: Choice, names: list[str]) -> Callable[[str, torch.nn.Module], bool]:
    """`skip` or `only` as a function. Raises TypeError for a str, ValueError for a pattern that matches no name."""
    if callable(choice):
        return choice
    chosen = set().union(*named(argument, choice, names).values())
    return lambda name, _: name in chosen


def _shared_weights(module: torch.nn.Module) -> dict[int, str]:
    """id of a layer -> why it is left: another one has the same weight, and packed ones would each have their own."""
    owners: dict[int, dict[str, int]] = {}
    for name, child in module.named_modules():
        if (weight := child._parameters.get("weight")) is not None:
            owners.setdefault(id(weight), {})[name] = id(child)
    return {
        key: f"its weight is that of {next(other for other in names if other != name)!r}, too"
        for names in owners.values()
        for name, key in names.items()
        if len(names) > 1
    }


def _check_no_adapters(module: torch.nn.Module) -> None:
    """Raises ValueError for a model with modules of PEFT: it trains some, and merges into dense weights."""
    for name, child in module.named_modules():
        if any(cls.__module__.partition(".")[0] == "peft" for cls in type(child).__mro__):
            raise ValueError(
                f"module: expected a model without adapters, got a {type(child).__name__} of PEFT at {name!r}; "
                "quantize the model first and then call get_peft_model, or merge_and_unload() first"
            )


def _in_training(module: torch.nn.Module, names_of: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """id of a layer -> why it is left: it asks for gradients, while other layers are frozen."""
    dense = {
        key: any(p.requires_grad for p in child.parameters())
        for key, names in names_of.items()
        if not isinstance(child := module.get_submodule(names[0]), PackedLayer)
    }
    reason = "it is trained (requires_grad), and other layers are frozen"
    return {} if all(dense.values()) else {key: reason for key, asks in dense.items() if asks}


def _output_embeddings(module: torch.nn.Module) -> dict[int, str]:
    """id of a layer -> why it is left: it is the output embeddings of a model, or shares an embedding's weight."""
    found: dict[int, str] = {}
    embeddings = {
        id(child.weight): name for name, child in module.named_modules() if isinstance(child, torch.nn.Embedding)
    }
    for child in module.modules():
        weight = getattr(child, "weight", None)
        if not isinstance(child, torch.nn.Embedding) and id(weight) in embeddings:
            found[id(child)] = f"output embeddings: its weight is that of {embeddings[id(weight)]!r}"
        getter = getattr(child, "get_output_embeddings", None)
        try:
            output = getter() if callable(getter) else None
        except (NotImplementedError, AttributeError):
            output = None  # a model that has none
        if isinstance(output, torch.nn.Module):
            found.setdefault(id(output), "output embeddings")
    return found
