"""`python -m weightonly convert`: a checkpoint packed once, for one GPU, into a folder that needs no packing later."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..device import check_memory
from ..heuristics.arch import Arch
from ..hub import model_folder
from ..packing import target_name
from ..require import require_int, require_path
from ..shown import shown
from .checkpoint import Checkpoint, open_checkpoint
from .converted import shape_of, tensors_of
from .folder import SHARD_BYTES, check_target, companions_of, new_folder, write_json, write_shards
from .gguf import GgufShards
from .layers import LayerShape
from .packed_config import METHOD, VERSION, check_runs, guard_of, options_of
from .recognize import quantization_config
from .records import QuantizedLayer, Record
from .shards import CONFIG


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    arch: Arch | None = None,
    device: torch.device | str = "cpu",
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Read the checkpoint in `source`, pack its layers for `arch`, and write them to the new folder `target`.

    Writes safetensors files with a digest of each tensor (see `load_checkpoint(verify=True)`), their index, config.json
    with a quantization config of this library, and copies of the tokenizer's and other small files.
    `load_checkpoint(target)` then yields what `load_checkpoint(source, arch)` does, and with `import weightonly.hf`
    transformers' `from_pretrained(target)` loads the model.

    `target` appears complete or not at all: everything is written to a hidden folder beside it, which is synced to the
    disk and renamed last. A run that fails removes that folder. A run that is killed leaves it; the next one for
    `target` removes it, and `load_checkpoint` refuses it.

    Raises what `load_checkpoint` raises.

    Args:
        source: a folder that `load_checkpoint` reads.
        target: the folder to write.
        arch: as for `load_checkpoint`.
        device: as for `load_checkpoint`.
        shard_bytes: about the size of a file.
        progress: as for `load_checkpoint`.

    Raises:
        FileExistsError: a `target` that exists.
        ValueError: a `shard_bytes` below 1, layers that no kernel of `arch` computes (groups of 16, codes for a GPU
            that does not read them) and for small files that are links to elsewhere.
        OSError: what cannot be written.

    Examples:
        >>> wo.formats.convert("Llama-GPTQ", "Llama-packed", arch="sm90", progress=False)
        >>> wo.formats.open_checkpoint("Llama-packed").shapes["model.layers.0.mlp.up_proj"].layout
        'tiled'
    """
    source, target = model_folder(source, argument="source"), require_path("target", target)
    check_target(target)
    require_int("shard_bytes", shard_bytes, least=1)
    if arch is not None:
        target_name(arch)
    check_memory(device)
    checkpoint = open_checkpoint(source)
    check_runs(checkpoint.shapes, arch)
    shapes: dict[str, LayerShape] = {}
    is_gguf = isinstance(checkpoint.shards, GgufShards)
    with new_folder(target, [] if is_gguf else companions_of(checkpoint.folder)) as folder:
        records = checkpoint.records(arch, device, progress)
        write_shards(folder, _tensors(records, shapes, checkpoint), shard_bytes)
        if is_gguf:
            _write_tokenizer(checkpoint.folder, folder)
        write_json(folder / CONFIG, _config(checkpoint, arch, shapes))


def _tensors(
    records: Iterable[Record], shapes: dict[str, LayerShape], checkpoint: Checkpoint
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each record; writes the shapes of the layers to `shapes`."""
    for record in records:
        if isinstance(record, QuantizedLayer):
            shapes[record.name] = shape_of(record, checkpoint.activations_of(record.name))
        yield tensors_of(record)


def _config(checkpoint: Checkpoint, arch: Arch | None, shapes: dict[str, LayerShape]) -> dict[str, Any]:
    """config.json of the source, with a quantization config that says what the folder is now."""
    config = config_of(checkpoint)
    original = quantization_config(checkpoint.shards)[1]
    if original.get("quant_method") == METHOD:  # a converted checkpoint, packed again for another GPU
        original = original.get("source", {})
    config["quantization_config"] = {
        "quant_method": METHOD,
        "format_version": VERSION,
        "arch": None if arch is None else target_name(arch),
        **options_of(shapes),
        "modules_to_not_convert": dense_layers(checkpoint),
        "source": original,
    }
    return config | guard_of(config)


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json of the source, as it is before it gets another quantization config."""
    config = copy.deepcopy(dict(checkpoint.shards.config(CONFIG) or {}))
    config.pop("compression_config", None)
    if isinstance(config.get("text_config"), dict):
        config["text_config"].pop("quantization_config", None)
    return config


def dense_layers(checkpoint: Checkpoint) -> list[str]:
    """Modules with a matrix that is not quantized: linear layers, and embeddings, which no name tells from them."""
    tensors = checkpoint.shards.tensors
    names = (name for name in checkpoint.plain if name.endswith(".weight") and len(tensors[name].shape) == 2)
    return [name.removesuffix(".weight") for name in names]


def _write_tokenizer(source: Path, folder: Path) -> None:
    """That of a GGUF file, as transformers' files. Where it cannot be made, a warning says why: weights do without."""
    try:
        from ..hf.tokenizer import load_tokenizer

        if (tokenizer := load_tokenizer(source)) is not None:
            tokenizer.save_pretrained(folder)
    except (ValueError, ImportError) as error:
        logging.getLogger("weightonly").warning("no tokenizer is written: %s", shown(error))
