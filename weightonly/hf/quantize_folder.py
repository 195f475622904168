"""quantize_folder: a dense model becomes the folder that `save_pretrained` would write of it, without being loaded.

transformers first makes the packed model on meta, which holds no numbers. Then the tensors of the files go through what
`from_pretrained` reads a model with, and through what `save_pretrained` writes it with, a few of them at a time.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from ..device import check_memory
from ..extras import require_package
from ..formats.folder import SHARD_BYTES, check_target, companions_of, new_folder, write_shards
from ..formats.foreign import of_activations
from ..formats.recognize import is_dense, quantization_config
from ..formats.shards import CONFIG, Shards
from ..hub import model_folder
from ..nn.handlers import handler_of
from ..nn.head import head_names
from ..nn.summary import LayerSummary, describe_left, in_words, megabytes, module_bytes, some_of
from ..require import require_int, require_path
from ..shown import counted
from ..tensor_file import digest
from .checkpoint import PlainLazy
from .config import WeightOnlyConfig
from .dense_folder import DenseFolder
from .loader import complete, entries, model_class, model_config
from .memory import after_packing
from .modules import Plan
from .names import Names

BATCH_BYTES = 1 << 25
"""Of tensors that are read for one call of transformers, which goes through all names of the model each time."""


@dataclass(frozen=True)
class Kind:
    """Layers of one name, such as "q_proj" or "experts.down_proj", and of one format.

    group_size: rows that share a scale, -1: all. error: the norm of what their weights lost, as a part of their norm.
    """

    name: str
    layers: int
    format: str
    group_size: int
    symmetric: bool
    activations: str | None
    error: float


@dataclass(frozen=True)
class FolderSummary:
    """What `quantize_folder` wrote: `print` shows it.

    left: layers that stay dense, and why. unused: tensors that the model does not have, which were left out.
    bytes_before, bytes_after: of the tensors of both folders.
    """

    folder: Path
    kinds: tuple[Kind, ...]
    left: tuple[LayerSummary, ...]
    unused: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        cells = [
            (
                kind.name,
                counted(kind.layers, "layer"),
                in_words(kind.format, kind.group_size, kind.activations) + ("" if kind.symmetric else ", zero points"),
                f"error {100 * kind.error:.2f}%",
            )
            for kind in self.kinds
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rows = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        sizes = f"{megabytes(self.bytes_before)} before, {megabytes(self.bytes_after)} after"
        lines = [f"{self.folder}: {sizes}", *rows, *describe_left(self.left)]
        if self.unused:
            lines.append(f"  left out, as the model has no such tensors: {some_of(self.unused)}")
        return "\n".join(lines)


def quantize_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    config: WeightOnlyConfig,
    *,
    skip: Iterable[str] = (),
    only: Iterable[str] | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> FolderSummary:
    """Quantize the dense model `source`, and write it to the folder `target`, which is new or empty.

    What comes there is what `from_pretrained(source, quantization_config=config)` and `save_pretrained(target)` make,
    bit for bit, with digests, as of `convert`, and the tokenizer's files. In memory are a layer (all experts of one,
    where they are stacked), and the model without numbers.

    source: a folder, or "OWNER/NAME" of the Hugging Face Hub, which is downloaded. config: how layers are quantized.
    skip, only: patterns of layers, as `WeightOnlyConfig` has them in `layers`. What `only` names is quantized, or
        refused.
    revision: of a model of the hub.
    dtype: of scales, biases and what stays dense; None: the one in config.json, else that of the tensors.
    device: where weights are quantized. shard_bytes: about the size of a file. progress: whether to show a bar, on a
        terminal.

    `target` appears complete or not at all, as with `convert`.

    Raises FileExistsError for a `target` with something in it. Raises ValueError for a `source` that is quantized, for
    one whose code is in the folder, for patterns that match no layer, for tensors of the model that are missing, and
    what `WeightOnlyConfig`, `from_pretrained` and `quantize` refuse. Raises ImportError without accelerate.
    """
    target = require_path("target", target)
    check_target(target, may_be_empty=True)
    require_int("shard_bytes", shard_bytes, least=1)
    device = check_memory(device)
    require_package("accelerate")
    folder = model_folder(source, revision, "source")
    shards = Shards(folder)
    if shards.config(CONFIG) is None:
        raise ValueError(f"{folder}: expected config.json, which says what the model is, got none")
    _check_dense(shards)
    companions = companions_of(folder)
    dense = DenseFolder(shards, tuple(skip), None if only is None else tuple(only))
    of_others = of_activations(shards)
    names = [name for name in shards.tensors if name not in of_others]
    if config.quantize_head is not None:
        names += _untie_head(shards, names)
    model, unused = _on_meta(dense, names, config, dtype)
    plan = model.hf_quantizer.plan
    with new_folder(target, companions) as made:
        after = write_shards(made, _tensors(model, dense, names, device, progress), shard_bytes)
        _write_configs(model, made)
    before = sum(shards.tensors[name].bytes for name in names)
    return FolderSummary(target, _kinds(plan, dense), _left(model, plan), unused, before, after)


def _untie_head(shards: Shards, names: Sequence[str]) -> list[str]:
    """Lets the files have the output embeddings under a name of their own, where they have them as an embedding.

    Returns that name, if it is new.
    """
    own = model_config(shards.folder)
    with torch.device("meta"):
        model = model_class(own, shards.folder / CONFIG)(own)
    heads, known = head_names(model), Names(model)
    embedding = model.get_input_embeddings()
    sources = [name for name, module in model.named_modules() if module is embedding]
    stored = {inside: name for name in names for inside in known.of_tensors(name)}
    weights = [f"{name}.weight" for name in heads]
    if not getattr(own, "tie_word_embeddings", False) or not stored.keys().isdisjoint(weights) or not sources:
        return []
    source = stored.get(f"{sources[0]}.weight")
    if source is None:
        return []
    shards.tensors[weights[0]] = shards.tensors[source]
    return weights[:1]


def _check_dense(shards: Shards) -> None:
    """Raises ValueError for a folder that is quantized."""
    if is_dense(shards):
        return
    source, options = quantization_config(shards)
    method = options.get("quant_method") or "another quantizer"
    raise ValueError(
        f"{shards.folder / source}: expected a dense model, got one that {method} quantized; `weightonly convert` "
        "packs it as it is"
    )


def _on_meta(
    dense: DenseFolder, names: Iterable[str], config: WeightOnlyConfig, dtype: torch.dtype | str | None
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The packed model without numbers, as `from_pretrained` makes it of the headers of the files; unused tensors."""
    shards, folder = dense.shards, dense.shards.folder
    own = model_config(folder)
    shards.configs[CONFIG] = entries(own)
    arguments: dict[str, Any] = {"dtype": "auto" if dtype is None else dtype, "trust_remote_code": False}
    if (folder / "generation_config.json").is_file():
        arguments["generation_config"] = GenerationConfig.from_pretrained(folder)
    asked = copy.copy(config)
    asked.dense = dense
    with _quiet(), dense.problems_raised():
        model, info = model_class(own, folder / CONFIG).from_pretrained(
            None,
            config=own,
            state_dict={name: shards.without_data(name) for name in names},
            device_map="meta",
            quantization_config=asked,
            output_loading_info=True,
            **arguments,
        )
    return complete(model, info, folder), tuple(sorted(info["unexpected_keys"]))


