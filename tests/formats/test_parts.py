"""A part of a layer is read from a file as the whole layer is, and no bytes of other parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.formats_llama import FFN, HIDDEN, MODELS

from weightonly import dequantize
from weightonly.formats import QuantizedLayer
from weightonly.formats.checkpoint import open_checkpoint
from weightonly.formats.parts import read_part
from weightonly.packing import unpack

K, N = FFN, HIDDEN
PARTS = {
    "columns": ((0, K), [(32, 64)]),
    "columns inside of words": ((0, K), [(5, 46)]),
    "columns of two parts": ((0, K), [(0, 16), (64, 80)]),
    "rows": ((64, 128), [(0, N)]),
    "the last rows": ((192, 256), [(0, N)]),
}


def numbers(record: QuantizedLayer) -> torch.Tensor:
    """The weight [K, N], its rows in the order of the packed one."""
    zeros = None if record.zeros is None else record.zeros.float()
    return dequantize(record.weight, record.scales.float(), zeros)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", MODELS)
def test_like_the_whole(case: str, part: str, tmp_path: Path, generator: torch.Generator) -> None:
    model = MODELS[case](generator)
    name = "model.layers.0.mlp.down_proj"
    tensors = {key: tensor.contiguous() for key, tensor in model.tensors.items() if key.startswith(f"{name}.")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": model.config}))
    checkpoint = open_checkpoint(tmp_path)
    whole, all_bytes = checkpoint.read_layer(name, 90), checkpoint.layer_bytes(name)
    rows, columns = PARTS[part]
    before = checkpoint.shards.bytes_read
    got = read_part(checkpoint, name, 90, rows, columns)
    read = checkpoint.shards.bytes_read - before
    of = slice(*rows)
    pieces = torch.cat([unpack(whole.weight)[of, begin:end] for begin, end in columns], 1)
    assert torch.equal(unpack(got.weight), pieces)
    assert (got.perm is None) == (whole.perm is None)
    assert got.perm is None or whole.perm is None or torch.equal(got.perm, whole.perm[of])
    expected = torch.cat([numbers(whole)[of, begin:end] for begin, end in columns], 1)
    assert torch.equal(numbers(got), expected)
    is_whole = case.startswith("bitsandbytes") or (whole.perm is not None and part.endswith("rows"))
    assert read == all_bytes if is_whole else read < 0.7 * all_bytes, (read, all_bytes)
