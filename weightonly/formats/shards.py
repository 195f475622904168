"""The safetensors files of a checkpoint folder: what is in them, and reading one tensor at a time.

A file is 8 bytes, the length of the header as a little-endian integer; the header, JSON of name -> dtype, shape and
the bytes' place; the bytes (https://github.com/huggingface/safetensors). They are read here and not by the
safetensors package, which maps whole files into memory: a process would seem to grow by all that it has read.

Pickles (.bin, .pt) are never opened: loading one runs whatever code it contains.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_DTYPES: dict[str, torch.dtype] = {
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
    if hasattr(torch, name)  # some are younger than the oldest PyTorch that is supported
}

_MAX_HEADER_BYTES = 100_000_000
"""The safetensors package's own limit."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint, without its data. begin: its first byte, from the start of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    bytes: int


class Shards:
    """The tensors of a folder's safetensors files.

    tensors: name -> what it is, file by file. metadata: file -> its `__metadata__`. index: the index file, or None.

    Raises FileNotFoundError for a folder or a named shard that does not exist, ValueError naming the file, and the
    tensor where there is one, for pickles, damaged and truncated files, and files that contradict the index.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: expected the folder of a checkpoint, got none")
        self.folder = folder
        self.index = _find_index(folder)
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[Path, Mapping[str, str]] = {}
        if self.index is None:
            self._add_every_file()
        else:
            self._add_indexed(self.index)

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensor `name` on `device`. Raises ValueError naming file and tensor if it cannot be read."""
        info = self.tensors[name]
        data = torch.empty(info.bytes, dtype=torch.uint8)
        with info.file.open("rb") as stream:
            stream.seek(info.begin)
            got = stream.readinto(data.numpy().data)
        if got != info.bytes:
            raise ValueError(f"{info.file}: {name}: expected {info.bytes} bytes, got {got}: the file is truncated")
        return data.view(info.dtype).view(info.shape).to(device)

    def without_data(self, name: str) -> torch.Tensor:
        """A tensor of the same dtype and shape on the meta device."""
        info = self.tensors[name]
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    def _add_every_file(self) -> None:
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            pickles = sorted(f.name for f in self.folder.iterdir() if f.suffix in PICKLES)
            if pickles:
                raise ValueError(
                    f"{self.folder}: expected safetensors files, got pickles ({', '.join(pickles[:3])}); a pickle "
                    "runs code when it is loaded and is never opened here: save the model as safetensors first"
                )
            raise FileNotFoundError(f"{self.folder}: expected safetensors files, got none")
        for file in files:
            found, self.metadata[file] = read_header(file)
            for name, info in found.items():
                if name in self.tensors:
                    other = self.tensors[name].file
                    raise ValueError(f"{file}: {name}: expected in one file, got it in {other.name} too")
                self.tensors[name] = info

    def _add_indexed(self, index: Path) -> None:
        weight_map = _weight_map(index)
        for shard in sorted(set(weight_map.values())):
            file = self.folder / shard
            named = [name for name, of in weight_map.items() if of == shard]
            if not file.is_file():
                raise FileNotFoundError(f"{index}: {named[0]}: expected in {shard}, which does not exist")
            found, self.metadata[file] = read_header(file)
            for name in named:
                if name not in found:
                    raise ValueError(f"{file}: {name}: expected in this file as {index.name} says, got none")
                self.tensors[name] = found[name]


def read_header(file: Path) -> tuple[dict[str, TensorInfo], Mapping[str, str]]:
    """The tensors of a safetensors file in the order of their bytes, and its metadata; no data is read.

    Raises ValueError naming the file, and the tensor where there is one, if it is damaged or truncated.
    """
    total_bytes = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, total_bytes - 8):
            raise ValueError(f"{file}: expected a safetensors file, got {total_bytes} bytes without its header")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: expected a safetensors header, got no JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file}: expected a safetensors header, got JSON of another kind")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{file}: __metadata__: expected an object, got {metadata!r}")
    found = [(name, _tensor(file, name, fields, 8 + length)) for name, fields in header.items()]
    tensors = dict(sorted(found, key=lambda item: item[1].begin))
    for name, info in tensors.items():
        end = info.begin + info.bytes
        if end > total_bytes:
            raise ValueError(
                f"{file}: {name}: expected {end} bytes up to its end, got {total_bytes}: the file is truncated"
            )
    return tensors, metadata


def _tensor(file: Path, name: str, fields: Any, data_begin: int) -> TensorInfo:
    """A header's entry. Raises ValueError naming file and tensor for one that makes no sense."""
    try:
        code, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
            raise ValueError("a size or offset that is no integer from 0")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {name}: expected dtype, shape and data_offsets, got {fields!r}") from error
    if code not in _DTYPES:
        raise ValueError(f"{file}: {name}: expected a dtype of {', '.join(_DTYPES)}, got {code!r}")
    dtype = _DTYPES[code]
    expected_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != expected_bytes:
        raise ValueError(f"{file}: {name}: expected {expected_bytes} bytes for {code} {shape}, got {end - begin}")
    return TensorInfo(file, dtype, tuple(shape), data_begin + begin, expected_bytes)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises ValueError naming the file for anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: expected JSON, got a damaged file ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def _find_index(folder: Path) -> Path | None:
    if (folder / INDEX).is_file():
        return folder / INDEX
    others = sorted(folder.glob("*.safetensors.index.json"))
    if len(others) > 1:
        raise ValueError(f"{folder}: expected one index, got {', '.join(f.name for f in others)}")
    return others[0] if others else None


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file name. Raises ValueError for an index of another form or one that points out of its folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map: expected names and files, got {weight_map!r}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index}: {name}: expected the name of a file beside the index, got {shard!r}")
        if Path(shard).suffix != ".safetensors":
            raise ValueError(f"{index}: {name}: expected a safetensors file, got {shard!r}")
    return weight_map
