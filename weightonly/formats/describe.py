"""`python -m weightonly inspect`: what a checkpoint folder contains, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..shown import counted
from .checkpoint import Checkpoint
from .expect import dtype_name
from .layers import LayerShape

_HEADER = ("layers", "format", "group", "zeros", "act order", "K x N", "layout", "bytes")


def describe(checkpoint: Checkpoint) -> str:
    """A line for each kind of layer (format, group size, zero points, act-order, shape), with count and bytes.

    Only headers and small tensors have been read, so the config alone tells whether there are zero points.
    """
    files = {info.file for info in checkpoint.shards.tensors.values()}
    counts = Counter(checkpoint.shapes.values())
    bytes_of: Counter[LayerShape] = Counter()
    for name, shape in checkpoint.shapes.items():
        bytes_of[shape] += checkpoint.layer_bytes(name)
    kinds = sorted(counts, key=lambda shape: -bytes_of[shape])
    plain = [checkpoint.shards.tensors[name] for name in checkpoint.plain]
    dtypes = ", ".join(sorted({dtype_name(info.dtype) for info in plain}))
    asks = sum(shape.activations is not None for shape in checkpoint.shapes.values())
    is_own = any(checkpoint.activations_of(name) is not None for name in checkpoint.shapes)
    cure = "" if is_own else "; load_model computes in 16 bits unless activations='fp8'"
    return "\n".join(
        [
            f"{checkpoint.folder}: {' and '.join(checkpoint.methods)} (from {checkpoint.source})",
            f"{counted(len(checkpoint.layers), 'quantized layer')}, {counted(len(files), 'file')}, "
            f"{readable(checkpoint.total_bytes)}",
            "",
            *_table([_HEADER, *(_row(shape, counts[shape], bytes_of[shape]) for shape in kinds)]),
            "",
            *([f"activations in fp8, a scale for each row: {counted(asks, 'layer')}{cure}"] if asks else []),
            f"{counted(len(plain), 'other tensor')} ({dtypes or 'none'}), "
            f"{readable(sum(info.bytes for info in plain))}",
        ]
    )


def readable(size_bytes: int) -> str:
    """ "1.50 GiB" for 1.5 * 2^30."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size_bytes} B" if unit == "B" else f"{size:.2f} {unit}"


def _row(shape: LayerShape, count: int, size_bytes: int) -> tuple[str, ...]:
    group = "per channel" if shape.group_size == shape.k else str(shape.group_size)
    zeros = {True: "none", False: "yes", None: "unknown"}[shape.symmetric]
    order = "yes" if shape.act_order else "no"
    size = f"{shape.k} x {shape.n}" if shape.experts is None else f"{shape.experts} x {shape.k} x {shape.n}"
    return str(count), shape.format, group, zeros, order, size, shape.layout or "-", readable(size_bytes)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
