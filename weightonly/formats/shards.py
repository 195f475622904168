"""The safetensors files of a checkpoint folder: what is in them, and reading one tensor at a time.

A file is: 8 bytes, the length of the header as a little-endian integer; the header, JSON of name -> dtype, shape and
offsets; the bytes (https://github.com/huggingface/safetensors). The safetensors package maps whole files into memory,
so that the process seems to grow by all that it has read. Without that (`backend="pread"` of 0.8) it holds a tensor
twice, and reads all of one whose part is asked for. This module reads one tensor, or a part, at a time. It accepts no
header that the package refuses: the bytes of the tensors cover the file, once, and names are there once.

Pickles (.bin, .pt) are never opened: loading one runs whatever code it contains.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..shown import shown
from ..storage import MAX_JSON_BYTES, open_regular, parse_json, read_json
from ..tensor_file import DTYPES, digest
from .stacks import Part, TensorInfo, take_apart

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
GGUF = ".gguf"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


_MAX_DIMS = 64
"""Of PyTorch."""


class Shards:
    """The tensors of a folder's safetensors files, or of some `files` of it.

    tensors: name -> TensorInfo, file by file; stacked experts of 8-bit floats one by one (stacks.py). metadata: file ->
    its `__metadata__`. index: the index file, or None. bytes_read: of tensors, until now. own: (what says it, the
    quantization config) where no file of JSON does.

    Raises FileNotFoundError for a missing folder or shard. Raises ValueError, naming the file and, where there is one,
    the tensor, for pickles, damaged or truncated files, files that contradict the index, and names of files and tensors
    that are not printable: they come to terminals and logs.
    """

    own: tuple[str, dict[str, Any]] | None = None

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        check_folder(folder)
        self.folder = folder
        self.index = _find_index(folder) if files is None else None
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[Path, Mapping[str, str]] = {}
        self.bytes_read = 0
        self.configs: dict[str, Mapping[str, Any] | None] = {}
        """Name of a JSON file of the folder -> its content, once it has been read; None: it is not there."""
        if files is not None:
            self._add_files(files)
        elif self.index is None:
            self._add_every_file()
        else:
            self._add_indexed(self.index)
        self.tensors = take_apart(self.tensors)

    def config(self, name: str) -> Mapping[str, Any] | None:
        """The JSON object in a file of the folder, which is read once; None where it is not there."""
        if name not in self.configs:
            self.configs[name] = read_json(self.folder / name) if os.path.lexists(self.folder / name) else None
        return self.configs[name]

    def read(
        self, name: str, device: torch.device | str = "cpu", sha256: str | None = None, part: Any = ...
    ) -> torch.Tensor:
        """The tensor `name` on `device`. sha256: of its bytes; None: they are taken as they are.

        part: an index of slices and numbers, as tensors take them; no bytes of other rows are read, and of the columns
            none beyond the first and the last.

        Raises ValueError, naming file and tensor, if the file is truncated, or its bytes have another digest.
        """
        info = self.tensors[name]
        if not isinstance(info, Part):
            return self._read(name, info, device, sha256, part)
        whole = self._read(name, info.in_file, device, sha256, ...)
        return (whole.t() if info.is_transposed else whole)[part]

    def _read(
        self, name: str, info: TensorInfo, device: torch.device | str, sha256: str | None, part: Any
    ) -> torch.Tensor:
        slices = _slices(part, info.shape) if sha256 is None else None
        rows, columns = slices or (slice(0, 1), slice(0, 1))
        if slices is None:  # as one row
            shape, row_bytes, first, length = info.shape, info.bytes, 0, info.bytes
        else:
            item_bytes = info.dtype.itemsize * math.prod(info.shape[2:])
            width = info.shape[1] if len(info.shape) > 1 else 1
            shape = (rows.stop - rows.start, columns.stop - columns.start, *info.shape[2:])[: max(len(info.shape), 1)]
            row_bytes, first = width * item_bytes, columns.start * item_bytes
            length = (columns.stop - columns.start) * item_bytes
        data = _memory(info.file, name, (rows.stop - rows.start) * length)
        self.bytes_read += len(data)
        begin = info.begin + rows.start * row_bytes + first
        spans = [data.numpy()] if length == row_bytes else data.view(-1, max(length, 1)).numpy()
        with open_regular(info.file) as stream:
            for row, span in enumerate(spans if len(data) else ()):
                got, at = 0, begin + row * row_bytes
                while got < len(span) and (more := os.preadv(stream.fileno(), [span.data[got:]], at + got)):
                    got += more  # a call reads 2 GiB at most
                if got != len(span):
                    problem = f"expected {len(span)} bytes, got {got}: the file is truncated"
                    raise ValueError(f"{info.file}: {name}: {problem}")
        if sha256 is not None and digest(data) != sha256:
            raise ValueError(f"{info.file}: {name}: expected bytes with SHA-256 {sha256}, got others: it is damaged")
        whole = data.view(info.dtype).view(shape)
        return (whole[part] if slices is None else whole).to(device)

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
                    f"{self.folder}: expected safetensors files, got pickles ({shown(', '.join(pickles[:3]))}); "
                    "a pickle runs code when it is loaded and is never opened here: save the model as safetensors "
                    "first, where you trust it: AutoModel.from_pretrained(folder, use_safetensors=False)."
                    "save_pretrained(OUT)"
                )
            if of_gguf := sorted(self.folder.glob(f"*{GGUF}")):
                raise ValueError(
                    f"{self.folder}: expected safetensors files, got a GGUF file; give the file itself: "
                    f"{shown(of_gguf[0])}"
                )
            raise FileNotFoundError(f"{self.folder}: expected safetensors files, got none")
        self._add_files(files)

    def _add_files(self, files: Sequence[Path]) -> None:
        for file in files:
            _check_printable(self.folder, file.name)
            found, self.metadata[file] = read_header(file)
            for name, info in found.items():
                if name in self.tensors:
                    other = self.tensors[name].file
                    raise ValueError(f"{file}: {name}: expected in one file, got it in {other.name} too")
                self.tensors[name] = info

    def _add_indexed(self, index: Path) -> None:
        weight_map = _weight_map(index)
        names_in: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            names_in.setdefault(shard, []).append(name)
        for shard, named in sorted(names_in.items()):
            file = self.folder / shard
            if not file.is_file():
                raise FileNotFoundError(f"{index}: {named[0]}: expected in {shard}, which does not exist")
            found, self.metadata[file] = read_header(file)
            for name in named:
                if name not in found:
                    raise ValueError(f"{file}: {name}: expected in this file as {index.name} says, got none")
                self.tensors[name] = found[name]
            if len(found) > len(named):
                left_out = next(name for name in found if weight_map.get(name) != shard)
                raise ValueError(f"{file}: {left_out}: expected in this file by {index.name}, too, got another or none")


def _memory(file: Path, name: str, size_bytes: int) -> torch.Tensor:
    """uint8 [size_bytes]. Raises OSError, naming file and tensor, where there is no memory for them."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"{file}: {name}: no memory for its {size_bytes} bytes") from error