def _tensors(
    model: PreTrainedModel, dense: DenseFolder, names: Iterable[str], device: torch.device, progress: bool
) -> Iterator[Mapping[str, torch.Tensor]]:
    """The tensors of the quantized model by the names of files, those of a few layers at a time."""
    shards, quantizer = dense.shards, model.hf_quantizer
    conversions, when_saved = get_model_conversion_mapping(model, None, quantizer), model._weight_conversions
    dtype = model.dtype
    arguments = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        hf_quantizer=quantizer,
        weight_mapping=conversions,
        device_map={"": device},
    )
    places = _places(model, names, conversions)
    written = _untied(model, shards, places, dtype)
    dropped = {*(model._keys_to_ignore_on_save or ()), *(places.keys() - written.keys())}
    with _quiet(), _bar(sum(shards.tensors[name].bytes for name in names) if progress else None) as bar:
        for batch in _batches(shards, places.values()):
            given = {name: PlainLazy(shards, name) for name in batch}
            with dense.problems_raised():
                info, _ = convert_and_load_state_dict_in_model(model, given, arguments)
                _check_loaded(info)
            loaded = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
            kept = {written.get(name, name): tensor for name, tensor in loaded.items() if name not in dropped}
            model._weight_conversions = when_saved
            made = after_packing(revert_weight_conversion(model, kept))
            for _, inside in itertools.groupby(made, lambda name: name.rpartition(".")[0]):
                yield {name: made[name] for name in inside}
            for name in loaded:
                _forget(model, name)
            del loaded, kept, made
            if bar is not None:
                bar.update(sum(shards.tensors[name].bytes for name in batch))


