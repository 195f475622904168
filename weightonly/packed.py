"""PackedWeight: the bytes of a quantized weight, and what they mean."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .codebooks import codebook_of, codebook_on
from .dense import WEIGHT_DTYPES, resolve_group_size
from .device import check_visible
from .heuristics.problem import CODE_FORMATS, FORMAT_GROUPS, FORMATS, FP8_FORMATS
from .layout import SLICED_LAYOUTS, TILE, TILED_FP8, Range, check_code_layout, check_layout, cut_bytes, padded_shape
from .plain import PLAIN
from .require import require_bool, require_dtype, require_int, require_memory
from .shown import shown
from .tensor_file import publish_tensors, read


class PackedWeight:
    """A weight of shape [K, N], or E of them stacked, in the byte order of a kernel.

    A stacked weight is for `grouped_gemm`. `qweight[e]` is expert e, `qweight[begin:end]` some of them, stacked: both
    are PackedWeights on the same memory. A loop over a stacked weight goes through its experts.

    Args:
        data: uint8 [k_padded * n_padded * bits / 8], contiguous; of stacked experts E times as many bytes, one expert
            after another.
        k: rows of the weight before padding.
        n: columns of the weight before padding.
        format: "int4" or "int8" for integers; "nf4", "fp4", "mxfp4", "nvfp4" or "code4" for 4-bit codes, each the index
            of a number in a codebook of 16; "fp8" for floats of 8 bits (E4M3).
        layout: the order of the bytes, "row_major", "interleaved", "tiled" or "tiled_fp8" for GPUs, "cpu" for CPUs;
            their number and shape cannot tell. Codes are "interleaved", "tiled" or "cpu"; "tiled_fp8" is for x in
            float8_e4m3fn and has "int4" without zeros, and "mxfp4".
        code: the codebook of "code4": 16 numbers, a tensor or a sequence. None for the other formats. The attribute
            `code` holds 16 floats, rounded to fp32, for every format of 4-bit codes, and None for others.
        group_size: rows that share a scale, -1: all of them; None: nobody said. Where it is set, `gemm` and
            `dequantize` refuse other scales. Always set of "mxfp4" (32) and "nvfp4" (16).
        has_zeros: whether there are zero points; None: nobody said. Where it is set, zeros have to fit.
        has_perm: whether the rows are in act-order; None: nobody said. Where it is set, perm has to fit.
        experts: E, how many weights [K, N] of one format are stacked; None: a single one.

    Raises:
        TypeError | ValueError: naming the argument, data that does not fit the other arguments.

    Examples:
        >>> w = wo.preprocess(torch.zeros(512, 768, dtype=torch.int8), arch="sm90")
        >>> w.k, w.n, w.format, w.layout, w.data.numel()
        (512, 768, 'int4', 'tiled', 196608)
    """

    __slots__ = (
        "_checked_out",
        "_data",
        "_held",
        "_held_x",
        "_kind",
        "bits",
        "code",
        "experts",
        "format",
        "group_size",
        "has_perm",
        "has_zeros",
        "is_code",
        "k",
        "k_padded",
        "layout",
        "n",
        "n_padded",
    )

    def __init__(
        self,
        data: torch.Tensor,
        k: int,
        n: int,
        format: str,
        layout: str,
        code: torch.Tensor | Sequence[float] | None = None,
        group_size: int | None = None,
        has_zeros: bool | None = None,
        has_perm: bool | None = None,
        *,
        experts: int | None = None,
    ) -> None:
        bits = format_bits(format)
        self.is_code = format in CODE_FORMATS
        check_format_layout(format, layout)
        codebook = codebook_of(format, code)
        for name, size in (("k", k), ("n", n), ("experts", 1 if experts is None else experts)):
            require_int(name, size, least=1)
        group_size = format_groups(format, group_size, k)
        if group_size is not None:
            group_size = -1 if resolve_group_size(group_size, k) == k else group_size
        require_bool("has_zeros", has_zeros, or_none=True)
        require_bool("has_perm", has_perm, or_none=True)
        if has_zeros and self.is_code:
            raise ValueError(f"has_zeros: expected False or None for {format}, whose codes have no zeros, got True")
        if has_zeros and layout == TILED_FP8:
            raise ValueError(f"has_zeros: expected False or None in layout {layout!r}, got True")
        k_padded, n_padded = padded_shape(k, n, bits, layout)
        require_dtype("data", data, (torch.uint8,), in_memory=False)
        if data.dim() != 1 or not data.is_contiguous():
            raise ValueError(
                f"data: expected one contiguous dimension, got {list(data.shape)}, strides {data.stride()}"
            )
        expected_bytes = (experts or 1) * k_padded * n_padded * bits // 8
        if data.numel() != expected_bytes:
            stack = "" if experts is None else f"{experts} x "
            raise ValueError(
                f"data: expected {expected_bytes} bytes for {stack}{format} [{k}, {n}] "
                f"padded to [{k_padded}, {n_padded}], got {data.numel()}"
            )
        self._data = data
        self.code = codebook
        self.k = k
        self.n = n
        self.format = format
        self.layout = layout
        self.bits = bits
        self.k_padded = k_padded
        self.n_padded = n_padded
        self.experts = experts
        self.group_size = group_size
        self.has_zeros = has_zeros
        self.has_perm = has_perm
        # Of `gemm`, never copied: this kind of weight, and the operands and the `out` that were checked last
        # (plan/base.py).
        self._kind: object | None = None
        self._held: tuple[object, ...] | None = None
        self._held_x: int | None = None
        self._checked_out: tuple[object, ...] | None = None
        if codebook is not None and data.is_cuda and not torch.compiler.is_compiling():
            # Copied now: the first use may be inside of a CUDA graph, which cannot capture the copy.
            for dtype in WEIGHT_DTYPES:
                codebook_on(codebook, data.device, dtype)

    @property
    def data(self) -> torch.Tensor:
        """The bytes. Kernels read as many as the other attributes say, so no other tensor can take their place."""
        return self._data

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        raise AttributeError(
            "data: expected to stay as it is; PackedWeight(data, **qweight.fields) makes another weight"
        )

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.data.device

    @property
    def kind(self) -> object:
        """What a plan of `gemm` depends on: weights of one kind have the same one, compared by identity; kept.

        Raises:
            TypeError: bytes in a subclass of torch.Tensor, which has none.
        """
        if self._kind is None:
            if type(self._data) not in PLAIN:
                raise TypeError("a subclass of torch.Tensor has no plan")
            expected = (self.group_size, self.has_zeros, self.has_perm)
            fields = (self.k, self.n, self.format, self.layout, self.code, self.experts, self.device)
            self._kind = kind_of(*fields, *expected)
        return self._kind

    @property
    def fields(self) -> dict[str, Any]:
        """The arguments beside `data`, as JSON can hold them: PackedWeight(data, **fields) has the same meaning."""
        fields = {"k": self.k, "n": self.n, "format": self.format, "layout": self.layout}
        optional = {
            "code": self.code if self.format == "code4" else None,
            "experts": self.experts,
            "group_size": self.group_size,
            "has_zeros": self.has_zeros,
            "has_perm": self.has_perm,
        }
        return fields | {name: value for name, value in optional.items() if value is not None}

    def __getitem__(self, index: int | slice) -> PackedWeight:
        """Expert `index` of stacked weights; for a slice of step 1 these experts, stacked. Nothing is copied.

        Raises TypeError for a weight that is not stacked and for another index, IndexError for one out of range, and
        ValueError for an empty slice and other steps.
        """
        count = self._stack_size()
        if isinstance(index, slice):
            begin, end, step = index.indices(count)
            if step != 1 or begin >= end:
                raise ValueError(f"index: expected at least one of {count} experts, in steps of 1, got {index}")
        elif isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"index: expected an int or a slice, got {type(index).__name__}")
        elif not -count <= index < count:
            raise IndexError(f"index: expected one of {count} experts, got {index}")
        else:
            begin = index % count
            end = begin + 1
        expert_bytes = self.data.numel() // count
        experts = end - begin if isinstance(index, slice) else None
        return PackedWeight(self.data[begin * expert_bytes : end * expert_bytes], **self.fields | {"experts": experts})

    def __iter__(self) -> Iterator[PackedWeight]:
        return map(self.__getitem__, range(self._stack_size()))

    def _stack_size(self) -> int:
        if self.experts is None:
            raise TypeError(f"qweight: expected stacked experts, got one weight {self!r}")
        return self.experts

    def to(self, device: torch.device | str | int) -> PackedWeight:
        """The same bytes on `device`; `self` if they are there already. The layout stays as it is."""
        require_memory("qweight", self.data)
        data = self.data.to(check_visible(device))
        return self if data is self.data else PackedWeight(data, **self.fields)

    def slice_n(self, begin: int, end: int) -> PackedWeight:
        """`w[:, begin:end]` of a "tiled", "tiled_fp8" or "cpu" weight: byte for byte what packing them alone gives.

        Args:
            begin: the first column, a multiple of 64.
            end: the column after the last, a multiple of 64 or N.

        Returns:
            A weight [K, end - begin] on the same memory: nothing is copied, and the whole is kept alive; for scales[:,
            begin:end], and so zeros and bias. Of stacked experts it cuts each, into a copy, for scales[:, :,
            begin:end].

        Raises:
            TypeError: bounds that are not integers.
            ValueError: another layout, an empty range, and bounds that are no such multiples or beyond N.
        """
        self._check_slice("N", self.n, begin, end)
        return PackedWeight(self._cut((0, self.k), (begin, end)), **self.fields | {"n": end - begin})

    def slice_k(self, begin: int, end: int) -> PackedWeight:
        """`w[begin:end]` of a "tiled", "tiled_fp8" or "cpu" weight, byte for byte what packing these rows alone gives.

        Args:
            begin: the first row, a multiple of 64.
            end: the row after the last, a multiple of 64 or K.

        Returns:
            A weight [end - begin, N] on a copy, because each column panel holds some of the rows. Where the group size
            g divides both bounds, it is for scales[begin // g : end // g], and so zeros; scales per channel stay as
            they are. Of stacked experts it cuts each, for scales[:, begin // g : end // g]. Of a weight in act-order, x
            is permuted before it is cut, and the slice takes no perm.

        Raises:
            TypeError: bounds that are not integers.
            ValueError: another layout, an empty range, bounds that are no such multiples or beyond K, and bounds inside
                of a group where the weight knows its group size.
        """
        self._check_slice("K", self.k, begin, end)
        group = self.group_size
        if group is not None and group != -1 and (begin % group or (end % group and end != self.k)):
            raise ValueError(f"begin, end: expected multiples of the group size {group}, got {begin}, {end}")
        data = self._cut((begin, end), (0, self.n))
        if data.untyped_storage().data_ptr() == self.data.untyped_storage().data_ptr():
            data = data.clone()  # of one panel, or all rows: this method never keeps the whole alive
        perm = {} if self.has_perm is None else {"has_perm": False}
        return PackedWeight(data, **self.fields | {"k": end - begin} | perm)

    def _cut(self, rows: Range, columns: Range) -> torch.Tensor:
        require_memory("qweight", self.data)
        return cut_bytes(self.data, self.k_padded, self.n_padded, self.bits, self.layout, rows, [columns])

    def _check_slice(self, dimension: str, size: int, begin: int, end: int) -> None:
        if self.layout not in SLICED_LAYOUTS:
            expected = ", or ".join(map(repr, SLICED_LAYOUTS))
            raise ValueError(f"layout: expected {expected}, which can be sliced, got {self.layout!r}")
        for name, bound in (("begin", begin), ("end", end)):
            require_int(name, bound)
        if not 0 <= begin < end <= size:
            raise ValueError(f"begin, end: expected 0 <= begin < end <= {dimension} = {size}, got {begin}, {end}")
        if begin % TILE:
            raise ValueError(f"begin: expected a multiple of {TILE}, got {begin}")
        if end % TILE and end != size:
            raise ValueError(f"end: expected a multiple of {TILE} or {dimension} = {size}, got {end}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this weight to a safetensors file, under the name "qweight"; see `weightonly.save`."""
        require_memory("qweight", self.data)
        publish_tensors(path, {"qweight": self.data}, {"qweight": self.fields})

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> PackedWeight:
        """Read a file that `PackedWeight.save` wrote; raises what `weightonly.load` does."""
        tensors, packed = read(path, device)
        if [*tensors] != ["qweight"] or "qweight" not in packed:
            raise ValueError(f"{path}: expected one packed weight named 'qweight', got {sorted(tensors)}; use load()")
        try:
            return cls(tensors["qweight"], **packed["qweight"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: packed weight 'qweight': {shown(error)}") from error

    def __repr__(self) -> str:
        return (
            f"PackedWeight({self.format} {[*([self.experts] if self.experts else []), self.k, self.n]}, "
            f"layout={self.layout!r}, {self.data.numel()} bytes on {self.device})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.data, self.fields)


@functools.lru_cache(maxsize=1 << 13)
def kind_of(*fields: object) -> object:
    """The one object of these fields."""
    return object()


def _rebuild(data: torch.Tensor, fields: dict[str, Any]) -> PackedWeight:
    """PackedWeight by name: what pickle calls."""
    return PackedWeight(data, **fields)


def format_groups(format: str, group_size: int | None, k: int) -> int | None:
    """`group_size`, or the one size that a format has. Raises ValueError for another, or a wrong K."""
    expected = FORMAT_GROUPS.get(format)
    if expected is None:
        return group_size
    if k % expected:
        raise ValueError(f"k: expected a multiple of {expected}, the group size of {format}, got {k}")
    if group_size is not None and resolve_group_size(group_size, k) != expected:
        raise ValueError(f"group_size: expected {expected} for {format}, got {group_size}")
    return expected


def check_format_layout(format: str, layout: str) -> None:
    """Raises ValueError unless weights of a format are packed in a layout, or for an unknown layout."""
    check_layout(layout)
    if format in CODE_FORMATS and (layout, format in FP8_FORMATS) != (TILED_FP8, True):
        check_code_layout(format_bits(format), layout)


def format_bits(format: str) -> int:
    """Bits per weight. Raises ValueError for an unknown format."""
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    return FORMATS[format]
