"""`weightonly export`: a checkpoint in the format of another quantizer, for what that format can hold."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator

import torch

from ..codebooks import codebook
from ..device import check_memory
from ..packing import unpack
from ..require import require_int, require_path
from .checkpoint import Checkpoint, open_checkpoint
from .convert import config_of, dense_layers
from .converted import shape_of
from .expect import FLOATS
from .expert_names import NamesOfExperts, names_of_experts
from .folder import SHARD_BYTES, check_target, companions_of, new_folder, write_json, write_shards
from .layers import LayerShape
from .packed_config import unguard
from .plain import CodeWeight, IntWeight
from .records import PlainTensor, QuantizedLayer
from .shards import CONFIG
from .writers import TARGETS, Target

_FUSED = re.compile(r"(.+\.experts)\.(\d+)\.(gate_up_proj|up_proj|down_proj)$")
"""A layer of one expert as `save_pretrained` writes it."""


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    device: torch.device | str = "cpu",
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Write the quantized checkpoint in `source` to the new folder `target`, in the format `to`.

    Codes, scales and zero points are those of `source`, bit for bit: `load_checkpoint` gives them back, scales of 4-bit
    floats as numbers of another dtype. Rows in act-order go back to the order of x, beside the group of each. GPTQ is
    written as version 1, and as version 2 ("gptq_v2") where there are zero points. Layers of experts get the names that
    the model's checkpoints have, gate and up apart (this needs transformers). config.json gets the quantization config
    of the format, and small files are copied.

    `target` appears complete or not at all, and one layer at a time is in memory.

    Raises what `load_checkpoint` raises.

    Args:
        source: a folder that `load_checkpoint` reads: of `save_pretrained`, `weightonly quantize`, `convert`, or of
            another quantizer.
        target: the folder to write.
        to: "compressed-tensors", "gptq" or "awq".
        device: as for `convert`.
        shard_bytes: as for `convert`.
        progress: as for `convert`.

    Raises:
        FileExistsError: a `target` that exists.
        ValueError: another `to` or `shard_bytes`; and, naming the layer, what it has and which format holds it, what
            `to` cannot hold: codes of NF4, FP4 and other codebooks (none does), 4-bit floats in gptq and awq,
            fractional zero points, scales that are not fp16 in gptq and awq, int8, act-order and several group sizes in
            awq, N and K that do not fill words, and experts without names of their own.
        OSError: what cannot be written.

    Examples:
        >>> wo.formats.export("Llama-int4", "Llama-AWQ", "awq", progress=False)
        >>> wo.formats.open_checkpoint("Llama-AWQ").methods
        ('awq',)
    """
    source, target = require_path("source", source), require_path("target", target)
    check_target(target)
    if to not in TARGETS:
        raise ValueError(f"to: expected one of {', '.join(TARGETS)}, got {to!r}")
    require_int("shard_bytes", shard_bytes, least=1)
    check_memory(device)
    checkpoint = open_checkpoint(source)
    for name in checkpoint.layers:
        _check(to, name, checkpoint.shapes[name], _dtype_of(checkpoint, name))
    is_fused = any(map(_FUSED.match, checkpoint.layers))
    names: NamesOfExperts = names_of_experts(checkpoint.folder) if is_fused else lambda stack: None
    dense = dense_layers(checkpoint)
    TARGETS[to].config(checkpoint.shapes, dense)  # what it cannot describe is an error now
    shapes: dict[str, LayerShape] = {}
    with new_folder(target, companions_of(checkpoint.folder)) as folder:
        write_shards(folder, _tensors(checkpoint, to, device, progress, names, shapes), shard_bytes)
        config = config_of(checkpoint)
        config = {**unguard(config), "quantization_config": TARGETS[to].config(shapes, dense)}
        write_json(folder / CONFIG, config)


def _tensors(
    checkpoint: Checkpoint,
    to: str,
    device: torch.device | str,
    progress: bool,
    names: NamesOfExperts,
    shapes: dict[str, LayerShape],
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each record in the format; writes the shapes of its layers to `shapes`."""
    target = TARGETS[to]
    has_zeros = any(checkpoint.exact_shape(name).symmetric is False for name in checkpoint.layers)
    for record in checkpoint.records(None, device, progress):
        if isinstance(record, PlainTensor):
            yield {record.name: record.tensor}
            continue
        _check(to, record.name, shape_of(record), record.scales.dtype)
        parts = _parts(record, names)
        for number, name in enumerate(parts):
            weight, bias = _part(record, number, len(parts))
            k, n = (weight.q if isinstance(weight, IntWeight) else weight.codes).shape
            shapes[name] = dataclasses.replace(shape_of(record), k=k, n=n)
            try:
                inside = target.tensors(weight, has_zeros)
            except ValueError as error:
                raise ValueError(f"{record.name}: {error}") from error
            inside |= {} if bias is None else {"bias": bias}
            yield {f"{name}.{tensor}": value for tensor, value in inside.items()}


def _part(record: QuantizedLayer, number: int, parts: int) -> tuple[IntWeight | CodeWeight, torch.Tensor | None]:
    """Columns of a layer, which is cut into equal parts, unpacked."""
    packed = record.weight
    q, scales, zeros, bias = (
        None if t is None else t.chunk(parts, -1)[number].contiguous()
        for t in (unpack(packed), record.scales, record.zeros, record.bias)
    )
    assert q is not None and scales is not None
    if packed.code is not None:
        table = codebook(packed.format, q.device)
        return CodeWeight(q.view(torch.uint8), table, scales, packed.format, scales.dtype), bias
    return IntWeight(q, packed.bits, scales, zeros, record.perm), bias


def _check(to: str, name: str, shape: LayerShape, dtype: torch.dtype | None) -> None:
    """Raises ValueError for a layer that the target cannot hold, which says what can. dtype: None: not known yet."""

    def why_not(target: Target) -> str | None:
        if shape.experts is not None:
            return f"{shape.experts} stacked experts, which have no names of their own"
        return target.why_not(shape, torch.float16 if dtype is None else dtype)

    problem = why_not(TARGETS[to])
    if problem is None:
        return
    others = [other for other, target in TARGETS.items() if why_not(target) is None]
    cure = f"{' and '.join(others)} can hold it" if others else f"none of {', '.join(TARGETS)} holds it"
    raise ValueError(f"{name}: expected a layer that {to} can hold, got one with {problem}; {cure}")


def _dtype_of(checkpoint: Checkpoint, name: str) -> torch.dtype | None:
    """That of the scales in the file, where they are there as they are used."""
    tensor = checkpoint.layers[name].tensors.get("scales")
    dtype = None if tensor is None else checkpoint.shards.tensors[tensor].dtype
    return dtype if dtype in FLOATS else None


def _parts(record: QuantizedLayer, names: NamesOfExperts) -> list[str]:
    """The names that the parts of a layer have in the target; two for gate and up in one."""
    found = _FUSED.match(record.name)
    sources = names(f"{found[1]}.{found[3]}") if found else None
    if found is None or (sources is None and found[3] != "gate_up_proj"):
        return [record.name]
    if sources is None:
        raise ValueError(
            f"{record.name}: expected experts whose gate and up have names of their own in the model's checkpoints, "
            "got others; no target holds them"
        )
    return [source.replace("*", found[2]) for source in sources]
