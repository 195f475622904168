"""PackedWeight: the bytes of a quantized weight together with what they mean; packing, unpacking, files."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .code_tables import CODE_TABLES, table_on, table_values
from .heuristics.problem import CODE_FORMATS, FORMATS
from .layout import (
    INTERLEAVED,
    ROW_MAJOR,
    TILE,
    TILED,
    block_bytes,
    check_bits,
    check_code_layout,
    check_layout,
    column_step,
    matrix_shape,
    pack_bytes,
    padded_shape,
    unpack_bytes,
)
from .quantize import WEIGHT_DTYPES

# sm70 and sm72 have no ldmatrix: their kernels read B row by row and dequantize it after the global load. sm90 has
# wgmma, whose one operand in registers is A: the weight becomes A, in the order of its fragments.
_ARCH_LAYOUT = (
    dict.fromkeys((70, 72), ROW_MAJOR)
    | dict.fromkeys((75, 80, 86, 87, 89), INTERLEAVED)
    | {90: TILED}
    | dict.fromkeys((100, 101, 103, 110, 120, 121), INTERLEAVED)
)

_FILE_VERSION = "1"
_KEY_VERSION = "weightonly.file_version"
_KEY_PACKED = "weightonly.packed"


class PackedWeight:
    """A weight of shape [K, N] in the byte order of a kernel.

    data: uint8, one dimension, contiguous: k_padded * n_padded * bits / 8 bytes.
    k, n: the shape of the weight before padding.
    format: "int4", "int8"; "nf4", "fp4", "code4" for 4-bit codes that stand for the numbers of a table.
    layout: "row_major", "interleaved" or "tiled"; says what the bytes mean, as their number and shape cannot. Codes
        are always "tiled".
    code: the table of "code4", 16 numbers, a tensor or a sequence; None for other formats. The attribute has them as
        floats, exact in fp32; it is the fixed table for "nf4" and "fp4", None for integers.

    Raises TypeError or ValueError for data that does not fit the other fields.
    """

    __slots__ = ("_plans", "bits", "code", "data", "format", "k", "k_padded", "layout", "n", "n_padded")

    def __init__(
        self,
        data: torch.Tensor,
        k: int,
        n: int,
        format: str,
        layout: str,
        code: torch.Tensor | Sequence[float] | None = None,
    ) -> None:
        bits = _format_bits(format)
        check_layout(layout)
        if format in CODE_FORMATS:
            check_code_layout(bits, layout)
        table = _table_of(format, code)
        for name, size in (("k", k), ("n", n)):
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name}: expected an int, got {type(size).__name__}")
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        k_padded, n_padded = padded_shape(k, n, bits, layout)
        if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8:
            raise TypeError(f"data: expected a uint8 tensor, got {getattr(data, 'dtype', type(data).__name__)}")
        if data.dim() != 1 or not data.is_contiguous():
            raise ValueError(
                f"data: expected one contiguous dimension, got {list(data.shape)}, strides {data.stride()}"
            )
        expected_bytes = k_padded * n_padded * bits // 8
        if data.numel() != expected_bytes:
            raise ValueError(
                f"data: expected {expected_bytes} bytes for {format} [{k}, {n}] "
                f"padded to [{k_padded}, {n_padded}], got {data.numel()}"
            )
        self.data = data
        self.code = table
        self.k = k
        self.n = n
        self.format = format
        self.layout = layout
        self.bits = bits
        self.k_padded = k_padded
        self.n_padded = n_padded
        self._plans: dict[Any, Any] = {}  # gemm's cache; belongs to this object and this device, never copied
        if table is not None and data.is_cuda and not torch.compiler.is_compiling():
            for dtype in WEIGHT_DTYPES:  # now, as the first use may be inside of a CUDA graph
                table_on(table, data.device, dtype)

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.data.device

    @property
    def fields(self) -> dict[str, Any]:
        """What the bytes mean, as JSON can hold it: PackedWeight(data, **fields) is this weight on other bytes."""
        fields = {"k": self.k, "n": self.n, "format": self.format, "layout": self.layout}
        return fields | ({"code": self.code} if self.format == "code4" else {})

    def to(self, device: torch.device | str | int) -> PackedWeight:
        """The same bytes on `device`; `self` if they are there already. The layout is kept as it is."""
        data = self.data.to(device)
        return self if data is self.data else PackedWeight(data, **self.fields)

    def slice_n(self, begin: int, end: int) -> PackedWeight:
        """Columns begin..end of a tiled weight, as if they had been packed alone: w[:, begin:end].

        begin, end: multiples of 64; `end` may be N too. Goes with scales[:, begin:end], zeros and bias alike.
        Returns a weight [K, end - begin] on the same bytes, without a copy: it keeps the memory of the whole.

        Raises ValueError for another layout, an empty range or one beyond N, and other borders; TypeError for
        borders that are not integers.
        """
        self._check_slice("N", self.n, begin, end)
        stripe_bytes = self.k_padded // TILE * block_bytes(self.bits)
        data = self.data[begin // TILE * stripe_bytes : -(-end // TILE) * stripe_bytes]
        return PackedWeight(data, **self.fields | {"n": end - begin})

    def slice_k(self, begin: int, end: int) -> PackedWeight:
        """Rows begin..end of a tiled weight, as if they had been packed alone: w[begin:end].

        begin, end: multiples of 64; `end` may be K too. Where the group size g divides both, the slice goes with
        scales[begin // g : end // g] and zeros alike; scales per channel stay as they are.
        Returns a weight [end - begin, N] on a copy of its bytes, as every stripe has some of them.

        Raises ValueError for another layout, an empty range or one beyond K, and other borders; TypeError for
        borders that are not integers.
        """
        self._check_slice("K", self.k, begin, end)
        blocks = self.data.view(self.n_padded // TILE, self.k_padded // TILE, block_bytes(self.bits))
        part = blocks[:, begin // TILE : -(-end // TILE)].clone(memory_format=torch.contiguous_format)
        return PackedWeight(part.view(-1), **self.fields | {"k": end - begin})

    def _check_slice(self, dimension: str, size: int, begin: int, end: int) -> None:
        if self.layout != TILED:
            raise ValueError(f"layout: expected {TILED!r}, the one that can be sliced, got {self.layout!r}")
        for name, border in (("begin", begin), ("end", end)):
            if isinstance(border, bool) or not isinstance(border, int):
                raise TypeError(f"{name}: expected an int, got {type(border).__name__}")
        if not 0 <= begin < end <= size:
            raise ValueError(f"begin, end: expected 0 <= begin < end <= {dimension} = {size}, got {begin}, {end}")
        if begin % TILE:
            raise ValueError(f"begin: expected a multiple of {TILE}, got {begin}")
        if end % TILE and end != size:
            raise ValueError(f"end: expected a multiple of {TILE} or {dimension} = {size}, got {end}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this weight to a safetensors file; see `save`."""
        save(path, {"qweight": self})

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> PackedWeight:
        """Read a file that `PackedWeight.save` wrote; see `load` for the errors."""
        entries = load(path, device)
        weight = entries.get("qweight")
        if len(entries) != 1 or not isinstance(weight, cls):
            raise ValueError(f"{path}: expected one packed weight named 'qweight', got {sorted(entries)}; use load()")
        return weight

    def __repr__(self) -> str:
        return (
            f"PackedWeight({self.format} [{self.k}, {self.n}], layout={self.layout!r}, "
            f"{self.data.numel()} bytes on {self.device})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeight, (self.data, *self.fields.values())


def _format_bits(format: str) -> int:
    if format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    return FORMATS[format]


def _table_of(format: str, code: torch.Tensor | Sequence[float] | None) -> tuple[float, ...] | None:
    """The table of a weight, None for integers. Raises ValueError or TypeError for a `code` that does not fit."""
    if format == "code4":
        if code is None:
            raise ValueError("code: expected the table of a code4 weight, got None")
        return table_values(code)
    if code is not None:
        raise ValueError(f"code: expected None for {format}, which has no table of its own, got one")
    return CODE_TABLES.get(format)


def arch_number(arch: str | int) -> int:
    """80 for 80, "80", "sm80", "sm_80". Raises ValueError unless it is a known one of sm70 to sm121."""
    match = None if isinstance(arch, bool) else re.fullmatch(r"(?:sm_?)?(\d+)[af]?", str(arch).lower())
    number = int(match[1]) if match else -1
    if number not in _ARCH_LAYOUT:
        raise ValueError(f"arch: expected one of {', '.join(f'sm{a}' for a in _ARCH_LAYOUT)}, got {arch!r}")
    return number


def layout_for_arch(arch: str | int) -> str:
    """The layout that the kernels of `arch` read. Raises ValueError for an unknown one; see `arch_number`."""
    return _ARCH_LAYOUT[arch_number(arch)]


def preprocess(
    q: torch.Tensor,
    bits: int = 4,
    arch: str | int | None = None,
    layout: str | None = None,
    *,
    format: str | None = None,
    code: torch.Tensor | Sequence[float] | None = None,
) -> PackedWeight:
    """Bring a quantized weight into the byte order of a GPU's kernels: once, before deployment.

    q: int8 [K, N], K, N >= 1, any device; values -8..7 for bits=4. Padded with zeros to multiples of 64 in K
        and 64 in N, but 32 in N for int8 that is not "tiled". For code formats the codes 0..15, int8 or uint8,
        padded with code 0, which is finite in every table: it meets zeros of x or gives columns that are dropped.
    arch: the GPU to pack for, "sm70" to "sm121" in any common spelling ("sm_80", 80, "sm90a").
    layout: the layout itself, instead of an arch. With neither: the layout of the device of `q`; for a CPU
        tensor that of the visible GPU, else "interleaved". Codes: "tiled", whatever the GPU, as there is no other.
    format: None for the integers of `bits`; "nf4" or "fp4" for codes of these tables, "code4" for those of `code`.
    code: the table of "code4": 16 numbers within the range of fp16, kept in fp32.

    Returns a PackedWeight on the device of `q`. Raises TypeError for a `q` or `code` of another kind, ValueError for
    a wrong rank, an empty `q`, values out of range, other `bits`, an unknown arch, layout or format, an arch, a layout
    and a format that contradict, or a `code` that is missing or not needed.
    """
    is_code = format in CODE_FORMATS
    if is_code and isinstance(q, torch.Tensor) and q.dtype == torch.uint8:
        q = q.view(torch.int8)  # 128 and above become negative, which the check of the range refuses
    k, n = matrix_shape(q, bits)
    format = format_of(bits, format)
    layout = code_layout(format, arch, layout) if is_code else _resolve_layout(q, arch, layout)
    _table_of(format, code)  # what is wrong with it, before any work
    if q.numel() == 0:
        raise ValueError(f"q: expected shape [K, N] with K, N >= 1, got {list(q.shape)}")
    k_padded, n_padded = padded_shape(k, n, bits, layout)
    if (k_padded, n_padded) != (k, n):
        q = torch.nn.functional.pad(q, (0, n_padded - n, 0, k_padded - k))
    return PackedWeight(pack_bytes(q, bits, layout, is_code), k, n, format, layout, code)


def unpack(qweight: PackedWeight) -> torch.Tensor:
    """The inverse of `preprocess`: int8 [K, N] on the device of `qweight`, without the padding; codes as 0..15.

    Raises TypeError for anything but a PackedWeight.
    """
    if not isinstance(qweight, PackedWeight):
        raise TypeError(f"qweight: expected a PackedWeight, got {type(qweight).__name__}")
    return unpack_columns(qweight, 0, qweight.n).contiguous()


def unpack_columns(qweight: PackedWeight, begin: int, end: int) -> torch.Tensor:
    """Columns begin..end of the unpacked weight, int8 [K, end - begin]; begin: a multiple of `column_step`."""
    step = column_step(qweight.bits, qweight.layout)
    padded_end = -(-end // step) * step  # N itself need not be at a border; the padded N is
    w = qweight
    q = unpack_bytes(w.data, w.k_padded, w.n_padded, w.bits, w.layout, (begin, padded_end), codes=w.code is not None)
    return q[: w.k, : end - begin]


def format_of(bits: int, format: str | None) -> str:
    """`format`, or the integers of `bits` where it is None. Raises ValueError for one unknown or of other bits."""
    check_bits(bits)
    if format is None:
        return f"int{bits}"
    if bits != _format_bits(format):
        raise ValueError(f"bits: expected {_format_bits(format)} for {format}, got {bits}")
    return format


def code_layout(format: str, arch: str | int | None, layout: str | None = None) -> str:
    """ "tiled", the layout of every code format. Raises ValueError for another one, or an arch that reads another."""
    if arch is not None and layout_for_arch(arch) != TILED:
        tiled = " or ".join(f"sm{a}" for a, of_arch in _ARCH_LAYOUT.items() if of_arch == TILED)
        raise ValueError(f"arch: expected {tiled} for {format}, which has no layout for other GPUs, got {arch!r}")
    if layout is not None:
        check_layout(layout)
        check_code_layout(4, layout)
    return TILED


def _resolve_layout(q: torch.Tensor, arch: str | int | None, layout: str | None) -> str:
    if layout is not None:
        check_layout(layout)
        if arch is not None and layout_for_arch(arch) != layout:
            raise ValueError(f"layout: expected {layout_for_arch(arch)!r} for arch {arch!r}, got {layout!r}")
        return layout
    if arch is not None:
        return layout_for_arch(arch)
    if q.is_cuda:
        return layout_for_arch(_capability(q.device))
    if torch.cuda.is_available():
        return _ARCH_LAYOUT.get(_capability(None), INTERLEAVED)
    return INTERLEAVED


def _capability(device: torch.device | None) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


# --- files -------------------------------------------------------------------------------------------------


def save(path: str | os.PathLike[str], entries: Mapping[str, PackedWeight | torch.Tensor]) -> None:
    """Write packed weights and plain tensors to one safetensors file, with the metadata to read them back.

    The file appears under `path` complete or not at all: it is written beside it and then renamed.
    Raises TypeError for an entry of another kind.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    packed: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        if isinstance(entry, PackedWeight):
            tensors[name] = entry.data
            packed[name] = entry.fields
        elif isinstance(entry, torch.Tensor):
            tensors[name] = entry.detach().contiguous()
        else:
            raise TypeError(f"entries[{name!r}]: expected a PackedWeight or a tensor, got {type(entry).__name__}")
    metadata = {_KEY_VERSION: _FILE_VERSION, _KEY_PACKED: json.dumps(packed)}
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, PackedWeight | torch.Tensor]:
    """Read a file that `save` wrote: name -> PackedWeight or tensor, on `device`.

    Raises FileNotFoundError, or ValueError naming the file for one that is damaged, has no metadata of this
    library, or whose bytes do not fit their metadata.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            packed = _packed_metadata(path, file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a safetensors file, got an unreadable one ({error})") from error
    entries: dict[str, PackedWeight | torch.Tensor] = dict(tensors)
    for name, fields in packed.items():
        try:
            entries[name] = PackedWeight(tensors[name], **fields)
        except KeyError as error:
            raise ValueError(f"{path}: the metadata names a packed weight {name!r} that is not in the file") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: packed weight {name!r}: {error}") from error
    return entries


def _packed_metadata(path: str | os.PathLike[str], metadata: dict[str, str] | None) -> dict[str, dict[str, Any]]:
    version = (metadata or {}).get(_KEY_VERSION)
    if metadata is None or version is None:
        raise ValueError(f"{path}: expected a file written by weightonly.save, got one without its metadata")
    if version != _FILE_VERSION:
        raise ValueError(f"{path}: expected file version {_FILE_VERSION}, got {version!r}")
    try:
        packed = json.loads(metadata[_KEY_PACKED])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: metadata {_KEY_PACKED!r} is missing or not JSON") from error
    if not isinstance(packed, dict) or not all(isinstance(fields, dict) for fields in packed.values()):
        raise ValueError(f"{path}: metadata {_KEY_PACKED!r} does not map names to fields")
    return packed
