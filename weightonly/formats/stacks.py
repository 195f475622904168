"""Stacked experts of 8-bit floats in files, taken apart: a layer for each expert, as other checkpoints have them.

x                      float8_e4m3fn [E, N, K]; [E, K, N] beside x_scale or x_weight_scale
x_scale_inv            of transformers' "fp8": [E, ...]
x_scale                of FBGEMM (Llama 4): float [E, 1, N] or [E, N, 1]
x_weight_scale         of ModelOpt (Llama 4, gpt-oss): [E, ...], or one number for all
x_activation_scale, x_input_scale, x_bias

With x = "y.gate_up_proj" the weight of expert 3 is read as "y.3.gate_up_proj.weight", a part of the same bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_SCALES = {"_scale_inv": "weight_scale_inv", "_scale": "weight_scale", "_weight_scale": "weight_scale"}
_BESIDE = {"_activation_scale": "activation_scale", "_input_scale": "input_scale", "_bias": "bias"}

_MAX_PARTS = 1 << 18


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint, without its data. begin: offset of its first byte in the file; bytes: its size."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    bytes: int


@dataclass(frozen=True)
class Part(TensorInfo):
    """What one expert has of a stack.

    stack: the name of the tensor in the file. expert: None: every one has all of it. is_transposed: whether the file
    has it as shape[::-1].
    """

    stack: str
    expert: int | None
    is_transposed: bool = False

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of the stack."""
        part = whole if self.expert is None else whole[self.expert]
        return part.t() if self.is_transposed else part.reshape(self.shape)

    @property
    def in_file(self) -> TensorInfo:
        """The same bytes, in the shape that the file has."""
        return TensorInfo(self.file, self.dtype, self.shape[:: -1 if self.is_transposed else 1], self.begin, self.bytes)


def take_apart(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of files, with those of each expert in the places of stacks.

    Raises ValueError, naming the file and the tensor, for what stands beside a stack and is of another number of
    experts, or unknown, for names that are there already, and for too many parts.
    """
    parts: dict[str, dict[str, TensorInfo]] = {}
    owner: dict[str, str] = {}
    for name, info in tensors.items():
        scales = [suffix for suffix in _SCALES if f"{name}{suffix}" in tensors]
        if scales and info.dtype == torch.float8_e4m3fn and len(info.shape) == 3 and 0 not in info.shape:
            parts[name] = dict(_parts(name, scales[0], tensors))
            owner |= {f"{name}{suffix}": name for suffix in ("", scales[0], *_BESIDE) if f"{name}{suffix}" in tensors}
            if sum(map(len, parts.values())) > _MAX_PARTS:
                raise ValueError(f"{info.file}: {name}: expected at most {_MAX_PARTS} tensors of experts, got more")
    names = sorted(tensors)
    for stack in parts:
        for name in itertools.islice(names, bisect_left(names, f"{stack}_"), None):
            if not name.startswith(f"{stack}_"):
                break
            if name not in owner:
                raise ValueError(f"{tensors[name].file}: {name}: expected none beside the experts of {stack}, got one")
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if name not in owner:
            found[name] = info
        elif owner[name] in parts:
            stack = owner[name]
            for inside, part in parts.pop(stack).items():
                if inside in tensors:
                    raise ValueError(f"{info.file}: {inside}: expected none beside {stack} of all experts, got one")
                found[inside] = part
    return found


def _parts(name: str, of_scale: str, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """(name, tensor) of each expert."""
    owner, _, product = name.rpartition(".")
    weight, is_transposed = tensors[name], of_scale != "_scale_inv"
    count = weight.shape[0]
    inside = {"": "weight", of_scale: _SCALES[of_scale]} | _BESIDE
    whole = {suffix: tensors[f"{name}{suffix}"] for suffix in inside if f"{name}{suffix}" in tensors}
    for suffix, info in whole.items():
        if info.shape not in ((), (1,)) and info.shape[0] != count:
            expected = f"[{count}, ...], as {name} is of {count} experts"
            raise ValueError(f"{info.file}: {name}{suffix}: expected {expected}, got {list(info.shape)}")
    for expert in range(min(count, _MAX_PARTS + 1)):
        for suffix, info in whole.items():
            yield f"{owner}.{expert}.{product}.{inside[suffix]}", _part(info, f"{name}{suffix}", expert, is_transposed)


def _part(info: TensorInfo, stack: str, expert: int, is_transposed: bool) -> Part:
    if info.shape in ((), (1,)):
        return Part(**vars(info), stack=stack, expert=None)
    shape, size = info.shape[1:], info.bytes // info.shape[0]
    part = Part(info.file, info.dtype, shape, info.begin + expert * size, size, stack, expert)
    if not is_transposed or len(shape) != 2:
        return part
    if 1 in shape and info.dtype != torch.float8_e4m3fn:  # FBGEMM has scales of columns both ways
        return dataclasses.replace(part, shape=(math.prod(shape),))
    return dataclasses.replace(part, shape=shape[::-1], is_transposed=True)
