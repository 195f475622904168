"""Folders of 8-bit floats: tiny models whose layers a quantizer's formula made, and what they stand for in fp64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)

Tensors = dict[str, torch.Tensor]


def quantize(w: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [N, K], scales fp32 [ceil(N / bn), ceil(K / bk)]) of w [N, K]; a block of -1 is all of them."""
    n, k = w.shape
    rows, columns = (n if block[0] == -1 else block[0]), (k if block[1] == -1 else block[1])
    grid = -(-n // rows), -(-k // columns)
    padded = torch.zeros(grid[0] * rows, grid[1] * columns)
    padded[:n, :k] = w
    cut = padded.view(grid[0], rows, grid[1], columns)
    scale = cut.abs().amax((1, 3)) / 448
    q = (cut / scale[:, None, :, None]).view(padded.shape)[:n, :k]
    return q.contiguous().to(torch.float8_e4m3fn), scale


def random_e4m3(shape: tuple[int, ...], generator: torch.Generator, *, exact: bool) -> torch.Tensor:
    """float8_e4m3fn [..., K, N], any bytes but NaN; exact: a column has integers up to 15 times a power of two.

    The powers are 2^-9, where numbers are subnormal, to 2^2. So sums along K are exact in fp32, and far from the limits
    of fp16.
    """
    if exact:
        integers = torch.randint(-15, 16, shape, generator=generator).float()
        powers = torch.randint(-9, 3, (*shape[:-2], 1, shape[-1]), generator=generator)
        return (integers * torch.exp2(powers)).to(torch.float8_e4m3fn)
    codes = torch.randint(0, 254, shape, generator=generator)
    return (codes + (codes > 126)).to(torch.uint8).view(torch.float8_e4m3fn)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """fp64 [N, K]: each number times the scale of its block."""
    n, k = weight.shape
    rows, columns = (n if block[0] == -1 else block[0]), (k if block[1] == -1 else block[1])
    grid = scale.double().reshape(-(-n // rows), -(-k // columns))
    return weight.double() * grid[torch.arange(n) // rows][:, torch.arange(k) // columns]


def ct_config(scales: str, activations: str | None) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors. scales: "tensor", "channel" or "block"; of activations, which may
    stay in 16 bits, "static", "dynamic" or None."""
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    block = {"block_structure": [128, 128]} if scales == "block" else {}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": args | {"strategy": scales, "dynamic": False} | block}
    if activations == "static":
        group["input_activations"] = args | {"strategy": "tensor", "dynamic": False}
    elif activations is not None:
        size = {"strategy": "group", "group_size": 128} if scales == "block" else {"strategy": "token"}
        group["input_activations"] = args | size | {"dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
    }


def dequantize_nvfp4(weight: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """fp64 [N, K] of ModelOpt's layers."""
    codes = torch.stack([weight & 15, weight >> 4], -1).flatten(1).long()
    return E2M1[codes] * (scale.double() * factor.double()).repeat_interleave(16, 1)


def experts(
    w: torch.Tensor,
    block: tuple[int, int],
    scale: str = "_scale_inv",
    form: Callable[[torch.Tensor], torch.Tensor] = lambda scale: scale,
    halves: int = 1,
    is_transposed: bool = False,
) -> tuple[Tensors, torch.Tensor]:
    """Stacked experts w [E, N, K], or [E, K, N], for `write`. halves: in how many parts N is cut before the blocks."""
    rows = w.transpose(1, 2) if is_transposed else w
    parts = [[quantize(part, block) for part in expert.chunk(halves)] for expert in rows]
    q = torch.stack([torch.cat([part for part, _ in expert]) for expert in parts])
    scales = torch.stack([torch.cat([scale for _, scale in expert]) for expert in parts])
    exact = torch.stack([torch.cat([dequantize(*part, block) for part in expert]) for expert in parts])
    stored, dense = (t.transpose(1, 2) if is_transposed else t for t in (q, exact))
    return {"": stored, scale: form(scales)}, dense


def write(
    folder: Path,
    model: Any,
    options: Mapping[str, Any],
    block: tuple[int, int],
    scale_name: str,
    form: Callable[[torch.Tensor], torch.Tensor] = lambda scale: scale,
    beside: Mapping[str, torch.Tensor] | None = None,
    stack: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]] | None = None,
) -> Tensors:
    """Saves a model with its linear layers, but for heads and routers, quantized. Returns its numbers, dense.

    options: quantization_config. form: of the scales. beside: other tensors of each layer. stack: (name of stacked
    experts, their weight) -> ({what follows the name in the file: tensor}, the numbers, dense).
    """
    model.save_pretrained(folder, save_original_format=stack is None)
    from safetensors.torch import load_file

    tensors, dense = load_file(folder / "model.safetensors"), {}
    written: Tensors = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        is_linear = (
            tensor.dim() == 2 and name != layer and not layer.endswith(("embed_tokens", "lm_head", ".gate", ".router"))
        )
        dense[name] = tensor.float()
        written[name] = tensor
        if is_linear:
            written[name], scale = quantize(tensor.float(), block)
            stored = form(scale)
            written[f"{layer}.{scale_name}"] = stored
            written |= {f"{layer}.{inside}": value.clone() for inside, value in (beside or {}).items()}
            dense[name] = dequantize(written[name], stored.float(), block).float()
        elif tensor.dim() == 3 and stack is not None:
            found, w = stack(name, tensor.float())
            written |= {f"{name}{suffix}": value.contiguous() for suffix, value in found.items()}
            dense[name] = w.float().contiguous()
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    return dense
