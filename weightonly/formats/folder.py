"""A checkpoint folder of ours is written: shards, their index, the small files; complete or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ..shown import shown
from ..storage import publish, staged
from ..tensor_file import TensorWriter
from .converted import INCOMPLETE
from .foreign import MODELOPT_CONFIG
from .shards import CONFIG, INDEX

SHARD_BYTES = 2 << 30
"""A file is complete when it holds this much."""

_COMPANIONS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Suffixes of the small files that are copied: tokenizer, generation settings."""


def check_target(target: Path, may_be_empty: bool = False) -> None:
    """Raises FileExistsError for a folder to write that is there. may_be_empty: an empty one may be."""
    if not os.path.lexists(target):
        return
    is_folder = target.is_dir() and not target.is_symlink()
    if may_be_empty and is_folder and not any(target.iterdir()):
        return
    kind = "a link" if target.is_symlink() else "an existing one"
    expected = "a folder that does not exist yet" + ", or an empty one" * may_be_empty
    raise FileExistsError(f"{target}: expected {expected}, got {kind}")


@contextlib.contextmanager
def new_folder(target: Path, companions: Sequence[Path]) -> Iterator[Path]:
    """A folder beside `target` to write to, with copies of the files `companions`; it is moved there in the end.

    An error inside leaves nothing. A process that is killed leaves a hidden folder that no reader takes, and that the
    next run for `target` removes.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with staged(target) as folder:
        marker = folder / INCOMPLETE
        marker.touch()
        for file in companions:
            shutil.copyfile(file, folder / file.name)
        yield folder
        marker.unlink()
        publish(folder, target)


def write_shards(folder: Path, groups: Iterable[Mapping[str, torch.Tensor]], shard_bytes: int) -> int:
    """Write tensors to files of about `shard_bytes`, and the index of these.

    groups: tensors that are in one file, such as those of a layer. One group is in memory at a time.

    Returns the bytes of all tensors. Raises ValueError for a name that comes twice.
    """
    weight_map: dict[str, str] = {}
    files = total = 0
    writer = None
    for tensors in groups:
        if writer is None:
            files += 1
            writer = TensorWriter(folder / f"model-{files:05}.safetensors")
        for name, tensor in tensors.items():
            if name in weight_map:
                raise ValueError(f"{name}: expected one tensor of this name after conversion, got two")
            writer.add(name, tensor)
            weight_map[name] = writer.file.name
            total += tensor.nbytes
        if writer.bytes >= shard_bytes:
            writer.close()
            writer = None
    if writer is not None:
        writer.close()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return total


def companions_of(source: Path) -> list[Path]:
    """The small files to copy. Raises ValueError for one that is a link to elsewhere, whatever that may be.

    The cache of Hugging Face's hub has links in `snapshots/REVISION` to its own folder `blobs`.
    """
    homes = [source.resolve()]
    if source.absolute().parent.name == "snapshots":
        homes.append((source.absolute().parents[1] / "blobs").resolve())
    companions: list[Path] = []
    for file in sorted(source.iterdir()):
        describes_weights = file.name.endswith(".index.json") or file.name in (
            CONFIG,
            "quantize_config.json",
            "quant_config.json",
            MODELOPT_CONFIG,
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


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