def _slices(part: Any, shape: tuple[int, ...]) -> tuple[slice, slice] | None:
    """An index as (rows, columns) of a tensor with one dimension or more. None: of one that is read as a whole."""
    part = part if isinstance(part, tuple) else (part,)
    if part in ((), (...,)) or not shape or len(part) > 2 or not all(isinstance(index, slice) for index in part):
        return None
    if any(index.step not in (None, 1) for index in part) or len(part) > len(shape):
        return None
    bounds = [slice(*index.indices(size)) for index, size in zip(part, shape, strict=False)]
    if any(index.stop < index.start for index in bounds):
        return None
    columns = bounds[1] if len(bounds) == 2 else slice(0, shape[1] if len(shape) > 1 else 1)
    return bounds[0], columns


def check_folder(folder: Path) -> None:
    """Raises NotADirectoryError for a file, FileNotFoundError for a folder that does not exist."""
    if folder.is_file():
        raise NotADirectoryError(f"{folder}: expected the folder of a checkpoint, with config.json, got a file")
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected the folder of a checkpoint, got none")


def _check_printable(place: Path, name: str) -> None:
    if not name.isprintable():
        raise ValueError(f"{place}: expected printable names of files and tensors, got {name!r}")


def read_header(file: Path) -> tuple[dict[str, TensorInfo], Mapping[str, str]]:
    """(tensors of a safetensors file in the order of their bytes, its metadata). No data is read.

    Raises ValueError, naming the file and, where there is one, the tensor, if it is damaged or truncated.
    """
    with open_regular(file) as stream:
        total_bytes = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_JSON_BYTES, total_bytes - 8):
            raise ValueError(f"{file}: expected a safetensors file, got {total_bytes} bytes without its header")
        content = stream.read(length)
    try:
        header = parse_json(content)
        if b"\\ud" in content.lower():  # a lone surrogate, in a part that is not looked at, too
            json.dumps(header, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"{file}: expected a safetensors header, got no JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file}: expected a safetensors header, got JSON of another kind")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"{file}: __metadata__: expected an object of strings, got {metadata!r:.200}")
    begin = 8 + length
    found = [(name, _tensor(file, name, fields, begin, total_bytes)) for name, fields in header.items()]
    tensors = dict(sorted(found, key=lambda item: (item[1].begin, item[1].bytes)))
    for name, info in tensors.items():
        if info.begin != begin:
            raise ValueError(
                f"{file}: {name}: expected to begin at byte {begin}, where the tensor before it ends, got {info.begin}"
            )
        begin += info.bytes
    if begin != total_bytes:
        raise ValueError(f"{file}: expected {begin} bytes, up to the end of the last tensor, got {total_bytes}")
    return tensors, metadata


