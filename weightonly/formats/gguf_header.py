"""The header of a GGUF file: its metadata and where its tensors are. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Package gguf's reader, and transformers' own, believe counts and lengths, and keep an object for each word of a
vocabulary. This one reads each byte of the header once, keeps no arrays, and checks everything against the file before
anything is allocated. What it accepts is safe to give to the others.
"""

from __future__ import annotations

import io
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..extras import missing_packages_named
from ..shown import shown
from ..storage import MAX_JSON_BYTES, open_regular

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Type of a value -> how `struct` reads it."""

_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
"""Of GGML."""

_MAX_ENTRIES = 1 << 16
"""Tensors, and values, of a file: models have some thousands, and an entry takes more memory than bytes of a header."""


@dataclass(frozen=True)
class Array:
    """An array of the metadata, which is not kept. count: of its values."""

    count: int


@dataclass(frozen=True)
class Stored:
    """A tensor of a file. type: as package gguf names it. shape: as PyTorch has it. begin, bytes: in the file."""

    file: Path
    name: str
    type: str
    shape: tuple[int, ...]
    begin: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """metadata: key -> a number, a text, or an Array. tensors: in the order of the header."""

    file: Path
    metadata: dict[str, Any]
    tensors: tuple[Stored, ...]


def read_gguf_header(file: Path) -> Header:
    """The header of a file. No tensor is read, and no more than MAX_JSON_BYTES of the header.

    Raises ValueError, naming the file and, where there is one, the tensor, if it is damaged or truncated, has a key or
    a tensor twice, an unknown type, or tensors that overlap or end beyond the file. Raises ImportError without gguf.
    """
    with missing_packages_named():
        from gguf import GGML_QUANT_SIZES

    with open_regular(file) as stream:
        source = _Source(file, stream)
        if source.take(4, "its first bytes") != b"GGUF":
            raise ValueError(f"{file}: expected a GGUF file, got other first bytes")
        version, tensor_count, value_count = source.numbers("<IQQ", "version and counts")
        if version not in (2, 3):
            raise ValueError(f"{file}: expected GGUF of version 2 or 3, little endian, got version {version}")
        if max(tensor_count, value_count) > _MAX_ENTRIES:
            counts = f"{tensor_count} tensors and {value_count} values"
            raise ValueError(f"{file}: expected a header of at most {_MAX_ENTRIES} tensors and values, got {counts}")
        metadata: dict[str, Any] = {}
        for index in range(value_count):
            key = source.text(f"key {index} of {value_count}")
            if key in metadata:
                raise ValueError(f"{file}: {key}: expected once in the header, got it twice")
            metadata[key] = source.value(key)
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(tensor_count):
            name, shape, kind, offset = _entry(source, f"tensor {index} of {tensor_count}")
            if name in entries:
                raise ValueError(f"{file}: {name}: expected one tensor of this name, got two")
            entries[name] = shape, kind, offset
        begin, total_bytes = stream.tell(), source.total_bytes
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{file}: general.alignment: expected a power of two, got {alignment!r:.200}")
    begin = -(-begin // alignment) * alignment
    sizes = {int(number): (number.name, *size) for number, size in GGML_QUANT_SIZES.items()}
    tensors = []
    for name, (shape, kind, offset) in entries.items():
        if kind not in sizes:
            raise ValueError(f"{file}: {name}: expected a type of GGML that package gguf knows, got number {kind}")
        type_name, values, block_bytes = sizes[kind]
        count = math.prod(shape)
        if not 1 <= count < 1 << 62:
            raise ValueError(f"{file}: {name}: expected a shape of 1 to 2^62 elements, got {list(shape)}")
        if shape[-1] % values:
            raise ValueError(
                f"{file}: {name}: expected rows of whole blocks of {values} for {type_name}, got {list(shape)}"
            )
        if offset % alignment:
            raise ValueError(f"{file}: {name}: expected an offset that is a multiple of {alignment}, got {offset}")
        tensors.append(Stored(file, name, type_name, shape, begin + offset, count // values * block_bytes))
    _check_places(file, tensors, total_bytes)
    return Header(file, metadata, tuple(tensors))


def _entry(source: _Source, what: str) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, number of the type, offset) of a tensor. Raises ValueError for what no tensor has."""
    name = source.text(what)
    (dims,) = source.numbers("<I", name)
    if not 1 <= dims <= _MAX_DIMS:
        raise ValueError(f"{source.file}: {name}: expected 1 to {_MAX_DIMS} dimensions, got {dims}")
    shape = source.numbers(f"<{dims}Q", name)[::-1]  # GGML has the fastest one first
    kind, offset = source.numbers("<IQ", name)
    return name, shape, kind, offset


def _check_places(file: Path, tensors: list[Stored], total_bytes: int) -> None:
    before: Stored | None = None
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.bytes)):
        end = tensor.begin + tensor.bytes
        if end > total_bytes:
            raise ValueError(
                f"{file}: {tensor.name}: expected {end} bytes up to its end, got {total_bytes}: the file is truncated"
            )
        if before is not None and tensor.begin < before.begin + before.bytes:
            raise ValueError(f"{file}: {tensor.name}: expected to begin after {before.name} ends, got an overlap")
        before = tensor


class _Source:
    """The bytes of a header, from the first on. file, total_bytes: of the file."""

    def __init__(self, file: Path, stream: io.BufferedReader) -> None:
        self.file = file
        self._stream = stream
        self.total_bytes = os.fstat(stream.fileno()).st_size
        self._left = min(self.total_bytes, MAX_JSON_BYTES)

    def take(self, count: int, what: str) -> bytes:
        """The next bytes. Raises ValueError, naming `what`, where the file, or the longest header, has no more."""
        if count > self._left:
            kind = "the file is truncated or damaged" if self.total_bytes <= MAX_JSON_BYTES else "it is damaged"
            raise ValueError(
                f"{self.file}: {shown(what)}: expected {count} more bytes of the header, got {self._left} of at most "
                f"{MAX_JSON_BYTES}: {kind}"
            )
        self._left -= count
        data = self._stream.read(count)
        if len(data) != count:
            problem = f"expected {count} bytes, got {len(data)}: the file is truncated"
            raise ValueError(f"{self.file}: {shown(what)}: {problem}")
        return data

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form), what))

    def text(self, what: str, is_name: bool = True) -> str:
        """A string. Raises ValueError for one that is no UTF-8, or, where it is a name, not printable."""
        (length,) = self.numbers("<Q", what)
        data = self.take(length, what)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.file}: {shown(what)}: expected UTF-8, got other bytes ({error})") from error
        if is_name and not (text and text.isprintable()):
            raise ValueError(f"{self.file}: expected printable names of keys and tensors, got {text!r:.200}")
        return text

    def value(self, key: str) -> Any:
        (kind,) = self.numbers("<I", key)
        if kind == _STRING:
            return self.text(key, is_name=False)
        if kind != _ARRAY:
            return self.numbers(self._form(kind, key), key)[0]
        inside, count = self.numbers("<IQ", key)
        if inside == _STRING:
            for _ in range(count):
                self.take(self.numbers("<Q", key)[0], key)
        else:
            self.take(count * struct.calcsize(self._form(inside, key)), key)
        return Array(count)

    def _form(self, kind: int, key: str) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"{self.file}: {key}: expected a type of value 0 to 12, no arrays of arrays, got {kind}")
        return _NUMBERS[kind]
