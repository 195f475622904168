"""Independent references of the checkpoint formats, one element at a time in plain numpy, and checkpoints to read.

Nothing here uses weightonly: each loop follows the description of a format and not the code that is tested.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

Ints = npt.NDArray[np.int64]

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble of a word -> column, of eight."""


def field(words: torch.Tensor, row: int, column: int, position: int, bits: int) -> int:
    """The value `position` of a 32-bit word, lowest bits first."""
    word = int(words[row, column]) % 2**32
    return word >> (bits * position) & (2**bits - 1)


def int32(word: int) -> int:
    """The 32 bits of `word` as a signed number."""
    word %= 2**32
    return word - 2**32 if word >= 2**31 else word


def random_words(rows: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """int32 words of random bits."""
    return torch.randint(-(2**31), 2**31, (rows, columns), generator=g).to(torch.int32)


def random_scales(groups: int, n: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return (torch.rand(groups, n, generator=g) * 0.02 + 1e-4).to(dtype)


def weights(u: Ints, zeros: Ints, scales: torch.Tensor, group: Ints) -> torch.Tensor:
    """scales * (u - z) in fp32 [K, N]: u [K, N], zeros and scales [groups, N], group [K]."""
    k, n = u.shape
    s = scales.float().numpy()
    w = np.empty((k, n), dtype=np.float32)
    for i in range(k):
        for j in range(n):
            w[i, j] = s[group[i], j] * np.float32(u[i, j] - zeros[group[i], j])
    return torch.from_numpy(w)


# --- AWQ ---------------------------------------------------------------------------------------------------


def awq_values(words: torch.Tensor) -> Ints:
    """int32 [rows, N / 8] -> [rows, N]."""
    rows, columns = words.shape
    values = np.empty((rows, columns * 8), dtype=np.int64)
    for row in range(rows):
        for column in range(columns):
            for nibble in range(8):
                values[row, 8 * column + AWQ_COLUMNS[nibble]] = field(words, row, column, nibble, 4)
    return values


def awq_words(values: Ints) -> torch.Tensor:
    """[rows, N] of 0..15 -> int32 [rows, N / 8]."""
    rows, n = values.shape
    words = torch.zeros(rows, n // 8, dtype=torch.int32)
    for row in range(rows):
        for column in range(n // 8):
            nibbles = [int(values[row, 8 * column + AWQ_COLUMNS[i]]) << (4 * i) for i in range(8)]
            words[row, column] = int32(sum(nibbles))
    return words


def random_awq_layer(k: int, n: int, groups: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, Any]:
    return {
        "qweight": random_words(k, n // 8, g),
        "scales": random_scales(groups, n, dtype, g),
        "qzeros": random_words(groups, n // 8, g),
    }


def awq_weight(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> torch.Tensor:
    k, groups = qweight.shape[0], scales.shape[0]
    return weights(awq_values(qweight), awq_values(qzeros), scales, np.arange(k) // (k // groups))


# --- GPTQ --------------------------------------------------------------------------------------------------


def gptq_rows(words: torch.Tensor, bits: int, k: int) -> Ints:
    """qweight int32 [ceil(K * bits / 32), N] -> [K, N]."""
    per_word = 32 // bits
    n = words.shape[1]
    values = np.empty((k, n), dtype=np.int64)
    for i in range(k):
        for j in range(n):
            values[i, j] = field(words, i // per_word, j, i % per_word, bits)
    return values


def gptq_columns(words: torch.Tensor, bits: int, n: int) -> Ints:
    """qzeros int32 [groups, ceil(N * bits / 32)] -> [groups, N]."""
    per_word = 32 // bits
    groups = words.shape[0]
    values = np.empty((groups, n), dtype=np.int64)
    for i in range(groups):
        for j in range(n):
            values[i, j] = field(words, i, j // per_word, j % per_word, bits)
    return values


def pack_rows(values: Ints, bits: int) -> torch.Tensor:
    """The inverse of `gptq_rows`; zeros fill up the last word."""
    per_word = 32 // bits
    k, n = values.shape
    words = torch.zeros(-(-k // per_word), n, dtype=torch.int32)
    for row in range(words.shape[0]):
        for j in range(n):
            inside = range(row * per_word, min(k, (row + 1) * per_word))
            words[row, j] = int32(sum(int(values[i, j]) << (bits * (i % per_word)) for i in inside))
    return words


def pack_columns(values: Ints, bits: int) -> torch.Tensor:
    """The inverse of `gptq_columns`."""
    return pack_rows(values.T, bits).t().contiguous()


def ones(bits: int) -> int:
    """What version 2 adds to the words of version 1: a 1 in every value."""
    return sum(1 << position for position in range(0, 32, bits))


def add_to_words(words: torch.Tensor, number: int) -> torch.Tensor:
    return torch.tensor([[int32(int(word) + number) for word in row] for row in words], dtype=torch.int32).view_as(
        words
    )


def gptq_weight(
    qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor, group: Ints, bits: int, version: int
) -> torch.Tensor:
    words = add_to_words(qzeros, ones(bits)) if version == 1 else qzeros
    n = qweight.shape[1]
    return weights(gptq_rows(qweight, bits, len(group)), gptq_columns(words, bits, n), scales, group)


# --- folders -----------------------------------------------------------------------------------------------


def write_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None, shards: int = 1
) -> Path:
    """A folder as Hugging Face lays it out: tensors dealt to `shards` files in turn, so that layers are split."""
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensor.contiguous() for i, (key, tensor) in enumerate(tensors.items()) if i % shards == shard}
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