def _tensor(file: Path, name: str, fields: Any, data_begin: int, total_bytes: int) -> TensorInfo:
    """The tensor of a header's entry. Raises ValueError, naming file and tensor, for an invalid entry."""
    _check_printable(file, name)
    try:
        code, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(shape, list) or not all(_is_size(number) for number in (*shape, begin, end)):
            raise ValueError("expected sizes and offsets to be integers from 0")
    except (KeyError, TypeError, ValueError) as error:
        expected = "dtype, shape and data_offsets"
        raise ValueError(f"{file}: {name}: expected {expected}, got {fields!r:.200}") from error
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{file}: {name}: expected a dtype of {', '.join(DTYPES)}, got {code!r:.200}")
    dtype = DTYPES[code]
    size = _bytes(shape, dtype.itemsize)
    if size is None:
        raise ValueError(f"{file}: {name}: expected a shape that PyTorch can have, got {shape!r:.200}")
    if end - begin != size:
        raise ValueError(f"{file}: {name}: expected {size} bytes for {code} {shape!r:.200}, got {end - begin}")
    if data_begin + end > total_bytes:
        raise ValueError(
            f"{file}: {name}: expected {data_begin + end} bytes up to its end, got {total_bytes}: the file is truncated"
        )
    return TensorInfo(file, dtype, tuple(shape), data_begin + begin, size)


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _bytes(shape: list[int], item_bytes: int) -> int | None:
    """The size of a tensor; None for one that PyTorch cannot describe, be it empty."""
    total, extent = item_bytes, item_bytes
    for size in shape:
        total, extent = total * size, extent * max(size, 1)
        if extent >= 1 << 63:
            return None
    return total if len(shape) <= _MAX_DIMS else None


def _find_index(folder: Path) -> Path | None:
    if os.path.lexists(folder / INDEX):
        return folder / INDEX
    others = sorted(folder.glob("*.safetensors.index.json"))
    if len(others) > 1:
        raise ValueError(f"{folder}: expected one index, got {shown(', '.join(f.name for f in others))}")
    for other in others:
        _check_printable(folder, other.name)
    return others[0] if others else None


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file name. Raises ValueError for a damaged index and one that names files outside of its folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map: expected names and files, got {weight_map!r:.200}")
    for name, shard in weight_map.items():
        _check_printable(index, name)
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index}: {name}: expected the name of a file beside the index, got {shard!r:.200}")
        _check_printable(index, shard)
        if Path(shard).suffix != ".safetensors":
            raise ValueError(f"{index}: {name}: expected a safetensors file, got {shard!r:.200}")
    return weight_map
