"""Models of llama.cpp: a GGUF file, or several that one model was split into, as the tensors of a checkpoint.

A linear layer "x" is "x.Q4_K": uint8 [N, blocks of a row, bytes of a block], named by the type of its blocks. Experts,
which the file has stacked, are a layer each. Rows of q and k are in transformers' order. Norms of Gemma are w, not
w + 1. A quantized embedding is dense. All are read from the file where they are asked for.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .expect import FLOATS, TensorError, dtype_name, expect
from .gguf_blocks import TYPES
from .gguf_header import Header, Stored, read_gguf_header
from .gguf_model import ROPE, Model, Place
from .layers import Axis, LayerFormat, LayerShape, Tensors, check_bias
from .plain import CodeWeight, IntWeight
from .shards import CONFIG, GGUF, Shards, TensorInfo

METHOD = "gguf"

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EMBEDDING = "model.embed_tokens"
_MAX_TENSORS = 1 << 18
_CHUNK_ELEMENTS = 1 << 24
"""Of an embedding that are dequantized at once, in fp32."""


@dataclass(frozen=True)
class _Tensor(TensorInfo):
    """place: where it is in the file. blocks: of an embedding whose dtype and shape are those of the dense one."""

    place: Place
    blocks: TensorInfo | None = None


class GgufShards(Shards):
    """The tensors of a GGUF file under transformers' names. folder: the file. model: its config and metadata.

    dtype: what a quantized embedding becomes, and what the config says, if it is one of FLOATS, or its name; else the
    model's own (`Model`).

    Raises ValueError, naming the file and, where there is one, the tensor, for damaged and truncated files, types,
    names and architectures that are not read, and missing metadata. Raises ImportError without package gguf.
    """

    def __init__(self, file: Path, dtype: object = None) -> None:
        headers = _headers(file)
        stored: dict[str, Stored] = {}
        for header in headers:
            for tensor in header.tensors:
                if (other := stored.setdefault(tensor.name, tensor)) is not tensor:
                    raise ValueError(
                        f"{header.file}: {tensor.name}: expected in one file, got it in {other.file.name} too"
                    )
        self.folder = file
        self.index = None
        self.metadata = {}
        self.bytes_read = 0
        self.model = Model(headers[0], stored)
        if (name := str(dtype).removeprefix("torch.")) in map(dtype_name, FLOATS):
            self.model.config["dtype"] = name
        if (rope := stored.get(ROPE)) is not None and self.model.arch == "llama":
            is_short = (rope.type, rope.shape) == ("F32", (self.model.config["head_dim"] // 2,))
            factors = self._read(ROPE, _info(rope), "cpu", None, ...).tolist() if is_short else []
            self.model.divide_frequencies(factors)
        self.configs = {CONFIG: self.model.config}
        self.tensors = {}
        for place in self.model.places():
            name, info = self._tensor(place)
            if name in self.tensors:
                raise ValueError(f"{info.file}: {place.stored.name}: expected one tensor for {name}, got two")
            self.tensors[name] = info
            if len(self.tensors) > _MAX_TENSORS:
                raise ValueError(f"{info.file}: expected at most {_MAX_TENSORS} tensors, each expert counted, got more")
        counts = Counter(s.type for s in stored.values() if s.type in TYPES)
        types = ", ".join(f"{kind} x {count}" for kind, count in counts.most_common())
        self.own = (f"its header: {types}", {"quant_method": METHOD}) if counts else None

    def config(self, name: str) -> Mapping[str, Any] | None:
        return self.configs.get(name)

    def read(
        self, name: str, device: torch.device | str = "cpu", sha256: str | None = None, part: Any = ...
    ) -> torch.Tensor:
        info = self.tensors[name]
        assert isinstance(info, _Tensor)
        if info.blocks is not None:
            return self._dense(name, info, info.blocks, device)[part]
        if not info.place.heads and not info.place.minus_one:
            return self._read(name, info, device, sha256, part)
        tensor = self._read(name, info, device, sha256, ...)
        if info.place.minus_one:
            return (tensor.float() - 1).to(tensor.dtype)[part]
        # llama.cpp has the two halves of a head in turns.
        return tensor.unflatten(0, (info.place.heads, -1, 2)).transpose(1, 2).flatten(0, 2)[part]

    def _tensor(self, place: Place) -> tuple[str, TensorInfo]:
        """(name, tensor) of a place."""
        stored, raw = place.stored, _info(place.stored)
        name, where = f"{place.name}.{place.inside}", (stored.file, raw.dtype, raw.shape, raw.begin, raw.bytes)
        if stored.type not in TYPES:
            return name, _Tensor(*where, place)
        if place.name == _EMBEDDING:
            dtype = getattr(torch, self.model.config["dtype"])
            return name, _Tensor(stored.file, dtype, stored.shape, stored.begin, stored.bytes, place, raw)
        return f"{place.name}.{stored.type}", _Tensor(*where, place)

    def _dense(self, name: str, info: _Tensor, blocks: TensorInfo, device: torch.device | str) -> torch.Tensor:
        """A dequantized embedding [rows, K], some rows at a time."""
        kind = info.place.stored.type
        dense = torch.empty(info.shape, dtype=info.dtype, device=device)
        step = max(1, _CHUNK_ELEMENTS // info.shape[1])
        for begin in range(0, info.shape[0], step):
            part = self._read(name, blocks, device, None, slice(begin, begin + step))
            try:
                dense[begin : begin + step] = TYPES[kind].read(kind, part).dequantize(torch.float32).t()
            except TensorError as error:
                raise ValueError(f"{info.file}: {name}: {error}") from error
        return dense


def _info(stored: Stored) -> TensorInfo:
    """A tensor as the file has it; of blocks: uint8 [..., blocks of a row, bytes of a block]."""
    dtype, shape = _FLOATS.get(stored.type, torch.uint8), stored.shape
    if stored.type in TYPES:
        blocks = shape[-1] // TYPES[stored.type].values
        shape = (*shape[:-1], blocks, stored.bytes // (math.prod(shape[:-1]) * blocks))
    return TensorInfo(stored.file, dtype, shape, stored.begin, stored.bytes)


def open_shards(path: Path, dtype: object = None) -> Shards:
    """The tensors of a GGUF file, or of a folder. dtype: see `GgufShards`. Raises what both raise."""
    return GgufShards(path, dtype) if path.suffix == GGUF and path.is_file() else Shards(path)


def gguf_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format of the layers of `GgufShards`. options: none are looked at."""

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        name, blocks = _blocks(tensors)
        kind = TYPES[name]
        expect(name, blocks, torch.uint8, ["N", "blocks", blocks.shape[-1]])
        n, k = blocks.shape[0], blocks.shape[1] * kind.values
        check_bias(tensors, n)
        return LayerShape(kind.format, k, n, kind.group_size, not kind.has_zeros, act_order=False)

    def read(layer: str, tensors: Tensors, _: torch.Tensor | None) -> IntWeight | CodeWeight:
        name, blocks = _blocks(tensors)
        return TYPES[name].read(name, blocks)

    return LayerFormat(
        name=METHOD,
        anchors=tuple(TYPES),
        required=(),
        optional=("bias",),
        owned=(),
        small=(),
        describe=describe,
        read=read,
        axes=lambda bits: {
            **{name: (Axis("n"), Axis("k", kind.values)) for name, kind in TYPES.items()},
            "bias": (Axis("n"),),
        },
    )


def _blocks(tensors: Tensors) -> tuple[str, torch.Tensor]:
    return next((name, tensor) for name, tensor in tensors.items() if name in TYPES)


def _headers(file: Path) -> list[Header]:
    """Those of a file, and of the others that its model was split into, the first first."""
    first = read_gguf_header(file)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or count < 2:
        return [first]
    match = re.fullmatch(r"(.+-)00001(-of-(\d{5})\.gguf)", file.name)
    if match is None or int(match[3]) != count:
        raise ValueError(f"{file}: expected the first file of {count}, NAME-00001-of-{count:05}.gguf, got another name")
    others = [file.with_name(f"{match[1]}{number:05}{match[2]}") for number in range(2, count + 1)]
    return [first, *map(read_gguf_header, others)]
