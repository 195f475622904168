"""Folders of random weights, those that our method alone serves and groups of 16, and their dense twins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.quantized_cases import Weight, config, tensors

import weightonly as wo
from weightonly.bench.serve.engine import METHOD
from weightonly.bench.serve.models import MODELS, QUANTIZERS, Quantizer, Tensors, Weights, config_of, with_layers
from weightonly.codebooks import codebook

LAYERS = 2
_BLOCK = 64


@dataclass(frozen=True)
class Folder:
    """is_converted: as `convert` writes it. provider: of bench serve, METHOD or vLLM's own method with our `kernel`."""

    quantizer: Quantizer
    model: str = "tiny"
    group: int = 128
    is_converted: bool = False
    provider: str = METHOD
    kernel: str = "WeightOnlyLinearKernel"

    @property
    def kernels(self) -> dict[str, int]:
        """What computes the layers, as `kernels` of bench serve counts it."""
        linear = "WeightOnlyLinearMethod" if self.provider == METHOD else self.kernel
        found = dict.fromkeys((f"{name}: {linear}" for name in ("qkv_proj", "o_proj")), LAYERS)
        if MODELS[self.model].mixture is not None:
            return found | {"routed_experts: WeightOnlyExpertsMethod": LAYERS}
        return found | dict.fromkeys((f"{name}: {linear}" for name in ("gate_up_proj", "down_proj")), LAYERS)


def _act_order(bits: int, has_zeros: bool) -> Quantizer:
    def layer(w: torch.Tensor, group: int) -> tuple[Tensors, torch.Tensor]:
        k, middle = len(w), 1 << bits - 1
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k))  # one of all layers with the same x
        q, scales, zeros = wo.quantize(w[order], bits, group, symmetric=not has_zeros, search=False)
        z = None if zeros is None else zeros.round().int() + middle
        rows = order.argsort()
        stored = Weight(bits, q[rows].int() + middle, scales, z, torch.arange(k)[rows] // group)
        return tensors("gptq", stored), stored.dense.float()

    return Quantizer(lambda group: config("gptq", bits, group, has_zeros, act_order=True), layer)


def _bitsandbytes(kind: str) -> Quantizer:
    """The layout: weightonly/formats/bitsandbytes.py."""
    options = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}

    def layer(w: torch.Tensor, group: int) -> tuple[Tensors, torch.Tensor]:
        codes, scales, _ = wo.quantize(w, group_size=_BLOCK, format=kind)
        by_row = codes.view(torch.uint8).t()  # (N, K)
        state = {"quant_type": kind, "blocksize": _BLOCK, "dtype": "float16", "shape": list(by_row.shape)}
        found = {
            "weight": (by_row[:, ::2] << 4 | by_row[:, 1::2]).reshape(-1, 1),
            "weight.absmax": scales.t().float().flatten(),
            "weight.quant_map": codebook(kind),
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode())).byte(),
        }
        return found, codebook(kind)[codes.long()] * scales.float().repeat_interleave(_BLOCK, 0)

    return Quantizer(lambda group: options, layer)


FOLDERS = {
    "gptq-act-order": Folder(_act_order(4, False)),
    "gptq8-act-order-zeros": Folder(_act_order(8, True)),
    "nf4": Folder(_bitsandbytes("nf4")),
    "nf4-experts": Folder(_bitsandbytes("nf4"), "tiny-mixtral"),
    "converted": Folder(QUANTIZERS["ct-zeros"], is_converted=True),
    "converted-experts": Folder(QUANTIZERS["ct"], "tiny-mixtral", is_converted=True),
    "ct-groups-of-16": Folder(QUANTIZERS["ct"], group=16, provider="weightonly"),
    "ct-fp8": Folder(QUANTIZERS["fp8"], provider="weightonly", kernel="WeightOnlyFp8LinearKernel"),
}


def write(case: Folder, place: Path, is_dense: bool, arch: str | None = None) -> Path:
    """A folder inside of `place`. is_dense: the twin, with the same numbers in fp16. arch: of `convert`."""
    model = with_layers(MODELS[case.model], LAYERS)
    weights = Weights(model, case.quantizer, is_dense, case.group, torch.float16, torch.device("cpu"))
    folder = place / ("dense" if is_dense else "quantized")
    folder.mkdir()
    save_file(
        {name: t.clone(memory_format=torch.contiguous_format) for name, t in weights}, folder / "model.safetensors"
    )
    options = None if is_dense else case.quantizer.config(case.group)
    (folder / "config.json").write_text(json.dumps(config_of(model, options, torch.float16)))
    if is_dense or not case.is_converted:
        return folder
    wo.formats.convert(folder, place / "converted", arch=arch, progress=False)
    return place / "converted"
