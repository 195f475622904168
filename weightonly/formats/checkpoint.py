"""A quantized checkpoint folder: recognized and checked at once, then read one layer at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .expect import TensorError
from .layers import Layer, LayerShape, MissingTensorError, find_layers
from .recognize import recognize
from .records import PlainTensor, QuantizedLayer, Record, pack, repack, target_layout
from .shards import Shards


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose format is known and whose headers fit together; no weight has been read yet.

    source: where the format was recognized, a config file's name or "tensor names".
    layers: name -> layer, and shapes: name -> its shape, in the order in which `records` yields them.
    plain: the names of the tensors that belong to no layer.
    """

    folder: Path
    source: str
    shards: Shards
    layers: dict[str, Layer]
    shapes: dict[str, LayerShape]
    plain: tuple[str, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        """The formats that its layers have, as a config names them."""
        return tuple(dict.fromkeys(layer.format.name for layer in self.layers.values()))

    @property
    def total_bytes(self) -> int:
        """Of all its tensors."""
        names = [*self.plain, *(name for layer in self.layers.values() for name in layer.tensors.values())]
        return sum(self.shards.tensors[name].bytes for name in names)

    def layer_bytes(self, layer: str) -> int:
        """Of the tensors of `layer`."""
        return sum(self.shards.tensors[name].bytes for name in self.layers[layer].tensors.values())

    def records(
        self, arch: str | int | None = None, device: torch.device | str = "cpu", progress: bool = True
    ) -> Iterator[Record]:
        """See `load_checkpoint`."""
        from tqdm import tqdm

        plain = set(self.plain)
        owners = {name: layer for layer in self.layers.values() for name in layer.tensors.values()}
        read: set[str] = set()
        # None: a bar on a terminal only
        bar = tqdm(total=self.total_bytes, unit="B", unit_scale=True, disable=None if progress else True)
        try:
            for name in self.shards.tensors:
                if name in plain:
                    bar.set_postfix_str(name, refresh=False)
                    yield PlainTensor(name, self.shards.read(name, device))
                    bar.update(self.shards.tensors[name].bytes)
                elif owners[name].name not in read:
                    layer = owners[name]
                    read.add(layer.name)
                    bar.set_postfix_str(layer.name, refresh=False)
                    yield self._read_layer(layer, arch, device)
                    bar.update(self.layer_bytes(layer.name))
        finally:
            bar.close()

    def _read_layer(self, layer: Layer, arch: str | int | None, device: torch.device | str) -> QuantizedLayer:
        tensors = {inside: self.shards.read(name, device) for inside, name in layer.tensors.items()}
        try:
            weight = layer.format.read(layer.name, tensors)
        except TensorError as error:
            raise _located(error, layer, self.shards) from error
        if isinstance(weight, QuantizedLayer):
            return dataclasses.replace(weight, weight=repack(weight.weight, arch))
        return pack(layer.name, weight, tensors.get("bias"), arch)


def load_checkpoint(
    folder: str | os.PathLike[str],
    arch: str | int | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> Iterator[Record]:
    """Read a quantized checkpoint (AWQ, GPTQ, compressed-tensors, bitsandbytes, converted), layer by layer.

    folder: with safetensors files, sharded or not, and config.json, or the quantizer's quantize_config.json or
        quant_config.json. Without a config the names of the tensors decide where they can.
    arch: the GPU to pack for (see `weightonly.preprocess`). None: the visible one; a converted checkpoint keeps
        the layout that it has. Code formats (bitsandbytes) have one layout, whatever the GPU.
    device: where the tensors go, and where they are unpacked and packed.
    progress: show a bar, on a terminal.

    Yields a QuantizedLayer for every quantized layer and a PlainTensor for every other tensor, in the order of the
    files. One layer is in memory at a time, beside what the caller keeps. Weights are bit-exact: `dequantize` of a
    record, in fp32, is what the format defines.

    Raises before anything is yielded: FileNotFoundError for a folder or shard that does not exist, ValueError
    naming the file and the tensor for an unknown format, pickles, truncated files, missing tensors, wrong shapes
    and dtypes, and groups out of range.
    """
    if arch is not None:
        target_layout(4, arch)  # an unknown one is an error now, not at the first layer
    return open_checkpoint(folder).records(arch, device, progress)


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Recognize a folder's format and check every header. Raises what `load_checkpoint` raises."""
    shards = Shards(Path(folder))
    source, formats = recognize(shards)
    try:
        layers = find_layers(shards.tensors, formats)
    except MissingTensorError as error:
        raise ValueError(f"{shards.tensors[error.present].file}: {error}") from error
    if not layers:
        names = " or ".join(f"*.{form.anchors[0]}" for form in formats)
        raise ValueError(f"{shards.folder}: expected tensors {names} as {source} says, got none")
    shapes = {name: _describe(layer, shards) for name, layer in layers.items()}
    owned = {name for layer in layers.values() for name in layer.tensors.values()}
    plain = tuple(name for name in shards.tensors if name not in owned)
    return Checkpoint(shards.folder, source, shards, layers, shapes, plain)


def _describe(layer: Layer, shards: Shards) -> LayerShape:
    tensors = {
        inside: shards.read(name) if inside in layer.format.small else shards.without_data(name)
        for inside, name in layer.tensors.items()
    }
    try:
        return layer.format.describe(layer.name, tensors)
    except TensorError as error:
        raise _located(error, layer, shards) from error


def _located(error: TensorError, layer: Layer, shards: Shards) -> ValueError:
    """The error with the file and the whole name of its tensor."""
    name = layer.tensors.get(error.tensor) or next(iter(layer.tensors.values()))
    return ValueError(f"{shards.tensors[name].file}: {layer.name}.{error}")
