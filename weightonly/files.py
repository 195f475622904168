"""save and load: packed weights and plain tensors in one safetensors file."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from .packed import PackedWeight
from .require import require_memory
from .shown import shown
from .tensor_file import publish_tensors, read

Entries = Mapping[str, PackedWeight | torch.Tensor]


def save(path: str | os.PathLike[str], entries: Entries) -> None:
    """Write packed weights and plain tensors to one safetensors file, with the metadata to read them back.

    Two names of one tensor are written twice. The file has the permissions that the umask leaves. It appears under
    `path` complete or not at all: it is written beside it, synced to the disk, and then renamed.

    Args:
        path: of the file.
        entries: name -> PackedWeight or tensor, on any device. For a single weight there is `PackedWeight.save`.

    Raises:
        TypeError: entries that are no mapping, and an entry of another type.
        FileNotFoundError: where the folder of `path` does not exist.
        OSError: naming `path`, where it cannot be written.

    Examples:
        >>> q, scales, _ = wo.quantize(torch.randn(512, 768))
        >>> wo.save("up.safetensors", {"qweight": wo.preprocess(q), "scales": scales})
        >>> wo.load("up.safetensors")["qweight"].n
        768
    """
    given: object = entries
    if not isinstance(given, Mapping):
        cure = "; qweight.save(path) writes a single one" if isinstance(given, PackedWeight) else ""
        raise TypeError(f"entries: expected a mapping of names to weights, got {type(given).__name__}{cure}")
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise TypeError(f"entries: expected names, got {name!r}")
        if not isinstance(entry, (PackedWeight, torch.Tensor)):
            raise TypeError(f"entries[{name!r}]: expected a PackedWeight or a tensor, got {type(entry).__name__}")
        require_memory(f"entries[{name!r}]", entry.data)
    packed = {name: entry.fields for name, entry in entries.items() if isinstance(entry, PackedWeight)}
    publish_tensors(path, {name: entry.data for name, entry in entries.items()}, packed)


def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, PackedWeight | torch.Tensor]:
    """Read a file that `save` wrote.

    Args:
        path: of the file.
        device: where the tensors go.

    Returns:
        Name -> PackedWeight or tensor.

    Raises:
        FileNotFoundError: a missing file.
        ValueError: naming the file, for one that is damaged, that was not written by this library, or whose bytes do
            not fit their metadata, and for what is no regular file.

    Examples:
        >>> wo.save("bias.safetensors", {"bias": torch.zeros(768)})
        >>> wo.load("bias.safetensors")["bias"].shape
        torch.Size([768])
    """
    tensors, packed = read(path, device)
    entries: dict[str, PackedWeight | torch.Tensor] = dict(tensors)
    for name, fields in packed.items():
        try:
            entries[name] = PackedWeight(tensors[name], **fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: packed weight {name!r}: {shown(error)}") from error
    return entries
