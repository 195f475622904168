"""`python -m weightonly convert`: a checkpoint packed once, for one GPU, into a folder that loads without work."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..packed import PackedWeight, arch_number, save
from .checkpoint import Checkpoint, open_checkpoint
from .converted import INCOMPLETE, METHOD, VERSION, entries_of
from .recognize import CONFIG, quantization_config
from .records import Record
from .shards import INDEX, read_json

SHARD_BYTES = 2 << 30
"""A file is written when it holds this much: what `convert` needs of memory, beside one layer."""

_COMPANIONS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Small files that a model is not run without: tokenizer, generation settings."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    arch: str | int | None = None,
    device: torch.device | str = "cpu",
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Read the checkpoint in `source`, pack its layers for `arch`, and write them to the new folder `target`.

    Written are safetensors files of about `shard_bytes`, their index, config.json with a quantization config of
    this library, and copies of the tokenizer's and other small files. `load_checkpoint(target)` then yields what
    `load_checkpoint(source, arch)` does. Other arguments as there.

    `target` appears complete or not at all: everything is written to a hidden folder beside it, which is renamed
    last. A run that fails removes that folder; what a killed run leaves of it is refused by `load_checkpoint`.

    Raises FileExistsError for a `target` that exists, ValueError for a `shard_bytes` below 1 or an unknown arch,
    and what `load_checkpoint` raises.
    """
    target = Path(target)
    if target.exists():
        raise FileExistsError(f"{target}: expected a folder that does not exist yet, got an existing one")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected at least 1, got {shard_bytes}")
    if arch is not None:
        arch_number(arch)
    checkpoint = open_checkpoint(source)
    temporary = target.absolute().with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir(parents=True)
    try:
        marker = temporary / INCOMPLETE
        marker.touch()
        weight_map = _write_shards(temporary, checkpoint.records(arch, device, progress), shard_bytes)
        _write_json(temporary / INDEX, {"metadata": {"total_size": _data_bytes(temporary)}, "weight_map": weight_map})
        _copy_companions(checkpoint.folder, temporary)
        _write_json(temporary / CONFIG, _config(checkpoint, arch))
        marker.unlink()
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_shards(folder: Path, records: Iterable[Record], shard_bytes: int) -> dict[str, str]:
    """Write records to files of about `shard_bytes`. Returns tensor -> file name.

    Raises ValueError for a tensor whose name a converted layer takes.
    """
    weight_map: dict[str, str] = {}
    entries: dict[str, PackedWeight | torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save(folder / name, entries)
        weight_map.update(dict.fromkeys(entries, name))
        entries.clear()

    for record in records:
        for name, entry in entries_of(record).items():
            if name in weight_map or name in entries:
                raise ValueError(f"{name}: expected one tensor of this name after conversion, got two")
            entries[name] = entry
        if sum(_bytes(entry) for entry in entries.values()) >= shard_bytes:
            flush()
    if entries:
        flush()
    return weight_map


def _bytes(entry: PackedWeight | torch.Tensor) -> int:
    tensor = entry.data if isinstance(entry, PackedWeight) else entry
    return tensor.numel() * tensor.element_size()


def _data_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _config(checkpoint: Checkpoint, arch: str | int | None) -> dict[str, Any]:
    """config.json of the source, with a quantization config that says what the folder is now."""
    path = checkpoint.folder / CONFIG
    config = read_json(path) if path.is_file() else {}
    config.pop("compression_config", None)
    if isinstance(config.get("text_config"), dict):
        config["text_config"].pop("quantization_config", None)
    original = quantization_config(checkpoint.shards)[1]
    if original.get("quant_method") == METHOD:  # packed again for another GPU
        original = original.get("source", {})
    config["quantization_config"] = {
        "quant_method": METHOD,
        "format_version": VERSION,
        "arch": None if arch is None else f"sm{arch_number(arch)}",
        "source": original,
    }
    return config


def _copy_companions(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        describes_weights = file.name.endswith(".index.json") or file.name in (
            CONFIG,
            "quantize_config.json",
            "quant_config.json",
        )
        if file.is_file() and file.suffix in _COMPANIONS and not describes_weights:
            shutil.copyfile(file, target / file.name)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
