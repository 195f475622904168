"""A quantized checkpoint folder: recognized and checked at once, then read one layer at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from ..device import check_memory
from ..heuristics.arch import Arch
from ..hub import model_folder
from ..packing import target_name
from .converted import digests_of
from .expect import TensorError
from .foreign import check_foreign, of_activations
from .gguf import open_shards
from .layers import Layer, LayerShape, MissingTensorError, find_layers
from .packed_config import METHOD
from .plain import CodeWeight, IntWeight
from .recognize import quantization_config, recognize
from .records import PlainTensor, QuantizedLayer, Record, pack, repack
from .shards import Shards

Part: TypeAlias = Callable[[str, int], tuple[tuple[slice, ...], Callable[[torch.Tensor], torch.Tensor]]]


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose format is known and whose headers fit together. No weight has been read yet.

    Args:
        folder: the folder.
        source: what told the format: the name of a config file, or "tensor names".
        shards: its files.
        layers: name -> layer, in the order in which `records` yields them.
        shapes: name -> shape of the layer.
        plain: names of the tensors that belong to no quantized layer.
        unused: those of `plain` that are of quantized activations or a quantized KV cache, as the config says: no model
            here has them.

    Examples:
        >>> checkpoint = open_checkpoint("Llama-GPTQ")
        >>> checkpoint.methods, checkpoint.shapes["model.layers.0.mlp.up_proj"].group_size
        (('gptq',), 64)
    """

    folder: Path
    source: str
    shards: Shards
    layers: dict[str, Layer]
    shapes: dict[str, LayerShape]
    plain: tuple[str, ...]
    unused: frozenset[str] = frozenset()
    _zeros: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict, repr=False)
    """Layer -> zero points that were read before the layer is. Where there are any, they go with the layer."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Formats of its layers, as quantization configs name them ("awq")."""
        return tuple(dict.fromkeys(layer.format.name for layer in self.layers.values()))

    @property
    def total_bytes(self) -> int:
        """Bytes of all its tensors."""
        names = [*self.plain, *(name for layer in self.layers.values() for name in layer.tensors.values())]
        return sum(self.shards.tensors[name].bytes for name in names)

    def layer_bytes(self, layer: str) -> int:
        """Bytes of the tensors of `layer`."""
        return sum(self.shards.tensors[name].bytes for name in self.layers[layer].tensors.values())

    def activations_of(self, layer: str) -> str | None:
        """What `layer` makes of x: of a packed folder what its config says; others only ask for it."""
        return self.shapes[layer].activations if self.layers[layer].format.name == METHOD else None

    def exact_shape(self, layer: str) -> LayerShape:
        """The shape of `layer`, with its zero points read, and kept, where nothing else tells whether there are any."""
        found = self.layers[layer]
        if found.format.zeros not in found.tensors:
            return self.shapes[layer]
        zeros = self._zeros[layer] = self._zero_points(found, self.shards.read)
        return dataclasses.replace(self.shapes[layer], symmetric=zeros is None)

    def _zero_points(self, layer: Layer, read: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
        """int8 [groups, N]; None: all are 0."""
        name, form = layer.name, layer.format
        if form.zero_points is None or form.zeros is None or form.zeros not in layer.tensors:
            return None
        if name not in self._zeros:
            return form.zero_points(self.shapes[name], name, read(layer.tensors[form.zeros]))
        return None if self._zeros[name] is None else self._zeros.pop(name)

    def records(
        self,
        arch: Arch | None = None,
        device: torch.device | str = "cpu",
        progress: bool = True,
        digests: Mapping[str, str] | None = None,
    ) -> Iterator[Record]:
        """See `load_checkpoint`.

        Args:
            digests: tensor -> SHA-256 of its bytes, which is compared.
        """

        def read(name: str) -> torch.Tensor:
            return self.shards.read(name, device, None if digests is None else digests[name])

        bar = None
        if progress:
            from tqdm import tqdm

            # disable=None: on a terminal only. Without progress there is no bar, not a hidden one: that takes a lock
            # which forked processes share, and one that is killed may keep it for good.
            bar = tqdm(total=self.total_bytes, unit="B", unit_scale=True, disable=None)
        owners = {tensor: layer.name for layer in self.layers.values() for tensor in layer.tensors.values()}
        done: set[str] = set()
        try:
            for name, info in self.shards.tensors.items():
                layer = owners.get(name)
                if layer in done:
                    continue
                if bar is not None:
                    bar.set_postfix_str(layer or name, refresh=False)
                if layer is None:
                    yield PlainTensor(name, read(name))
                else:
                    done.add(layer)
                    yield self.record_of(layer, arch, read, None, self.activations_of(layer))
                if bar is not None:
                    bar.update(info.bytes if layer is None else self.layer_bytes(layer))
        finally:
            if bar is not None:
                bar.close()

    def read_layer(
        self,
        name: str,
        arch: Arch | None,
        device: torch.device | str = "cpu",
        part: Part | None = None,
        activations: str | None = None,
    ) -> QuantizedLayer:
        """The record of one layer; arguments and errors are those of `load_checkpoint`.

        Args:
            part: (tensor inside of the layer, its number of dimensions) -> (the index of what is read of it, what turns
                it into a tensor of the part).
            activations: "fp8": packed for x in E4M3, which the weight goes with; None: for x in 16 bits.
        """
        layer = self.layers[name]
        inside = {tensor: suffix for suffix, tensor in layer.tensors.items()}
        if part is None:
            return self.record_of(name, arch, lambda tensor: self.shards.read(tensor, device), None, activations)

        def read(tensor: str) -> torch.Tensor:
            if inside[tensor] == layer.format.zeros:  # all of them tell whether there are any
                return self.shards.read(tensor, device)
            index, change = part(inside[tensor], len(self.shards.tensors[tensor].shape))
            return change(self.shards.read(tensor, device, part=index))

        return self.record_of(name, arch, read, part, activations)

    def read(
        self, layer: Layer, read: Callable[[str], torch.Tensor] | None = None, part: Part | None = None
    ) -> tuple[IntWeight | CodeWeight | QuantizedLayer, torch.Tensor | None]:
        """The weight of one layer as its file has it, packed if that is a converted one, and its bias.

        Args:
            read: (name of a tensor) -> the tensor, or its part, but all of the zero points; None: on the CPU, as the
                file has it.
            part: see `read_layer`.
        """
        read, form = self.shards.read if read is None else read, layer.format
        # The small ones first: what stays for long does not lie between the large ones that packing frees.
        names = sorted(layer.tensors.items(), key=lambda item: self.shards.tensors[item[1]].bytes)
        try:
            zeros = self._zero_points(layer, read)
            if zeros is not None and part is not None and form.zeros is not None:
                zeros = zeros[part(form.zeros, 2)[0]]
            tensors = {inside: read(name) for inside, name in names if inside != form.zeros}
            return form.read(layer.name, tensors, zeros), tensors.get("bias")
        except TensorError as error:
            raise _located(error, layer, self.shards) from error

    def record_of(
        self,
        name: str,
        arch: Arch | None,
        read: Callable[[str], torch.Tensor],
        part: Part | None = None,
        activations: str | None = None,
    ) -> QuantizedLayer:
        """The record of one layer.

        Args:
            read: see `read`.
            part: see `read`.
            activations: see `read_layer`.
        """
        weight, bias = self.read(self.layers[name], read, part)
        if isinstance(weight, QuantizedLayer):
            return dataclasses.replace(weight, weight=repack(weight.weight, arch, activations))
        return pack(name, weight, bias, arch, activations)


def load_checkpoint(
    folder: str | os.PathLike[str],
    arch: Arch | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
    verify: bool = False,
) -> Iterator[Record]:
    """Read a quantized checkpoint layer by layer: of AWQ, GPTQ, compressed-tensors, bitsandbytes, HQQ, torchao, Quark,
    FP8, ModelOpt, GGUF, gpt-oss, or a converted one.

    Args:
        folder: on this machine, or "OWNER/NAME" of the Hugging Face Hub, which is downloaded; with safetensors files,
            sharded or not, and config.json, quantize_config.json or quant_config.json. Without a config the names of
            the tensors tell the format, where they can. Or a GGUF file.
        arch: the GPU to pack for, or "cpu" (see `weightonly.preprocess`). None: the visible GPU, else the CPU; a
            converted checkpoint keeps its layout. Code formats (bitsandbytes, MXFP4, NVFP4) have one layout on every
            GPU.
        device: where tensors are unpacked, packed and returned.
        progress: whether to show a bar, on a terminal.
        verify: compare the bytes of each tensor with the digest that `convert` wrote; a tensor that differs is a
            ValueError when its record comes. The digests are in the same files: this finds damage, not a forger.

    Yields:
        A QuantizedLayer for every quantized layer and a PlainTensor for every other tensor, in the order of the files.
        One layer is in memory at a time, beside what the caller keeps. Weights are bit-exact: `dequantize` of a record
        in fp32 is what the format defines.

    Raises:
        FileNotFoundError: before the first record, a missing folder or shard.
        ValueError: before the first record, an unknown arch or format, a GPU that is not there, and, naming file and
            tensor, pickles, truncated files, missing tensors, wrong shapes and dtypes, groups out of range, tensors
            that contradict the config, and, with `verify`, missing digests.

    Examples:
        >>> for record in wo.load_checkpoint("Llama-GPTQ", progress=False):
        ...     if isinstance(record, wo.formats.QuantizedLayer) and record.name.endswith("up_proj"):
        ...         print(record.name, record.weight.format, tuple(record.dequantize().shape))
        model.layers.0.mlp.up_proj int4 (128, 256)
    """
    if arch is not None:
        target_name(arch)  # an unknown one is an error now, not at the first layer
    check_memory(device)
    checkpoint = open_checkpoint(folder)
    return checkpoint.records(arch, device, progress, digests_of(checkpoint.shards) if verify else None)


def open_checkpoint(folder: str | os.PathLike[str] | Shards) -> Checkpoint:
    """Recognize the format of a folder, or of one whose headers have been read, and check every header. No weight is
    read.

    Raises what `load_checkpoint` raises.

    Args:
        folder: as for `load_checkpoint`.

    Returns:
        What is in it.

    Examples:
        >>> open_checkpoint("Llama-GPTQ").source
        'config.json'
    """
    shards = folder if isinstance(folder, Shards) else open_shards(model_folder(folder))
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
    unused = of_activations(shards, quantization_config(shards)).intersection(plain)
    check_foreign(shards, (name for name in plain if name not in unused), layers)
    return Checkpoint(shards.folder, source, shards, layers, shapes, plain, unused)


def _describe(layer: Layer, shards: Shards) -> LayerShape:
    tensors = {
        inside: shards.read(name) if inside in layer.format.small else shards.without_data(name)
        for inside, name in layer.tensors.items()
    }
    try:
        return layer.format.describe(layer.name, tensors)
    except TensorError as error:
        raise _located(error, layer, shards) from error
    except MissingTensorError as error:
        raise ValueError(f"{shards.tensors[error.present].file}: {error}") from error


def _located(error: TensorError, layer: Layer, shards: Shards) -> ValueError:
    """The error, naming the file and the full name of the tensor."""
    name = layer.tensors.get(error.tensor) or next(iter(layer.tensors.values()))
    return ValueError(f"{shards.tensors[name].file}: {layer.name}{layer.format.separator}{error}")
