"""A part of a layer: some rows or columns, for a rank of tensor parallelism. Other bytes of the files are not read.

A format says what each dimension of its tensors counts (`LayerFormat.axes`). A slice of all of them, at whole words and
whole groups, is a layer in the same format, which the format reads as it reads any other. What was asked for is cut out
of it after packing. Layers in act-order are read as a whole where rows are asked for: a group's rows are scattered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ..grouped import Product
from ..heuristics.arch import Arch
from ..heuristics.problem import CODE_FORMATS, FORMATS
from ..layout import Range
from ..slicing import cut_columns, cut_rows
from .checkpoint import Checkpoint, Part
from .layers import Axis, Layer, LayerShape
from .records import QuantizedLayer


def read_part(
    checkpoint: Checkpoint,
    name: str,
    arch: Arch | None,
    rows: Range,
    columns: Sequence[Range],
    activations: str | None = None,
) -> QuantizedLayer:
    """Rows of a layer, in the order of the packed weight, and its `columns`, side by side, as a layer.

    activations: see `Checkpoint.read_layer`.

    Raises what `Checkpoint.read_layer` raises, and ValueError for rows that leave no groups that `gemm` takes.
    """
    layer, shape = checkpoint.layers[name], checkpoint.shapes[name]
    read = rows if _has_groups(checkpoint, layer, shape) else (0, shape.k)
    outer = _wider(layer, shape, read, (columns[0][0], columns[-1][1]))
    part = None if outer is None else _reader(layer, shape, *outer)
    record = checkpoint.read_layer(name, arch, part=part, activations=activations)
    (top, bottom), (left, right) = outer or ((0, shape.k), (0, shape.n))
    product = Product(record.operand, record.bias)
    inner = [(begin - left, end - left) for begin, end in columns]
    if inner != [(0, right - left)]:
        product = cut_columns(product, inner)
    if rows not in ((0, shape.k), (top, bottom)):
        perm = product.operand.perm
        w = cut_rows(product.operand, rows[0] - top, rows[1] - top)
        perm = None if perm is None else perm[rows[0] - top : rows[1] - top]
        return QuantizedLayer(name, w.packed, w.scales, w.zeros, product.bias, perm)
    return QuantizedLayer.of(name, product)


def _has_groups(checkpoint: Checkpoint, layer: Layer, shape: LayerShape) -> bool:
    """Whether the groups of the file are those of `shape`; else they have been cut, as the last one is short."""
    axes = {} if layer.format.axes is None else layer.format.axes(FORMATS[shape.format])
    for inside, dims in axes.items():
        if inside in layer.tensors and inside != layer.format.zeros and Axis("g") in dims:
            sizes = checkpoint.shards.tensors[layer.tensors[inside]].shape
            return len(sizes) != len(dims) or sizes[dims.index(Axis("g"))] * shape.group_size == shape.k
    return True


def _wider(layer: Layer, shape: LayerShape, rows: Range, columns: Range) -> tuple[Range, Range] | None:
    """Rows and columns at whole groups and words around these. None: the layer has to be read as a whole."""
    if layer.format.axes is None or shape.format in CODE_FORMATS:
        return None
    axes = layer.format.axes(FORMATS[shape.format])
    dims = [axis for inside, found in axes.items() if inside in layer.tensors for axis in found]
    of = {kind: [axis.values for axis in dims if axis.kind == kind] for kind in "kn"}
    n_step = math.lcm(*of["n"])
    k_step = math.lcm(1 if shape.group_size == shape.k else shape.group_size, *of["k"])
    if shape.act_order or shape.k % k_step:
        rows = (0, shape.k)
    return _widened(rows, k_step, shape.k), _widened(columns, n_step, shape.n)


def _widened(bounds: Range, step: int, size: int) -> Range:
    return bounds[0] // step * step, min(-(-bounds[1] // step) * step, size)


def _reader(layer: Layer, shape: LayerShape, rows: Range, columns: Range) -> Part:
    assert layer.format.axes is not None
    axes: Mapping[str, tuple[Axis, ...]] = layer.format.axes(FORMATS[shape.format])
    group = shape.group_size
    ranges = {"k": rows, "n": columns, "g": (rows[0] // group, -(-rows[1] // group))}

    def part(inside: str, dims: int) -> tuple[tuple[slice, ...], Callable[[torch.Tensor], torch.Tensor]]:
        index = tuple(
            slice(ranges[axis.kind][0] // axis.values, -(-ranges[axis.kind][1] // axis.values))
            for axis in axes.get(inside, ())
        )
        index = index if len(index) <= dims else ()
        if inside.endswith("g_idx") and rows[0]:
            return index, lambda tensor: torch.where(tensor < 0, tensor, tensor - ranges["g"][0])
        if inside == "weight_shape":
            return (), lambda tensor: tensor.new_tensor([columns[1] - columns[0], rows[1] - rows[0]])
        return index, lambda tensor: tensor

    return part
