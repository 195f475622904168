"""`python -m weightonly convert`: a checkpoint packed once, for one GPU, into a folder that needs no packing later."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..device import check_memory
from ..heuristics.arch import Arch
from ..packing import target_name
from ..require import require_int, require_path
from ..shown import shown
from ..storage import publish, staged
from ..tensor_file import write
from .checkpoint import Checkpoint, open_checkpoint
from .converted import INCOMPLETE, shape_of, tensors_of
from .gguf import GgufShards
from .layers import LayerShape
from .packed_config import METHOD, VERSION, check_runs, guard_of, options_of
from .recognize import quantization_config
from .records import QuantizedLayer, Record
from .shards import CONFIG, INDEX

SHARD_BYTES = 2 << 30
"""A file is written when it holds this much. `convert` needs this much memory, and one layer."""

_COMPANIONS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Suffixes of the small files that are copied: tokenizer, generation settings."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    arch: Arch | None = None,
    device: torch.device | str = "cpu",
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Read the checkpoint in `source`, pack its layers for `arch`, and write them to the new folder `target`.

    arch, device, progress: as for `load_checkpoint`. shard_bytes: about the size of a file.

    Writes safetensors files with a digest of each tensor (see `load_checkpoint(verify=True)`), their index, config.json
    with a quantization config of this library, and copies of the tokenizer's and other small files.
    `load_checkpoint(target)` then yields what `load_checkpoint(source, arch)` does, and with `import weightonly.hf`
    transformers' `from_pretrained(target)` loads the model.

    `target` appears complete or not at all: everything is written to a hidden folder beside it, which is synced to the
    disk and renamed last. A run that fails removes that folder. A run that is killed leaves it; the next one for
    `target` removes it, and `load_checkpoint` refuses it.

    Raises FileExistsError for a `target` that exists, ValueError for a `shard_bytes` below 1, for layers that no kernel
    of `arch` computes (groups of 16, codes for a GPU that does not read them) and for small files that are links to
    elsewhere, OSError for what cannot be written, and what `load_checkpoint` raises.
    """
    source, target = require_path("source", source), require_path("target", target)
    if os.path.lexists(target):
        kind = "a link" if target.is_symlink() else "an existing one"
        raise FileExistsError(f"{target}: expected a folder that does not exist yet, got {kind}")
    require_int("shard_bytes", shard_bytes, least=1)
    if arch is not None:
        target_name(arch)
    check_memory(device)
    checkpoint = open_checkpoint(source)
    check_runs(checkpoint.shapes, arch)
    is_gguf = isinstance(checkpoint.shards, GgufShards)
    companions = [] if is_gguf else _companions(checkpoint.folder)
    shapes: dict[str, LayerShape] = {}
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with staged(target) as folder:
        marker = folder / INCOMPLETE
        marker.touch()
        weight_map = _write_shards(folder, checkpoint.records(arch, device, progress), shard_bytes, shapes)
        total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        for file in companions:
            shutil.copyfile(file, folder / file.name)
        if is_gguf:
            _write_tokenizer(checkpoint.folder, folder)
        _write_json(folder / CONFIG, _config(checkpoint, arch, shapes))
        marker.unlink()
        publish(folder, target)


def _write_shards(
    folder: Path, records: Iterable[Record], shard_bytes: int, shapes: dict[str, LayerShape]
) -> dict[str, str]:
    """Write records to files of about `shard_bytes`, and their shapes to `shapes`. Returns tensor -> file name.

    Raises ValueError for a tensor whose name a converted layer takes.
    """
    weight_map: dict[str, str] = {}
    entries: dict[str, torch.Tensor] = {}

    files = held_bytes = 0

    def flush() -> None:
        nonlocal files, held_bytes
        files += 1
        name = f"model-{files:05}.safetensors"
        write(folder / name, entries, {}, digests=True)
        weight_map.update(dict.fromkeys(entries, name))
        entries.clear()
        held_bytes = 0

    for record in records:
        if isinstance(record, QuantizedLayer):
            shapes[record.name] = shape_of(record)
        for name, entry in tensors_of(record).items():
            if name in weight_map or name in entries:
                raise ValueError(f"{name}: expected one tensor of this name after conversion, got two")
            entries[name] = entry
            held_bytes += entry.nbytes
        if held_bytes >= shard_bytes:
            flush()
    if entries:
        flush()
    return weight_map


def _config(checkpoint: Checkpoint, arch: Arch | None, shapes: dict[str, LayerShape]) -> dict[str, Any]:
    """config.json of the source, with a quantization config that says what the folder is now."""
    config = copy.deepcopy(dict(checkpoint.shards.config(CONFIG) or {}))
    config.pop("compression_config", None)
    if isinstance(config.get("text_config"), dict):
        config["text_config"].pop("quantization_config", None)
    original = quantization_config(checkpoint.shards)[1]
    if original.get("quant_method") == METHOD:  # a converted checkpoint, packed again for another GPU
        original = original.get("source", {})
    config["quantization_config"] = {
        "quant_method": METHOD,
        "format_version": VERSION,
        "arch": None if arch is None else target_name(arch),
        **options_of(shapes),
        "modules_to_not_convert": _dense_layers(checkpoint),
        "source": original,
    }
    return config | guard_of(config)


def _dense_layers(checkpoint: Checkpoint) -> list[str]:
    """Modules with a matrix that is not quantized: linear layers, and embeddings, which no name tells from them."""
    tensors = checkpoint.shards.tensors
    names = (name for name in checkpoint.plain if name.endswith(".weight") and len(tensors[name].shape) == 2)
    return [name.removesuffix(".weight") for name in names]


def _companions(source: Path) -> list[Path]:
    """The small files to copy. Raises ValueError for one that is a link to elsewhere, whatever that may be.

    The cache of Hugging Face's hub has links in `snapshots/REVISION` to its own folder `blobs`.
    """
    homes = [source.resolve()]
    if source.absolute().parent.name == "snapshots":
        homes.append((source.absolute().parents[1] / "blobs").resolve())
    companions = []
    for file in sorted(source.iterdir()):
        describes_weights = file.name.endswith(".index.json") or file.name in (
            CONFIG,
            "quantize_config.json",
            "quant_config.json",
        )
        if file.suffix not in _COMPANIONS or describes_weights or not file.is_file():
            continue
        place = file.resolve()
        if not any(place.is_relative_to(home) for home in homes):
            raise ValueError(
                f"{shown(file)}: expected a file of this folder, got a link to {shown(place)}; copy it or remove it"
            )
        companions.append(file)
    return companions


def _write_tokenizer(source: Path, folder: Path) -> None:
    """That of a GGUF file, as transformers' files. Where it cannot be made, a warning says why: weights do without."""
    try:
        from ..hf.tokenizer import load_tokenizer

        if (tokenizer := load_tokenizer(source)) is not None:
            tokenizer.save_pretrained(folder)
    except (ValueError, ImportError) as error:
        logging.getLogger("weightonly").warning("no tokenizer is written: %s", shown(error))


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