def _bar(total_bytes: int | None) -> contextlib.AbstractContextManager[Any]:
    """A bar on a terminal. None: none at all (see `Checkpoint.records`)."""
    if total_bytes is None:
        return contextlib.nullcontext()
    from tqdm import tqdm

    bar: contextlib.AbstractContextManager[Any] = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=None)
    return bar


def _places(model: PreTrainedModel, names: Iterable[str], conversions: list[Any]) -> dict[str, list[str]]:
    """Tensor of the model -> those of the files that it is made of; none that the model does not have.

    Where a converter makes several, the first one stands for all.
    """
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    own, prefix = model.state_dict(), model.base_model_prefix
    places: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found, _ = rename_source_key(name, renamings, converters, prefix, own)
        if found not in own and name in own:
            found = name
        if found in own:
            places[found].append(name)
    return dict(sorted(places.items(), key=lambda place: dot_natural_key(place[0])))


def _untied(
    model: PreTrainedModel, shards: Shards, places: Mapping[str, list[str]], dtype: torch.dtype
) -> dict[str, str]:
    """Tensor of the model -> its name when the model is saved; without those that are another one again.

    As transformers does it: of tied tensors the first one is saved, and two of the files are tied where they are equal.
    """
    tensor_of = {name: name for name in places}

    def digests(tensor: str) -> list[str]:
        return [digest(shards.read(part).to(dtype)) for part in places[tensor]]

    for name, other in model.all_tied_weights_keys.items():
        if name not in tensor_of:
            continue
        if other not in tensor_of or digests(tensor_of[name]) == digests(tensor_of[other]):
            tensor_of.setdefault(other, tensor_of[name])
            del tensor_of[name]
    return {tensor: name for name, tensor in tensor_of.items()}


def _batches(shards: Shards, groups: Iterable[list[str]]) -> Iterator[list[str]]:
    """Groups of tensors put together, up to BATCH_BYTES where one group is not more."""
    batch: list[str] = []
    size = 0
    for group in groups:
        more = sum(shards.tensors[name].bytes for name in group)
        if batch and size + more > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch = batch + group
        size += more
    if batch:
        yield batch


def _check_loaded(info: Any) -> None:
    """Raises ValueError for what transformers could not load."""
    for name, text in info.conversion_errors.items():
        raise ValueError(f"{name}: {text.splitlines()[-1]}")
    for name, got, expected in info.mismatched_keys:
        raise ValueError(f"{name}: expected {list(expected)} as the model's config says, got {list(got)}")


def _forget(model: PreTrainedModel, name: str) -> None:
    """Frees a tensor of the model."""
    owner, _, inside = name.rpartition(".")
    module = model.get_submodule(owner)
    for tensors in (module._parameters, module._buffers):
        if (tensor := tensors.get(inside)) is not None:
            on_meta = tensor.detach().to("meta")
            parameter = isinstance(tensor, torch.nn.Parameter)
            tensors[inside] = torch.nn.Parameter(on_meta, requires_grad=False) if parameter else on_meta


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars of transformers, and its reports, of each call."""
    was_on, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(max(verbosity, logging.ERROR))
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_on:
            logging.enable_progress_bar()


def _write_configs(model: PreTrainedModel, folder: Path) -> None:
    """config.json and generation_config.json, as `save_pretrained` writes them."""
    model.hf_quantizer.get_state_dict_and_metadata(model)  # which writes to the config what files have
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _kinds(plan: Plan, dense: DenseFolder) -> tuple[Kind, ...]:
    layers: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    shapes = plan.layers | {name: stack.shape for name, stack in plan.stacks.items()}
    for name, shape in shapes.items():
        kind = ".".join(name.split(".")[-2 if name in plan.stacks else -1 :])
        rows = -1 if shape.group_size == shape.k else shape.group_size
        layers[kind, shape.format, rows, shape.symmetric is not False, shape.activations].append(name)
    return tuple(
        Kind(kind, len(names), format, group_size, symmetric, activations, dense.error(names))
        for (kind, format, group_size, symmetric, activations), names in layers.items()
    )


def _left(model: PreTrainedModel, plan: Plan) -> tuple[LayerSummary, ...]:
    left = []
    for name, reason in plan.dense.items():
        module = model.get_submodule(name)
        handler, size = handler_of(module), module_bytes(module)
        assert handler is not None
        left.append(LayerSummary((name,), handler.kind, handler.shape(module), size, size, reason))
    return tuple(left)
