"""A safetensors file with metadata that says which of its tensors are the bytes of a packed weight."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .device import check_memory
from .require import require_path
from .shown import shown
from .storage import open_regular, parse_json, publish, staged

_FILE_VERSION = "1"
_VERSION_KEY = "weightonly.file_version"
PACKED_KEY = "weightonly.packed"
"""Metadata key of a file: name -> the fields of its packed weights, as JSON."""
DIGEST_KEY = "weightonly.sha256"
"""Metadata key of a file of `convert`: name -> SHA-256 of the tensor's bytes, as JSON."""

DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name)
    for code, name in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
    }.items()
    if hasattr(torch, name)  # the oldest PyTorch that is supported lacks some
}
"""What a safetensors file calls a dtype."""

Tensors = Mapping[str, torch.Tensor]
Fields = Mapping[str, dict[str, Any]]
"""Name -> `PackedWeight.fields`."""


def publish_tensors(path: str | os.PathLike[str], tensors: Tensors, packed: Fields) -> None:
    """Write a file that appears under `path` complete or not at all. Raises OSError where it cannot be written."""
    target = require_path("path", path).absolute()
    if target.is_dir():
        raise IsADirectoryError(f"{path}: expected the name of a file, got a folder")
    with staged(target) as folder:
        write(folder / "file.safetensors", tensors, packed, as_path=path)
        publish(folder / "file.safetensors", target)


def write(
    file: Path,
    tensors: Tensors,
    packed: Fields,
    as_path: str | os.PathLike[str] | None = None,
) -> None:
    """Write tensors to a new file in a folder of our own.

    packed: name -> what describes the bytes of a packed weight. as_path: the name of the file in errors. Raises OSError
    where it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file.touch(exist_ok=False)
    mode = file.stat().st_mode & 0o777  # what the umask leaves; save_file makes another file, of mode 0600
    tensors = _apart({name: tensor.detach().resolve_neg().resolve_conj() for name, tensor in tensors.items()})
    metadata = {_VERSION_KEY: _FILE_VERSION, PACKED_KEY: json.dumps(packed)}
    try:
        save_file(tensors, file, metadata)
        file.chmod(mode)
    except (SafetensorError, OSError) as error:
        raise OSError(f"{as_path or file}: could not be written ({shown(error)})") from error


class TensorWriter:
    """A safetensors file, with the digest of each tensor, that is written a tensor at a time: none stays in memory.

    The bytes wait in files beside it, `FILE.ITEM BYTES`, as the header, which comes first, names every tensor. The
    largest items come first in the file: each tensor then begins at a multiple of its items, as readers expect.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.bytes = 0
        """Of the tensors that were added."""
        self._spools: dict[int, BinaryIO] = {}
        self._entries: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Raises OSError, naming the file, where it cannot be written."""
        tensor = tensor.detach().resolve_neg().resolve_conj().to("cpu").contiguous()
        try:
            if tensor.itemsize not in self._spools:
                self._spools[tensor.itemsize] = self._spool(tensor.itemsize).open("xb")
            self._spools[tensor.itemsize].write(tensor.view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise self._failed(error) from error
        self._entries[name] = (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        self._digests[name] = digest(tensor)
        self.bytes += tensor.nbytes

    def close(self) -> None:
        """Put the file together. Raises OSError, naming it, where it cannot be written."""
        codes = {dtype: code for code, dtype in DTYPES.items()}
        metadata = {_VERSION_KEY: _FILE_VERSION, PACKED_KEY: "{}", DIGEST_KEY: json.dumps(self._digests)}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"} | metadata}  # other readers ask for the format
        end = 0
        for name, (dtype, shape, size) in sorted(self._entries.items(), key=lambda entry: -entry[1][0].itemsize):
            header[name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": [end, end + size]}
            end += size
        content = json.dumps(header).encode()
        content += b" " * (-len(content) % 8)
        try:
            with self.file.open("xb") as out:
                out.write(struct.pack("<Q", len(content)) + content)
                for item_bytes, spool in sorted(self._spools.items(), reverse=True):
                    spool.close()
                    with self._spool(item_bytes).open("rb") as data:
                        shutil.copyfileobj(data, out, 1 << 20)
                    os.unlink(self._spool(item_bytes))
        except OSError as error:
            raise self._failed(error) from error

    def _spool(self, item_bytes: int) -> Path:
        return self.file.with_name(f"{self.file.name}.{item_bytes}")

    def _failed(self, error: OSError) -> OSError:
        return OSError(f"{self.file}: could not be written ({shown(error)})")


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors that share no memory: safetensors refuses others."""
    apart: dict[str, torch.Tensor] = {}
    seen: set[tuple[torch.device, int]] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        place = (tensor.device, storage.data_ptr())
        whole = tensor.is_contiguous() and storage.nbytes() == tensor.numel() * tensor.element_size()
        if not whole or (tensor.numel() and place in seen):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(place)
        apart[name] = tensor
    return apart


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes in row-major order, in hexadecimal digits."""
    data = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def read(path: str | os.PathLike[str], device: torch.device | str) -> tuple[dict[str, torch.Tensor], Fields]:
    """Tensors, on `device`, and what describes the bytes of packed weights among them.

    Raises FileNotFoundError for a missing file. Raises ValueError, naming the file, for one that is damaged or that was
    not written by this library, and for what is no regular file.
    """
    from safetensors import SafetensorError, safe_open

    path = require_path("path", path)
    device = check_memory(device)
    open_regular(path).close()
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            packed = _packed_metadata(path, file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a safetensors file, got an unreadable one ({shown(error)})") from error
    for name in packed:
        if name not in tensors:
            raise ValueError(f"{path}: the metadata names a packed weight {name!r} that is not in the file")
    return tensors, packed


def _packed_metadata(path: str | os.PathLike[str], metadata: dict[str, str] | None) -> dict[str, dict[str, Any]]:
    version = (metadata or {}).get(_VERSION_KEY)
    if metadata is None or version is None:
        raise ValueError(f"{path}: expected a file written by weightonly.save, got one without its metadata")
    if version != _FILE_VERSION:
        raise ValueError(f"{path}: expected file version {_FILE_VERSION}, got {version!r}")
    try:
        packed = parse_json(metadata[PACKED_KEY].encode())
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: metadata {PACKED_KEY!r} is missing or not JSON") from error
    if not isinstance(packed, dict) or not all(isinstance(fields, dict) for fields in packed.values()):
        raise ValueError(f"{path}: metadata {PACKED_KEY!r} does not map names to fields")
    return packed
